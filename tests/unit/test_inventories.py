"""Repairs are few at a time, one of each worker, and none holds up the others."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from itertools import islice

import msgspec
import pytest

from kvatlas.events.bus import OnRequest
from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.events.subjects import inventory_subject
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.inventory_requests import pauses
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import EventBatch
from testkit.builders import MODEL, a_batch, digests, inventory, stored, subject_of, up
from testkit.waiting import until

SETTINGS = IndexServiceLimits(
    poll_seconds=0.01,
    lease_missing_seconds=60.0,
    lease_settling_seconds=0.0,
    inventory_jitter_seconds=0.01,
    inventory_timeout_seconds=5.0,
    inventory_retry_seconds=5.0,
    inventory_max_retry_seconds=5.0,
    max_inventory_requests=8,
)
#: pauses that a test waits out
SOON = msgspec.structs.replace(
    SETTINGS,
    inventory_timeout_seconds=0.02,
    inventory_retry_seconds=0.01,
    inventory_max_retry_seconds=0.02,
    max_inventory_requests=2,
)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBroker().connect() as bus:
        await bus.declare_stream(events_stream())
        yield bus


async def publish(bus: MemoryBus, *batches: EventBatch) -> None:
    publisher = bus.publisher(KV_EVENTS)
    for batch in batches:
        await publisher.publish(subject_of(batch), encode(batch))
    await publisher.flush()


class Broken:
    """Workers that have lost their second batch, and say what they hold when a test lets them."""

    def __init__(self, bus: MemoryBus, names: Iterable[str], way: str = "answers") -> None:
        self._bus, self.names, self._way = bus, list(names), way
        #: in order; a name stands there twice if it was asked twice
        self.asked: list[str] = []

    async def begin(self) -> None:
        """Serve `inventory` in the way of these workers, and hold a block."""
        for name in self.names if self._way != "is not there" else ():
            await self._bus.serve(inventory_subject(InstanceId(name, 0)), self._answering(name))
        await publish(self._bus, *(a_batch(up(), stored(1), worker=name) for name in self.names))

    def _answering(self, name: str) -> OnRequest:
        async def answer(_payload: bytes) -> bytes:
            self.asked.append(name)
            if self._way == "raises":
                raise ValueError("broken")
            if self._way == "never answers":
                await asyncio.get_running_loop().create_future()
            return b""

        return answer

    async def lose(self, seq: int = 3) -> None:
        """Let what they say next show the loss, all at once."""
        await publish(self._bus, *(a_batch(stored(2), worker=name, seq=seq) for name in self.names))

    async def heal(self, name: str, seq: int = 4) -> None:
        """Let one's inventory come through the log."""
        told = a_batch(inventory(1, 2, as_of=seq - 1), *digests(1, 2), worker=name, seq=seq)
        await publish(self._bus, told)


async def until_asked(broken: Broken, times: int) -> None:
    await until(lambda: len(broken.asked) >= times)


def the_exact(service: IndexService) -> set[str]:
    return {
        each.instance.worker for each in service.index.serving(MODEL) if each.trust is Trust.exact
    }


def a_service(bus: MemoryBus, settings: IndexServiceLimits) -> IndexService:
    return IndexService(bus, IndexState(ReferenceIndex()), settings=settings)


async def test_of_a_hundred_at_once_few_are_under_way_and_all_are_healed(bus: MemoryBus) -> None:
    """An answer alone frees no place: the inventory is still on its way through the log."""
    broken = Broken(bus, [f"w{number}" for number in range(100)])
    await broken.begin()
    async with a_service(bus, SETTINGS) as service:
        await service.wait_ready()
        await broken.lose()
        for num_healed in range(100):
            most = min(num_healed + 8, 100)
            await until_asked(broken, most)
            await asyncio.sleep(0.02)  # enough for one too many to be asked
            assert len(broken.asked) == most
            await broken.heal(broken.asked[num_healed])
        await until(lambda: len(the_exact(service)) == 100)
        assert sorted(broken.asked) == sorted(broken.names), "one repair each"
        assert service.inventories.num_requests == 100


async def test_one_that_loses_more_while_it_is_repaired_is_asked_once(bus: MemoryBus) -> None:
    broken = Broken(bus, ["w1"])
    await broken.begin()
    async with a_service(bus, SETTINGS) as service:
        await service.wait_ready()
        for seq in (3, 5, 7):
            await broken.lose(seq)
            await until(lambda: len(broken.asked) > 0)
        await until(lambda: service.state.stats().gaps == 3)
        await asyncio.sleep(0.05)  # enough for a second request
        assert broken.asked == ["w1"]
        await broken.heal("w1", seq=8)
        await until(lambda: the_exact(service) == {"w1"})


async def test_who_does_not_answer_lets_others_be_asked_meanwhile(bus: MemoryBus) -> None:
    silent = Broken(bus, [f"silent{number}" for number in range(20)], "never answers")
    good = Broken(bus, ["good"])
    await silent.begin()
    await good.begin()
    settings = msgspec.structs.replace(
        SETTINGS,
        inventory_timeout_seconds=60.0,
        inventory_patience_seconds=0.01,
        max_inventory_requests=1,
    )
    async with a_service(bus, settings) as service:
        await service.wait_ready()
        await silent.lose()
        await until_asked(silent, 20)
        await good.lose()
        await until_asked(good, 1)
        await good.heal("good")
        await until(lambda: the_exact(service) == {"good"})
        assert service.inventories.num_requests == 21
        assert service.inventories.num_failed_requests == 0, "all of them are still asked"


@pytest.mark.parametrize("way", ["is not there", "raises", "never answers", "answers"])
async def test_those_who_are_not_healed_do_not_hold_up_the_others(bus: MemoryBus, way: str) -> None:
    bad = Broken(bus, [f"bad{number}" for number in range(10)], way)
    good = Broken(bus, [f"good{number}" for number in range(10)])
    await bad.begin()
    await good.begin()
    async with a_service(bus, SOON) as service:
        await service.wait_ready()
        await bad.lose()
        await until(lambda: service.inventories.num_requests >= 10)
        await good.lose()
        healed = set[str]()
        while len(healed) < len(good.names):
            await until(lambda: bool(set(good.asked) - healed))
            for name in set(good.asked) - healed:
                await good.heal(name)
                healed.add(name)
        await until(lambda: the_exact(service) == set(good.names))


def test_pauses_double_up_to_the_longest() -> None:
    assert list(islice(pauses(1.0, 30.0), 7)) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert list(islice(pauses(5.0, 3.0), 2)) == [3.0, 3.0]


W1 = InstanceId("w1", 0)


async def test_who_heals_again_and_again_is_never_given_up(bus: MemoryBus) -> None:
    seq = 1

    async def heal(_payload: bytes) -> bytes:
        nonlocal seq
        seq += 1
        await publish(bus, a_batch(inventory(1, as_of=seq - 1), *digests(1), seq=seq))
        return b""

    await bus.serve(inventory_subject(W1), heal)
    async with IndexService(bus, IndexState(ReferenceIndex()), settings=SOON) as service:
        await publish(bus, a_batch(up(), stored(1)))
        num_losses = 2 * SOON.max_vain_inventory_requests
        for number in range(1, num_losses + 1):
            seq += 2
            await publish(bus, a_batch(stored(1), seq=seq))
            await until(lambda n=number: has_healed(service, n))  # type: ignore[misc]
        assert service.state.stats().forgotten == 0
        assert service.inventories.num_requests >= num_losses


def has_healed(service: IndexService, num_gaps: int) -> bool:
    view = service.state.instance(W1)
    is_exact = view is not None and view.trust is Trust.exact
    return is_exact and service.state.stats().gaps == num_gaps
