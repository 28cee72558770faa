"""Objects as files of one folder."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from secrets import token_hex

from kvatlas.common.own_files import FOLDER_MODE, create_file, has_own
from kvatlas.events.objects import ORPHAN_SECONDS, Buffer, ObjectEntry, Take, check_name
from kvatlas.schemas.errors import ForeignFile, NotFound, Unavailable

CHUNK_BYTES = 1 << 20
#: of names that are no objects, or not yet
_UNFINISHED = ".unfinished-"
#: by which a folder is known that was made here
_MARK, _MARK_CONTENT = ".kvatlas-objects", b"objects of kvatlas\n"


class FolderObjects:
    """The `ObjectStore` of a folder, which is made at the first `put`, for this user alone.

    All files in it are taken for objects, so a folder that has others already is refused: writing
    and deleting raise ForeignFile for one that is not empty and was not made here.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, name: str, parts: Iterable[Buffer]) -> None:
        check_name(name)
        unfinished = self._folder / f"{_UNFINISHED}{token_hex(8)}"
        try:
            await asyncio.to_thread(self._prepare)
            await asyncio.to_thread(self._write, unfinished, self._folder / name, parts)
        except OSError as error:
            raise Unavailable(f"object {name} cannot be written: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                unfinished.unlink()

    async def get(self, name: str, take: Take) -> None:
        check_name(name)
        try:
            with await asyncio.to_thread((self._folder / name).open, "rb") as file:
                while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                    if not take(chunk):
                        return
        except FileNotFoundError as error:
            raise NotFound(f"no object {name} in {self._folder}") from error
        except OSError as error:
            raise Unavailable(f"object {name} cannot be read: {error}") from error

    async def entries(self) -> list[ObjectEntry]:
        try:
            return await asyncio.to_thread(self._found)
        except OSError as error:
            raise Unavailable(f"{self._folder} cannot be read: {error}") from error

    async def delete(self, name: str) -> None:
        check_name(name)
        try:
            if self._folder.is_dir():
                self._prepare()
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(f"object {name} cannot be deleted: {error}") from error

    def _write(self, unfinished: Path, path: Path, parts: Iterable[Buffer]) -> None:
        for left in self._folder.glob(f"{_UNFINISHED}*"):
            if left.stat().st_mtime < time.time() - ORPHAN_SECONDS:
                left.unlink(missing_ok=True)
        with open(create_file(unfinished), "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def _prepare(self) -> None:
        """Make the folder, or see that it is ours. Raises ForeignFile, OSError."""
        self._folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        mark = self._folder / _MARK
        change = "name a folder for objects alone"
        if not has_own(mark, (_MARK_CONTENT,), "a mark of kvatlas'", change):
            others = [path.name for path in self._folder.iterdir() if path.name != _MARK]
            if others:
                found = f"{min(others)} and no mark of ours"
                raise ForeignFile(self._folder, "an empty folder or one of ours", found, change)
            with contextlib.suppress(FileExistsError), open(create_file(mark), "wb") as file:
                file.write(_MARK_CONTENT)

    def _found(self) -> list[ObjectEntry]:
        if not self._folder.is_dir():
            return []
        found = []
        for path in self._folder.iterdir():
            if not path.name.startswith(".") and path.is_file():
                about = path.stat()
                found.append(ObjectEntry(path.name, about.st_size, about.st_mtime_ns))
        return sorted(found, key=lambda entry: (-entry.stored_ns, entry.name))
