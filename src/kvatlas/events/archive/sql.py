"""The archive in a database: SQLite by default, PostgreSQL for fleets.

    events     one row a message of the log, by stream sequence; batches also by their key
    decisions  one row a decision, by id
    holes      stream sequences that never came
    cursors    stream name -> position, written in the transaction of what was read

Workers' names stand escaped as in subjects, so that any name is a text to any database.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.event import listens_for
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from kvatlas.common.own_files import create_file
from kvatlas.events.archive.port import (
    Cut,
    DamagedRow,
    DamagedRows,
    DecisionRecord,
    EventRecord,
    Hole,
)
from kvatlas.events.archive.rows import (
    holes_of,
    key_of,
    message_of,
    number_problem,
)
from kvatlas.events.archive.sqlite_reading import (
    BUSY_SECONDS,
    SqliteReading,
    describe,
    refuse_foreign_tables,
)
from kvatlas.events.bus import Message
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS
from kvatlas.events.subjects import escape_token
from kvatlas.schemas.errors import (
    ArchiveDamaged,
    ArchiveNewer,
    ArchiveUnavailable,
    ForeignFile,
    InvalidSetting,
    UnknownDecision,
)
from kvatlas.schemas.printable import without_credentials

SCHEMA_VERSION = 1
READ_ROWS = 2000
#: damaged values of a column that are looked up; more are as good as all
MAX_DAMAGED = 1_000
#: their INSERT statements have the same methods and no type in common
_DIALECTS: dict[str, Callable[[sa.Table], Any]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
_MAX_INT64 = 2**63 - 1

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

    Creates what is not there yet; one that `must_exist` is only read, and nothing of it is made,
    written or locked: a writer may go on, and the file may lie where nothing can be written. Rows
    that another program has damaged are noted in `damaged`, and hide no other.

    Raises InvalidSetting for a URL that is none, ArchiveNewer for a schema of a later version,
    ArchiveDamaged for a database without our tables, which stays as it is, ForeignFile, and
    ArchiveUnavailable.
    """

    def __init__(self, url: str, *, must_exist: bool = False) -> None:
        parsed = _parse(url)
        self._insert = _DIALECTS[parsed.get_backend_name()]
        self._shown = without_credentials(parsed.render_as_string(hide_password=True))
        self.damaged = DamagedRows()
        self._is_reading = must_exist
        self._file: SqliteReading | None = None
        if must_exist and parsed.get_backend_name() == "sqlite":
            self._file = SqliteReading(Path(parsed.database or ""), self._shown)
        elif parsed.get_backend_name() == "sqlite" and "uri" not in parsed.query:
            _make_file(Path(parsed.database or ""))
        self._engine = _engine(parsed, must_exist)
        try:
            with self._translated():
                if not must_exist:
                    self._make_tables()
                self._check_version()
        except (ArchiveUnavailable, ArchiveNewer):
            self.close()
            raise

    def _make_tables(self) -> None:
        refuse_foreign_tables(self._engine, self._shown, _tables)
        if self._engine.dialect.name == "sqlite":
            with self._engine.connect() as connection:
                # readers and the writer do not wait for each other
                connection.exec_driver_sql("PRAGMA journal_mode=WAL")
        with self._engine.begin() as connection:
            _tables.create_all(connection)
            row = self._insert(_about).values(id=1, version=SCHEMA_VERSION)
            connection.execute(row.on_conflict_do_nothing())

    def _check_version(self) -> None:
        try:
            rows = self._rows(_plain(_about.c.version))
        except ArchiveDamaged as error:
            raise ArchiveUnavailable(f"{self._shown} holds no archive: {error.problem}") from error
        found: Any = rows[0][0] if rows else None
        if problem := number_problem("version", found, 1):
            damaged = DamagedRow(_about.name, key_of(id=1), problem)
            raise ArchiveDamaged(self._shown, f"{damaged}; set it to {SCHEMA_VERSION}")
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
        if self._is_reading:
            raise ArchiveUnavailable(f"{self._shown} is opened to be read only")
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
        query = _plain(_cursors.c.sequence).where(_cursors.c.stream == stream_name)
        rows = self._rows(query)
        if not rows:
            return 0
        if problem := number_problem("sequence", rows[0][0]):
            self.damaged.note(DamagedRow(_cursors.name, key_of(stream=stream_name), problem))
            return self._newest(_events if stream_name == KV_EVENTS else _decisions)
        return int(rows[0][0])

    def cut(self) -> Cut:
        # of one statement all parts are of one moment, in both databases
        newest = [_newest(table).scalar_subquery() for table in (_events, _decisions)]
        cursor = _plain(_cursors.c.sequence).where(_cursors.c.stream == KV_EVENTS)
        found = self._rows(sa.select(cursor.scalar_subquery(), *newest))[0]
        last_event, last_decision = found[1] or 0, found[2] or 0
        is_sound = found[0] is None or not number_problem("sequence", found[0])
        return Cut(
            (found[0] or 0) if is_sound else self.cursor(KV_EVENTS), last_event, last_decision
        )

    def _newest(self, table: sa.Table) -> int:
        return self._rows(_newest(table))[0][0] or 0

    def read_events(self, first: int, last: int) -> Iterator[Message]:
        sequence = _events.c.stream_sequence
        while first <= last:
            query = _select(_events).where(sequence >= first, sequence <= last)
            rows = self._rows(query.order_by(sequence).limit(READ_ROWS))
            for row in rows:
                key = key_of(stream_sequence=row[0])
                yield message_of(_events.name, key, row._mapping, self.damaged)
            if len(rows) < READ_ROWS:
                return
            first = rows[-1][0] + 1

    def holes(self, stream_name: str) -> list[Hole]:
        query = _plain(_holes.c.first, _holes.c.last).where(_holes.c.stream == stream_name)
        return holes_of([row._mapping for row in self._rows(query)], stream_name, self.damaged)

    def sequence_at(self, broker_ns: int) -> int:
        query = sa.select(_events.c.stream_sequence).where(_events.c.broker_ns <= broker_ns)
        newest = query.order_by(_events.c.broker_ns.desc(), _events.c.stream_sequence.desc())
        rows = self._rows(newest.limit(1))
        return rows[0][0] if rows else 0

    def decision(self, decision_id: str) -> Message:
        rows = self._rows(_select(_decisions).where(_decisions.c.id == decision_id))
        if not rows:
            raise UnknownDecision(decision_id)
        return self._decision(rows[0])

    def decisions(self, before: int, limit: int) -> list[Message]:
        sequence = _decisions.c.stream_sequence
        query = _select(_decisions).where(sequence < before).order_by(sequence.desc())
        return [self._decision(row) for row in self._rows(query.limit(limit))]

    def _decision(self, row: Any) -> Message:
        return message_of(_decisions.name, key_of(id=row[-1]), row._mapping, self.damaged)

    def look_for_damage(self) -> int:
        """Note all damaged rows of all tables, and return how many rows there are."""
        num_rows = 0
        for table in _tables.sorted_tables:
            num_rows += self._rows(sa.select(sa.func.count()).select_from(table))[0][0]
            keys = [each for each in table.columns if each.primary_key]
            for column in table.columns:
                bad = _is_damaged(column, is_sqlite=self._engine.dialect.name == "sqlite")
                if bad is None:
                    continue
                query = _plain(*keys, column).where(bad).limit(MAX_DAMAGED)
                for row in self._rows(query):
                    key = key_of(**{each.name: at for each, at in zip(keys, row, strict=False)})
                    self.damaged.note(DamagedRow(table.name, key, _problem(column, row[-1])))
        return num_rows

    def _rows(self, query: sa.Select[*tuple[Any, ...]]) -> Sequence[Any]:
        """Return the rows of a query, all of one moment."""
        with self._translated():
            if self._file is not None:
                return self._file.rows(query)
            with self._engine.connect() as connection:
                return connection.execute(query).all()

    def close(self) -> None:
        self._engine.dispose()
        if self._file is not None:
            self._file.close()

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
            raise describe(error, self._shown) from error
        except PoolTimeout as error:
            raise ArchiveUnavailable(f"{self._shown}: no connection is free") from error


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):  # its text may have a part of a password
        parsed = None
    if parsed is None or "@" in (parsed.host or ""):
        problem = "archive.url is no URL of a database: give one such as sqlite:///kvatlas.db"
        if "@" in url:
            problem += "; in a password / is written as %2F, @ as %40, : as %3A"
        raise InvalidSetting("archive.url", "", problem)
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


def _make_file(path: Path) -> None:
    """Make an empty file where there is none, for this user alone, as what SQLite puts beside it.

    Raises ForeignFile for a link that leads nowhere: a file would come to be elsewhere.
    """
    try:
        os.close(create_file(path))
    except FileExistsError:
        if not path.exists():
            change = "give another --archive (archive.url)"
            found = "a symbolic link that leads nowhere"
            raise ForeignFile(path, "nothing or an archive", found, change) from None
    except OSError as error:
        problem = f"cannot be made ({error.strerror or error})"
        raise ArchiveUnavailable(f"archive {path}: {problem}: give another --archive") from error


def _engine(url: sa.URL, is_reading: bool) -> sa.Engine:
    if url.get_backend_name() != "sqlite":
        engine = sa.create_engine(url, pool_pre_ping=True)
        if not is_reading:
            return engine
        return engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS})

    @listens_for(engine, "connect")
    def _prepare(connection: Any, _record: object) -> None:
        # a power cut may take the last transactions, cursor included, which are then read again
        connection.execute("PRAGMA synchronous=NORMAL").close()

    return engine


def _plain(*columns: sa.Column[Any]) -> Any:
    """Select columns as the database has them: a driver must not stumble over a damaged value."""
    plain = [sa.type_coerce(each, sa.types.NullType()).label(each.name) for each in columns]
    return sa.select(*plain)


def _select(table: sa.Table) -> sa.Select[*tuple[Any, ...]]:
    c = table.c
    key = (c.id,) if "id" in c else ()
    query: sa.Select[*tuple[Any, ...]] = _plain(
        c.stream_sequence, c.subject, c.payload, c.broker_ns, *key
    )
    return query


def _newest(table: sa.Table) -> sa.Select[*tuple[Any, ...]]:
    """Select the highest stream sequence; in SQLite a text would be higher than any number."""
    sequence = table.c.stream_sequence
    return sa.select(sa.func.max(sequence)).where(sequence <= _MAX_INT64)


def _is_damaged(column: sa.Column[Any], *, is_sqlite: bool) -> sa.ColumnElement[bool] | None:
    """Return the condition under which a column has a value that no archiver writes."""
    value = sa.type_coerce(column, sa.types.NullType())
    is_number = isinstance(column.type, sa.Integer)
    if not is_sqlite:  # PostgreSQL holds the types
        return value < 0 if is_number else None
    kind = "integer" if is_number else "blob" if isinstance(column.type, sa.LargeBinary) else "text"
    kinds = [kind, "null"] if column.nullable else [kind]
    bad = sa.func.typeof(value).not_in(kinds)
    return sa.or_(bad, value < 0) if is_number else bad


def _problem(column: sa.Column[Any], value: object) -> str:
    if isinstance(column.type, sa.Integer):
        return number_problem(column.name, value)
    kind = "a blob" if isinstance(column.type, sa.LargeBinary) else "a text"
    return f"{column.name} is not {kind}"


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
