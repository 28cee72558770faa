"""What every Archive does; a new adapter adds one line to ADAPTERS."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvatlas.events.archive.memory import MemoryArchive
from kvatlas.events.archive.port import Archive, BatchKey, Cut, DecisionRecord, EventRecord, Hole
from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.bus import Message
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS
from kvatlas.events.subjects import escape_token
from kvatlas.schemas.errors import UnknownDecision

#: an empty database to test against, such as postgresql+psycopg://...; its tables are dropped
POSTGRES_URL = os.environ.get("KVATLAS_TEST_POSTGRES_URL", "")


def _postgres(_folder: Path) -> Archive:
    from sqlalchemy import MetaData, create_engine

    engine = create_engine(POSTGRES_URL)
    known = MetaData()
    known.reflect(engine)
    known.drop_all(engine)
    engine.dispose()
    return SqlArchive(POSTGRES_URL)


ADAPTERS = [
    pytest.param(lambda folder: MemoryArchive(), id="memory"),
    pytest.param(lambda folder: SqlArchive(f"sqlite:///{folder}/archive.db"), id="sqlite"),
    pytest.param(
        _postgres,
        id="postgresql",
        marks=pytest.mark.skipif(not POSTGRES_URL, reason="KVATLAS_TEST_POSTGRES_URL is not set"),
    ),
]


@pytest.fixture(params=ADAPTERS)
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Archive]:
    make: Callable[[Path], Archive] = request.param
    with make(tmp_path) as made:
        yield made


def a_record(
    at: int, worker: str | None = "w1", seq: int | None = None, payload: bytes = b"payload"
) -> EventRecord:
    message = Message(at, f"kv.events.m.{escape_token(worker or 'w')}.0", payload, at * 1000)
    return EventRecord(message, worker and BatchKey(worker, 0, 1, seq or at))  # type: ignore[arg-type]


def a_decision(at: int, decision_id: str) -> DecisionRecord:
    return DecisionRecord(Message(at, "kv.decisions.m", b"decision", at * 1000), decision_id)


def test_an_empty_archive_stands_at_zero(archive: Archive) -> None:
    assert archive.cursor(KV_EVENTS) == archive.cursor(KV_DECISIONS) == 0
    assert list(archive.read_events(1, 100)) == []
    assert archive.holes(KV_EVENTS) == []
    assert archive.sequence_at(10**18) == 0


def test_events_come_back_as_they_went_in_and_in_stream_order(archive: Archive) -> None:
    records = [a_record(1), a_record(2, worker="ä.b >\0"), a_record(3, worker=None)]
    archive.append_events([records[2], records[0]], [], 3)
    archive.append_events([records[1]], [], 3)
    assert list(archive.read_events(1, 3)) == [record.message for record in records]
    assert list(archive.read_events(2, 2)) == [records[1].message]


def test_the_same_append_again_changes_nothing(archive: Archive) -> None:
    records, holes = [a_record(1), a_record(4, worker=None)], [Hole(2, 3)]
    archive.append_events(records, holes, 4)
    archive.append_events(records, holes, 4)
    assert [message.stream_sequence for message in archive.read_events(1, 9)] == [1, 4]
    assert archive.holes(KV_EVENTS) == holes


def test_a_batch_stored_twice_in_the_stream_is_kept_once(archive: Archive) -> None:
    archive.append_events([a_record(1, seq=7), a_record(2, seq=7)], [], 2)
    archive.append_events([a_record(3, seq=7), a_record(4, worker="w2", seq=7)], [], 4)
    assert [message.stream_sequence for message in archive.read_events(1, 9)] == [1, 4]
    assert archive.cursor(KV_EVENTS) == 4


def test_what_is_no_batch_is_known_by_its_stream_sequence(archive: Archive) -> None:
    archive.append_events([a_record(1, worker=None), a_record(2, worker=None)], [], 2)
    assert len(list(archive.read_events(1, 9))) == 2


def test_a_cursor_never_goes_back(archive: Archive) -> None:
    archive.append_events([], [], 9)
    archive.append_events([a_record(5)], [], 5)
    assert archive.cursor(KV_EVENTS) == 9
    assert archive.cursor(KV_DECISIONS) == 0


def test_holes_are_kept_by_stream_and_in_order(archive: Archive) -> None:
    archive.append_events([], [Hole(20, 29)], 29)
    archive.append_events([], [Hole(1, 9)], 29)
    archive.append_decisions([], [Hole(1, 4)], 4)
    assert archive.holes(KV_EVENTS) == [Hole(1, 9), Hole(20, 29)]
    assert archive.holes(KV_DECISIONS) == [Hole(1, 4)]


def test_more_events_than_a_page(archive: Archive) -> None:
    archive.append_events([a_record(at) for at in range(1, 5001)], [], 5000)
    read = [message.stream_sequence for message in archive.read_events(2, 4999)]
    assert read == list(range(2, 5000))


def test_appends_may_go_on_while_somebody_reads(archive: Archive) -> None:
    archive.append_events([a_record(at) for at in range(1, 2501)], [], 2500)
    reading = archive.read_events(1, 2500)
    next(reading)
    archive.append_events([a_record(2501)], [], 2501)
    assert len(list(reading)) == 2499


def test_a_time_is_the_newest_sequence_at_or_before_it(archive: Archive) -> None:
    archive.append_events([a_record(at) for at in (1, 2, 5)], [], 5)
    asked = {999: 0, 1000: 1, 1999: 1, 2000: 2, 4999: 2, 5000: 5, 10**18: 5}
    assert {at: archive.sequence_at(at) for at in asked} == asked


def test_a_cut_says_how_far_everything_reaches(archive: Archive) -> None:
    assert archive.cut() == Cut(0, 0, 0)
    archive.append_events([a_record(at) for at in (1, 2, 5)], [Hole(6, 9)], 9)
    archive.append_decisions([a_decision(3, "d3"), a_decision(1, "d1")], [], 4)
    assert archive.cut() == Cut(9, 5, 3)


def test_what_an_archiver_writes_is_not_damaged(archive: Archive) -> None:
    archive.append_events([a_record(1), a_record(2, worker=None)], [Hole(3, 3)], 3)
    archive.append_decisions([a_decision(3, "d3")], [], 4)
    assert archive.look_for_damage() >= 3
    assert list(archive.read_events(1, 9))
    assert archive.holes(KV_EVENTS)
    assert archive.damaged.num_rows == 0


def test_decisions_are_found_by_id_and_listed_newest_first(archive: Archive) -> None:
    records = [a_decision(at, f"d{at}") for at in (1, 2, 3)]
    archive.append_decisions(records, [], 3)
    archive.append_decisions([a_decision(4, "d3")], [], 4)
    assert archive.decision("d2") == records[1].message
    assert [m.stream_sequence for m in archive.decisions(before=100, limit=2)] == [3, 2]
    assert [m.stream_sequence for m in archive.decisions(before=2, limit=2)] == [1]
    assert archive.cursor(KV_DECISIONS) == 4


def test_an_unknown_decision_is_named(archive: Archive) -> None:
    with pytest.raises(UnknownDecision, match="nope"):
        archive.decision("nope")


def test_closing_twice_is_no_error(archive: Archive) -> None:
    archive.close()
    archive.close()
