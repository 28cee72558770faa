"""An archive that is only read: beside a writer, where nothing may be written, and damaged."""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvatlas.cli.commands import run_command
from kvatlas.events.archive.port import BatchKey, DecisionRecord, EventRecord, Hole
from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.bus import Message
from kvatlas.events.streams import KV_EVENTS
from kvatlas.hindsight.check import check_archive, check_url
from kvatlas.indexer import ReferenceIndex
from kvatlas.schemas.errors import ArchiveDamaged, ArchiveUnavailable
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.kv_events import EventBatch
from kvatlas.schemas.routing import (
    DECISION_VERSION,
    CandidateScore,
    Decision,
    Plan,
    Question,
    encode_decision,
)
from testkit.builders import a_batch, a_message, stored, up

COMMANDS = ("replay", "explain", "check")
NEWEST = f"{2:012x}{'r' * 6}{2:08x}"


def an_event(seq: int) -> EventRecord:
    batch: EventBatch = a_batch(*([up()] if seq == 1 else []), stored(seq), seq=seq)
    return EventRecord(a_message(batch, seq), BatchKey(batch.worker, batch.rank, 1, seq))


def a_decision(at: int, decision_id: str, ts_ns: int = 1) -> Decision:
    chosen = CandidateScore("w1", 0, "http://w1", Trust.exact, 0, {}, 1.0, {"compute": 1.0})
    return Decision(
        v=DECISION_VERSION,
        id=decision_id,
        ts_ns=ts_ns,
        stream_sequence=at,
        policy="predicted_ttft",
        model="m",
        prompt_tokens=16,
        chosen=chosen,
        candidates=(chosen,),
        num_candidates=1,
        plan=Plan(16, 0, (), 16),
        reasons=(),
        settings={},
        question=Question(16, 0, 0, ()),
    )


def decision_record(at: int) -> DecisionRecord:
    found = a_decision(at, decision_id=f"{at:012x}{'r' * 6}{at:08x}")
    return DecisionRecord(Message(at, "kv.decisions.m", encode_decision(found), at), found.id)


def fill(archive: SqlArchive, last: int = 3, first: int = 1) -> None:
    archive.append_events([an_event(seq) for seq in range(first, last + 1)], (), last)
    archive.append_decisions([decision_record(at) for at in range(first, last)], (), last - 1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "archive.db"
    with SqlArchive(f"sqlite:///{path}") as archive:
        fill(archive)
    return path


def reading(file: Path) -> SqlArchive:
    return SqlArchive(f"sqlite:///{file}", must_exist=True)


def change(file: Path, *statements: str) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


# --- beside a writer ----------------------------------------------------------------------------


@pytest.mark.parametrize("journal", ["wal", "delete"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_writer_that_holds_the_lock_keeps_nobody_from_reading(
    file: Path, command: str, journal: str
) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute(f"PRAGMA journal_mode={journal}")
        writer.execute("BEGIN IMMEDIATE")
        assert run_command([command, "--archive", f"sqlite:///{file}"]) == 0


def test_a_reader_that_is_not_done_keeps_no_writer_waiting(file: Path) -> None:
    with reading(file) as archive:
        messages = archive.read_events(1, 9)
        next(messages)
        with closing(sqlite3.connect(file, timeout=0)) as writer, writer:
            writer.execute("INSERT INTO holes VALUES ('KV_EVENTS', 8, 9)")
        assert len(list(messages)) == 2


class Growing(SqlArchive):
    """An archive that gets more with each question."""

    def read_events(self, first: int, last: int) -> Iterator[Message]:
        self._grow()
        return super().read_events(first, last)

    def holes(self, stream_name: str) -> list[Hole]:
        self._grow()
        return super().holes(stream_name)

    def decisions(self, before: int, limit: int) -> list[Message]:
        self._grow()
        return super().decisions(before, limit)

    def _grow(self) -> None:
        last = super().cursor(KV_EVENTS)
        fill(self, last + 2, last + 1)
        self.append_events([], [Hole(last + 3, last + 3)], last + 3)


def test_a_healthy_archive_that_grows_contradicts_nothing(tmp_path: Path) -> None:
    with Growing(f"sqlite:///{tmp_path}/archive.db") as archive:
        fill(archive)
        report = check_archive(archive, ReferenceIndex)
    assert report.num_contradictions == 0
    assert (report.stream_sequence, report.num_holes, report.num_absent) == (3, 0, 0)


def test_a_file_that_nobody_had_open_may_be_written_meanwhile(file: Path) -> None:
    """It was opened as one that does not change, and is opened anew."""
    with reading(file) as archive:
        assert archive.cursor(KV_EVENTS) == 3
        with SqlArchive(f"sqlite:///{file}") as writer:
            fill(writer, 5, 4)
            assert archive.cursor(KV_EVENTS) == 5
            assert len(list(archive.read_events(1, 9))) == 5
        assert archive.cut().last_event == 5


# --- nothing is written -------------------------------------------------------------------------


def seen(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {each.name: (each.stat().st_mtime_ns, each.read_bytes()) for each in folder.iterdir()}


@pytest.mark.parametrize("command", COMMANDS)
def test_reading_leaves_nothing_behind(file: Path, command: str) -> None:
    before = seen(file.parent)
    assert list(before) == [file.name]
    assert run_command([command, "--archive", f"sqlite:///{file}"]) == 0
    assert seen(file.parent) == before


def test_what_is_only_read_is_not_written(file: Path) -> None:
    with reading(file) as archive, pytest.raises(ArchiveUnavailable, match="read only"):
        archive.append_events([], (), 9)
    with reading(file) as archive:
        assert archive.cursor(KV_EVENTS) == 3


def powerless() -> list[str]:
    """Return what takes root's power to write anywhere."""
    if os.geteuid():
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root may write anywhere, and setpriv is not installed")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.mark.parametrize("ends", [("",), ("", "-wal", "-shm"), ("", "-wal")], ids="+".join)
def test_a_copy_that_may_only_be_read_is_read(file: Path, tmp_path: Path, ends: list[str]) -> None:
    """With a -wal beside it the last transactions are in that alone."""
    copy = tmp_path / "evidence"
    copy.mkdir()
    with SqlArchive(f"sqlite:///{file}") as writer:
        fill(writer, 5, 4)
        if len(ends) == 1:
            writer.close()
        for end in ends:
            shutil.copyfile(f"{file}{end}", copy / f"archive.db{end}")
            (copy / f"archive.db{end}").chmod(0o444)
    copy.chmod(0o555)
    try:
        ran = subprocess.run(
            [
                *powerless(),
                sys.executable,
                "-m",
                "kvatlas",
                "check",
                "--archive",
                f"sqlite:///{copy}/archive.db",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "log up to 5:" in ran.stdout
    finally:
        copy.chmod(0o755)


# --- other files --------------------------------------------------------------------------------


def test_files_that_are_no_archive_are_named_with_what_is_expected(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    (tmp_path / "folder.db").mkdir()
    (tmp_path / "text.db").write_text("no database at all" * 100)
    change(tmp_path / "other.db", "CREATE TABLE mine (id)")
    change(tmp_path / "namesake.db", "CREATE TABLE kvatlas_archive (id)")
    for name, problem in {
        "empty": "is empty and holds no archive",
        "folder": "is a folder: expected a file",
        "text": "not a database of SQLite",
        "other": "holds no archive",
        "namesake": "holds no archive",
        "missing": "no archive at",
    }.items():
        with pytest.raises(ArchiveUnavailable, match=problem) as refused:
            reading(tmp_path / f"{name}.db")
        assert f"{name}.db" in str(refused.value)


@pytest.mark.parametrize("table", ["mine", "events"])
def test_a_database_of_another_program_is_not_written_to(tmp_path: Path, table: str) -> None:
    file = tmp_path / "other.db"
    change(file, f"CREATE TABLE {table} (id)")
    with pytest.raises(ArchiveDamaged, match=f"{table}.* another program"):
        SqlArchive(f"sqlite:///{file}")
    with closing(sqlite3.connect(file)) as connection:
        found = connection.execute("SELECT name FROM sqlite_master").fetchall()
    assert found == [(table,)]


def test_a_start_that_was_cut_off_is_gone_on_with(tmp_path: Path) -> None:
    file = tmp_path / "archive.db"
    with SqlArchive(f"sqlite:///{file}"):
        pass
    change(file, "DROP TABLE kvatlas_archive", "DROP TABLE holes")
    with SqlArchive(f"sqlite:///{file}") as archive:
        fill(archive)
    assert check_url(f"sqlite:///{file}").num_contradictions == 0


# --- damaged rows -------------------------------------------------------------------------------

#: what another program did -> what is said of it
DAMAGES = {
    "UPDATE cursors SET sequence = 'x' WHERE stream = 'KV_EVENTS'": "table cursors, row stream",
    "UPDATE cursors SET sequence = -3": "table cursors, row stream",
    "UPDATE events SET payload = 'text' WHERE stream_sequence = 2": "payload is text|not a blob",
    "UPDATE events SET payload = x'ff00' WHERE stream_sequence = 2": "1 unreadable",
    "UPDATE events SET subject = x'c328' WHERE stream_sequence = 2": "subject is blob|not a text",
    "UPDATE events SET subject = cast(x'c328' as text) WHERE stream_sequence = 2": "lacks 2 to 2",
    "UPDATE events SET broker_ns = 'noon' WHERE stream_sequence = 2": "broker_ns is text",
    "UPDATE events SET broker_ns = -1 WHERE stream_sequence = 2": "broker_ns is -1",
    "UPDATE events SET broker_ns = 1.5 WHERE stream_sequence = 2": "broker_ns is real",
    "UPDATE events SET stream_sequence = -2 WHERE stream_sequence = 2": "stream_sequence is -2",
    "UPDATE events SET epoch = -1 WHERE stream_sequence = 2": "epoch is -1",
    "UPDATE decisions SET payload = 7 WHERE stream_sequence = 1": "payload is integer|not a blob",
    "UPDATE decisions SET payload = x'c1' WHERE stream_sequence = 1": "unreadable decisions",
    "UPDATE decisions SET stream_sequence = 'a' WHERE stream_sequence = 1": "sequence is text",
    "UPDATE decisions SET stream_sequence = 1.5 WHERE stream_sequence = 1": "sequence is real",
    "UPDATE decisions SET id = 'other' WHERE stream_sequence = 1": "another id",
    "UPDATE decisions SET broker_ns = -9 WHERE stream_sequence = 1": "broker_ns is -9",
    "INSERT INTO holes VALUES ('KV_EVENTS', 'a', 9)": "table holes, row stream",
    "INSERT INTO holes VALUES ('KV_EVENTS', -4, -2)": "first is -4",
}


@pytest.mark.parametrize("statement", DAMAGES)
def test_a_damaged_row_is_named_and_hides_no_other(
    file: Path, statement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change(file, statement)
    url = f"sqlite:///{file}"
    status = run_command(["check", "--archive", url])
    said = capsys.readouterr()
    assert status == int(
        "unreadable" not in DAMAGES[statement] and "another" not in DAMAGES[statement]
    )
    assert any(each in said.out for each in DAMAGES[statement].split("|")), said.out
    assert run_command(["replay", "--archive", url]) == 0
    replayed = capsys.readouterr().out
    assert "w1/0" in replayed
    if "x'ff00'" in statement:
        assert "skipped: 1 of w1 could not be read (payload)" in replayed
    assert run_command(["explain", "--archive", url]) == 0
    assert f"decision {NEWEST} at" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("table", "works"),
    {
        "events": ["explain"],
        "decisions": ["replay"],
        "holes": ["explain"],
        "cursors": ["explain"],
    }.items(),
)
def test_a_missing_table_is_named_and_what_needs_it_not_goes_on(
    file: Path, table: str, works: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    change(file, f"DROP TABLE {table}")
    for command in COMMANDS:
        status = run_command([command, "--archive", f"sqlite:///{file}"])
        said = capsys.readouterr().err
        assert status == (command not in works)
        if status:
            assert said.startswith(f"kvatlas: sqlite:///{file}: no such table: {table}")
            assert len(said.splitlines()) == 1


@pytest.mark.parametrize("version", ["'new'", "NULL", "-1", "x'00'"])
def test_a_version_that_is_none_is_named(file: Path, version: str) -> None:
    change(
        file,
        "DROP TABLE kvatlas_archive",
        "CREATE TABLE kvatlas_archive (id INTEGER PRIMARY KEY, version INTEGER)",
        f"INSERT INTO kvatlas_archive VALUES (1, {version})",
    )
    for must_exist in (True, False):
        with pytest.raises(ArchiveDamaged, match="table kvatlas_archive, row id 1: version is"):
            SqlArchive(f"sqlite:///{file}", must_exist=must_exist)


def test_a_decision_that_cannot_be_read_is_named_when_it_is_asked_for(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(file, "UPDATE decisions SET payload = x'c1' WHERE stream_sequence = 2")
    url = f"sqlite:///{file}"
    assert run_command(["explain", NEWEST, "--archive", url]) == 1
    assert f"table decisions, row {NEWEST}: payload is no decision" in capsys.readouterr().err
    assert run_command(["explain", "--archive", url]) == 0  # the one before it
    said = capsys.readouterr()
    assert "db: table decisions, row stream_sequence 2" in said.err
    assert f"decision {1:012x}" in said.out


def test_an_id_that_is_not_there_is_answered_with_those_that_are(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["explain", "nosuchid", "--archive", f"sqlite:///{file}"]) == 1
    said = capsys.readouterr().err
    assert "'nosuchid'" in said
    assert NEWEST in said
    assert "/v1/route" in said
    with SqlArchive(f"sqlite:///{tmp_path}/none.db"):
        pass
    for arguments in ([], ["nosuchid"]):
        url = f"sqlite:///{tmp_path}/none.db"
        assert run_command(["explain", *arguments, "--archive", url]) == 1
        assert "holds no decision" in capsys.readouterr().err


def test_a_time_that_is_none_is_written_as_a_number(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decision = a_decision(3, decision_id="late", ts_ns=2**62)
    with SqlArchive(f"sqlite:///{file}") as archive:
        record = DecisionRecord(Message(3, "kv.decisions.m", encode_decision(decision), 3), "late")
        archive.append_decisions([record], (), 3)
    assert run_command(["explain", "late", "--archive", f"sqlite:///{file}"]) == 0
    assert "decision late at" in capsys.readouterr().out
