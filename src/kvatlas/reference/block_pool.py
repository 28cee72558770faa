"""Who has which slot: reference counts, a cache by hash, eviction of leaves first.

    blank    no content                                   <- taken first, last in first out
    stale    content that no hash finds any more          <- taken next
    idle     cached, used by nobody, oldest first         <- taken last; its hash is evicted
    in use   one request or more has it

A request frees its blocks tail first, so the leaves of a chain are older than their parents and go
before them. Two requests may compute the same block at the same time; both slots are kept, the hash
leads to the first, and it is evicted when the last of them is. Pure.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

TryEvict = Callable[[list[int]], list[int]]


class Allocation(NamedTuple):
    """Slots for a request, or none at all; and the hashes that nobody holds any more for it."""

    slots: list[int]
    evicted: list[bytes]


class BlockPool:
    """The slots of one engine. `try_evict` empties slots and may refuse some, which stay."""

    def __init__(self, num_slots: int, try_evict: TryEvict = list) -> None:
        self.num_slots = num_slots
        self._try_evict = try_evict
        self._blank = list(reversed(range(num_slots)))
        self._stale: OrderedDict[int, None] = OrderedDict()
        self._idle: OrderedDict[int, None] = OrderedDict()
        #: users of a slot; 0 for blank, stale and idle ones
        self._num_users = [0] * num_slots
        #: None for a slot that no hash leads to
        self._hash_of: list[bytes | None] = [None] * num_slots
        #: slots of a cached hash in the order of their commits; never empty
        self._slots_of: dict[bytes, list[int]] = {}

    @property
    def num_available(self) -> int:
        """Slots that could be allocated if none is refused."""
        return len(self._blank) + len(self._stale) + len(self._idle)

    @property
    def num_in_use(self) -> int:
        """Slots that requests have now."""
        return self.num_slots - self.num_available

    def cached_hashes(self) -> list[bytes]:
        """Return every hash that a lookup finds."""
        return list(self._slots_of)

    def contents(self) -> Iterator[tuple[int, bytes]]:
        """Yield each slot that a hash leads to, copies included, with the hash."""
        return ((slot, h) for slot, h in enumerate(self._hash_of) if h is not None)

    def is_cached(self, block_hash: bytes) -> bool:
        """Return whether a lookup finds the hash."""
        return block_hash in self._slots_of

    def match(self, chain: Iterable[bytes]) -> list[int]:
        """Return the slots of the leading cached blocks. Nothing is taken."""
        slots = []
        for block_hash in chain:
            found = self._slots_of.get(block_hash)
            if found is None:
                break
            slots.append(found[0])
        return slots

    def use(self, slots: Iterable[int]) -> None:
        """Add a user to each slot; from then on it is not evicted."""
        for slot in slots:
            self._num_users[slot] += 1
            self._idle.pop(slot, None)

    def allocate(self, num_slots: int) -> Allocation:
        """Take slots for one user; all or nothing.

        Without enough slots nothing is taken, though hashes may have been evicted on the way.
        """
        if num_slots > self.num_available:
            return Allocation([], [])
        evicted: list[bytes] = []
        for source in (self._stale, self._idle):
            self._empty_oldest(source, num_slots - len(self._blank), evicted)
        if num_slots > len(self._blank):
            return Allocation([], evicted)
        slots = [self._blank.pop() for _ in range(num_slots)]
        for slot in slots:
            self._num_users[slot] = 1
        return Allocation(slots, evicted)

    def commit(self, slot: int, block_hash: bytes) -> bool:
        """Let lookups find a slot in use; return False if the hash was cached before."""
        self._hash_of[slot] = block_hash
        slots = self._slots_of.setdefault(block_hash, [])
        slots.append(slot)
        return len(slots) == 1

    def free(self, slots: Iterable[int]) -> None:
        """Take a user away from each slot, in this order; a chain's tail comes first.

        What nobody uses stays cached if a hash leads to it and is blank otherwise.
        """
        for slot in slots:
            self._num_users[slot] -= 1
            if self._num_users[slot] == 0:
                if self._hash_of[slot] is None:
                    self._blank.append(slot)
                else:
                    self._idle[slot] = None

    def free_unclean(self, slots: Iterable[int]) -> None:
        """Take the only user away from slots that no hash leads to and that are not empty."""
        for slot in slots:
            self._num_users[slot] -= 1
            self._stale[slot] = None

    def reset(self) -> bool:
        """Forget every cached hash; False, and nothing happens, while slots are in use."""
        if self.num_in_use:
            return False
        self._stale.update(self._idle)
        self._idle.clear()
        self._slots_of.clear()
        self._hash_of = [None] * self.num_slots
        self._empty(list(self._stale), self._stale, [])
        return True

    def validate(self) -> None:
        """Assert what holds between calls."""
        assert len(set(self._blank)) == len(self._blank)
        unused = [*self._blank, *self._stale, *self._idle]
        assert len(set(unused)) == len(unused)
        assert set(unused) == {s for s, n in enumerate(self._num_users) if n == 0}
        assert min(self._num_users) >= 0
        assert all(self._hash_of[slot] is None for slot in [*self._blank, *self._stale])
        assert all(self._hash_of[slot] is not None for slot in self._idle)
        by_slot = dict(self.contents())
        by_hash = [(slot, h) for h, slots in self._slots_of.items() for slot in slots]
        assert dict(by_hash) == by_slot
        assert len(by_hash) == len(by_slot)

    def _empty_oldest(
        self, source: OrderedDict[int, None], wanted: int, evicted: list[bytes]
    ) -> None:
        """Empty slots from the oldest on, passing over those that are refused."""
        passed = 0
        while wanted > 0 and passed < len(source):
            asked = list(islice(source, passed, passed + wanted))
            num_emptied = self._empty(asked, source, evicted)
            passed += len(asked) - num_emptied
            wanted -= num_emptied

    def _empty(
        self, slots: list[int], kept_in: OrderedDict[int, None], evicted: list[bytes]
    ) -> int:
        emptied = self._try_evict(slots)
        for slot in emptied:
            del kept_in[slot]
            self._blank.append(slot)
            block_hash = self._hash_of[slot]
            if block_hash is not None:
                self._hash_of[slot] = None
                copies = self._slots_of[block_hash]
                copies.remove(slot)
                if not copies:
                    del self._slots_of[block_hash]
                    evicted.append(block_hash)
        return len(emptied)
