"""Events on their way to the bus: cut into batches, numbered, kept while the broker is away.

    add -> open batch -> sealed batches (numbered, bounded in bytes) -> take -> publisher

A batch has its sequence before it waits, so whatever is dropped here is a visible gap of the
instance. Pure: times are arguments, in seconds of one monotonic clock.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import (
    WIRE_VERSION,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Inventory,
    KvEvent,
    NamespacesOverBudget,
    Resync,
    WorkerDown,
    WorkerUp,
)
from kvatlas.schemas.settings import ReportingSettings

_DEFAULTS = ReportingSettings()
DEFAULT_MAX_BYTES = _DEFAULTS.max_outbox_bytes
DEFAULT_MAX_SECONDS = _DEFAULTS.max_outbox_seconds
# What these cost and save: the delays and rates of tests/bench/ingest.py.
COALESCE_BYTES = _DEFAULTS.coalesce_bytes
COALESCE_SECONDS = _DEFAULTS.coalesce_seconds
#: of an inventory, which comes at once however long: a reader answers requests between batches
INVENTORY_BATCH_BYTES = 8 * 1024
_FIXED_BYTES = 64


class _Waiting(NamedTuple):
    """A sealed batch; `num_bytes` is what it counts towards the bound."""

    seq: int
    events: tuple[KvEvent, ...]
    num_bytes: int


class Outbox:
    """A bounded queue of numbered batches of one instance.

    A batch leaves at once after a quiet moment, and else when it has `coalesce_bytes` or the last
    one left `coalesce_seconds` ago; unstamped ones wait until the epoch is known. At more than
    `max_bytes`, or when something has waited for `max_seconds`, all that waits is dropped: one
    `Resync` takes its place, or, if nothing of the epoch has left, the epoch begins anew. From then
    on nothing more enters (`is_lost`) until the inventory that has to follow, for it says it all.
    """

    def __init__(
        self,
        instance: InstanceId,
        up: WorkerUp,
        max_bytes: int = DEFAULT_MAX_BYTES,
        coalesce_bytes: int = COALESCE_BYTES,
        coalesce_seconds: float = COALESCE_SECONDS,
        max_seconds: float = DEFAULT_MAX_SECONDS,
        wire_version: int = WIRE_VERSION,
    ) -> None:
        self._instance, self.up = instance, up
        self._wire_version = wire_version
        self._max_bytes, self._max_seconds = max_bytes, max_seconds
        self._coalesce_bytes, self._coalesce_seconds = coalesce_bytes, coalesce_seconds
        self.epoch: int | None = None
        self.is_lost = False
        self.num_overflows = 0
        #: when a batch left last; the next open one stays for a while after it
        self._last_take = -coalesce_seconds
        self._restart()

    def _restart(self) -> None:
        self._sealed: deque[_Waiting] = deque()
        self._sealed_bytes = 0
        self._open: list[KvEvent] = [self.up]
        self._open_bytes = _FIXED_BYTES
        #: of the last sealed batch; the open one gets the next
        self._last_sealed_seq = 0
        self.last_taken_seq = 0
        #: (when, the sequence that was the youngest then), oldest first; of what still waits
        self._looks: deque[tuple[float, int]] = deque()
        #: first sequence dropped, while the Resync that tells it waits here
        self._lost_from: int | None = None

    def _restart_lost(self) -> None:
        self._restart()
        self._open.append(Resync(1, 1))
        self.is_lost = True

    @property
    def last_seq(self) -> int:
        """The sequence of the youngest batch, open or sealed."""
        return self._last_sealed_seq + bool(self._open)

    @property
    def waiting_bytes(self) -> int:
        """What counts towards the bound."""
        return self._sealed_bytes + self._open_bytes

    @property
    def is_empty(self) -> bool:
        """Whether everything has been taken."""
        return not self._sealed and not self._open

    def age_out(self, now: float) -> None:
        """Drop what waits if some of it has waited for too long; to be called now and then."""
        while self._looks and self._looks[0][1] <= self.last_taken_seq:
            self._looks.popleft()
        if self.is_empty or self.is_lost:
            self._looks.clear()
        elif self._looks and now - self._looks[0][0] >= self._max_seconds:
            self._overflow()
        else:
            self._looks.append((now, self.last_seq))

    def begin_epoch(self, epoch: int) -> None:
        """Stamp what waits and what comes.

        With a second epoch everything that waits is void, for its sequences belong to the first
        one; an inventory has to follow.
        """
        if self.epoch is not None:
            self._restart_lost()
        self.epoch = epoch

    def introduce(self, up: WorkerUp) -> None:
        """Say who speaks in other words from now on."""
        self.up = up
        self.add([up])

    def add(self, events: Iterable[KvEvent]) -> None:
        """Append events."""
        for event in events:
            if not self.is_lost or isinstance(event, WorkerDown):
                self._append(event)
        if self.waiting_bytes > self._max_bytes and not self.is_lost:
            self._overflow()

    def add_whole(self, events: Iterable[KvEvent]) -> None:
        """Append events that stand in one batch, so that none is lost without the others."""
        if self.is_lost:
            return
        for event in events:
            self._open.append(event)
            self._open_bytes += _num_bytes(event)
        if self._open_bytes >= self._coalesce_bytes:
            self.seal()
        if self.waiting_bytes > self._max_bytes:
            self._overflow()

    def add_inventory(self, events: Iterable[KvEvent]) -> None:
        """Append an inventory, which repairs a loss; it is bounded by what is held, not here."""
        self.is_lost = False
        before, counted = self.seal(), self._sealed_bytes
        for event in events:
            self._append(event)
            if self._open_bytes >= INVENTORY_BATCH_BYTES:
                self.seal()
        self.seal()
        free = (w if w.seq <= before else w._replace(num_bytes=0) for w in self._sealed)
        self._sealed, self._sealed_bytes = deque(free), counted

    def lose(self, seq: int) -> None:
        """Note that a batch is gone for good after it was taken; an inventory has to follow."""
        self._lose_from(seq)

    def seal(self) -> int:
        """Close the open batch, so that it leaves next; return its sequence or the last one."""
        if self._open:
            self._last_sealed_seq += 1
            sealed = _Waiting(self._last_sealed_seq, tuple(self._open), self._open_bytes)
            self._sealed.append(sealed)
            self._sealed_bytes += self._open_bytes
            self._open, self._open_bytes = [], 0
        return self._last_sealed_seq

    def seconds_until_due(self, now: float) -> float | None:
        """Return how long `take` has nothing to give; None while nothing waits or no epoch is."""
        if self.epoch is None or self.is_empty:
            return None
        if self._sealed:
            return 0.0
        return max(self._last_take + self._coalesce_seconds - now, 0.0)

    def next_batch(self, now: float, ts_ns: int) -> EventBatch | None:
        """Return the oldest batch that is due; None if there is none."""
        if self.seconds_until_due(now) != 0.0:
            return None
        if not self._sealed:
            self.seal()
        assert self.epoch is not None
        self._last_take = now
        taken = self._sealed.popleft()
        self._sealed_bytes -= taken.num_bytes
        self.last_taken_seq = taken.seq
        if self._lost_from is not None and any(isinstance(e, Resync) for e in taken.events):
            self._lost_from = None
        worker, rank = self._instance
        version, epoch = self._wire_version, self.epoch
        return EventBatch(version, worker, rank, epoch, taken.seq, ts_ns, taken.events)

    def _append(self, event: KvEvent) -> None:
        if isinstance(event, Resync):
            event = Resync(self._last_sealed_seq + 1, self._last_sealed_seq + 1)
        self._open.append(event)
        self._open_bytes += _num_bytes(event)
        if self._open_bytes >= self._coalesce_bytes:
            self.seal()

    def _overflow(self) -> None:
        self.num_overflows += 1
        if self.last_taken_seq == 0:
            self._restart_lost()
        else:
            self._lose_from(self.last_taken_seq + 1)

    def _lose_from(self, seq: int) -> None:
        """Drop what waits; a Resync tells that everything from a sequence on is gone."""
        last_dropped = self.seal()
        if self._lost_from is None:
            self._lost_from = seq
        self._sealed.clear()
        self._sealed_bytes = 0
        self._open = [Resync(self._lost_from, last_dropped)]
        self._open_bytes = _FIXED_BYTES
        self.is_lost = True


def _num_bytes(event: KvEvent) -> int:
    match event:
        case BlockStored():
            return _FIXED_BYTES + len(event.hashes) + len(event.tokens or b"")
        case BlockRemoved() | Inventory():
            return _FIXED_BYTES + len(event.hashes)
        case NamespacesOverBudget():
            return _FIXED_BYTES + len(event.roots)
        case _:
            return _FIXED_BYTES
