"""The shell around the fold, over a bus in memory."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvatlas.events.bus import Publisher
from kvatlas.events.codec import decode_control, encode
from kvatlas.events.leases import LeaseKeeper, LeaseValue
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.streams import KV_EVENTS, LEASES_BUCKET, events_stream
from kvatlas.events.subjects import inventory_subject
from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.fold.budgets import BudgetSettings
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index import kernel
from kvatlas.indexer.index.kernel.fences import VERSION
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.reader import SharedIndexReader
from kvatlas.indexer.reader import finished
from kvatlas.indexer.service.index_service import NOTHING_COMES, IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.router.http.trees import Trees
from kvatlas.schemas.conditions import LOG_NOT_STORED, Conditions
from kvatlas.schemas.errors import StreamRefused
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import ControlRecord, EventBatch, WorkerDown
from testkit.builders import (
    MODEL,
    a_batch,
    a_control,
    digests,
    hashes,
    inventory,
    stored,
    subject_of,
    up,
)
from testkit.bus import Collected
from testkit.waiting import WAIT_SECONDS, until

W1 = InstanceId("w1", 0)
FAST = IndexServiceLimits(
    poll_seconds=0.01,
    lease_ended_seconds=0.0,
    lease_missing_seconds=60.0,
    lease_settling_seconds=0.0,
    inventory_jitter_seconds=0.0,
    inventory_timeout_seconds=5.0,
    inventory_retry_seconds=0.02,
    inventory_max_retry_seconds=0.04,
)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        yield bus


async def publish(bus: MemoryBus, *batches: EventBatch | ControlRecord) -> None:
    publisher = bus.publisher(KV_EVENTS)
    for batch in batches:
        await publisher.publish(subject_of(batch), encode(batch))
    await publisher.flush()


def a_service(
    bus: MemoryBus, settings: IndexServiceLimits = FAST, name: str = "me"
) -> IndexService:
    return IndexService(bus, IndexState(ReferenceIndex()), name=name, settings=settings)


def is_exact(service: IndexService) -> Callable[[], bool]:
    return lambda: [m.trust for m in service.index.match(hashes(1))] == [Trust.exact]


# --- following ----------------------------------------------------------------------------------


async def test_it_is_ready_when_what_was_in_the_log_is_folded_in(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)), a_batch(stored(2), seq=2))
    async with a_service(bus) as service:
        assert not service.is_ready
        await service.wait_ready()
        assert service.state.stream_sequence == 2
        assert service.lag.stream_sequences == 0
        await publish(bus, a_batch(stored(3), seq=3))
        await until(lambda: service.state.stream_sequence == 3)
        assert [match.num_blocks for match in service.index.match(hashes(1, 2, 3))] == [3]


async def test_an_empty_log_is_ready_at_once(bus: MemoryBus) -> None:
    async with a_service(bus) as service:
        assert service.is_ready
        assert service.convergence_ms() == {}


async def says_what_it_is(bus: MemoryBus, seq: int) -> None:
    """Serve W1's inventory as a sidecar does: WorkerUp first, behind what was said before."""

    async def give_inventory(_: bytes) -> bytes:
        told = inventory(1, 2, as_of=seq - 1)
        await publish(bus, a_batch(up(), told, *digests(1, 2), seq=seq))
        return b""

    await bus.serve(inventory_subject(W1), give_inventory)


async def test_a_worker_whose_beginning_left_the_log_is_asked_when_it_speaks(
    bus: MemoryBus, broker: MemoryBroker
) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    broker.purge(KV_EVENTS, 2)
    async with a_service(bus) as service:
        await says_what_it_is(bus, seq=3)
        await publish(bus, a_batch(stored(2), seq=2))
        await service.wait_ready()
        await until(is_exact(service))
        assert service.state.stats().unknown_batches == 1
        assert [match.num_blocks for match in service.index.match(hashes(1, 2))] == [2]


async def test_a_worker_that_is_only_known_by_its_lease_is_asked(
    bus: MemoryBus, broker: MemoryBroker
) -> None:
    """It holds nothing new and says nothing, and what it said has left the log."""
    await publish(bus, a_batch(up(), stored(1)), a_batch(stored(2), seq=2))
    broker.purge(KV_EVENTS, 3)
    keys = bus.keys(LEASES_BUCKET)
    async with a_service(bus) as service, LeaseKeeper(keys, W1, 1, print):
        await says_what_it_is(bus, seq=3)
        await until(is_exact(service))


async def test_invented_names_cost_a_few_requests_and_no_instance(bus: MemoryBus) -> None:
    async with a_service(bus) as service:
        await service.wait_ready()
        for number in range(2_000):
            name = f"invented-{number}"
            await publish(
                bus,
                a_batch(stored(1), worker=name),
                a_control(worker=name),
                a_control(worker=name, kind="forgotten", reason="1"),
            )
        await until(lambda: service.state.stream_sequence == 6_000)
        stats = service.state.stats()
        assert (stats.unknown_batches, stats.unknown_controls) == (2_000, 4_000)
        assert service.index.instances() == []
        assert service.inventories.num_requests <= 2_000 / 5
        assert service.num_control_records == 0


# --- epochs that are nobody's -------------------------------------------------------------------


@pytest.mark.parametrize("has_ended", [False, True])
async def test_an_epoch_above_a_living_one_ends_so_that_the_living_one_hears_of_it(
    bus: MemoryBus, has_ended: bool
) -> None:
    records = Collected[ControlRecord]()
    await bus.follow(
        KV_EVENTS, 1, lambda m: records(decode_control(m.payload)), subjects="kv.control.>"
    )
    async with a_service(bus) as service:
        await service.wait_ready()
        await publish(bus, a_batch(up(), stored(1), epoch=5))
        forged = a_batch(up(), *[WorkerDown("end")] * has_ended, epoch=9)
        await publish(bus, forged, a_batch(stored(2), epoch=5, seq=2))
        await until(lambda: service.state.stats().old_epochs == 1)
        # each renewal is reported by itself
        for count in range(2):
            await bus.keys(LEASES_BUCKET).put(
                "lease.w1.0", msgspec.msgpack.encode(LeaseValue(5, b"%d" % count)), 60.0
            )
            await asyncio.sleep(0.02)
        await records.count(1)
        assert [(r.instance, r.epoch, r.kind) for r in records.items] == [(W1, 9, "expired")]
        await until(lambda: trust_of(service) is Trust.gone)


async def test_a_straggler_of_a_dead_process_ends_no_epoch(bus: MemoryBus) -> None:
    keys = bus.keys(LEASES_BUCKET)
    async with a_service(bus) as service, LeaseKeeper(keys, W1, 9, print):
        await service.wait_ready()
        await publish(bus, a_batch(up(), stored(1), epoch=5), a_batch(up(), stored(1), epoch=9))
        await publish(bus, a_batch(stored(2), epoch=5, seq=2))
        await until(lambda: service.state.stats().old_epochs == 1)
        assert service.num_control_records == 0
        assert trust_of(service) is Trust.exact


def trust_of(service: IndexService) -> Trust | None:
    view = service.index.instance(W1)
    return None if view is None else view.trust


async def test_a_log_that_ages_away_while_it_is_read_does_not_keep_it_from_being_ready(
    bus: MemoryBus, broker: MemoryBroker
) -> None:
    await publish(bus, a_batch(up()), a_batch(seq=2))
    async with a_service(bus) as service:
        broker.purge(KV_EVENTS, 3)
        async with asyncio.timeout(WAIT_SECONDS):
            await service.wait_ready()
        await publish(bus, a_batch(seq=3))
        await until(lambda: service.state.stats().stream_holes == 1)


async def test_until_it_is_ready_everybody_is_catching_up(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)), a_batch(stored(2), seq=2))
    async with a_service(bus) as service:
        await asyncio.sleep(0)  # one round of the event loop: the follower's first message
        trusts = [view.trust for view in service.index.instances()]
        assert trusts in ([], [Trust.catching_up])
        await service.wait_ready()
        assert [view.trust for view in service.index.serving(MODEL)] == [Trust.exact]


async def test_without_a_log_it_does_not_start(broker: MemoryBroker) -> None:
    async with broker.connect() as bus:
        with pytest.raises(StreamRefused):
            async with a_service(bus):
                pass


async def test_it_measures_how_long_a_message_takes(bus: MemoryBus) -> None:
    async with a_service(bus) as service:
        await publish(bus, a_batch(up()), a_batch(seq=2))
        await until(lambda: service.state.stream_sequence == 2)
        delays = service.convergence_ms()
        assert 0 <= delays["p50"] <= delays["p99"] <= delays["max"]


async def test_a_poison_message_stops_nothing(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = bus.publisher(KV_EVENTS)
    async with a_service(bus) as service:
        for payload in (b"", b"\xc1", b"\x91" * 5000, encode(a_batch(worker="other"))) * 3:
            await publisher.publish("kv.events.model.w1.0", payload)
        await publisher.publish("kv.events.nonsense", b"")
        await publish(bus, a_batch(up(), stored(1)))
        await until(lambda: service.state.stream_sequence == 14)
        assert is_exact(service)()
        assert service.state.stats().rejected_total == 13
    lines = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(lines) == 3, "one line per kind and worker"


async def test_what_was_wrong_before_it_started_is_no_news(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(bus, a_batch(up()), a_batch(seq=5), a_batch(epoch=2))
    caplog.set_level(logging.INFO, "kvatlas")
    async with a_service(bus) as service:
        await service.wait_ready()
    assert [
        r.getMessage() for r in caplog.records if r.name == "kvatlas.indexer.service.index_service"
    ] == []


async def test_a_lost_part_of_the_log_is_a_hole(bus: MemoryBus, broker: MemoryBroker) -> None:
    async with a_service(bus) as service:
        await publish(bus, a_batch(up(), stored(1)))
        broker.faults.drop_next = 1
        await publish(bus, a_batch(stored(2), seq=2), a_batch(stored(3), seq=3))
        await until(lambda: service.state.stream_sequence == 3)
        assert service.state.stats().stream_holes == 1
        assert service.state.fleet.wants_inventory(W1)


# --- while the broker is away -------------------------------------------------------------------


async def test_it_goes_on_answering_and_tells_its_age(bus: MemoryBus) -> None:
    stale_soon = IndexServiceLimits(poll_seconds=0.01, stale_seconds=0.05)
    async with a_service(bus, stale_soon) as service:
        await publish(bus, a_batch(up(), stored(1)))
        await until(lambda: service.state.stream_sequence == 1)
        bus.cut()
        assert not service.connected
        await until(lambda: service.lag.seconds_since_contact > 0.1)
        (match,) = service.index.match(hashes(1))
        assert (match.num_blocks, match.trust) == (1, Trust.stale)
        bus.restore()
        await publish(bus, a_batch(stored(2), seq=2))
        await until(lambda: service.lag.seconds_since_contact < 0.05)
        assert service.connected


# --- inventories --------------------------------------------------------------------------------


async def test_an_inventory_is_asked_for_until_it_has_healed(bus: MemoryBus) -> None:
    asked: list[bytes] = []

    async def answer(payload: bytes) -> bytes:
        asked.append(payload)
        if len(asked) == 3:  # what came before was lost on its way
            await publish(bus, a_batch(inventory(1, as_of=3), *digests(1), seq=4))
        return b""

    await bus.serve(inventory_subject(W1), answer)
    async with a_service(bus) as service:
        await publish(bus, a_batch(up(), stored(1)), a_batch(stored(2), seq=3))
        await until(is_exact(service))
        assert service.inventories.num_requests == 3


async def test_nobody_who_answers_is_no_error(bus: MemoryBus) -> None:
    async with a_service(bus) as service:
        await publish(bus, a_batch(up()), a_batch(seq=3))
        await until(lambda: service.inventories.num_failed_requests >= 2)


async def test_an_owner_that_fails_is_asked_again(bus: MemoryBus) -> None:
    async def fail(_payload: bytes) -> bytes:
        raise ValueError("broken")

    await bus.serve(inventory_subject(W1), fail)
    async with a_service(bus) as service:
        await publish(bus, a_batch(up()), a_batch(seq=3))
        await until(lambda: service.inventories.num_failed_requests >= 2)


async def test_losses_of_the_past_are_asked_about_once_it_is_ready(bus: MemoryBus) -> None:
    """A reader that starts over must not ask for every gap in history, only for what is open."""
    asked = Collected[InstanceId]()

    async def serve(instance: InstanceId) -> None:
        async def answer(_payload: bytes) -> bytes:
            asked(instance)
            return b""

        await bus.serve(inventory_subject(instance), answer)

    await serve(W1)
    await serve(InstanceId("w2", 0))
    await publish(
        bus,
        a_batch(up(), seq=3),
        a_batch(up(), seq=3, worker="w2"),
        a_batch(up(), epoch=2, worker="w2"),
    )
    async with a_service(bus):
        await asked.count(2)
    assert set(asked.items) == {W1}


async def test_many_losses_are_few_requests_at_a_time(bus: MemoryBus) -> None:
    under_way, most = 0, 0
    release = asyncio.Event()

    async def answer(_payload: bytes) -> bytes:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await release.wait()
        under_way -= 1
        return b""

    workers = [f"w{number}" for number in range(30)]
    for worker in workers:
        await bus.serve(inventory_subject(InstanceId(worker, 0)), answer)
    async with a_service(bus) as service:
        await publish(bus, *(a_batch(up(), worker=worker, seq=2) for worker in workers))
        await until(lambda: under_way == 2)
        release.set()
        await until(lambda: service.inventories.num_requests >= 30)
    assert most == 2


# --- leases -------------------------------------------------------------------------------------


async def lose_lease(bus: MemoryBus, broker: MemoryBroker, clock: "Clock", epoch: int) -> None:
    keys = bus.keys(LEASES_BUCKET)
    keeper = LeaseKeeper(keys, W1, epoch, lambda fenced: None, ttl_seconds=5.0)
    async with keeper:
        clock.now += 10.0
        broker.expire()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_an_expired_lease_becomes_a_record_that_all_replicas_fold() -> None:
    clock = Clock()
    broker = MemoryBroker(clock)
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        await publish(bus, a_batch(up(), stored(1), epoch=7))
        async with a_service(bus, name="one") as one, a_service(bus, name="two") as two:
            await lose_lease(bus, broker, clock, epoch=7)
            await until(lambda: one.index.match(hashes(1)) == [])
            await until(lambda: two.index.match(hashes(1)) == [])
            await until(lambda: one.num_control_records + two.num_control_records >= 1)
            assert one.state.state_digest() == two.state.state_digest()
        messages = [m async for m in bus.read_range(KV_EVENTS, 2, 9)]
        records = [decode_control(message.payload) for message in messages]
        assert {(r.instance, r.epoch, r.kind, r.reason) for r in records} == {
            (W1, 7, "expired", "lease")
        }
        assert {record.by for record in records} <= {"one", "two"}


async def test_an_instance_that_never_had_a_lease_is_expired_after_a_while(bus: MemoryBus) -> None:
    settings = IndexServiceLimits(
        poll_seconds=0.01, lease_missing_seconds=0.05, lease_settling_seconds=0.0
    )
    async with a_service(bus, settings) as service:
        await publish(bus, a_batch(up(), stored(1)))
        await until(lambda: service.state.stats().controls == 1)
        assert [view.trust for view in service.index.instances()] == [Trust.gone]


async def test_a_living_lease_keeps_its_instance(bus: MemoryBus) -> None:
    settings = IndexServiceLimits(
        poll_seconds=0.01, lease_missing_seconds=0.0, lease_settling_seconds=0.0
    )
    keys = bus.keys(LEASES_BUCKET)
    async with (
        LeaseKeeper(keys, W1, 1, lambda fenced: None),
        a_service(bus, settings) as service,
    ):
        await publish(bus, a_batch(up(), stored(1)), a_batch(up(), worker="w2"))
        await until(lambda: service.state.stats().controls == 1)
        assert is_exact(service)()


# --- end ----------------------------------------------------------------------------------------


async def test_it_leaves_nothing_running(bus: MemoryBus) -> None:
    before = asyncio.all_tasks()
    async with a_service(bus) as service:
        await publish(bus, a_batch(up()), a_batch(seq=3))
        await until(lambda: service.inventories.num_failed_requests >= 1)
    assert asyncio.all_tasks() == before
    sequence = service.state.stream_sequence
    await publish(bus, a_batch(seq=4))
    await asyncio.sleep(0)
    assert service.state.stream_sequence == sequence


class RefusingFirst:
    """A Publisher whose broker refuses the first message."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher, self.num_refused = publisher, 0
        self.num_unacked = self.unacked_bytes = 0

    async def publish(self, subject: str, payload: bytes) -> None:
        if not self.num_refused:
            self.num_refused += 1
            raise StreamRefused(f"no permission to publish {subject}")
        await self._publisher.publish(subject, payload)

    async def flush(self) -> None:
        await self._publisher.flush()

    async def close(self) -> None: ...


async def test_a_refused_record_is_proposed_again(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = RefusingFirst(bus.publisher(KV_EVENTS))
    await publish(bus, a_batch(up(), stored(1)))
    monkeypatch.setattr(bus, "publisher", lambda _: refusing)
    settings = msgspec.structs.replace(FAST, lease_missing_seconds=0.0, record_retry_seconds=0.01)
    async with a_service(bus, settings) as service:
        await until(lambda: service.num_control_records == 1)
        await until(lambda: not service.index.match(hashes(1)))
    assert refusing.num_refused == 1


# --- what replicas propose ------------------------------------------------------------------------


async def test_who_gives_no_inventory_is_forgotten_once_by_all_replicas(
    bus: MemoryBus, broker: MemoryBroker
) -> None:
    settings = msgspec.structs.replace(FAST, max_vain_inventory_requests=2)
    async with (
        broker.connect() as other,
        a_service(bus, settings, "one") as one,
        a_service(other, settings, "two") as two,
    ):
        await publish(bus, a_batch(up(), stored(1)), a_batch(stored(2), seq=3))
        for service in (one, two):
            await until(lambda service=service: service.state.stats().forgotten == 1)  # type: ignore[misc]
            assert service.index.match(hashes(1)) == []
        await publish(bus, a_batch(inventory(1, 2, as_of=3), *digests(1, 2), seq=4))
        await until(is_exact(one))
        await until(is_exact(two))
        assert one.state.state_digest() == two.state.state_digest()


async def test_a_storm_is_throttled_and_heals_by_the_inventory(bus: MemoryBus) -> None:
    budget = BudgetSettings(bytes_per_second=1_000.0, burst_bytes=20_000.0, throttle_seconds=0.1)
    settings = msgspec.structs.replace(FAST, budget=budget)

    async def give_inventory(_: bytes) -> bytes:
        seq = service.state.instance(W1).seq  # type: ignore[union-attr]
        batch = a_batch(inventory(1, 2, as_of=seq), *digests(1, 2), seq=seq + 1)
        await publish(bus, batch)
        return b""

    async with a_service(bus, settings) as service:
        await bus.serve(inventory_subject(W1), give_inventory)
        await publish(bus, a_batch(up(), stored(1)), a_batch(up(), worker="w2"))
        await publish(bus, *(a_batch(stored(*range(1, 100)), seq=seq) for seq in range(2, 30)))
        await until(lambda: service.state.stats().throttles == 1)
        other = service.index.instance(InstanceId("w2", 0))
        assert other
        assert other.trust is Trust.exact
        await until(is_exact(service))
        assert [match.num_blocks for match in service.index.match(hashes(1, 2, 3))] == [2]


async def test_memory_that_changes_by_itself_is_found_and_told_anew(bus: MemoryBus) -> None:
    index = FlatRadixIndex()
    settings = msgspec.structs.replace(FAST, audit_seconds=0.02)

    async def give_inventory(_: bytes) -> bytes:
        await publish(bus, a_batch(inventory(1, 2, as_of=1), *digests(1, 2), seq=2))
        return b""

    async with IndexService(bus, IndexState(index), settings=settings) as service:
        await bus.serve(inventory_subject(W1), give_inventory)
        await publish(bus, a_batch(up(), stored(1, 2)))
        await until(is_exact(service))
        index._cells[np.flatnonzero(index._cells[:, kernel.ROW])[0], kernel.LOW] ^= np.uint32(4)
        await until(lambda: service.state.stats().audit_failures == 1)
        await until(is_exact(service))
        assert [match.num_blocks for match in service.index.match(hashes(1, 2))] == [2]


async def test_a_long_history_is_no_storm(bus: MemoryBus) -> None:
    budget = BudgetSettings(bytes_per_second=1.0, burst_bytes=500.0)
    settings = msgspec.structs.replace(FAST, budget=budget)
    batches = [a_batch(stored(*range(1, 100)), seq=seq) for seq in range(2, 30)]
    await publish(bus, a_batch(up()), *batches)
    async with a_service(bus, settings) as service:
        await service.wait_ready()
        await asyncio.sleep(0.05)
        assert service.num_control_records == 0
        assert service.state.stats().throttles == 0
        await publish(bus, a_batch(stored(*range(1, 100)), seq=30))
        await until(lambda: service.state.stats().throttles == 1)


async def test_no_clock_of_a_worker_is_believed(bus: MemoryBus) -> None:
    """Batches of ten minutes ago and to come: lag and silence are the broker's."""
    async with a_service(bus) as service:
        now = time.time_ns()
        for seq, ahead in enumerate((0, -600, 600, -86_400), 1):
            batch = a_batch(*([up()] if seq == 1 else []), stored(seq), seq=seq)
            ts_ns = now + ahead * 1_000_000_000
            await publish(bus, msgspec.structs.replace(batch, ts_ns=ts_ns))
        await until(lambda: service.state.stream_sequence == 4)
        await asyncio.sleep(0.05)
        view = service.index.instance(W1)
        assert view is not None
        assert (view.trust, view.seq) == (Trust.exact, 4)
        assert abs(view.last_event_ns - time.time_ns()) < 60e9
        assert service.convergence_ms()["max"] < 60_000


async def test_a_tree_is_no_change_for_who_reads_the_same_memory(
    bus: MemoryBus, tmp_path: Path
) -> None:
    """It sweeps what forgotten instances left out of a copy."""
    shared = SharedArrays(tmp_path)
    state = IndexState(FlatRadixIndex(arrays=shared))
    async with IndexService(bus, state, settings=FAST, shared=shared) as service:
        await publish(bus, a_batch(up(), stored(1, 2)), a_batch(up(), stored(1), worker="w2"))
        await publish(bus, a_batch(WorkerDown("end"), worker="w2", seq=2))
        await until(lambda: service.state.stream_sequence == 3)
        before = int(shared.header[VERSION])
        [run] = finished(service.index.copy_tree()().view(3, 8))
        assert (run.num_blocks, run.holders) == (2, (W1,))
        assert int(shared.header[VERSION]) == before
        reader = SharedIndexReader(tmp_path)
        assert [match.num_blocks for match in reader.match(hashes(1, 2))] == [2]
    shared.close()


async def test_while_the_index_is_counted_nothing_changes_it(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = msgspec.structs.replace(FAST, audit_seconds=0.01)
    begun, may_end = threading.Event(), threading.Event()
    async with a_service(bus, settings) as service:
        await publish(bus, a_batch(up(), stored(1)))
        await until(is_exact(service))
        audit = service.state.audit

        def slow_audit() -> tuple[tuple[InstanceId, Tier], ...]:
            begun.set()
            may_end.wait(2 * WAIT_SECONDS)
            return audit()

        monkeypatch.setattr(service.state, "audit", slow_audit)
        await until(begun.is_set)
        trees = Trees(service.index, service.still)
        viewing = asyncio.create_task(trees.view(3, 8))
        await publish(bus, a_batch(stored(2), seq=2))
        assert [match.num_blocks for match in service.index.match(hashes(1, 2))] == [1]
        may_end.set()
        await until(lambda: service.state.stream_sequence == 2)
        stream_sequence, runs = await viewing
        assert (stream_sequence, sum(run.num_blocks for run in runs)) == (2, 2)
        assert service.state.stats().audit_failures == 0


async def test_what_this_replica_finds_waits_too_while_the_fold_stands_still(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_service(bus) as service:
        await publish(bus, a_batch(up(), stored(1)))
        await until(is_exact(service))
        num_looks = 0

        def lapsed(*_given: object) -> list[tuple[InstanceId, int]]:
            nonlocal num_looks
            num_looks += 1
            return [(W1, 1)]

        async with service.still():
            monkeypatch.setattr(service._lapses, "due", lapsed)
            await publish(bus, a_batch(stored(2), seq=2))
            await until(lambda: num_looks > 1)
            [view] = service.index.instances()
            assert (view.trust, view.seq) == (Trust.exact, 1)
            assert not service.state.fleet.instances[W1].is_expiring
        await until(lambda: service.index.instances()[0].trust is Trust.gone)


# --- a log that takes nothing ---------------------------------------------------------------------


async def test_a_log_that_says_nothing_while_leases_are_renewed_is_a_condition(
    bus: MemoryBus,
) -> None:
    impatient = IndexServiceLimits(poll_seconds=0.01, log_silence_seconds=0.1)
    conditions = Conditions()
    await publish(bus, a_batch(up(), epoch=7))
    keys = bus.keys(LEASES_BUCKET)
    async with (
        IndexService(
            bus, IndexState(ReferenceIndex()), settings=impatient, conditions=conditions
        ) as service,
        LeaseKeeper(keys, W1, 7, lambda _: None, ttl_seconds=0.09),
    ):
        await service.wait_ready()
        await until(lambda: conditions.reasons == {LOG_NOT_STORED: NOTHING_COMES})
        publishing = asyncio.create_task(publish_on(bus))
        await until(lambda: not conditions.present)
        publishing.cancel()


async def publish_on(bus: MemoryBus) -> None:
    for seq in range(2, 10_000):
        await publish(bus, a_batch(seq=seq, epoch=7))
        await asyncio.sleep(0.005)
