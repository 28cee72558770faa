"""The archiver over a bus and an archive in memory, and what each of them can do wrong."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from kvatlas.events.archive.archiver import Archiver, ArchiverSettings
from kvatlas.events.archive.memory import MemoryArchive
from kvatlas.events.archive.port import EventRecord, Hole
from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS, decisions_stream, events_stream
from kvatlas.schemas.conditions import ARCHIVE_NOT_WRITTEN, Conditions
from kvatlas.schemas.errors import ArchiveMismatch, ArchiveUnavailable, StreamRefused
from kvatlas.schemas.kv_events import ControlRecord, EventBatch
from testkit.builders import a_batch, a_control, subject_of
from testkit.waiting import until

FAST = ArchiverSettings(retry_seconds=0.01)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        await bus.declare_stream(decisions_stream())
        yield bus


async def publish(bus: MemoryBus, *batches: EventBatch | ControlRecord) -> None:
    publisher = bus.publisher(KV_EVENTS)
    for batch in batches:
        await publisher.publish(subject_of(batch), encode(batch))
    await publisher.flush()


async def decide(bus: MemoryBus, *payloads: bytes) -> None:
    publisher = bus.publisher(KV_DECISIONS)
    for payload in payloads:
        await publisher.publish("kv.decisions.m", payload)
    await publisher.flush()


def numbers(archive: MemoryArchive) -> list[int]:
    return [message.stream_sequence for message in archive.read_events(1, 10**9)]


class GatedArchive(MemoryArchive):
    """An archive that is away while `is_away`, and waits at `gate` for its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.gate = threading.Event()
        self.gate.set()
        self.num_appends = 0
        self.largest_append = 0

    def append_events(
        self, records: Sequence[EventRecord], holes: Sequence[Hole], cursor: int
    ) -> None:
        self.gate.wait(10)
        if self.is_away:
            raise ArchiveUnavailable("gone fishing")
        self.num_appends += 1
        self.largest_append = max(self.largest_append, len(records))
        super().append_events(records, holes, cursor)


def has_written_its_queue(archiver: Archiver) -> bool:
    feed = archiver._feeds[0]
    return not feed.queue and feed.stored == feed.next_sequence - 1


# --- what it writes -----------------------------------------------------------------------------


async def test_events_records_and_garbage_are_kept_and_a_repeated_batch_once(
    bus: MemoryBus,
) -> None:
    archive = MemoryArchive()
    await publish(bus, a_batch(), a_batch(), a_control(), a_control(), a_batch(seq=2))
    await bus.publisher(KV_EVENTS).publish("kv.events.model.w1.0", b"garbage")
    async with Archiver(bus, archive) as archiver:
        await archiver.caught_up()
        assert archiver.cursors == {KV_EVENTS: 6, KV_DECISIONS: 0}
    assert numbers(archive) == [1, 3, 4, 5, 6]


async def test_a_batch_on_somebody_elses_subject_does_not_take_its_place(bus: MemoryBus) -> None:
    """Spoofed first, genuine second: the fold skips the one and takes the other, so keep both."""
    archive = MemoryArchive()
    await bus.publisher(KV_EVENTS).publish("kv.events.model.mallory.0", encode(a_batch()))
    await publish(bus, a_batch())
    async with Archiver(bus, archive) as archiver:
        await archiver.caught_up()
    assert numbers(archive) == [1, 2]


async def test_numbers_that_no_database_has_room_for_are_kept_as_a_message(bus: MemoryBus) -> None:
    archive = MemoryArchive()
    await publish(bus, a_batch(epoch=2**63), a_batch(seq=2**63), a_batch(epoch=2**63))
    async with Archiver(bus, archive) as archiver:
        await archiver.caught_up()
    assert numbers(archive) == [1, 2, 3]


async def test_decisions_are_kept_by_id_and_what_is_none_is_passed_over(bus: MemoryBus) -> None:
    archive = MemoryArchive()
    good = b"\x82\xa2id\xa2d1\xa1v\x64"
    wrong = [b"", b"\x91" * 5000, b"\x81\xa1v\x64", b"\x81\xa2id\xa0", b"\x81\xa2id\xa3a\0b"]
    await decide(bus, *wrong, good, good)
    async with Archiver(bus, archive) as archiver:
        await archiver.caught_up()
    assert archive.decision("d1").stream_sequence == 6
    assert len(archive.decisions(100, 100)) == 1
    assert archive.cursor(KV_DECISIONS) == 7


async def test_holes_of_the_stream_are_kept(bus: MemoryBus, broker: MemoryBroker) -> None:
    archive = MemoryArchive()
    await publish(bus, *(a_batch(seq=seq) for seq in range(1, 6)))
    broker.purge(KV_EVENTS, 4)
    async with Archiver(bus, archive) as archiver:
        await archiver.caught_up()
        broker.faults.drop_next = 2
        await publish(bus, *(a_batch(seq=seq) for seq in range(6, 9)))
        await archiver.caught_up()
    assert archive.holes(KV_EVENTS) == [Hole(1, 3), Hole(6, 7)]
    assert numbers(archive) == [4, 5, 8]


# --- going on -----------------------------------------------------------------------------------


async def test_it_goes_on_where_the_archive_ends(bus: MemoryBus) -> None:
    archive = GatedArchive()
    for first in (1, 4):
        await publish(bus, *(a_batch(seq=seq) for seq in range(first, first + 3)))
        async with Archiver(bus, archive) as archiver:
            await archiver.caught_up()
            assert archiver.num_written == 3
    assert numbers(archive) == [1, 2, 3, 4, 5, 6]


async def test_what_was_received_is_written_before_it_ends(bus: MemoryBus) -> None:
    archive = GatedArchive()
    archive.gate.clear()
    async with Archiver(bus, archive):
        await publish(bus, *(a_batch(seq=seq) for seq in range(1, 6)))
        await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.01, archive.gate.set)
    assert numbers(archive) == [1, 2, 3, 4, 5]


async def test_a_full_queue_loses_nothing(bus: MemoryBus) -> None:
    """Back-pressure: what does not fit is read again from the stream."""
    archive = GatedArchive()
    archive.gate.clear()
    settings = ArchiverSettings(max_queued=10, max_batch=4)
    async with Archiver(bus, archive, settings=settings) as archiver:
        await publish(bus, *(a_batch(seq=seq) for seq in range(1, 101)))
        await until(lambda: archiver._feeds[0].is_full)
        archive.gate.set()
        await archiver.caught_up()
    assert numbers(archive) == list(range(1, 101))
    assert archive.largest_append == 4


async def test_a_queue_is_bounded_in_bytes_and_takes_one_message_however_large(
    bus: MemoryBus,
) -> None:
    archive = GatedArchive()
    settings = ArchiverSettings(max_queued_bytes=1)
    async with Archiver(bus, archive, settings=settings) as archiver:
        await publish(bus, *(a_batch(seq=seq) for seq in range(1, 6)))
        await archiver.caught_up()
    assert numbers(archive) == [1, 2, 3, 4, 5]


# --- what goes wrong ----------------------------------------------------------------------------


async def test_an_archive_that_is_away_is_tried_until_it_is_back(bus: MemoryBus) -> None:
    archive = GatedArchive()
    archive.is_away = True
    async with Archiver(bus, archive, settings=FAST) as archiver:
        await publish(bus, a_batch(), a_batch(seq=2))
        await until(lambda: archiver.num_failures >= 3)
        assert archiver.cursors[KV_EVENTS] == 0
        archive.is_away = False
        await archiver.caught_up()
    assert numbers(archive) == [1, 2]


async def test_an_archive_that_is_away_at_the_end_is_told(bus: MemoryBus) -> None:
    archive = GatedArchive()
    archive.is_away = True
    archiver = await Archiver(bus, archive, settings=FAST).__aenter__()
    await publish(bus, a_batch())
    await until(lambda: archiver.num_failures >= 1)
    with pytest.raises(ArchiveUnavailable, match="fishing"):
        await archiver.__aexit__()
    archive.is_away = False
    async with Archiver(bus, archive, settings=FAST) as archiver:
        await archiver.caught_up()
    assert numbers(archive) == [1]


async def test_an_outage_of_the_broker_is_waited_for(bus: MemoryBus) -> None:
    archive = GatedArchive()
    archive.gate.clear()
    settings = ArchiverSettings(max_queued=2, retry_seconds=0.01)
    async with Archiver(bus, archive, settings=settings) as archiver:
        await publish(bus, *(a_batch(seq=seq) for seq in range(1, 10)))
        await until(lambda: archiver._feeds[0].is_full)
        bus.cut()
        archive.gate.set()
        await until(lambda: has_written_its_queue(archiver))
        bus.restore()
        await archiver.caught_up()
    assert numbers(archive) == list(range(1, 10))


async def test_it_can_be_left_while_the_broker_is_away(bus: MemoryBus) -> None:
    archive = GatedArchive()
    archive.gate.clear()
    settings = ArchiverSettings(max_queued=2, retry_seconds=60)
    async with Archiver(bus, archive, settings=settings) as archiver:
        await publish(bus, *(a_batch(seq=seq) for seq in range(1, 10)))
        await until(lambda: archiver._feeds[0].is_full)
        bus.cut()
        archive.gate.set()
        await until(lambda: has_written_its_queue(archiver))
    assert numbers(archive) == list(range(1, archiver.cursors[KV_EVENTS] + 1))


async def test_an_archive_of_another_log_is_refused(bus: MemoryBus) -> None:
    archive = MemoryArchive()
    await publish(bus, a_batch(), a_batch(seq=2))
    async with Archiver(bus, archive) as archiver:
        await archiver.caught_up()
    other = MemoryBroker()
    async with other.connect() as shorter:
        await shorter.declare_stream(events_stream())
        await shorter.declare_stream(decisions_stream())
        with pytest.raises(ArchiveMismatch, match="ends at 0, an archive in memory has it up to"):
            await Archiver(shorter, archive).__aenter__()
        await publish(shorter, *(a_batch(worker="w9", seq=seq) for seq in range(1, 9)))
        with pytest.raises(ArchiveMismatch, match="message 2"):
            await Archiver(shorter, archive).__aenter__()
    assert numbers(archive) == [1, 2]


async def test_a_log_that_begins_anew_ends_it(bus: MemoryBus) -> None:
    archive = MemoryArchive()
    archiver = await Archiver(bus, archive).__aenter__()
    await publish(bus, a_batch())
    await archiver.caught_up()
    archiver._feeds[0]._on_hole(2, 1)
    await until(lambda: archiver.failure is not None)
    await publish(bus, a_batch(seq=2))
    for leave in (archiver.caught_up, archiver.__aexit__):
        with pytest.raises(ArchiveMismatch, match="begun anew"):
            await leave()
    assert numbers(archive) == [1]


async def test_a_stream_that_is_not_there_is_named(broker: MemoryBroker) -> None:
    async with broker.connect() as bus:
        with pytest.raises(StreamRefused):
            await Archiver(bus, MemoryArchive()).__aenter__()


async def test_it_leaves_nothing_running(bus: MemoryBus) -> None:
    before = asyncio.all_tasks()
    async with Archiver(bus, MemoryArchive()) as archiver:
        await publish(bus, a_batch())
        await archiver.caught_up()
    assert asyncio.all_tasks() == before
    await publish(bus, a_batch(seq=2))
    with pytest.raises(ArchiveUnavailable):
        await archiver.caught_up()


async def test_the_end_waits_for_no_broker_and_keeps_what_was_read(
    broker: MemoryBroker, bus: MemoryBus
) -> None:
    archive = MemoryArchive()
    async with broker.connect() as other, Archiver(other, archive, settings=FAST) as archiver:
        await publish(bus, a_batch(seq=1))
        await archiver.caught_up()
        other.cut()
        await publish(bus, a_batch(seq=2))
        await archiver.finish(0.01)
    assert numbers(archive) == [1]


async def test_an_archive_that_is_away_is_a_condition_until_all_is_written(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    archive, conditions = GatedArchive(), Conditions()
    archive.is_away = True
    async with Archiver(bus, archive, settings=FAST, conditions=conditions) as archiver:
        await publish(bus, a_batch())
        await until(lambda: archiver.num_failures > 3)
        expected = "gone fishing; what comes waits in the log"
        assert conditions.reasons == {ARCHIVE_NOT_WRITTEN: expected}
        archive.is_away = False
        await archiver.caught_up()
        assert conditions.present == ()
    assert numbers(archive) == [1]
    assert caplog.messages == []


async def test_without_conditions_an_archive_that_is_away_is_logged_once(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    archive = GatedArchive()
    archive.is_away = True
    async with Archiver(bus, archive, settings=FAST) as archiver:
        await publish(bus, a_batch())
        await until(lambda: archiver.num_failures > 3)
        archive.is_away = False
        await archiver.caught_up()
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "archive_not_written",
        caplog.messages[-1],
    ]
    assert caplog.messages[-1].startswith("archive_not_written is over after")
