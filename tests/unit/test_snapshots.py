"""An index that starts from a snapshot: like one that read everything, or as if there was none."""

import logging
from collections.abc import AsyncIterator
from functools import partial

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import LeaseExpired, Proposed, PublishControl
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.indexer.service.snapshot_metrics import SnapshotCollector
from kvatlas.indexer.snapshots.format import SnapshotReader, framed
from kvatlas.indexer.snapshots.schedule import sequence_of
from kvatlas.indexer.snapshots.writing import (
    SNAPSHOTS_BUCKET,
    TURN,
    TURNS_BUCKET,
    SnapshotSettings,
    SnapshotStatus,
    SnapshotWriter,
)
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import EventBatch
from kvatlas.schemas.settings import IndexerSettings
from testkit.builders import a_batch, arrived, hashes, stored, subject_of, up
from testkit.waiting import until

W1 = InstanceId("w1", 0)
FAST = IndexServiceLimits(poll_seconds=0.01, lease_missing_seconds=60.0)
#: takes none by itself
BY_HAND = SnapshotSettings(seconds=3_600.0, messages=1)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        yield bus


async def publish(bus: MemoryBus, *batches: EventBatch) -> None:
    publisher = bus.publisher(KV_EVENTS)
    for batch in batches:
        await publisher.publish(subject_of(batch), encode(batch))
    await publisher.flush()


def a_service(
    bus: MemoryBus, snapshots: SnapshotSettings | None = BY_HAND, name: str = "me"
) -> IndexService:
    state = IndexState(FlatRadixIndex(max_bytes=64 << 20))
    return IndexService(bus, state, name=name, settings=FAST, snapshots=snapshots)


async def snapshot_now(bus: MemoryBus) -> str:
    """Have a fresh index take a snapshot of the log as it is; return its name."""
    await bus.keys(TURNS_BUCKET).delete(TURN)
    async with a_service(bus) as service:
        await service.wait_ready()
        assert service._writer is not None
        assert await service._writer.poll()
    return (await bus.objects(SNAPSHOTS_BUCKET).entries())[0].name


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


# --- starting from one ------------------------------------------------------------------------


async def test_it_starts_from_the_newest_and_reads_what_follows(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)), a_batch(stored(2), seq=2))
    await snapshot_now(bus)
    await publish(bus, a_batch(stored(3), seq=3))
    newest = await snapshot_now(bus)
    await publish(bus, a_batch(stored(4), seq=4))
    async with a_service(bus) as service, a_service(bus, None) as whole:
        await service.wait_ready()
        await whole.wait_ready()
        assert service.loaded is not None
        assert service.loaded.name == newest
        assert service.loaded.about.stream_sequence == 3
        assert service.state.state_digest() == whole.state.state_digest()
        assert service.index.instances() == whole.index.instances()
        assert service.index.match(hashes(1, 2, 3, 4)) == whole.index.match(hashes(1, 2, 3, 4))
        assert service.index.instance(W1).trust is Trust.exact  # type: ignore[union-attr]


async def test_a_snapshot_of_the_whole_log_is_ready_at_once(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    await snapshot_now(bus)
    async with a_service(bus) as service:
        assert service.is_ready
        await publish(bus, a_batch(stored(2), seq=2))
        await until(lambda: service.state.stream_sequence == 2)
        assert service.state.stats().gaps == 0


async def test_who_was_not_exact_is_not_exact(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)), a_batch(stored(2), seq=4))
    await snapshot_now(bus)
    async with a_service(bus) as service:
        view = service.index.instance(W1)
        assert view is not None
        assert view.trust is Trust.degraded
        await until(lambda: service.inventories.num_requests > 0)


async def test_without_the_setting_nothing_is_read_or_written(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    await snapshot_now(bus)
    async with a_service(bus, None) as service:
        await service.wait_ready()
        assert (service.loaded, service.snapshots) == (None, None)


async def test_a_record_that_was_only_proposed_is_proposed_again() -> None:
    """The replica that noticed may have died with its record."""
    state, later = IndexState(ReferenceIndex()), IndexState(ReferenceIndex())
    state.handle(arrived(a_batch(up())))
    for stimulus in (LeaseExpired(W1, 1, 0), Proposed(W1, 1, "throttled", 0)):
        (proposal,) = state.handle(stimulus)
        assert isinstance(proposal, PublishControl)
        assert state.handle(stimulus) == []
        later.restore(state.export()())
        assert later.handle(stimulus) == [proposal]


# --- none that can be used --------------------------------------------------------------------


async def damaged(bus: MemoryBus, name: str, content: bytes | None = None) -> None:
    objects = bus.objects(SNAPSHOTS_BUCKET)
    taken = bytearray()

    def take(chunk: bytes) -> bool:
        taken.extend(chunk)
        return True

    await objects.get(name, take)
    taken[-70] ^= 1  # within the cells
    await objects.put(name, [taken if content is None else content])


@pytest.mark.parametrize("how", ["damaged", "truncated", "none at all"])
async def test_a_damaged_one_is_named_and_the_older_one_used(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    older = await snapshot_now(bus)
    await publish(bus, a_batch(stored(2), seq=2))
    newest = await snapshot_now(bus)
    content = {"damaged": None, "truncated": b"KVATLAS1", "none at all": b""}[how]
    await damaged(bus, newest, content)
    async with a_service(bus) as service:
        await service.wait_ready()
        assert service.loaded is not None
        assert service.loaded.name == older
        assert [match.num_blocks for match in service.index.match(hashes(1, 2))] == [2]
    assert any(newest in line and "of no use" in line for line in warnings(caplog))


@pytest.mark.parametrize("part", ["tables", "flat.numbers"])
async def test_one_with_numbers_that_nothing_has_is_named_and_the_older_one_used(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    older = await snapshot_now(bus)
    await publish(bus, a_batch(stored(2), seq=2))
    newest = await snapshot_now(bus)
    (entry, _) = await bus.objects(SNAPSHOTS_BUCKET).entries()
    reader = SnapshotReader(entry.num_bytes)
    await bus.objects(SNAPSHOTS_BUCKET).get(newest, reader.feed)
    about, parts = reader.finish()
    tree = msgspec.msgpack.decode(parts[part])
    if part == "tables":
        tree["instances"][0]["number"] = 7
    else:
        tree["num_numbers"] = 2**62
    planted = {**parts, part: memoryview(msgspec.msgpack.encode(tree))}
    await bus.objects(SNAPSHOTS_BUCKET).put(newest, framed(about, planted))
    async with a_service(bus) as service:
        await service.wait_ready()
        assert service.loaded is not None
        assert service.loaded.name == older
        assert [match.num_blocks for match in service.index.match(hashes(1, 2))] == [2]
    assert any(newest in line and "of no use" in line for line in warnings(caplog))


async def test_with_all_damaged_the_whole_log_is_read(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    await damaged(bus, await snapshot_now(bus))
    async with a_service(bus) as service:
        await service.wait_ready()
        assert service.loaded is None
        assert service.state.stats().batches == 1


async def test_one_that_the_log_no_longer_goes_on_from_is_not_used(
    bus: MemoryBus, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    await snapshot_now(bus)
    await publish(bus, a_batch(stored(2), seq=2), a_batch(stored(3), seq=3))
    broker.purge(KV_EVENTS, 3)
    async with a_service(bus) as service:
        await service.wait_ready()
        assert service.loaded is None
        assert service.index.instance(W1) is None
        assert service.state.stats().unknown_batches == 1
    assert any("stands for 1, the log has 3 to 3" in line for line in warnings(caplog))


async def test_one_that_the_log_just_goes_on_from_is_used(
    bus: MemoryBus, broker: MemoryBroker
) -> None:
    await publish(bus, a_batch(up(), stored(1)), a_batch(stored(2), seq=2))
    await snapshot_now(bus)
    await publish(bus, a_batch(stored(3), seq=3))
    broker.purge(KV_EVENTS, 3)
    async with a_service(bus) as service:
        await service.wait_ready()
        assert service.loaded is not None
        assert service.index.instance(W1).trust is Trust.exact  # type: ignore[union-attr]


async def test_one_of_another_log_is_not_used(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    """The broker lost the stream, and the new one has grown past where the old one was."""
    await publish(bus, a_batch(up(), stored(1)))
    name = await snapshot_now(bus)
    content = bytearray()

    def take(chunk: bytes) -> bool:
        content.extend(chunk)
        return True

    await bus.objects(SNAPSHOTS_BUCKET).get(name, take)
    async with MemoryBroker().connect() as other:
        await other.declare_stream(events_stream())
        await other.objects(SNAPSHOTS_BUCKET).put(name, [content])
        await publish(other, a_batch(up(), stored(7)), a_batch(stored(8), seq=2))
        async with a_service(other) as service:
            await service.wait_ready()
            assert service.loaded is None
            assert service.index.match(hashes(1)) == []
    assert any("of another log" in line for line in warnings(caplog))


async def test_a_log_that_ends_before_the_snapshot_is_another_one(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    await snapshot_now(bus)
    async with MemoryBroker().connect() as other:
        await other.declare_stream(events_stream())
        (entry,) = await bus.objects(SNAPSHOTS_BUCKET).entries()
        await other.objects(SNAPSHOTS_BUCKET).put(entry.name, [b"x"])
        async with a_service(other) as service:
            assert service.is_ready
            assert service.loaded is None


# --- taking them ------------------------------------------------------------------------------


async def test_snapshots_come_by_themselves_and_old_ones_go(bus: MemoryBus) -> None:
    often = SnapshotSettings(seconds=0.05, messages=1, kept=2)
    async with a_service(bus, often) as service:
        for seq in range(1, 5):
            await publish(bus, a_batch(up(), stored(seq), seq=seq))
            await bus.keys(TURNS_BUCKET).delete(TURN)
            await until(partial(has_written, service, seq))
        await until(lambda: status_of(service).num_snapshots == 2)
    entries = await bus.objects(SNAPSHOTS_BUCKET).entries()
    assert [sequence_of(entry.name) for entry in entries] == [4, 3]


async def test_replicas_take_turns(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    async with a_service(bus, name="one") as one, a_service(bus, name="other") as other:
        for service in (one, other):
            await service.wait_ready()
        assert await writer_of(one).poll()
        await publish(bus, a_batch(stored(2), seq=2))
        await until(lambda: other.state.stream_sequence == 2)
        assert not await writer_of(other).poll()
        await bus.keys(TURNS_BUCKET).delete(TURN)
        assert await writer_of(other).poll()
    assert len(await bus.objects(SNAPSHOTS_BUCKET).entries()) == 2


def status_of(service: IndexService) -> SnapshotStatus:
    assert service.snapshots is not None
    return service.snapshots


def has_written(service: IndexService, count: int) -> bool:
    return status_of(service).num_written == count


def writer_of(service: IndexService) -> SnapshotWriter:
    assert service._writer is not None
    return service._writer


async def test_nothing_is_taken_before_enough_has_come(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    await snapshot_now(bus)
    await bus.keys(TURNS_BUCKET).delete(TURN)
    few = SnapshotSettings(seconds=3600.0, messages=2)
    async with a_service(bus, few) as service:
        await publish(bus, a_batch(stored(2), seq=2))
        await until(lambda: service.state.stream_sequence == 2)
        assert not await writer_of(service).poll()
        await publish(bus, a_batch(stored(3), seq=3))
        await until(lambda: service.state.stream_sequence == 3)
        assert await writer_of(service).poll()
        status = status_of(service)
        assert status.num_written == 1
        assert status.num_bytes > 0
        assert status.pause_seconds > 0


async def test_an_outage_costs_a_snapshot_and_no_more(bus: MemoryBus, broker: MemoryBroker) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    async with broker.connect() as other:
        often = SnapshotSettings(seconds=0.05, messages=1)
        async with a_service(other, often) as service:
            other.cut()
            await until(lambda: status_of(service).num_failed > 1)
            assert not service.failed.is_set()
            other.restore()
            await until(partial(has_written, service, 1))


async def test_the_oldest_one_near_the_beginning_of_the_log_is_told(
    bus: MemoryBus, broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    await publish(bus, *[a_batch(up(), stored(seq), seq=seq) for seq in range(1, 4)])
    await snapshot_now(bus)
    await publish(bus, *[a_batch(stored(seq), seq=seq) for seq in range(4, 20)])
    broker.purge(KV_EVENTS, 3)
    await bus.keys(TURNS_BUCKET).put(TURN, b"somebody else")
    async with a_service(bus) as service:
        await writer_of(service).poll()
        assert status_of(service).headroom == 1
        assert status_of(service).log_first == 3
    assert any("from where the log begins, 3" in line for line in warnings(caplog))


async def test_metrics_tell_of_snapshots(bus: MemoryBus) -> None:
    await publish(bus, a_batch(up(), stored(1)))
    await snapshot_now(bus)
    async with a_service(bus) as service:
        await writer_of(service).poll()
        registry = CollectorRegistry()
        registry.register(SnapshotCollector(service))
        told = generate_latest(registry).decode()
    assert "kv_snapshots 1.0" in told
    assert "kv_snapshot_loaded 1.0" in told
    assert "kv_snapshot_headroom_sequences 1.0" in told
    assert "kv_log_first_sequence 1.0" in told
    async with a_service(bus, None) as service:
        registry = CollectorRegistry()
        registry.register(SnapshotCollector(service))
        assert generate_latest(registry) == b""


def test_settings_have_the_same_defaults() -> None:
    at = IndexerSettings()
    assert SnapshotSettings() == SnapshotSettings(
        at.snapshot_seconds, at.snapshot_messages, at.snapshots_kept, at.snapshots_kept_seconds
    )
