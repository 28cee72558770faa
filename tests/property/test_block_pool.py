"""The block pool against the dumbest model of a paged cache."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvatlas.reference.block_pool import BlockPool

NUM_SLOTS = 12


class DumbPool:
    """Every slot as a record; what to evict is found by looking at all of them."""

    def __init__(self) -> None:
        self.users = [0] * NUM_SLOTS
        self.hash: list[bytes | None] = [None] * NUM_SLOTS
        self.is_clean = [True] * NUM_SLOTS
        self.freed_at = [0] * NUM_SLOTS
        self.committed_at = [0] * NUM_SLOTS
        self.leased: set[int] = set()
        self.time = 0

    def evictable(self) -> list[int]:
        unused = [s for s in range(NUM_SLOTS) if self.users[s] == 0]
        return [s for s in unused if self.is_clean[s] or s not in self.leased]

    def cached(self) -> dict[bytes, int]:
        first: dict[bytes, int] = {}
        by_age = sorted(range(NUM_SLOTS), key=lambda s: self.committed_at[s])
        for slot in by_age:
            block_hash = self.hash[slot]
            if block_hash is not None:
                first.setdefault(block_hash, slot)
        return first


def name(number: int) -> bytes:
    return bytes([number]) * 16


class Pools(RuleBasedStateMachine):
    """Requests come, match, allocate, commit and go; peers lease slots."""

    def __init__(self) -> None:
        super().__init__()
        self.model = DumbPool()
        self.pool = BlockPool(NUM_SLOTS, self.try_evict)
        self.requests: list[list[int]] = []

    def try_evict(self, slots: list[int]) -> list[int]:
        assert not any(self.model.users[slot] for slot in slots)
        return [slot for slot in slots if slot not in self.model.leased]

    @rule(chain=st.lists(st.integers(0, 9), max_size=5), fresh=st.integers(0, 6))
    def begin(self, chain: list[int], fresh: int) -> None:
        model, before = self.model, self.model.cached()
        matched = self.pool.match([name(n) for n in chain])
        expected = []
        for number in chain:
            if name(number) not in before:
                break
            expected.append(before[name(number)])
        assert matched == expected
        self.pool.use(matched)
        for slot in matched:
            model.users[slot] += 1
        possible = len(model.evictable())
        slots, evicted = self.pool.allocate(fresh)
        assert len(slots) == (fresh if fresh <= possible else 0)
        for slot in slots:
            assert model.users[slot] == 0
            assert model.is_clean[slot] or slot not in model.leased
        gone = set(before) - set(self.pool.cached_hashes())
        assert sorted(evicted) == sorted(gone)
        self.adopt_evictions(slots, fresh if slots else None)
        for slot in slots:
            model.users[slot] = 1
        self.requests.append([*matched, *slots])

    def adopt_evictions(self, slots: list[int], wanted: int | None) -> None:
        """Blanks go first, then what no hash leads to, then the idle ones that are oldest."""
        model = self.model
        emptied = {
            s
            for s in range(NUM_SLOTS)
            if model.users[s] == 0 and not model.is_clean[s] and self.is_blank(s, slots)
        }
        cached_before = [s for s in range(NUM_SLOTS) if model.hash[s] and model.users[s] == 0]
        if wanted is not None:
            idle = sorted(
                (s for s in cached_before if s not in model.leased),
                key=lambda s: model.freed_at[s],
            )
            evicted_idle = [s for s in emptied if model.hash[s] is not None]
            assert sorted(evicted_idle) == sorted(idle[: len(evicted_idle)])
        for slot in emptied:
            model.hash[slot], model.is_clean[slot] = None, True

    def is_blank(self, slot: int, taken: list[int]) -> bool:
        return slot in taken or slot in self.pool._blank

    @rule(which=st.integers(0, 99), number=st.integers(0, 9))
    def commit(self, which: int, number: int) -> None:
        free = [
            s
            for slots in self.requests
            for s in slots
            if self.model.hash[s] is None and self.model.users[s] == 1 and self.model.is_clean[s]
        ]
        if free:
            slot = free[which % len(free)]
            is_first = name(number) not in self.model.cached()
            assert self.pool.commit(slot, name(number)) == is_first
            self.model.time += 1
            self.model.hash[slot], self.model.is_clean[slot] = name(number), False
            self.model.committed_at[slot] = self.model.time

    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        if self.requests:
            slots = self.requests.pop(which % len(self.requests))
            self.pool.free(reversed(slots))
            for slot in reversed(slots):
                self.model.time += 1
                self.model.users[slot] -= 1
                if self.model.users[slot] == 0:
                    self.model.freed_at[slot] = self.model.time

    @rule(which=st.integers(0, 99))
    def end_unclean(self, which: int) -> None:
        """A pull was given up: something may still be written into its slots."""
        private = [
            slots
            for slots in self.requests
            if all(self.model.users[s] == 1 and self.model.hash[s] is None for s in slots)
        ]
        if private:
            slots = private[which % len(private)]
            self.requests.remove(slots)
            self.pool.free_unclean(slots)
            for slot in slots:
                self.model.users[slot], self.model.is_clean[slot] = 0, False

    @rule(slots=st.sets(st.integers(0, NUM_SLOTS - 1), max_size=4))
    def lease(self, slots: set[int]) -> None:
        self.model.leased = {s for s in slots if not self.model.is_clean[s]}

    @rule()
    def reset(self) -> None:
        is_possible = not any(self.model.users)
        assert self.pool.reset() == is_possible
        if is_possible:
            for slot in range(NUM_SLOTS):
                self.model.hash[slot] = None
                if slot not in self.model.leased:
                    self.model.is_clean[slot] = True

    @invariant()
    def both_agree(self) -> None:
        self.pool.validate()
        assert set(self.pool.cached_hashes()) == set(self.model.cached())
        assert self.pool.num_in_use == sum(n > 0 for n in self.model.users)
        assert {n: self.pool.match([n])[0] for n in self.pool.cached_hashes()} == (
            self.model.cached()
        )


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_a_chain_is_evicted_from_its_tail() -> None:
    pool = BlockPool(4)
    slots = pool.allocate(4).slots
    for number, slot in enumerate(slots):
        pool.commit(slot, name(number))
    pool.free(reversed(slots))
    assert [pool.allocate(1).evicted for _ in range(4)] == [[name(n)] for n in (3, 2, 1, 0)]


def test_a_refused_slot_is_passed_over_and_keeps_its_place() -> None:
    refused = {0}
    pool = BlockPool(3, lambda slots: [s for s in slots if s not in refused])
    slots = pool.allocate(3).slots
    for slot in slots:
        pool.commit(slot, name(slot))
    pool.free(sorted(slots))
    assert pool.allocate(1).evicted == [name(1)]
    refused.clear()
    assert pool.allocate(1).evicted == [name(0)]


def test_a_block_is_cached_until_its_last_copy_is_evicted() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2).slots
    assert pool.commit(first, name(1))
    assert not pool.commit(second, name(1))
    pool.free([first, second])
    assert pool.match([name(1)]) == [first]
    assert pool.allocate(1) == ([first], [])
    assert pool.match([name(1)]) == [second]
    assert pool.allocate(1) == ([second], [name(1)])
