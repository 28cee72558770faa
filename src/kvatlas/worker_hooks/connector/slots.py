"""Which block is in which slot of the serve pool; the engine's process alone decides that."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from kvatlas.schemas.errors import InvalidBlock, SlotInUse
from kvatlas.worker_hooks.transfer.pool import ServePool

#: slots looked at for one that nobody reads
_EVICTION_BATCH = 16


class PoolSlots:
    """The slots of a pool, the least recently used first to go. Calls may come from any thread."""

    def __init__(self, pool: ServePool) -> None:
        self.pool = pool
        self._lock = threading.Lock()
        self._free = list(range(pool.num_slots))
        #: no block's any more, but not emptied: leased, or the pool's lock was not free
        self._unready: list[int] = []
        #: hash -> slot, least recently used first
        self._held: OrderedDict[bytes, int] = OrderedDict()
        #: slots that somebody here is reading: they stay as they are meanwhile
        self._pinned: Counter[int] = Counter()

    @contextmanager
    def reading(self, block_hash: bytes) -> Generator[int | None, None, None]:
        """Yield the slot of a block, whose bytes stay inside `with`; None if it is not held."""
        with self._lock:
            slot = self._held.get(block_hash)
            if slot is not None:
                self._held.move_to_end(block_hash)
                self._pinned[slot] += 1
        try:
            yield slot
        finally:
            if slot is not None:
                with self._lock:
                    self._pinned[slot] -= 1
                    if not self._pinned[slot]:
                        del self._pinned[slot]

    def slot_of(self, block_hash: bytes) -> int | None:
        """Return the slot of a block that is held, and note that it was used."""
        with self._lock:
            slot = self._held.get(block_hash)
            if slot is not None:
                self._held.move_to_end(block_hash)
            return slot

    def acquire(self, num_slots: int) -> list[int]:
        """Return empty slots, as many as can be had up to so many."""
        with self._lock:
            if len(self._free) < num_slots:
                self._empty([])
            while len(self._free) < num_slots and self._evict_some():
                pass
            taken = self._free[-num_slots:] if num_slots else []
            del self._free[len(self._free) - len(taken) :]
            return taken

    def save(self, block_hash: bytes, *parts: Any) -> bool:
        """Copy a block into the pool; False if it is there, or there is no room.

        Raises InvalidBlock for parts that are not a block.
        """
        if self.slot_of(block_hash) is not None:
            return False
        for slot in self.acquire(1):
            try:
                self.pool.commit(slot, block_hash, *parts)
            except SlotInUse:
                self.release([slot])
                return False
            except InvalidBlock:
                self.release([slot])
                raise
            self._hold(slot, block_hash)
            return True
        return False

    def filled(self, slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Note that a pull has filled slots."""
        for slot, block_hash in zip(slots, hashes, strict=True):
            self._hold(slot, block_hash)

    def release(self, slots: Sequence[int]) -> None:
        """Take back slots that a pull has not filled."""
        with self._lock:
            self._empty(slots)

    def clear(self) -> bool:
        """Forget every block; False if peers are reading some of them now, which go later."""
        with self._lock:
            held = list(self._held.values())
            self._held.clear()
            self._empty(held)
            return not self._unready

    def sweep(self) -> None:
        """Empty what could not be emptied before; costs nothing if there is nothing."""
        with self._lock:
            if self._unready:
                self._empty([])

    def _hold(self, slot: int, block_hash: bytes) -> None:
        with self._lock:
            before = self._held.pop(block_hash, None)
            self._held[block_hash] = slot
            if before is not None and before != slot:
                self._empty([before])

    def _empty(self, slots: Sequence[int]) -> None:
        """Free these slots and those left over from before, as far as the pool lets them go."""
        unready = [*self._unready, *slots]
        unread = [slot for slot in unready if slot not in self._pinned]
        emptied = set(self.pool.try_evict(unread)) if unread else set()
        self._free += emptied
        self._unready = [slot for slot in unready if slot not in emptied]

    def _evict_some(self) -> bool:
        unread = (item for item in self._held.items() if item[1] not in self._pinned)
        oldest = list(islice(unread, _EVICTION_BATCH))
        emptied = set(self.pool.try_evict([slot for _, slot in oldest])) if oldest else set()
        for block_hash, slot in oldest:
            if slot in emptied:
                del self._held[block_hash]
                self._free.append(slot)
        return bool(emptied)
