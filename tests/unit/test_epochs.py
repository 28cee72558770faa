"""Epochs rise, whoever takes them and whatever the clock does."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from kvatlas.events.bus import KeyValue
from kvatlas.events.epochs import (
    MAX_AHEAD_MS,
    MAX_STEP,
    allocate_epoch,
    is_plausible,
    next_epoch,
)
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
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


@pytest.mark.parametrize(
    "value",
    [b"9" * 5_000, b"%d" % 10**30, b"%d" % 2**44, b"-5", b"", b"1.5", "\u0665".encode()],
    ids=["5,000 digits", "10^30", "2^44", "-5", "none", "1.5", "arabic"],
)
async def test_a_value_that_no_epoch_can_follow_is_named_and_replaced(
    keys: KeyValue, caplog: pytest.LogCaptureFixture, value: bytes
) -> None:
    now_ms = time.time_ns() // 1_000_000
    await keys.put("w1.0", value)
    assert await allocate_epoch(keys, W1, now_ms) == now_ms
    assert await allocate_epoch(keys, W1, now_ms) == now_ms + 1
    (line,) = [each.getMessage() for each in caplog.records]
    assert "w1.0" in line
    assert "replaced" in line
    assert len(line) < 200


async def test_an_epoch_is_above_one_that_was_seen(keys: KeyValue) -> None:
    assert await allocate_epoch(keys, W1, 1000, above=5000) == 5001
    assert await allocate_epoch(keys, W1, 1000) == 5002


async def test_a_clock_far_ahead_of_the_brokers_is_not_followed(
    keys: KeyValue, caplog: pytest.LogCaptureFixture
) -> None:
    now_ms = time.time_ns() // 1_000_000
    epoch = await allocate_epoch(keys, W1, now_ms + 30 * MAX_AHEAD_MS)
    assert now_ms <= epoch < now_ms + MAX_AHEAD_MS
    assert "set the clock" in caplog.text


async def test_a_clock_far_behind_does_not_make_epochs_of_others_implausible(
    keys: KeyValue,
) -> None:
    now_ms = time.time_ns() // 1_000_000
    epoch = await allocate_epoch(keys, W1, now_ms)
    assert await allocate_epoch(keys, W1, 1000) == epoch + 1


@pytest.mark.parametrize(
    ("epoch", "previous", "clock_ms", "is_believed"),
    [
        (1, 0, 0, True),
        (MAX_AHEAD_MS, 0, 0, True),
        (MAX_AHEAD_MS + 1, 0, 0, False),
        (2**43 + MAX_STEP, 2**43, 0, True),
        (2**43 + MAX_STEP + 1, 2**43, 0, False),
        (2**44, 1_800_000_000_000, 1_800_000_000_000, False),
        (1_800_000_000_000, 5, 1_800_000_000_000, True),
    ],
)
def test_an_epoch_is_believed_near_the_clock_or_the_one_before(
    epoch: int, previous: int, clock_ms: int, is_believed: bool
) -> None:
    assert is_plausible(epoch, previous, clock_ms) is is_believed


async def test_without_a_broker_there_is_no_epoch(bus: MemoryBus, keys: KeyValue) -> None:
    bus.cut()
    with pytest.raises(BusUnavailable):
        await allocate_epoch(keys, W1, 1000)
