"""The archive as a file: what other processes and other versions of us do to it."""

import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.schema import CreateTable

from kvatlas.events.archive import sql as sql_archive
from kvatlas.events.archive.port import EventRecord, Hole
from kvatlas.events.archive.sql import SCHEMA_VERSION, SqlArchive
from kvatlas.events.streams import KV_EVENTS
from kvatlas.schemas.errors import (
    ArchiveDamaged,
    ArchiveNewer,
    ArchiveUnavailable,
    ForeignFile,
    InvalidSetting,
)
from testkit.builders import a_batch, a_message


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "archive.db"


def open_archive(file: Path, **options: bool) -> SqlArchive:
    return SqlArchive(f"sqlite:///{file}", **options)


def an_event(at: int) -> EventRecord:
    return EventRecord(a_message(a_batch(seq=at), at), None)


def test_what_was_written_is_there_after_reopening(file: Path) -> None:
    with open_archive(file) as archive:
        archive.append_events([an_event(1)], [Hole(2, 3)], 3)
    with open_archive(file, must_exist=True) as archive:
        assert list(archive.read_events(1, 9)) == [an_event(1).message]
        assert archive.cursor(KV_EVENTS) == 3


def test_it_is_for_this_user_alone_whatever_the_umask(file: Path) -> None:
    before = os.umask(0)
    try:
        with open_archive(file) as archive:
            archive.append_events([an_event(1)], [], 1)
            modes = {path.name: path.stat().st_mode & 0o777 for path in file.parent.iterdir()}
    finally:
        os.umask(before)
    assert modes == {name: 0o600 for name in ("archive.db", "archive.db-wal", "archive.db-shm")}


@pytest.mark.parametrize("statement", ["CREATE TABLE mine (x)", "CREATE TABLE events (mine)"])
def test_another_programs_database_stays_to_the_byte(file: Path, statement: str) -> None:
    with closing(sqlite3.connect(file)) as other, other:
        other.execute(statement)
    before = file.read_bytes()
    with pytest.raises(ArchiveDamaged, match="another program"):
        open_archive(file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_file_that_is_no_database_stays_to_the_byte(file: Path) -> None:
    file.write_bytes(b"mine " * 1000)
    with pytest.raises(
        ArchiveUnavailable, match="not a database: it is left as it is: give another"
    ):
        open_archive(file)
    assert file.read_bytes() == b"mine " * 1000


def test_a_link_that_leads_nowhere_leads_nowhere_afterwards(file: Path) -> None:
    file.symlink_to(file.with_name("elsewhere"))
    with pytest.raises(ForeignFile, match="leads nowhere, which is left as it is: give another"):
        open_archive(file)
    assert not file.exists()


def test_an_archive_may_lie_behind_a_link(file: Path) -> None:
    with open_archive(file):
        pass
    link = file.with_name("link.db")
    link.symlink_to(file)
    with open_archive(link) as archive:
        archive.append_events([an_event(1)], [], 1)
    with open_archive(file) as archive:
        assert archive.cursor(KV_EVENTS) == 1


def test_a_failed_append_leaves_neither_messages_nor_cursor(file: Path) -> None:
    with open_archive(file) as archive:
        archive.append_events([an_event(1)], [], 1)
        with closing(sqlite3.connect(file)) as other, other:
            other.execute("DROP TABLE holes")
        with pytest.raises(ArchiveUnavailable, match="holes"):
            archive.append_events([an_event(2)], [Hole(3, 4)], 4)
        assert len(list(archive.read_events(1, 9))) == 1
        assert archive.cursor(KV_EVENTS) == 1


def test_two_processes_may_write_at_once(file: Path) -> None:
    """Two archivers by mistake: each message is kept once, and the cursor is the further one's."""

    def write(archive: SqlArchive) -> None:
        for at in range(1, 101):
            archive.append_events([an_event(at)], [], at)

    with open_archive(file) as one, open_archive(file) as two:
        threads = [threading.Thread(target=write, args=(archive,)) for archive in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [m.stream_sequence for m in one.read_events(1, 999)] == list(range(1, 101))
        assert two.cursor(KV_EVENTS) == 100


def test_a_schema_of_a_later_version_is_refused_by_name(file: Path) -> None:
    open_archive(file).close()
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE kvatlas_archive SET version = 99")
    with pytest.raises(ArchiveNewer) as refused:
        open_archive(file)
    assert (refused.value.found, refused.value.supported) == (99, SCHEMA_VERSION)


def test_an_archive_that_must_exist_is_not_made(file: Path) -> None:
    with pytest.raises(ArchiveUnavailable, match="no archive at"):
        open_archive(file, must_exist=True)
    assert not file.exists()


def test_another_database_is_not_taken_for_an_archive(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE mine (id)")
    with pytest.raises(ArchiveUnavailable, match="holds no archive"):
        open_archive(file, must_exist=True)


@pytest.mark.parametrize("content", [b"not a database at all" * 100])
def test_a_file_that_is_no_database_is_named(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(
        ArchiveUnavailable, match="not a database: it is left as it is: give another"
    ):
        open_archive(file)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArchiveUnavailable, match=r"nowhere/archive\.db: cannot be made"):
        open_archive(tmp_path / "nowhere" / "archive.db")


@pytest.mark.parametrize(
    "url",
    ["", "archive.db", "mysql://localhost/kv", "nosuch://x", "sqlite://", "sqlite:///:memory:"],
)
def test_a_url_that_is_none_of_ours_is_a_wrong_setting(url: str) -> None:
    with pytest.raises(InvalidSetting, match=r"archive\.url"):
        SqlArchive(url)


def test_a_password_is_in_no_error() -> None:
    pytest.importorskip("psycopg", reason="PostgreSQL's driver is not installed")
    with pytest.raises(ArchiveUnavailable) as refused:
        SqlArchive("postgresql+psycopg://me:secret@127.0.0.1:1/kv")
    assert "secret" not in str(refused.value)


def test_a_subject_that_no_database_takes_is_kept_as_text(file: Path) -> None:
    message = a_message(a_batch())
    record = EventRecord(type(message)(1, "kv.events.\0", message.payload, 1), None)
    with open_archive(file) as archive:
        archive.append_events([record], [], 1)
        (found,) = archive.read_events(1, 1)
    assert found.subject == "kv.events.\N{REPLACEMENT CHARACTER}"


# --- errors of drivers --------------------------------------------------------------------------


Driver = type[DBAPIError]


def errors_below(error: Driver) -> set[Driver]:
    return {error}.union(*map(errors_below, error.__subclasses__()))


@pytest.mark.parametrize("error", sorted(errors_below(DBAPIError), key=str))
def test_every_error_of_a_driver_becomes_ours(file: Path, error: Driver) -> None:
    with open_archive(file) as archive, pytest.raises(ArchiveUnavailable), archive._translated():
        raise error("statement", {"parameter": 1}, Exception("driver says no"))


def test_a_pool_without_a_free_connection_is_unavailable(file: Path) -> None:
    with open_archive(file) as archive, pytest.raises(ArchiveUnavailable), archive._translated():
        raise PoolTimeout


# --- PostgreSQL without one ---------------------------------------------------------------------


def test_the_tables_and_inserts_are_postgresql_too() -> None:
    dialect = postgresql.dialect()  # type: ignore[no-untyped-call]
    for table in sql_archive._tables.sorted_tables:
        created = str(CreateTable(table).compile(dialect=dialect))
        assert "INTEGER PRIMARY KEY" not in created
        insert = postgresql.insert(table).on_conflict_do_nothing()
        assert "ON CONFLICT DO NOTHING" in str(insert.compile(dialect=dialect))
