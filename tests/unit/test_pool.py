"""The serve pool as its two processes use it; here both are this one, with a mapping each."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvatlas.schemas.errors import (
    InvalidBlock,
    InvalidSetting,
    PoolInUse,
    PoolTooLarge,
    PoolUnreadable,
    SlotInUse,
)
from kvatlas.worker_hooks.transfer.pool import ServePool, SlotState
from kvatlas.worker_hooks.transfer.pool_file import default_folder, pool_path
from testkit.blocks import a_block, a_chain, a_hash

SIZE = 512
LATER, LONG_AGO = 1 << 62, 1


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=default_folder()) as name:
        yield Path(name)


@pytest.fixture
def engine(folder: Path) -> Iterator[ServePool]:
    with ServePool.create("w1", num_slots=4, block_bytes=SIZE, num_bounce=2, folder=folder) as pool:
        yield pool


@pytest.fixture
def sidecar(engine: ServePool) -> Iterator[ServePool]:
    with ServePool.attach(engine.path) as pool:
        yield pool


def commit(pool: ServePool, *numbers: int) -> None:
    """Put block n into slot n."""
    for number in numbers:
        pool.commit(number, a_hash(number), a_block(number, SIZE))


def fill(pool: ServePool, place: int, slot: int, number: int) -> None:
    """Let block n arrive at a place and go to a slot."""
    block = a_block(number, SIZE)
    pool.bytes_at(place)[:] = block
    filled = pool.fill([place], [slot], [a_hash(number)], [xxh3_64_intdigest(block)])
    assert filled.corrupt == filled.revoked == []


# --- commit and evict ------------------------------------------------------------------------


def test_a_committed_block_is_seen_by_the_other_process(
    engine: ServePool, sidecar: ServePool
) -> None:
    commit(engine, 2)
    assert sidecar.hash_of(2) == a_hash(2)
    assert bytes(sidecar.block(2)) == a_block(2, SIZE)
    assert sidecar.checksum_of(2) == xxh3_64_intdigest(a_block(2, SIZE))


def test_a_block_can_come_in_parts_or_be_in_place_already(engine: ServePool) -> None:
    block = a_block(1, SIZE)
    engine.commit(0, a_hash(0), block[:100], memoryview(block)[100:])
    engine.block(1)[:] = block
    engine.commit(1, a_hash(1))
    assert bytes(engine.block(0)) == bytes(engine.block(1)) == block
    assert engine.checksum_of(0) == engine.checksum_of(1)


def test_a_block_can_come_as_a_numpy_array_of_any_type(engine: ServePool) -> None:
    np = pytest.importorskip("numpy")
    array = np.arange(SIZE // 2, dtype=np.float16).reshape(2, -1)
    engine.commit(0, a_hash(0), array)
    assert bytes(engine.block(0)) == array.tobytes()


def test_an_array_with_gaps_is_no_block(engine: ServePool) -> None:
    np = pytest.importorskip("numpy")
    with pytest.raises(InvalidBlock, match="not contiguous"):
        engine.commit(0, a_hash(0), np.zeros((SIZE, 2), np.uint8)[:, 0])


def test_a_block_can_come_as_a_tensor(engine: ServePool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.arange(SIZE // 2).to(torch.bfloat16)
    engine.commit(0, a_hash(0), tensor)
    assert bytes(engine.block(0)) == tensor.view(torch.uint8).numpy().tobytes()


def test_what_does_not_fit_is_refused_and_the_slot_stays_empty(engine: ServePool) -> None:
    for parts in ([bytes(SIZE - 1)], [bytes(SIZE), b"x"], [3]):
        with pytest.raises(InvalidBlock):
            engine.commit(0, a_hash(0), *parts)
    with pytest.raises(InvalidBlock):
        engine.commit(0, b"short", bytes(SIZE))
    assert engine.state_of(0) is SlotState.empty


def test_a_held_slot_is_not_written_again_before_it_is_evicted(engine: ServePool) -> None:
    commit(engine, 0)
    with pytest.raises(SlotInUse) as caught:
        commit(engine, 0)
    assert (caught.value.slot, caught.value.state) == (0, "held")
    assert engine.try_evict([0]) == [0]
    assert engine.hash_of(0) is None
    commit(engine, 0)


# --- leases ----------------------------------------------------------------------------------


def test_a_leased_slot_is_not_evicted_before_the_lease_ends(
    engine: ServePool, sidecar: ServePool
) -> None:
    commit(engine, 0, 1)
    now = time.monotonic_ns()
    assert sidecar.lease([0], [a_hash(0)], now + 1000) == [engine.checksum_of(0)]
    assert engine.try_evict([0, 1], now_ns=now) == [1]
    assert engine.hash_of(0) == a_hash(0)
    assert engine.try_evict([0, 1], now_ns=now + 1000) == [0, 1]


def test_only_leading_blocks_that_are_held_are_leased(
    sidecar: ServePool, engine: ServePool
) -> None:
    commit(engine, 0, 1, 3)
    leased = sidecar.lease([0, 1, 2, 3], [a_hash(n) for n in range(4)], LATER)
    assert leased == [engine.checksum_of(0), engine.checksum_of(1)]
    assert engine.try_evict([3]) == [3]


def test_a_slot_that_has_another_block_now_is_not_leased(
    engine: ServePool, sidecar: ServePool
) -> None:
    commit(engine, 0)
    assert sidecar.lease([0], [a_hash(9)], LATER) == []
    assert engine.try_evict([0]) == [0]


def test_a_shorter_lease_does_not_shorten_a_longer_one(
    engine: ServePool, sidecar: ServePool
) -> None:
    commit(engine, 0)
    sidecar.lease([0], [a_hash(0)], LATER)
    sidecar.lease([0], [a_hash(0)], LONG_AGO)
    assert engine.lease_until_ns(0) == LATER


def test_a_lease_can_be_ended_early(engine: ServePool, sidecar: ServePool) -> None:
    commit(engine, 0)
    sidecar.lease([0], [a_hash(0)], LATER)
    assert sidecar.set_leases({0: 0})
    assert engine.try_evict([0]) == [0]


def test_ending_a_lease_does_not_lease_what_came_after(
    engine: ServePool, sidecar: ServePool
) -> None:
    commit(engine, 0)
    sidecar.set_leases({0: LATER})
    assert engine.try_evict([0]) == [0]


# --- offers and fills ------------------------------------------------------------------------


def test_a_pulled_block_takes_its_place_along(engine: ServePool, sidecar: ServePool) -> None:
    assert sidecar.bounce_places() == [4, 5]
    assert engine.offer([1], a_hash(7))
    fill(sidecar, place=4, slot=1, number=7)
    assert engine.hash_of(1) == a_hash(7)
    assert bytes(engine.block(1)) == a_block(7, SIZE)
    assert engine.place_of(1) == 4
    assert sidecar.bounce_places() == [1, 5]


def test_a_slot_keeps_its_place_when_it_is_reused(engine: ServePool, sidecar: ServePool) -> None:
    engine.offer([1], a_hash(7))
    fill(sidecar, place=4, slot=1, number=7)
    assert engine.try_evict([1]) == [1]
    commit(engine, 1)
    assert engine.place_of(1) == 4
    assert bytes(sidecar.block(1)) == a_block(1, SIZE)


def test_bytes_that_are_not_those_of_the_checksum_are_never_held(
    engine: ServePool, sidecar: ServePool
) -> None:
    engine.offer([0, 1], a_chain(7, 8))
    for place, number in ((4, 7), (5, 8)):
        sidecar.bytes_at(place)[:] = a_block(number, SIZE)
    sidecar.bytes_at(4)[3] ^= 1
    wanted = [xxh3_64_intdigest(a_block(number, SIZE)) for number in (7, 8)]
    filled = sidecar.fill([4, 5], [0, 1], [a_hash(7), a_hash(8)], wanted)
    assert filled == ([0], [], [4, 1])
    assert engine.state_of(0) is SlotState.offered
    assert engine.hash_of(1) == a_hash(8)


def test_a_slot_taken_back_is_not_filled(engine: ServePool, sidecar: ServePool) -> None:
    engine.offer([0, 1, 2], a_chain(7, 7, 7))
    assert engine.try_evict([0, 1]) == [0, 1]
    commit(engine, 0)
    engine.offer([1], a_hash(8))
    block = a_block(7, SIZE)
    sidecar.bytes_at(4)[:] = block
    for slot in (0, 1):
        filled = sidecar.fill([4], [slot], [a_hash(7)], [xxh3_64_intdigest(block)])
        assert filled == ([], [0], [4])
    assert engine.hash_of(0) == a_hash(0)
    assert engine.state_of(1) is SlotState.offered


def test_only_empty_slots_are_offered_all_or_none(engine: ServePool) -> None:
    commit(engine, 1)
    with pytest.raises(SlotInUse):
        engine.offer([0, 1], a_chain(7, 8))
    assert engine.state_of(0) is SlotState.empty
    with pytest.raises(InvalidBlock):
        engine.offer([0], a_chain(7, 8))


def test_an_offered_slot_is_not_committed(engine: ServePool) -> None:
    engine.offer([0], a_hash(7))
    with pytest.raises(SlotInUse):
        commit(engine, 0)


# --- what became held ------------------------------------------------------------------------


def test_the_journal_tells_what_became_held(engine: ServePool, sidecar: ServePool) -> None:
    commit(engine, 2, 0)
    slots, position = sidecar.held_since((0, 0))
    assert slots == [2, 0]
    engine.offer([3], a_hash(7))
    fill(sidecar, place=4, slot=3, number=7)
    assert sidecar.held_since(position) == ([3], (2, 1))


def test_a_reader_that_is_too_far_behind_is_told(engine: ServePool, sidecar: ServePool) -> None:
    for _ in range(5):
        commit(engine, 0)
        engine.try_evict([0])
    assert sidecar.held_since((0, 0)) == (None, (5, 0))
    assert sidecar.held_since((1, 0)) == ([0] * 4, (5, 0))


# --- the file --------------------------------------------------------------------------------


def test_closing_the_owner_removes_the_name_and_keeps_the_bytes(folder: Path) -> None:
    pool = ServePool.create("w1", 1, SIZE, folder=folder)
    pool.commit(0, a_hash(0), a_block(0, SIZE))
    pool.close()
    pool.close()
    assert not pool.path.exists()
    assert bytes(pool.block(0)) == a_block(0, SIZE)


def test_a_pool_of_a_living_owner_is_not_taken(engine: ServePool, folder: Path) -> None:
    with pytest.raises(PoolInUse) as caught:
        ServePool.create("w1", 1, SIZE, folder=folder)
    assert caught.value.owner_pid == os.getpid()


def test_a_pool_of_a_dead_owner_is_replaced(folder: Path) -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    with ServePool.create("w1", 1, SIZE, folder=folder) as old:
        with old.path.open("r+b") as file:
            file.seek(28)
            file.write(pid.to_bytes(4, "little"))
        with ServePool.create("w1", 2, SIZE, folder=folder) as new:
            assert new.num_slots == 2


@pytest.mark.parametrize("content", [b"", b"x" * 8192, b"KVATPOOL" + bytes(100)])
def test_a_file_that_is_no_pool_is_refused(folder: Path, content: bytes) -> None:
    path = pool_path("w1", folder)
    path.write_bytes(content)
    with pytest.raises(PoolUnreadable):
        ServePool.attach(path)
    with pytest.raises(PoolUnreadable):
        ServePool.attach(folder / "absent")


def test_a_pool_that_was_cut_off_is_refused(engine: ServePool) -> None:
    os.truncate(engine.path, 4096)
    with pytest.raises(PoolUnreadable, match="4096 bytes"):
        ServePool.attach(engine.path)


def test_more_than_there_is_is_an_error_at_once(folder: Path) -> None:
    with pytest.raises(PoolTooLarge):
        ServePool.create("w1", 1 << 31, 1 << 20, folder=folder)
    assert list(folder.iterdir()) == []


def test_a_pool_needs_room_for_a_block(folder: Path) -> None:
    with pytest.raises(InvalidSetting):
        ServePool.create("w1", 0, SIZE, folder=folder)


def test_names_become_file_names(folder: Path) -> None:
    assert pool_path("host:8000/0", folder).name == "kvatlas-host_8000_0.pool"
