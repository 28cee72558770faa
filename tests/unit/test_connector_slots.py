"""Which block is in which slot of the serve pool."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.worker_hooks.connector.slots import PoolSlots
from kvatlas.worker_hooks.transfer.pool import ServePool, SlotState

SIZE = 64
X, Y, Z = (bytes([n]) * 16 for n in (1, 2, 3))
DATA = bytes(SIZE)


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[PoolSlots]:
    with ServePool.create("p", 2, SIZE, folder=tmp_path) as pool:
        yield PoolSlots(pool)


def lease(slots: PoolSlots, block: bytes) -> None:
    slot = slots.slot_of(block)
    assert slot is not None
    assert slots.pool.lease([slot], [block], time.monotonic_ns() + 10**12)


def test_a_block_is_saved_once(slots: PoolSlots) -> None:
    assert slots.save(X, DATA)
    assert not slots.save(X, DATA)
    assert len(slots.acquire(2)) == 2  # only one slot was used, and it was evicted for this


def test_the_leased_stay(slots: PoolSlots) -> None:
    assert slots.save(X, DATA)
    assert slots.save(Y, DATA)
    lease(slots, X)
    lease(slots, Y)
    assert not slots.save(Z, DATA)
    assert slots.slot_of(X) is not None
    assert not slots.clear()


def test_clear_forgets_everything(slots: PoolSlots) -> None:
    slots.save(X, DATA)
    assert slots.clear()
    assert slots.slot_of(X) is None
    assert len(slots.acquire(9)) == 2


def test_clear_forgets_what_peers_read_and_empties_it_when_they_have(slots: PoolSlots) -> None:
    slots.save(X, DATA)
    slots.save(Y, DATA)
    slot = slots.slot_of(X)
    assert slot is not None
    lease(slots, X)
    assert not slots.clear()
    assert slots.slot_of(X) is slots.slot_of(Y) is None
    slots.sweep()
    assert slots.pool.hash_of(slot) == X
    slots.pool.set_leases({slot: 0})
    slots.sweep()
    assert slots.pool.hash_of(slot) is None
    assert slots.clear()
    assert len(slots.acquire(9)) == 2


def test_clear_leaves_what_is_read_here_until_it_has_been(slots: PoolSlots) -> None:
    slots.save(X, DATA)
    with slots.reading(X) as slot:
        assert slot is not None
        assert not slots.clear()
        assert slots.pool.hash_of(slot) == X
    assert slots.clear()
    assert slots.pool.hash_of(slot) is None


def test_clear_knows_of_slots_that_somebody_else_has_emptied(slots: PoolSlots) -> None:
    slots.save(X, DATA)
    slots.pool.try_evict(range(2))
    assert slots.clear()
    assert slots.save(X, DATA)


def test_slots_given_back_are_empty_again(slots: PoolSlots) -> None:
    taken = slots.acquire(2)
    assert slots.pool.offer(taken, X + Y)
    slots.release(taken)
    assert [slots.pool.state_of(slot) for slot in taken] == [SlotState.empty] * 2
    assert sorted(slots.acquire(2)) == sorted(taken)


def test_slots_given_back_while_the_lock_is_taken_are_not_lost(
    slots: PoolSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = slots.acquire(2)
    with monkeypatch.context() as patched:
        patched.setattr(slots.pool, "try_evict", lambda slots: [])
        slots.release(taken)
        assert slots.acquire(2) == []
    assert sorted(slots.acquire(2)) == sorted(taken)


def test_the_least_recently_used_goes_first(
    slots: PoolSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.worker_hooks.connector.slots._EVICTION_BATCH", 1)
    assert slots.save(X, DATA)
    assert slots.save(Y, DATA)
    assert slots.slot_of(X) is not None
    assert slots.save(Z, DATA)
    assert [slots.slot_of(b) is not None for b in (X, Y, Z)] == [True, False, True]


def test_a_slot_that_is_read_here_keeps_its_block(slots: PoolSlots) -> None:
    names = [bytes([n]) * 16 for n in range(slots.pool.num_slots)]
    for name in names:
        assert slots.save(name, name * (slots.pool.block_bytes // 16))
    with slots.reading(names[0]) as slot:
        assert slot is not None
        taken = slots.acquire(slots.pool.num_slots)
        assert slot not in taken
        assert slots.pool.hash_of(slot) == names[0]
    assert slots.acquire(1) == [slot]
