"""What came into a serve pool and what left it, seen from outside."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pool_watch import PoolWatch

SIZE = 64
X, Y = (bytes([n]) * 16 for n in (1, 2))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ServePool]:
    with ServePool.create("p", 2, SIZE, folder=tmp_path) as made:
        yield made


def test_blocks_come_and_leave_without_another_in_their_place(pool: ServePool) -> None:
    watch = PoolWatch(pool)
    pool.commit(0, X, bytes(SIZE))
    assert watch.poll() == ([X], [])
    assert watch.poll() == ([], [])
    pool.try_evict([0])
    assert watch.poll() == ([], [X])


def test_a_block_in_two_slots_leaves_with_the_last(pool: ServePool) -> None:
    watch = PoolWatch(pool)
    pool.commit(0, X, bytes(SIZE))
    pool.commit(1, X, bytes(SIZE))
    assert watch.poll() == ([X], [])
    pool.try_evict([0])
    assert watch.poll() == ([], [])
    pool.try_evict([1])
    assert watch.poll() == ([], [X])


def test_more_than_the_journal_keeps_is_found_in_the_slots(pool: ServePool) -> None:
    watch = PoolWatch(pool)
    for _ in range(5):
        pool.commit(0, X, bytes(SIZE))
        pool.try_evict([0])
    pool.commit(1, Y, bytes(SIZE))
    assert watch.poll() == ([Y], [])
