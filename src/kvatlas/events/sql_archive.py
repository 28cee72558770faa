"""The archive in a database: SQLite by default, PostgreSQL for fleets.

    events     one row a message of the log, by stream sequence; batches also by their key
    decisions  one row a decision, by id
    holes      stream sequences that never came
    cursors    stream name -> position, written in the transaction of what was read

Workers' names stand escaped as in subjects, so that any name is a text to any database.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.event import listens_for
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from kvatlas.events.archive import DecisionRecord, EventRecord, Hole
from kvatlas.events.bus import Message
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS
from kvatlas.events.subjects import escape_token
from kvatlas.schemas.errors import (
    ArchiveNewer,
    ArchiveUnavailable,
    InvalidSetting,
    UnknownDecision,
)

SCHEMA_VERSION = 1
READ_ROWS = 2000
#: their INSERT statements have the same methods and no type in common
_DIALECTS: dict[str, Callable[[sa.Table], Any]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
#: how long SQLite waits for another process that writes
_BUSY_SECONDS = 10

# INTEGER PRIMARY KEY is SQLite's own row number: one tree instead of two
_Sequence = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_tables = sa.MetaData()
_about = sa.Table(
    "kvatlas_archive",
    _tables,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("version", sa.Integer, nullable=False),
)
_cursors = sa.Table(
    "cursors",
    _tables,
    sa.Column("stream", sa.Text, primary_key=True),
    sa.Column("sequence", sa.BigInteger, nullable=False),
)
_holes = sa.Table(
    "holes",
    _tables,
    sa.Column("stream", sa.Text, primary_key=True),
    sa.Column("first", sa.BigInteger, primary_key=True),
    sa.Column("last", sa.BigInteger, nullable=False),
)
_events = sa.Table(
    "events",
    _tables,
    sa.Column("stream_sequence", _Sequence, primary_key=True, autoincrement=False),
    sa.Column("broker_ns", sa.BigInteger, nullable=False, index=True),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("worker", sa.Text),
    sa.Column("rank", sa.BigInteger),
    sa.Column("epoch", sa.BigInteger),
    sa.Column("seq", sa.BigInteger),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.UniqueConstraint("worker", "rank", "epoch", "seq"),
)
_decisions = sa.Table(
    "decisions",
    _tables,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("stream_sequence", sa.BigInteger, nullable=False, index=True),
    sa.Column("broker_ns", sa.BigInteger, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
)


class SqlArchive:
    """An archive at a database URL, such as `sqlite:///kvatlas.db`.

    Creates what is not there yet, unless it `must_exist`. Raises InvalidSetting for a URL that is
    none, ArchiveNewer for a schema of a later version, and ArchiveUnavailable.
    """

    def __init__(self, url: str, *, must_exist: bool = False) -> None:
        parsed = _parse(url)
        self._insert = _DIALECTS[parsed.get_backend_name()]
        self._shown = parsed.render_as_string(hide_password=True)
        if must_exist and parsed.get_backend_name() == "sqlite":
            path = Path(parsed.database or "")
            if not path.is_file():
                raise ArchiveUnavailable(f"no archive at {path}")
        self._engine = _engine(parsed)
        try:
            with self._translated():
                self._open_schema(must_exist)
        except (ArchiveUnavailable, ArchiveNewer):
            self.close()
            raise

    def _open_schema(self, must_exist: bool) -> None:
        if must_exist and not sa.inspect(self._engine).has_table(_about.name):
            raise ArchiveUnavailable(f"{self._shown} holds no archive")
        with self._engine.begin() as connection:
            _tables.create_all(connection)
            row = self._insert(_about).values(id=1, version=SCHEMA_VERSION)
            connection.execute(row.on_conflict_do_nothing())
            found = connection.execute(sa.select(_about.c.version)).scalar_one()
        if found > SCHEMA_VERSION:
            raise ArchiveNewer(self._shown, found, SCHEMA_VERSION)

    def append_events(
        self, records: Sequence[EventRecord], holes: Sequence[Hole], cursor: int
    ) -> None:
        self._append(_events, [_event_row(r) for r in records], KV_EVENTS, holes, cursor)

    def append_decisions(
        self, records: Sequence[DecisionRecord], holes: Sequence[Hole], cursor: int
    ) -> None:
        rows = [{"id": r.decision_id, **_message_row(r.message)} for r in records]
        self._append(_decisions, rows, KV_DECISIONS, holes, cursor)

    def _append(
        self,
        table: sa.Table,
        rows: list[dict[str, Any]],
        stream_name: str,
        holes: Sequence[Hole],
        cursor: int,
    ) -> None:
        with self._translated(), self._engine.begin() as connection:
            if rows:
                connection.execute(self._insert(table).on_conflict_do_nothing(), rows)
            if holes:
                missing = [{"stream": stream_name, **hole._asdict()} for hole in holes]
                connection.execute(self._insert(_holes).on_conflict_do_nothing(), missing)
            row = self._insert(_cursors).values(stream=stream_name, sequence=cursor)
            newer = row.excluded.sequence
            connection.execute(
                row.on_conflict_do_update(
                    index_elements=[_cursors.c.stream],
                    set_={"sequence": newer},
                    where=_cursors.c.sequence < newer,
                )
            )

    def cursor(self, stream_name: str) -> int:
        query = sa.select(_cursors.c.sequence).where(_cursors.c.stream == stream_name)
        with self._translated(), self._engine.connect() as connection:
            return int(connection.execute(query).scalar() or 0)

    def read_events(self, first: int, last: int) -> Iterator[Message]:
        sequence = _events.c.stream_sequence
        while first <= last:
            query = _select(_events).where(sequence >= first, sequence <= last)
            with self._translated(), self._engine.connect() as connection:
                rows = connection.execute(query.order_by(sequence).limit(READ_ROWS)).all()
            yield from (Message(*row) for row in rows)
            if len(rows) < READ_ROWS:
                return
            first = rows[-1][0] + 1

    def holes(self, stream_name: str) -> list[Hole]:
        query = sa.select(_holes.c.first, _holes.c.last).where(_holes.c.stream == stream_name)
        with self._translated(), self._engine.connect() as connection:
            return [Hole(*row) for row in connection.execute(query.order_by(_holes.c.first))]

    def sequence_at(self, broker_ns: int) -> int:
        query = sa.select(_events.c.stream_sequence).where(_events.c.broker_ns <= broker_ns)
        newest = query.order_by(_events.c.broker_ns.desc(), _events.c.stream_sequence.desc())
        with self._translated(), self._engine.connect() as connection:
            return connection.execute(newest.limit(1)).scalar() or 0

    def decision(self, decision_id: str) -> Message:
        query = _select(_decisions).where(_decisions.c.id == decision_id)
        with self._translated(), self._engine.connect() as connection:
            row = connection.execute(query).first()
        if row is None:
            raise UnknownDecision(decision_id)
        return Message(*row)

    def decisions(self, before: int, limit: int) -> list[Message]:
        sequence = _decisions.c.stream_sequence
        query = _select(_decisions).where(sequence < before).order_by(sequence.desc())
        with self._translated(), self._engine.connect() as connection:
            return [Message(*row) for row in connection.execute(query.limit(limit))]

    def close(self) -> None:
        self._engine.dispose()

    def __str__(self) -> str:
        return self._shown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Let a driver's errors leave as ours; the statement's parameters stay out of the text."""
        try:
            yield
        except DBAPIError as error:
            raise ArchiveUnavailable(f"{self._shown}: {error.orig}") from error
        except PoolTimeout as error:
            raise ArchiveUnavailable(f"{self._shown}: no connection is free") from error


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except ArgumentError as error:
        problem = "archive.url is no URL of a database: give one such as sqlite:///kvatlas.db"
        raise InvalidSetting("archive.url", "", problem) from error
    if parsed.get_backend_name() not in _DIALECTS:
        known = " and ".join(_DIALECTS)
        problem = f"--archive (archive.url) {parsed.get_backend_name()!r:.60}: known databases are"
        raise InvalidSetting("archive.url", "", f"{problem} {known}")
    if parsed.get_backend_name() == "sqlite" and parsed.database in (None, "", ":memory:"):
        problem = "--archive (archive.url): an archive in SQLite needs a file"
        raise InvalidSetting("archive.url", "", f"{problem}, such as sqlite:///kvatlas.db")
    return parsed


def check_archive_url(url: str) -> None:
    """Raise InvalidSetting where an archive can neither be opened nor made; opens nothing.

    Raises ModuleNotFoundError where the database's driver is missing.
    """
    parsed = _parse(url)
    try:
        parsed.get_dialect().import_dbapi()
    except NoSuchModuleError as error:
        problem = f"--archive (archive.url): no driver {parsed.get_driver_name()!r:.60} is known"
        raise InvalidSetting("archive.url", "", problem) from error
    if parsed.get_backend_name() != "sqlite":
        return
    path = Path(parsed.database or "")
    if path.is_dir():
        problem = f"--archive (archive.url) {path}: is a folder, expected a file"
        raise InvalidSetting("archive.url", "", problem)
    if not path.parent.is_dir():
        problem = f"--archive (archive.url) {path}: does the folder {path.parent} exist?"
        raise InvalidSetting("archive.url", "", problem)


def _engine(url: sa.URL) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        return sa.create_engine(url, pool_pre_ping=True)
    engine = sa.create_engine(url, connect_args={"timeout": _BUSY_SECONDS})

    @listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        # WAL: readers and the writer do not wait for each other. NORMAL: a power cut may take the
        # last transactions, cursor included, which are then read again from the stream.
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL"):
            connection.execute(f"PRAGMA {pragma}").close()

    return engine


def _select(table: sa.Table) -> sa.Select[int, str, bytes, int]:
    c = table.c
    return sa.select(c.stream_sequence, c.subject, c.payload, c.broker_ns)


def _message_row(message: Message) -> dict[str, Any]:
    return {
        "stream_sequence": message.stream_sequence,
        "broker_ns": message.broker_ns,
        # no PostgreSQL text has a NUL, and no subject of ours: one bad name must not stop the rest
        "subject": message.subject.replace("\0", "\N{REPLACEMENT CHARACTER}"),
        "payload": message.payload,
    }


def _event_row(record: EventRecord) -> dict[str, Any]:
    row = _message_row(record.message)
    if record.key is None:
        return row | {"worker": None, "rank": None, "epoch": None, "seq": None}
    worker, rank, epoch, seq = record.key
    return row | {"worker": escape_token(worker), "rank": rank, "epoch": epoch, "seq": seq}
