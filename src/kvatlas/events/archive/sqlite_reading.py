"""An archive in SQLite that is only read: nothing is written, locked for writing, or left behind.

    rollback journal            mode=ro     a reader holds its lock for a query
    WAL, and a -wal beside it   mode=ro     a writer goes on; readers do not wait for it
    WAL, and no -wal            immutable   nobody has it open: mode=ro would make -wal and -shm
    not readable there          a copy      a -wal or -journal that needs a folder to write to

A file that is opened as immutable and then changes is opened anew, and the query is repeated.
"""

import os
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from kvatlas.common.runtime_folder import runtime_folder, temporary_folder
from kvatlas.schemas.errors import ArchiveDamaged, ArchiveUnavailable

#: how long SQLite waits for another process that writes, where it has to
BUSY_SECONDS = 10
#: how often a query is repeated because the file has changed meanwhile
MAX_REPEATS = 100
_MAGIC = b"SQLite format 3\0"
#: of the header: 2 where the file is written through a -wal
_READ_VERSION = 19
#: what makes no sense without the folder to write to
_NEEDS_FOLDER = ("SQLITE_CANTOPEN", "SQLITE_READONLY")

#: what a file looked like: device, inode, size, time of change
_Stamp = tuple[int, int, int, int]


class SqliteReading:
    """Answers queries from a file. Raises ArchiveUnavailable and ArchiveDamaged."""

    def __init__(self, path: Path, shown: str) -> None:
        self._path, self._shown = path, shown
        self._owned = ExitStack()
        self._copied: Path | None = None
        self._engine: sa.Engine | None = None
        #: of the file where it is opened as immutable; None where it is not
        self._stamp: _Stamp | None = None
        self._check_file()

    def rows(self, query: sa.Select[*tuple[Any, ...]]) -> Sequence[sa.Row[Any]]:
        """Return the rows of a query, all of one moment. Raises DBAPIError too."""
        for _ in range(MAX_REPEATS):
            engine = self._opened()
            try:
                with engine.connect() as connection:
                    found = connection.execute(query).all()
            except DBAPIError:
                if not self._has_changed():
                    raise
            else:
                if not self._has_changed():
                    return found
            self._reopen()
        raise ArchiveUnavailable(f"{self._shown}: changes all the time: read a copy of it")

    def close(self) -> None:
        """Give everything back."""
        self._reopen()
        self._owned.close()

    def _check_file(self) -> None:
        """Raise what a look at the file is enough for."""
        if not self._path.exists():
            raise ArchiveUnavailable(f"no archive at {self._path}")
        if not self._path.is_file():
            problem = "is a folder" if self._path.is_dir() else "is no file"
            given = "expected a file, such as sqlite:///kvatlas.db"
            raise ArchiveUnavailable(f"{self._shown} {problem}: {given}")
        head = self._head()
        if not head:
            raise ArchiveUnavailable(
                f"{self._shown} is empty and holds no archive: give the file that `kvatlas archive`"
                " or `serve --archive` has written"
            )
        if not head.startswith(_MAGIC):
            raise ArchiveUnavailable(
                f"{self._shown}: file is not a database of SQLite: give the file that `kvatlas"
                " archive` or `serve --archive` has written"
            )

    def _head(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                return file.read(100)
        except OSError as error:
            raise ArchiveUnavailable(f"{self._shown}: {error.strerror}") from error

    def _opened(self) -> sa.Engine:
        if self._engine is None:
            self._engine = self._open()
        return self._engine

    def _reopen(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def _open(self) -> sa.Engine:
        if self._copied is not None:
            return _engine(self._copied / self._path.name, "mode=rw")
        head = self._head()
        has_wal = len(head) > _READ_VERSION and head[_READ_VERSION] == 2
        self._stamp = self._stamp_now() if has_wal and not self._beside("-wal").exists() else None
        if self._stamp is not None:
            return _engine(self._path, "mode=ro&immutable=1")
        engine = _engine(self._path, "mode=ro")
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").all()
        except DBAPIError as error:
            engine.dispose()
            name = getattr(error.orig, "sqlite_errorname", "")
            if not name.startswith(_NEEDS_FOLDER):
                raise
            self._copy()
            return self._open()
        return engine

    def _copy(self) -> None:
        """Copy the file and what lies beside it to where SQLite may write."""
        # gone with the next one if this process is killed
        folder = self._owned.enter_context(runtime_folder(temporary_folder(), "archive")) / "copy"
        try:
            folder.mkdir()
            for end in ("", "-wal", "-journal"):
                if self._beside(end).exists():
                    shutil.copyfile(self._beside(end), folder / (self._path.name + end))
        except OSError as error:
            self._owned.close()
            raise ArchiveUnavailable(
                f"{self._shown}: has changes beside it that are read in a folder to write to only,"
                f" and it cannot be copied into {folder}: {error.strerror}"
            ) from error
        self._copied = folder

    def _has_changed(self) -> bool:
        """Say whether a file that is opened as immutable is not what it was."""
        if self._stamp is None:
            return False
        return self._beside("-wal").exists() or self._stamp_now() != self._stamp

    def _stamp_now(self) -> _Stamp:
        try:
            found = os.stat(self._path)
        except OSError as error:
            raise ArchiveUnavailable(f"{self._shown}: {error.strerror}") from error
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _beside(self, end: str) -> Path:
        return self._path.with_name(self._path.name + end)


def _engine(path: Path, query: str) -> sa.Engine:
    uri = f"{path.absolute().as_uri()}?{query}"

    def connect() -> sqlite3.Connection:
        made = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False)
        # a text that is no UTF-8 is no subject of ours, and no reason to stop
        made.text_factory = lambda content: content.decode(errors="backslashreplace")
        made.execute("PRAGMA query_only=ON").close()
        return made

    return sa.create_engine("sqlite://", creator=connect, poolclass=sa.QueuePool)


def refuse_foreign_tables(engine: sa.Engine, shown: str, known: sa.MetaData) -> None:
    """Raise ArchiveDamaged for a database that another program's tables are in."""
    found = sa.inspect(engine)
    for name in found.get_table_names():
        ours = known.tables.get(name)
        if ours is None and engine.dialect.name == "sqlite":
            raise ArchiveDamaged(shown, f"holds table {name!r:.80} of another program")
        if ours is not None:
            columns = {column["name"] for column in found.get_columns(name)}
            if missing := [each.name for each in ours.columns if each.name not in columns]:
                problem = f"table {name} has no column {missing[0]}: another program's"
                raise ArchiveDamaged(shown, problem)


def describe(error: DBAPIError, shown: str) -> ArchiveUnavailable:
    """Return a driver's error as ours; the statement's parameters stay out of the text."""
    text = str(error.orig)
    code = getattr(error.orig, "sqlstate", None)  # PostgreSQL's, of a table or column
    if text.startswith(("no such table", "no such column")) or code in ("42P01", "42703"):
        return ArchiveDamaged(shown, text.partition("\n")[0])
    name = getattr(error.orig, "sqlite_errorname", "")
    if name.startswith("SQLITE_CORRUPT"):
        return ArchiveDamaged(shown, text)
    with suppress(KeyError):
        text = f"{text}: {_HINTS[name.partition('_')[2].partition('_')[0]]}"
    return ArchiveUnavailable(f"{shown}: {text}")


_HINTS = {
    "BUSY": "another program has it for itself alone: ask again when that is done",
    "NOTADB": "it is left as it is: give another --archive (archive.url)",
    "READONLY": "give a file and folder that may be written to",
}
