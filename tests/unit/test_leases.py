"""Leases: taken, renewed, given back, run out, fenced."""

import asyncio

import pytest

from kvatlas.events.epochs import allocate_epoch
from kvatlas.events.leases import (
    LeaseChange,
    LeaseKeeper,
    lease_key,
    parse_lease_key,
    watch_leases,
)
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.schemas.errors import Fenced, InvalidSubject
from kvatlas.schemas.ids import InstanceId
from testkit.bus import Collected
from testkit.waiting import until

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 3)


def a_keeper(
    bus: MemoryBus,
    epoch: int = 1,
    instance: InstanceId = W1,
    fenced: Collected[Fenced] | None = None,
    details: bytes = b"",
    ttl_seconds: float = 60.0,
) -> LeaseKeeper:
    on_fenced = fenced or Collected[Fenced]()
    keys = bus.keys("kv_leases")
    return LeaseKeeper(keys, instance, epoch, on_fenced, details, ttl_seconds)


@pytest.mark.parametrize("worker", ["w1", "pod-7.fleet", "a b", "w*>", "", "lease.w1.0", "\u00fc"])
def test_any_worker_name_has_a_key(worker: str) -> None:
    instance = InstanceId(worker, 12)
    assert parse_lease_key(lease_key(instance)) == instance


@pytest.mark.parametrize(
    "key",
    [
        "lease.w1",
        "lease.w1.x",
        "lease.w1.0.0",
        "other.w1.0",
        "lease.w1.00",
        "lease.w1." + "9" * 5_000,
        f"lease.w1.{2**32}",
    ],
)
def test_another_key_is_no_lease(key: str) -> None:
    with pytest.raises(InvalidSubject):
        parse_lease_key(key)


async def test_a_lease_is_seen_until_it_is_given_back() -> None:
    broker = MemoryBroker()
    async with broker.connect() as bus, broker.connect() as far:
        changes = Collected[LeaseChange]()
        await watch_leases(far.keys("kv_leases"), changes)
        async with a_keeper(bus, epoch=7, details=b"side:1"), a_keeper(bus, 8, W2):
            await changes.count(2)
        await changes.count(4)
        assert changes.items == [
            LeaseChange(W1, 7, "alive", b"side:1"),
            LeaseChange(W2, 8, "alive"),
            LeaseChange(W2, 8, "released"),
            LeaseChange(W1, 7, "released"),
        ]


async def test_a_lease_that_is_not_renewed_runs_out() -> None:
    now = 0.0
    broker = MemoryBroker(clock=lambda: now)
    async with broker.connect() as bus, broker.connect() as far:
        changes = Collected[LeaseChange]()
        await watch_leases(far.keys("kv_leases"), changes)
        keeper = a_keeper(bus, epoch=7)
        await keeper.__aenter__()
        bus.cut()
        now = 59.0
        broker.expire()
        await changes.count(1)
        now = 61.0
        broker.expire()
        await changes.count(2)
        assert [change.kind for change in changes.items] == ["alive", "expired"]
        assert changes.items[-1].epoch == 7
        await keeper.__aexit__()


async def test_a_watcher_that_comes_after_the_end_knows_no_epoch() -> None:
    async with MemoryBroker().connect() as bus:
        async with a_keeper(bus, epoch=7):
            pass
        changes = Collected[LeaseChange]()
        await watch_leases(bus.keys("kv_leases"), changes)
        assert changes.items == [LeaseChange(W1, None, "released")]


async def test_a_lease_is_renewed_before_it_runs_out() -> None:
    async with MemoryBroker().connect() as bus:
        changes = Collected[LeaseChange]()
        await watch_leases(bus.keys("kv_leases"), changes)
        async with a_keeper(bus, ttl_seconds=0.3) as keeper:
            await changes.count(4)
            assert keeper.is_held
        assert {change.kind for change in changes.items} == {"alive"}


async def test_a_newer_epoch_fences_the_older() -> None:
    fenced = Collected[Fenced]()
    async with MemoryBroker().connect() as bus:
        old = a_keeper(bus, epoch=1, fenced=fenced, ttl_seconds=0.3)
        async with old, a_keeper(bus, epoch=2):
            (error,) = await fenced.count(1)
            assert (error.own_epoch, error.newer_epoch) == (1, 2)
            assert not old.is_held
            await old.__aexit__()
            entry = await bus.keys("kv_leases").get(lease_key(W1))
            assert entry is not None


async def test_an_older_epoch_cannot_enter() -> None:
    async with MemoryBroker().connect() as bus, a_keeper(bus, epoch=2):
        with pytest.raises(Fenced):
            await a_keeper(bus, epoch=1).__aenter__()


async def test_a_keeper_enters_while_the_broker_is_away_and_goes_on_trying() -> None:
    async with MemoryBroker().connect() as bus:
        bus.cut()
        async with a_keeper(bus, ttl_seconds=0.3) as keeper:
            assert not keeper.is_held
            bus.restore()
            changes = Collected[LeaseChange]()
            await watch_leases(bus.keys("kv_leases"), changes)
            await changes.count(1)
            assert keeper.num_failed_renewals >= 1


async def test_the_newest_epoch_holds_however_many_restart_at_once() -> None:
    fenced = Collected[Fenced]()
    async with MemoryBroker().connect() as bus:
        epochs = bus.keys("kv_epochs")
        keepers = [
            a_keeper(bus, await allocate_epoch(epochs, W1, 1), fenced=fenced, ttl_seconds=0.3)
            for _ in range(5)
        ]
        entered = await asyncio.gather(
            *(keeper.__aenter__() for keeper in keepers), return_exceptions=True
        )
        refused = [outcome for outcome in entered if isinstance(outcome, Fenced)]
        await fenced.count(4 - len(refused))
        assert [keeper.is_held for keeper in keepers] == [False] * 4 + [True]
        for keeper in keepers:
            await keeper.__aexit__()


async def test_what_is_no_lease_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with MemoryBroker().connect() as bus:
        keys = bus.keys("kv_leases")
        await keys.put("other", b"")
        await keys.put(lease_key(W1), b"\xc1")
        changes = Collected[LeaseChange]()
        await watch_leases(keys, changes)
        async with a_keeper(bus, epoch=3):
            assert await changes.count(1) == [LeaseChange(W1, 3, "alive")]
    assert "no lease at other: expected lease.<worker>.<rank>" in caplog.text
    assert "no lease at lease.w1.0" in caplog.text


async def test_why_a_lease_is_not_renewed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    broker = MemoryBroker()
    async with broker.connect() as bus, a_keeper(bus, ttl_seconds=0.03) as keeper:
        bus.cut()
        await until(lambda: keeper.num_failed_renewals >= 3)
        bus.restore()
        await until(lambda: keeper.is_held)
    told = [line for line in caplog.messages if line.startswith("lease_not_renewed")]
    assert len(told) == 2
    assert "the lease of w1/0 is not renewed" in told[0]
    assert told[1].startswith("lease_not_renewed is over after")
