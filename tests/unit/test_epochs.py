"""Epochs rise, whoever takes them and whatever the clock does."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvatlas.events.bus import KeyValue
from kvatlas.events.epochs import allocate_epoch, next_epoch
from kvatlas.events.memory_bus import MemoryBroker, MemoryBus
from kvatlas.schemas.errors import BusUnavailable
from kvatlas.schemas.ids import InstanceId

W1 = InstanceId("w1", 0)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBroker().connect() as bus:
        yield bus


@pytest.fixture
def keys(bus: MemoryBus) -> KeyValue:
    return bus.keys("kv_epochs")


@pytest.mark.parametrize(
    ("previous", "now_ms", "epoch"),
    [(None, 1000, 1000), (999, 1000, 1000), (1000, 1000, 1001), (5000, 1000, 5001)],
)
def test_an_epoch_is_above_the_previous_and_near_the_clock(
    previous: int | None, now_ms: int, epoch: int
) -> None:
    assert next_epoch(previous, now_ms) == epoch


async def test_epochs_rise_also_when_the_clock_falls(keys: KeyValue) -> None:
    taken = [await allocate_epoch(keys, W1, now_ms) for now_ms in (1000, 1000, 10, 2000)]
    assert taken == [1000, 1001, 1002, 2000]


async def test_nobody_shares_an_epoch(keys: KeyValue) -> None:
    taken = await asyncio.gather(*(allocate_epoch(keys, W1, 1000) for _ in range(20)))
    assert sorted(taken) == list(range(1000, 1020))


async def test_instances_count_apart(keys: KeyValue) -> None:
    names = ["w1", "w.1", "w*1", "w 1", "", "w=2E1", "\u00fc"]
    taken = [await allocate_epoch(keys, InstanceId(name, 0), 1000) for name in names]
    assert taken == [1000] * len(names)
    assert await allocate_epoch(keys, InstanceId("w1", 1), 1000) == 1000
    assert await allocate_epoch(keys, W1, 1000) == 1001


async def test_a_value_that_is_no_epoch_is_replaced(
    keys: KeyValue, caplog: pytest.LogCaptureFixture
) -> None:
    await keys.put("w1.0", b"garbage")
    assert await allocate_epoch(keys, W1, 1000) == 1000
    assert await allocate_epoch(keys, W1, 1000) == 1001
    assert "is no number" in caplog.text


async def test_without_a_broker_there_is_no_epoch(bus: MemoryBus, keys: KeyValue) -> None:
    bus.cut()
    with pytest.raises(BusUnavailable):
        await allocate_epoch(keys, W1, 1000)
