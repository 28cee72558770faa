"""Objects as files of one folder."""

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path
from secrets import token_hex

from kvatlas.events.objects import ORPHAN_SECONDS, Buffer, ObjectEntry, Take, check_name
from kvatlas.schemas.errors import NotFound, Unavailable

CHUNK_BYTES = 1 << 20
#: of names that are no objects, or not yet
_UNFINISHED = ".unfinished-"


class FolderObjects:
    """The `ObjectStore` of a folder, which is made at the first `put`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, name: str, parts: Iterable[Buffer]) -> None:
        check_name(name)
        unfinished = self._folder / f"{_UNFINISHED}{token_hex(8)}"
        try:
            await asyncio.to_thread(self._write, unfinished, self._folder / name, parts)
        except OSError as error:
            raise Unavailable(f"object {name} cannot be written: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)

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
            (self._folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(f"object {name} cannot be deleted: {error}") from error

    def _write(self, unfinished: Path, path: Path, parts: Iterable[Buffer]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob(f"{_UNFINISHED}*"):
            if left.stat().st_mtime < time.time() - ORPHAN_SECONDS:
                left.unlink(missing_ok=True)
        with unfinished.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)

    def _found(self) -> list[ObjectEntry]:
        if not self._folder.is_dir():
            return []
        found = []
        for path in self._folder.iterdir():
            if not path.name.startswith(".") and path.is_file():
                about = path.stat()
                found.append(ObjectEntry(path.name, about.st_size, about.st_mtime_ns))
        return sorted(found, key=lambda entry: (-entry.stored_ns, entry.name))
