"""What an engine's adapter calls. Everything expensive happens in the sidecar."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvatlas.schemas.errors import InvalidBlock
from kvatlas.schemas.hashing import Extra, pack_tokens
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.raw_events import (
    EngineHash,
    RawCleared,
    RawEngineBatch,
    RawEvent,
    RawListed,
    RawRemoved,
    RawStored,
    RawStoredAhead,
    encode_raw,
)
from kvatlas.worker_hooks.reporting.ring import RingWriter

#: events of a listing appended by one call, so that no engine step pays for all of it
_LISTED_PER_CALL = 64
#: between two signs of life
BEAT_SECONDS = 0.5


class WorkerHook:
    """Appends what the engine does to the ring, in about a microsecond.

    All calls come from one thread. None waits and none raises: what cannot be encoded is counted in
    `num_rejected`, what finds no room in `num_lost`, and the sidecar learns of a loss.
    """

    def __init__(self, ring: RingWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring, self._clock = ring, clock
        self._beating: threading.Thread | None = None
        self._beats_end = threading.Event()
        #: when the engine's own loop called `pump` last
        self._pumped_at = self._clock()
        self._held: Callable[[], Iterator[RawEvent]] | None = None
        self._listing: Iterator[RawEvent] | None = None
        self._listings_begun = 0
        self._is_closed = False
        self.num_appended = 0
        self.num_rejected = 0

    @property
    def num_lost(self) -> int:
        """Events for which the ring had no room."""
        return self._ring.num_dropped

    def answer_listings(self, held: Callable[[], Iterator[RawEvent]]) -> None:
        """List with `held` what the engine holds whenever the sidecar asks for it.

        With it the sidecar recovers from a loss or a restart exactly. `held` yields parents before
        their children. The engine may change while its answer is read: it has to skip what is gone
        by then. The ring has to be created with `lists`.
        """
        self._held = held

    def stored(
        self,
        engine_hashes: Sequence[EngineHash],
        parent: EngineHash | None,
        tokens: bytes | Sequence[int],
        *,
        tier: Tier = Tier.hbm,
        lora: str | None = None,
        cache_salt: str | None = None,
        extras: Sequence[Extra] = (),
        first_token: int = 0,
        group: int = 0,
        lookahead: bytes | Sequence[int] = b"",
    ) -> None:
        """Report blocks of one chain, with their tokens (ids, or packed u32 LE).

        An engine whose blocks depend on tokens behind them gives those of each block in `lookahead`
        (ADR-0024).
        """
        try:
            packed = tokens if type(tokens) is bytes else pack_tokens(tokens)
            ahead = lookahead if type(lookahead) is bytes else pack_tokens(lookahead)
            hashes, tagged = tuple(engine_hashes), tuple(extras)
        except (InvalidBlock, TypeError):
            self.num_rejected += 1
            return
        fields = hashes, parent, packed, tier, lora, cache_salt, tagged, first_token, group
        self._append(RawStoredAhead(*fields, ahead) if ahead else RawStored(*fields))

    def removed(
        self, engine_hashes: Sequence[EngineHash], *, tier: Tier = Tier.hbm, group: int = 0
    ) -> None:
        """Report blocks that the tier no longer holds."""
        try:
            hashes = tuple(engine_hashes)
        except TypeError:
            self.num_rejected += 1
            return
        self._append(RawRemoved(hashes, tier, group))

    def cleared(self, tier: Tier | None = None) -> None:
        """Report that a tier, or all of them, is empty."""
        self._append(RawCleared(tier))

    def report_published(self, engine: str, payload: bytes) -> None:
        """Report a batch in an engine's own format; the sidecar reads it with its adapter."""
        self._append(RawEngineBatch(engine, payload))

    def report(self, event: RawEvent) -> None:
        """Report anything else."""
        self._append(event)

    def pump(self) -> None:
        """Go on with a listing that the sidecar wants. An idle engine calls it now and then."""
        if self._is_closed:
            return
        self._pumped_at = self._clock()
        if self._listing is not None or self._ring.listings_wanted != self._listings_begun:
            self._list_some()

    def start_beats(
        self, loop_seconds: float | None = None, also: Callable[[], None] | None = None
    ) -> None:
        """Give signs of life from a thread of this process, so that a stopped engine is noticed.

        With `loop_seconds` the engine promises to call `pump` at least so often from its own loop,
        also while it is idle; while it does not, no sign is given. `also` runs with each sign.
        """

        def beat() -> None:
            while not self._beats_end.wait(BEAT_SECONDS):
                if loop_seconds is None or self._clock() - self._pumped_at < loop_seconds:
                    self._ring.beat()
                if also is not None:
                    also()

        self._ring.beat()
        self._beating = threading.Thread(target=beat, name="kvatlas beats", daemon=True)
        self._beating.start()

    def close(self) -> None:
        """Let go of the ring; what is said afterwards is counted as rejected."""
        self._is_closed = True
        self._beats_end.set()
        # a forked child has no such thread; and it may be the thread itself that closes
        if self._beating is not None and self._beating is not threading.current_thread():
            self._beating.join()
        self._ring.close()

    def _append(self, event: RawEvent) -> None:
        if self._append_only(event):
            self.pump()

    def _append_only(self, event: RawEvent) -> bool:
        if self._is_closed:
            self.num_rejected += 1
            return False
        try:
            record = encode_raw(event)
        except (TypeError, ValueError, OverflowError):
            self.num_rejected += 1
            return False
        is_appended = self._ring.append(record)
        self.num_appended += is_appended
        return is_appended

    def _list_some(self) -> None:
        if self._ring.listings_wanted != self._listings_begun:
            self._listings_begun = self._ring.listings_wanted
            self._listing = self._held_blocks()
        assert self._listing is not None
        for _ in range(_LISTED_PER_CALL):
            if self._ring.waiting_bytes > self._ring.capacity // 2:
                return  # goes on when the sidecar has caught up
            try:
                block = next(self._listing)
            except StopIteration:
                self._end_listing(complete=self._held is not None)
                return
            except (LookupError, RuntimeError, TypeError, ValueError):
                self.num_rejected += 1  # the engine changed under its own iterator
                self._end_listing(complete=False)
                return
            self._append_only(block)

    def _held_blocks(self) -> Iterator[RawEvent]:
        if self._held is not None:
            yield from self._held()

    def _end_listing(self, *, complete: bool) -> None:
        self._listing = None
        self._append_only(RawListed(complete))
