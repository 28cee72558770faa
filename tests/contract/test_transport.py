"""What every Transport does; a new adapter adds one line to RIGS."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from kvatlas.worker_hooks.transfer import (
    BouncePlaces,
    MemoryFabric,
    MemorySource,
    MemoryTransport,
    ReadOutcome,
    ReadStatus,
    Row,
    SourceRef,
)
from kvatlas.worker_hooks.transfer.nixl.messages import NixlSettings
from kvatlas.worker_hooks.transfer.nixl.transport import NixlTransport
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pool_file import default_folder
from testkit.blocks import a_block, a_hash
from testkit.waiting import WAIT_SECONDS, until

SIZE, NUM_BLOCKS, NUM_BOUNCE = 4096, 8, 6
HAS_NIXL = importlib.util.find_spec("nixl") is not None


pytestmark = pytest.mark.asyncio(loop_scope="module")


class Rig:
    """A source with blocks 0 to 7, and a transport of another pool that reads from it."""

    source: MemorySource | NixlTransport
    transport: MemoryTransport | NixlTransport

    def __init__(self, folder: Path) -> None:
        self.theirs = ServePool.create("w1", NUM_BLOCKS, SIZE, folder=folder)
        self.ours = ServePool.create("w2", 2, SIZE, NUM_BOUNCE, folder)
        for number in range(NUM_BLOCKS):
            self.theirs.commit(number, a_hash(number), a_block(number, SIZE))
        self.bounce = BouncePlaces(self.ours.bounce_places())
        #: places that reads of this test brought
        self.kept: list[int] = []

    async def read(
        self, rows: list[Row], deadline_seconds: float = 30.0, source: SourceRef | None = None
    ) -> ReadOutcome:
        outcome = await self.transport.read(source or self.reference, rows, deadline_seconds)
        self.kept += outcome.places
        return outcome

    def give_back(self) -> None:
        self.bounce.release(self.kept)
        self.kept.clear()

    @property
    def reference(self) -> SourceRef:
        assert self.source.reference is not None
        return self.source.reference

    def close(self) -> None:
        self.theirs.close()
        self.ours.close()

    def rows(self, *numbers: int) -> list[Row]:
        return self.source.rows([self.theirs.place_of(number) for number in numbers])

    def bytes_at(self, places: object) -> list[bytes]:
        assert isinstance(places, list | tuple)
        return [bytes(self.ours.bytes_at(place)) for place in places]

    def is_ready(self) -> bool:
        """Whether a test can begin."""
        return self.source.reference is not None

    def freeze(self) -> None:
        """Stop the source in its tracks."""

    def thaw(self) -> None:
        """Let it go on."""

    async def lose(self) -> None:
        """End this incarnation of the source; another may come."""


class MemoryRig(Rig):
    async def run(self, stack: contextlib.AsyncExitStack) -> None:
        self.fabric = MemoryFabric()
        self.source = MemorySource(self.fabric, "w1/0:1", self.theirs)
        transport = MemoryTransport(self.fabric, self.ours, self.bounce)
        self.transport = await stack.enter_async_context(transport)

    def freeze(self) -> None:
        self.fabric.freeze(self.reference.agent)

    def thaw(self) -> None:
        self.fabric.thaw(self.reference.agent)

    async def lose(self) -> None:
        self.fabric.lose(self.reference.agent)
        self.source = MemorySource(self.fabric, "w1/0:2", self.theirs)


class NixlRig(Rig):
    """Over TCP: with CMA the kernel reads from a frozen process as if nothing were."""

    async def run(self, stack: contextlib.AsyncExitStack) -> None:
        tcp = NixlSettings(ucx_tls="tcp", idle_ms=1)
        self.source = self.served = NixlTransport("w1/0", self.theirs, BouncePlaces([]), tcp)
        self.transport = NixlTransport("w2/0", self.ours, self.bounce, tcp)
        await asyncio.gather(*map(stack.enter_async_context, (self.served, self.transport)))

    @property
    def pid(self) -> int:
        assert self.served.pid is not None
        return self.served.pid

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def lose(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        await until(lambda: self.source.reference is None)


RIGS = [
    pytest.param(MemoryRig, id="memory"),
    pytest.param(
        NixlRig,
        id="nixl",
        marks=[
            pytest.mark.integration,
            pytest.mark.skipif(not HAS_NIXL, reason="nixl is not installed"),
        ],
    ),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=RIGS)
async def shared_rig(request: pytest.FixtureRequest) -> AsyncIterator[MemoryRig | NixlRig]:
    make: Callable[[Path], MemoryRig | NixlRig] = request.param
    with tempfile.TemporaryDirectory(dir=default_folder()) as folder:
        made = make(Path(folder))
        with contextlib.closing(made):
            async with contextlib.AsyncExitStack() as stack:
                await made.run(stack)
                yield made


@pytest_asyncio.fixture(loop_scope="module")
async def rig(shared_rig: MemoryRig | NixlRig) -> AsyncIterator[MemoryRig | NixlRig]:
    await until(shared_rig.is_ready)
    yield shared_rig
    shared_rig.give_back()
    await until(lambda: shared_rig.bounce.num_free == NUM_BOUNCE)


async def test_rows_arrive_in_their_order(rig: Rig) -> None:
    outcome = await rig.read(rig.rows(5, 2, 3))
    assert outcome.status is ReadStatus.done
    assert rig.bytes_at(outcome.places) == [a_block(n, SIZE) for n in (5, 2, 3)]


async def test_places_belong_to_the_reader_until_they_are_given_back(rig: Rig) -> None:
    await rig.read(rig.rows(0, 1))
    assert rig.bounce.num_free == NUM_BOUNCE - 2
    rig.give_back()
    assert rig.bounce.num_free == NUM_BOUNCE


async def test_reads_at_the_same_time_do_not_mix(rig: Rig) -> None:
    outcomes = await asyncio.gather(*(rig.read(rig.rows(n)) for n in range(NUM_BOUNCE)))
    for number, outcome in enumerate(outcomes):
        assert rig.bytes_at(outcome.places) == [a_block(number, SIZE)]


async def test_without_places_nothing_is_asked_of_the_peer(rig: Rig) -> None:
    outcome = await rig.read(rig.rows(*range(NUM_BOUNCE + 1)))
    assert outcome.status is ReadStatus.no_room
    assert rig.bounce.num_free == NUM_BOUNCE


async def test_rows_that_are_no_block_are_refused(rig: Rig) -> None:
    (row,) = rig.rows(0)
    beyond = Row(row.address + 1000 * SIZE, SIZE, 0)
    for bad in (Row(row.address, SIZE - 1, 0), beyond):
        outcome = await rig.read([bad])
        assert outcome.status is ReadStatus.refused
    assert rig.bounce.num_free == NUM_BOUNCE


async def test_a_source_that_never_was_is_refused_or_gone(rig: Rig) -> None:
    stranger = SourceRef(rig.transport.name, "stranger", b"nothing that it knows", 3)
    outcome = await rig.read(rig.rows(0), source=stranger)
    assert outcome.status in (ReadStatus.refused, ReadStatus.disconnected)
    assert await rig.transport.connect(stranger, 30.0) is not ReadStatus.done
    assert rig.bounce.num_free == NUM_BOUNCE


async def test_a_source_can_be_connected_ahead(rig: Rig) -> None:
    assert await rig.transport.connect(rig.reference, 30.0) is ReadStatus.done
    assert await rig.transport.connect(rig.reference, 30.0) is ReadStatus.done
    outcome = await rig.read(rig.rows(1))
    assert outcome.status is ReadStatus.done


async def test_a_lost_source_is_disconnected(rig: Rig) -> None:
    reference, rows = rig.reference, rig.rows(0)
    await rig.read(rows)
    rig.give_back()
    await rig.lose()
    outcome = await rig.read(rows, source=reference)
    assert outcome.status is ReadStatus.disconnected
    assert rig.bounce.num_free == NUM_BOUNCE


async def test_a_frozen_source_ends_at_the_deadline_and_its_bytes_hit_nobody(rig: Rig) -> None:
    await rig.read(rig.rows(7))
    rig.give_back()
    rig.freeze()
    started = time.monotonic()
    async with asyncio.timeout(WAIT_SECONDS):
        outcome = await rig.read(rig.rows(0, 1), 0.2)
    assert time.monotonic() - started > 0.1
    assert (outcome.status, outcome.places) == (ReadStatus.timed_out, ())
    assert (rig.transport.num_quarantined, rig.bounce.num_free) == (1, NUM_BOUNCE - 2)
    others = rig.bounce.acquire(NUM_BOUNCE - 2)
    rig.kept += others
    for place in others:
        rig.ours.bytes_at(place)[:] = bytes(SIZE)
    rig.thaw()
    await until(lambda: rig.transport.num_quarantined == 0)
    assert rig.bounce.num_free == 2
    assert rig.bytes_at(others) == [bytes(SIZE)] * len(others)
    outcome = await rig.read(rig.rows(2, 3))
    assert rig.bytes_at(outcome.places) == [a_block(n, SIZE) for n in (2, 3)]


async def test_a_cancelled_read_gives_its_places_back_when_it_is_over(rig: Rig) -> None:
    await rig.read(rig.rows(7))
    rig.give_back()
    rig.freeze()
    reading = asyncio.create_task(rig.read(rig.rows(0), 120.0))
    await until(lambda: rig.bounce.num_free < NUM_BOUNCE)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert rig.bounce.num_free == NUM_BOUNCE - 1
    rig.thaw()
    await until(lambda: rig.bounce.num_free == NUM_BOUNCE)
