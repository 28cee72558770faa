"""Which block is in which slot of the serve pool; the engine's process alone decides that."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from kvatlas.schemas.errors import SlotInUse
from kvatlas.worker_hooks.pool import ServePool

#: slots looked at for one that nobody reads
_EVICTION_BATCH = 16


class PoolSlots:
    """The slots of a pool, the least recently used first to go. Calls may come from any thread."""

    def __init__(self, pool: ServePool) -> None:
        self.pool = pool
        self._lock = threading.Lock()
        self._free = list(range(pool.num_slots))
        #: hash -> slot, least recently used first
        self._held: OrderedDict[bytes, int] = OrderedDict()

    def slot_of(self, block_hash: bytes) -> int | None:
        """Return the slot of a block that is held, and note that it was used."""
        with self._lock:
            slot = self._held.get(block_hash)
            if slot is not None:
                self._held.move_to_end(block_hash)
            return slot

    def take(self, num_slots: int) -> list[int]:
        """Return empty slots, as many as can be had up to so many."""
        with self._lock:
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
        for slot in self.take(1):
            try:
                self.pool.commit(slot, block_hash, *parts)
            except SlotInUse:
                return False  # a pull that was given up is still being taken back
            self._hold(slot, block_hash)
            return True
        return False

    def filled(self, slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Note that a pull has filled slots."""
        for slot, block_hash in zip(slots, hashes, strict=True):
            self._hold(slot, block_hash)

    def give_back(self, slots: Sequence[int]) -> None:
        """Take back slots that a pull has not filled."""
        emptied = self.pool.try_evict(slots) if slots else []
        with self._lock:
            self._free += emptied

    def clear(self) -> bool:
        """Forget every block; False if peers are reading some of them now."""
        with self._lock:
            while self._evict_some():
                pass
            return not self._held

    def _hold(self, slot: int, block_hash: bytes) -> None:
        with self._lock:
            before = self._held.pop(block_hash, None)
            self._held[block_hash] = slot
            if before is not None and before != slot:
                self._free += self.pool.try_evict([before])

    def _evict_some(self) -> bool:
        oldest = [item for item, _ in zip(self._held.items(), range(_EVICTION_BATCH), strict=False)]
        emptied = set(self.pool.try_evict([slot for _, slot in oldest])) if oldest else set()
        for block_hash, slot in oldest:
            if slot in emptied:
                del self._held[block_hash]
                self._free.append(slot)
        return bool(emptied)
