"""A vLLM engine's publisher of KV events: encodes its batches and appends them to the ring.

`publish` runs on the scheduler's thread in every step: one encoding an event, one copy into shared
memory, a dict entry a block. It never waits and never raises.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kvatlas.worker_hooks.log_lines import printable_log
from kvatlas.worker_hooks.raw_events import RawEngineBatch, RawEvent, RawHeld
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.vllm_plugin.told_blocks import EngineHash, PublishedBlocks

ENGINE = "vllm"
#: the engine's own memory, by what it calls it
OWN_MEDIA = ("GPU", None)
#: how often the engine's count of blocks is told, so that the sidecar can audit itself
AUDIT_SECONDS = 5.0
#: how often an idle engine is looked after: a sidecar that has restarted wants a listing
IDLE_SECONDS = 0.05

#: (engine hash, group) -> whether the engine's block map has the block still
IsCached = Callable[[EngineHash, int], bool]

_encode = msgspec.msgpack.Encoder().encode
_log = printable_log(__name__)


class EngineReports:
    """What one engine tells its sidecar; every call may come from any thread.

    `is_cached` and `num_cached` look into the live block map and are called by `batch` only, on the
    engine's thread. Without them every removal is told as the engine tells it.
    """

    def __init__(
        self,
        hook: WorkerHook,
        rank: int,
        is_cached: IsCached | None = None,
        num_cached: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hook, self._rank = hook, rank
        self._is_cached, self._num_cached, self._clock = is_cached, num_cached, clock
        self._told = PublishedBlocks()
        self._lock = threading.Lock()
        self._next_audit = clock() + AUDIT_SECONDS
        self._stopped = threading.Event()
        self._pump = threading.Thread(target=self._pump_while_idle, daemon=True, name="kvatlas")
        #: batches that could not be encoded
        self.num_failed = 0
        hook.answer_listings(self._listing)

    def start(self) -> None:
        """Look after listings while the engine is idle."""
        self._pump.start()

    def batch(self, ts: float, events: list[Any]) -> None:
        """Report a step's events: objects with the fields of vLLM's own."""
        try:
            with self._lock:
                told = [raw for event in events if (raw := self._take(event)) is not None]
                if told:
                    self._hook.report_published(ENGINE, _encode([ts, told, self._rank]))
                self._audit()
        except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            if not self.num_failed:
                _log.error("kvatlas: a batch of KV events cannot be told: %r", error)
            self.num_failed += 1

    def close(self) -> None:
        """Tell nothing more."""
        self._stopped.set()
        if self._pump.is_alive():
            self._pump.join(1.0)
        with self._lock:
            self._hook.close()

    def _take(self, event: Any) -> msgspec.Raw | None:
        """Note an event and return it encoded; None for a removal that leaves a copy behind."""
        kind = type(event).__name__
        if kind == "BlockStored":
            payload = _encode(event)
            place = (event.group_idx or 0, event.medium)
            self._told.stored(place, event.block_hashes, payload)
            return msgspec.Raw(payload)
        if kind == "BlockRemoved":
            group = event.group_idx or 0
            if self._is_cached is not None and event.medium in OWN_MEDIA:
                is_cached = self._is_cached
                gone = [h for h in event.block_hashes if not is_cached(h, group)]
                if not gone:
                    return None
                event.block_hashes = gone
            self._told.removed((group, event.medium), event.block_hashes)
        elif kind == "AllBlocksCleared":
            self._told.cleared(OWN_MEDIA)
        return msgspec.Raw(_encode(event))

    def _audit(self) -> None:
        if self._num_cached is not None and self._clock() >= self._next_audit:
            self._next_audit = self._clock() + AUDIT_SECONDS
            self._hook.report(RawHeld(self._num_cached()))

    def _listing(self) -> Iterator[RawEvent]:
        for payload in self._told.batches():
            yield RawEngineBatch(ENGINE, payload)

    def _pump_while_idle(self) -> None:
        while not self._stopped.wait(IDLE_SECONDS):
            with self._lock:
                self._hook.pump()
