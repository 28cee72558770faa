"""Loads against a sidecar: every load ends, and what did not come is said to have failed."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvatlas.schemas.ids import InstanceId
from kvatlas.worker_hooks.connector.loads import BlockLoader, LoadOutcomes
from kvatlas.worker_hooks.connector.orders import BlockLoad, BlockRun
from kvatlas.worker_hooks.connector.slots import PoolSlots
from kvatlas.worker_hooks.sidecar.channel import (
    Answer,
    ChannelServer,
    PullBlocks,
    PullEnded,
    Question,
)
from kvatlas.worker_hooks.transfer.pool import ServePool
from testkit.waiting import until

X, Y = (bytes([n]) * 16 for n in (1, 2))
LOAD = BlockLoad("r", (10, 11), (X, Y), (BlockRun(0, 2, (InstanceId("a", 0),)),))


@pytest.mark.parametrize("behaviour", ["held", "missing", "closes", "gone", "own"])
async def test_a_load_always_ends(tmp_path: Path, behaviour: str) -> None:
    asked: list[Question] = []

    async def answer(question: Question) -> Answer:
        asked.append(question)
        assert isinstance(question, PullBlocks)
        if behaviour == "closes":
            raise ConnectionError  # the server closes the connection without an answer
        held = (0, 1) if behaviour == "held" else ()
        missing = () if held else ((0, "not_found"), (1, "not_found"))
        return PullEnded(question.id, held, missing)

    filled: list[int] = []
    finished: set[str] = set()
    path = tmp_path / "s"
    with ServePool.create("p", 4, 64, folder=tmp_path) as pool:
        slots = PoolSlots(pool)
        if behaviour == "own":
            slots.save(X, bytes(64))
            slots.save(Y, bytes(64))
        async with ChannelServer(tmp_path / "other" if behaviour == "gone" else path, answer):
            loads = BlockLoader(str(path), slots, lambda block, slot: filled.append(block), 0.2)
            try:
                loads.start(LOAD)

                def has_ended() -> bool:
                    finished.update(loads.finished())
                    return finished == {"r"}

                await until(has_ended)
                failed, outcomes = loads.failed(), loads.outcomes()
            finally:
                loads.close()
    came = behaviour in ("held", "own")
    assert failed == (set() if came else {10, 11})
    assert filled == ([10, 11] if came else [])
    assert len(asked) == (behaviour not in ("own", "gone"))
    told = {"closes": "no_sidecar", "gone": "no_sidecar", "missing": "not_found"}
    assert +outcomes.blocks == {told.get(behaviour, behaviour): 2}
    assert outcomes.num_loads == 1


class LoadsUnderTest:
    """Loads over a pool, beside a sidecar that brings whatever is asked for."""

    def __init__(self, loads: BlockLoader, slots: PoolSlots) -> None:
        self.loads, self.slots = loads, slots
        self.filled: list[int] = []
        #: how many blocks each pull asked for
        self.asked: list[int] = []

    async def ended(self, *requests: str) -> tuple[set[int], LoadOutcomes]:
        """Return the blocks that failed, and what became of all, when these requests have ended."""
        finished: set[str] = set()

        def have_ended() -> bool:
            finished.update(self.loads.finished())
            return finished >= set(requests)

        await until(have_ended)
        return self.loads.failed(), self.loads.outcomes()


@asynccontextmanager
async def loads_over(
    folder: Path, num_slots: int, deadline_seconds: float
) -> AsyncIterator[LoadsUnderTest]:
    async def answer(question: Question) -> Answer:
        assert isinstance(question, PullBlocks)
        one.asked.append(len(question.slots))
        return PullEnded(question.id, tuple(range(len(question.slots))))

    fill: Callable[[int, int], None] = lambda block, slot: one.filled.append(block)  # noqa: E731
    with ServePool.create("p", num_slots, 64, folder=folder) as pool:
        slots = PoolSlots(pool)
        async with ChannelServer(folder / "s", answer):
            loads = BlockLoader(str(folder / "s"), slots, fill, deadline_seconds)
            one = LoadsUnderTest(loads, slots)
            try:
                yield one
            finally:
                loads.close()


def leased(slots: PoolSlots, *blocks: bytes) -> list[int]:
    """Hold blocks that a peer reads, so that their slots cannot be had."""
    for block in blocks:
        assert slots.save(block, bytes(64))
    held = [slot for block in blocks if (slot := slots.slot_of(block)) is not None]
    assert slots.pool.lease(held, blocks, time.monotonic_ns() + 10**12)
    return held


async def test_a_load_waits_for_room_while_peers_read_the_pool(tmp_path: Path) -> None:
    async with loads_over(tmp_path, 2, deadline_seconds=30.0) as one:
        read = leased(one.slots, bytes(16), bytes([9]) * 16)
        one.loads.start(LOAD)
        one.loads.start(BlockLoad("other", (20,), (bytes([7]) * 16,), (BlockRun(0, 1, ()),)))
        with pytest.raises(TimeoutError):
            await until(lambda: bool(one.asked), 0.2)
        assert one.slots.pool.set_leases(dict.fromkeys(read, 0))
        failed, outcomes = await one.ended("r", "other")
        assert failed == set()
        assert outcomes.blocks["held"] == 3
        assert sorted(one.filled) == [10, 11, 20]


async def test_a_load_waits_for_room_no_longer_than_its_deadline(tmp_path: Path) -> None:
    async with loads_over(tmp_path, 2, deadline_seconds=0.2) as one:
        leased(one.slots, bytes(16), bytes([9]) * 16)
        one.loads.start(LOAD)
        failed, outcomes = await one.ended("r")
        assert failed == {10, 11}
        assert outcomes.blocks["no_room"] == 2
        assert one.asked == []


async def test_a_load_that_the_pool_cannot_hold_at_once_comes_in_pieces(tmp_path: Path) -> None:
    hashes = tuple(bytes([n]) * 16 for n in range(1, 6))
    async with loads_over(tmp_path, 2, deadline_seconds=30.0) as one:
        one.loads.start(BlockLoad("r", tuple(range(10, 15)), hashes, (BlockRun(0, 5, ()),)))
        failed, outcomes = await one.ended("r")
        assert failed == set()
        assert outcomes.blocks["held"] == 5
        assert one.asked == [2, 2, 1]
        assert one.filled == [10, 11, 12, 13, 14]
