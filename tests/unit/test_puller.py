"""Pulls between pools of one process, over the memory transport."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvatlas.schemas.errors import (
    BusUnavailable,
    InvalidBlock,
    InvalidSetting,
    NoResponder,
    RequestTimedOut,
)
from kvatlas.schemas.transfer import (
    LeaseReleased,
    LeaseRequest,
    decode_transfer_answer,
    decode_transfer_request,
    encode_transfer,
)
from kvatlas.worker_hooks.transfer import BouncePlaces, MemoryFabric, MemorySource, MemoryTransport
from kvatlas.worker_hooks.transfer.lease_server import LeaseServer
from kvatlas.worker_hooks.transfer.lease_table import LeaseLimits
from kvatlas.worker_hooks.transfer.pool import ServePool, SlotState
from kvatlas.worker_hooks.transfer.pool_file import default_folder
from kvatlas.worker_hooks.transfer.pull_protocol import Owner, PullSettings
from kvatlas.worker_hooks.transfer.puller import Puller, PullResult
from testkit.blocks import a_block, a_chain, a_hash
from testkit.waiting import until

SIZE, NUM_SLOTS = 256, 16
FINGERPRINT = bytes(range(16))
SETTINGS = PullSettings(
    batch_blocks=4, max_reads=2, max_batches=4, max_batches_per_owner=4, backoff_ms=1, try_ms=2000
)


class Peer:
    """A worker with blocks 0 to 11 in the slots of the same number."""

    def __init__(self, name: str, folder: Path, fabric: MemoryFabric) -> None:
        self.pool = ServePool.create(name, NUM_SLOTS, SIZE, folder=folder)
        for number in range(12):
            self.pool.commit(number, a_hash(number), a_block(number, SIZE))
        self.agent = f"{name}/0:1"
        source = MemorySource(fabric, self.agent, self.pool)
        limits = LeaseLimits(max_blocks=8)
        self.server = LeaseServer(self.pool, [source], FINGERPRINT, 1, limits)
        self.owner = Owner(f"{name}/0", f"kv.lease.{name}.0")


class Fleet:
    """Two owners, w1 and w2, and a puller, w3; `request` is the bus between them."""

    def __init__(self, folder: Path) -> None:
        self.fabric = MemoryFabric()
        self.w1, self.w2 = (Peer(name, folder, self.fabric) for name in ("w1", "w2"))
        self.owners = [self.w1.owner, self.w2.owner]
        self.pool = ServePool.create("w3", NUM_SLOTS, SIZE, 8, folder)
        self.bounce = BouncePlaces(self.pool.bounce_places())
        self.transport = MemoryTransport(self.fabric, self.pool, self.bounce)
        #: raised instead of an answer, by subject
        self.faults: dict[str, Exception] = {}
        self.requests: list[LeaseRequest] = []
        self.puller: Puller

    async def request(self, subject: str, payload: bytes, timeout_seconds: float) -> bytes:
        message = decode_transfer_request(payload)
        if isinstance(message, LeaseRequest):
            self.requests.append(message)
        if subject in self.faults:
            raise self.faults[subject]
        peer = self.w1 if subject == self.w1.owner.subject else self.w2
        return await peer.server.handle(payload)

    async def pull(self, *numbers: int, deadline_seconds: float = 30.0) -> PullResult:
        slots = list(range(len(numbers)))
        assert self.pool.offer(slots, a_chain(*numbers))
        return await self.puller.pull(a_chain(*numbers), slots, self.owners, deadline_seconds)

    def check(self, *numbers: int) -> None:
        """Assert that block n of a pull is in slot n with the right bytes."""
        for slot, number in enumerate(numbers):
            assert self.pool.hash_of(slot) == a_hash(number)
            assert bytes(self.pool.block(slot)) == a_block(number, SIZE)

    def close(self) -> None:
        for pool in (self.w1.pool, self.w2.pool, self.pool):
            pool.close()


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    with tempfile.TemporaryDirectory(dir=default_folder()) as folder:
        fleet = Fleet(Path(folder))
        with contextlib.closing(fleet):
            yield fleet


@contextlib.asynccontextmanager
async def pulling(
    fleet: Fleet, fingerprint: bytes = FINGERPRINT, settings: PullSettings = SETTINGS
) -> AsyncIterator[None]:
    """Run the fleet's puller; afterwards nobody keeps a lease or a bounce place."""
    async with fleet.transport:
        fleet.puller = Puller(
            "w3/0",
            fingerprint,
            fleet.pool,
            fleet.bounce,
            [fleet.transport],
            fleet.request,
            settings,
        )
        async with fleet.puller:
            yield
    assert fleet.bounce.num_free == fleet.bounce.num_places


async def test_blocks_come_verified_into_their_slots(fleet: Fleet) -> None:
    async with pulling(fleet):
        result = await fleet.pull(*range(10))
    assert (result.held, result.missing) == (list(range(10)), [])
    assert (result.num_bytes, result.transports) == (10 * SIZE, ("memory",))
    assert result.num_leading == 10
    fleet.check(*range(10))


async def test_leases_are_released_afterwards(fleet: Fleet) -> None:
    async with pulling(fleet):
        await fleet.pull(0, 1, 2)
    assert len(fleet.w1.server.table) == 0
    assert fleet.w1.pool.try_evict([0, 1, 2]) == [0, 1, 2]


async def test_metadata_is_asked_for_once(fleet: Fleet) -> None:
    async with pulling(fleet):
        await fleet.pull(0)
        fleet.pool.try_evict([0])
        await fleet.pull(1)
    first, second = fleet.requests
    assert first.known_metadata == 0
    assert second.known_metadata != 0


async def test_many_pulls_at_a_time_share_the_window(fleet: Fleet) -> None:
    async with pulling(fleet):
        fleet.pool.offer(range(12), a_chain(*range(12)))
        results = await asyncio.gather(
            *(
                fleet.puller.pull(a_chain(n), [n], fleet.owners, deadline_seconds=30.0)
                for n in range(12)
            )
        )
    assert all(result.held == [0] for result in results)
    fleet.check(*range(12))


async def test_what_one_owner_lacks_comes_from_the_other(fleet: Fleet) -> None:
    fleet.w1.pool.try_evict([1, 2])
    async with pulling(fleet):
        result = await fleet.pull(0, 1, 2)
    assert result.held == [0, 1, 2]
    fleet.check(0, 1, 2)


async def test_what_nobody_has_is_missing(fleet: Fleet) -> None:
    async with pulling(fleet):
        result = await fleet.pull(0, 99)
    assert (result.held, result.missing) == ([0], [(1, "not_held")])
    assert result.num_leading == 1
    assert fleet.pool.state_of(1) is SlotState.offered


async def test_a_corrupt_block_is_fetched_from_another_owner(fleet: Fleet) -> None:
    fleet.w1.pool.block(1)[0] ^= 1
    async with pulling(fleet):
        result = await fleet.pull(0, 1)
    assert result.held == [0, 1]
    assert result.num_checksum_failures == 1 + SETTINGS.max_retries
    fleet.check(0, 1)


async def test_a_block_that_is_corrupt_everywhere_is_never_held(fleet: Fleet) -> None:
    for peer in (fleet.w1, fleet.w2):
        peer.pool.block(1)[0] ^= 1
    async with pulling(fleet):
        result = await fleet.pull(0, 1)
    assert (result.held, result.missing) == ([0], [(1, "corrupt")])
    assert fleet.pool.state_of(1) is SlotState.offered


async def test_another_fingerprint_pulls_nothing(fleet: Fleet) -> None:
    async with pulling(fleet, fingerprint=bytes(16)):
        result = await fleet.pull(0)
    assert result.missing == [(0, "incompatible")]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (NoResponder("gone"), "no_responder"),
        (RequestTimedOut("silent"), "timed_out"),
        (BusUnavailable("away"), "bus_unavailable"),
    ],
)
async def test_a_bus_that_fails_is_a_reason_and_no_error(
    fleet: Fleet, fault: Exception, reason: str
) -> None:
    fleet.faults[fleet.w1.owner.subject] = fault
    fleet.owners = [fleet.w1.owner]
    async with pulling(fleet):
        result = await fleet.pull(0)
    assert result.missing == [(0, reason)]


async def test_an_owner_that_is_gone_is_replaced_by_the_next(fleet: Fleet) -> None:
    fleet.faults[fleet.w1.owner.subject] = NoResponder("gone")
    async with pulling(fleet):
        result = await fleet.pull(0, 1)
    assert result.held == [0, 1]


async def test_a_source_that_is_lost_is_replaced_by_the_next(fleet: Fleet) -> None:
    fleet.fabric.lose(fleet.w1.agent)
    async with pulling(fleet):
        result = await fleet.pull(0, 1)
    assert result.held == [0, 1]
    assert len(fleet.w1.server.table) == 0


async def test_answers_that_make_no_sense_are_a_reason(fleet: Fleet) -> None:
    async def nonsense(subject: str, payload: bytes, timeout_seconds: float) -> bytes:
        return encode_transfer(LeaseReleased(lease_id=1, was_held=True))

    fleet.request = nonsense  # type: ignore[method-assign]
    async with pulling(fleet):
        result = await fleet.pull(0)
    assert result.missing == [(0, "malformed_answer")]


async def test_a_frozen_source_costs_a_try_and_its_places_wait_for_it(fleet: Fleet) -> None:
    fleet.fabric.freeze(fleet.w1.agent)
    settings = PullSettings(4, 2, 4, 4, try_ms=500, fair_ms=10)
    async with pulling(fleet, settings=settings):
        result = await fleet.pull(0, 1)
        assert result.held == [0, 1]
        assert fleet.transport.num_quarantined == 1
        assert fleet.bounce.num_free == fleet.bounce.num_places - 2
        fleet.fabric.thaw(fleet.w1.agent)
        await until(lambda: fleet.transport.num_quarantined == 0)
    fleet.check(0, 1)


async def test_the_deadline_holds_and_what_comes_later_changes_nothing(fleet: Fleet) -> None:
    fleet.owners = [fleet.w1.owner]
    fleet.fabric.freeze(fleet.w1.agent)
    async with pulling(fleet):
        result = await fleet.pull(0, 1, deadline_seconds=0.05)
        assert result.held == []
        assert {reason for _, reason in result.missing} <= {"deadline", "timed_out"}
        assert fleet.pool.try_evict([0, 1]) == [0, 1]
        fleet.pool.commit(0, a_hash(50), a_block(50, SIZE))
        fleet.fabric.thaw(fleet.w1.agent)
        await until(lambda: fleet.transport.num_quarantined == 0)
    fleet.check(50)


async def test_a_slot_taken_back_during_the_pull_is_left_alone(fleet: Fleet) -> None:
    fleet.fabric.freeze(fleet.w1.agent)
    fleet.owners = [fleet.w1.owner]
    async with pulling(fleet):
        pull = asyncio.create_task(fleet.pull(0, 1))
        await until(lambda: fleet.bounce.num_free < fleet.bounce.num_places)
        assert fleet.pool.try_evict([1]) == [1]
        fleet.fabric.thaw(fleet.w1.agent)
        result = await pull
    assert (result.held, result.missing) == ([0], [(1, "revoked")])
    assert fleet.pool.state_of(1) is SlotState.empty


async def test_a_cancelled_pull_leaves_nothing_behind(fleet: Fleet) -> None:
    fleet.fabric.freeze(fleet.w1.agent)
    async with pulling(fleet):
        pull = asyncio.create_task(fleet.pull(0, 1))
        await until(lambda: fleet.bounce.num_free < fleet.bounce.num_places)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        fleet.fabric.thaw(fleet.w1.agent)
    assert len(fleet.w1.server.table) == 0
    assert fleet.pool.state_of(0) is SlotState.offered


async def test_leaving_the_puller_ends_its_pulls(fleet: Fleet) -> None:
    fleet.fabric.freeze(fleet.w1.agent)
    async with pulling(fleet):
        pull = asyncio.create_task(fleet.pull(0))
        await until(lambda: fleet.bounce.num_free < fleet.bounce.num_places)
        fleet.fabric.thaw(fleet.w1.agent)
    assert (await pull).missing == [(0, "cancelled")]


async def test_a_source_can_be_connected_ahead_of_need(fleet: Fleet) -> None:
    reference = MemorySource(fleet.fabric, fleet.w1.agent, fleet.w1.pool).reference
    async with pulling(fleet):
        assert await fleet.puller.connect(fleet.w1.owner, reference, 1.0)
        await fleet.pull(0)
    assert fleet.requests[0].known_metadata == reference.metadata_version


async def test_the_story_of_a_block_can_be_told(fleet: Fleet) -> None:
    async with pulling(fleet):
        await fleet.pull(0)
        story = [line.what for line in fleet.puller.story(a_hash(0))]
    assert story == ["asked for", "leased from w1/0", "held from w1/0"]


async def test_sizes_that_do_not_fit_are_refused(fleet: Fleet) -> None:
    async with pulling(fleet):
        with pytest.raises(InvalidBlock):
            await fleet.puller.pull(a_chain(1, 2), [0], fleet.owners, 1.0)
    with pytest.raises(InvalidSetting):
        async with pulling(fleet, settings=PullSettings(batch_blocks=8, max_reads=2)):
            pass


async def test_a_request_names_what_it_wants(fleet: Fleet) -> None:
    async with pulling(fleet):
        await fleet.pull(0, 1)
    (request,) = fleet.requests
    assert (request.requester, request.transports) == ("w3/0", ("memory",))
    assert request.hashes == a_chain(0, 1)
    answer = decode_transfer_answer(fleet.w1.server.answer(encode_transfer(request)))
    assert type(answer).__name__ == "LeaseGranted"
