"""The folder of a shared index: whose it is, and which files in it an earlier writer has left."""

import contextlib
import errno
import fcntl
import os
import re
import stat
import sys
from pathlib import Path

from kvatlas.common import own_files
from kvatlas.schemas.errors import FolderUnusable, ForeignFile, InvalidSetting

NAME = "indexer.shared_folder"
LOCK, HEADER = "lock", "header"
#: that arrays leave free: an index that takes the last byte could not say any more who the workers
#: are. Too low, new workers are unknown to routers; too high, a small file system holds no index
HEADROOM_BYTES = 1 << 20
#: of the header's second word: `kvatlas` and the version of the layout
FORMAT_MARK = 0x6B_7661_746C_6173
#: what the lock says since folders are checked; before, it was empty
_LOCK_MARK = b"kvatlas shared index\n"
_ARRAY = re.compile(r"[0-9a-f]{16}\.(header|(cells|directory|rows|words|masks|fleet)\.\d+)")
_CHANGE = "name a folder for the index alone, such as /dev/shm/kvatlas-index"


class SharedFolder:
    """The folder, locked by its one writer, who makes and removes files in it by their names.

    All goes through a descriptor, so that a folder put in its place later is not touched. Raises
    ForeignFile for a folder that is a link, not this user's alone, or holds what no writer of ours
    has made, which all stay as they are; InvalidSetting while another writes; FolderUnusable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.ExitStack() as on_error:
            self._fd = own_files.open_own_folder(path, NAME, _CHANGE)
            on_error.callback(os.close, self._fd)
            _files_of_ours(self._fd, path)  # a lock is no more put into a foreign folder
            try:
                self._lock = own_files.open_file(LOCK, os.O_RDWR | os.O_CREAT, folder_fd=self._fd)
            except OSError as error:
                raise FolderUnusable(path, error.strerror or str(error), NAME) from error
            on_error.callback(os.close, self._lock)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InvalidSetting(NAME, str(path), "another index writes here") from None
            with contextlib.suppress(OSError):  # without room for it, an empty one does as well
                os.pwrite(self._lock, _LOCK_MARK, 0)
            #: files of an earlier writer; readers may need them until there is a new header
            self.left = _files_of_ours(self._fd, path)
            on_error.pop_all()

    def create(self, name: str) -> int:
        """Return a descriptor of a new file. Raises OSError."""
        return own_files.create_file(name, folder_fd=self._fd)

    def open(self, name: str) -> int:
        """Return a descriptor of a file that this writer has made. Raises OSError."""
        return own_files.open_file(name, os.O_RDWR, folder_fd=self._fd)

    def remove(self, name: str) -> None:
        """Remove a file that may be gone already; readers that have it mapped keep it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def rename(self, old: str, new: str) -> None:
        """Rename a file over another one."""
        os.replace(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def take_room(self, fd: int, num_bytes: int) -> None:
        """Have memory for a file's first bytes; some is left for the fleet. Raises OSError."""
        lacking = num_bytes - 512 * os.fstat(fd).st_blocks
        if own_files.free_bytes(self._fd) < lacking + HEADROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        own_files.take_room(fd, num_bytes)

    def shortage(self, num_bytes: int) -> str:
        """Return, for a message, what its file system lacks for so many bytes."""
        return own_files.shortage(self.path, num_bytes + HEADROOM_BYTES)

    def close(self) -> None:
        """Let another one write. What is there stays for readers."""
        os.close(self._lock)
        os.close(self._fd)


def check_shared_folder(path: Path) -> None:
    """Raise as `SharedFolder` does for a folder that cannot be one; make and change nothing."""
    own_files.check_own_folder(path, NAME, _CHANGE)
    if path.is_dir():
        fd = own_files.open_own_folder(path, NAME, _CHANGE)
        try:
            _files_of_ours(fd, path)
        finally:
            os.close(fd)


def check_readable(path: Path) -> None:
    """Raise ForeignFile for a folder that another user could have written; one may be missing."""
    own_files.check_own_folder(path, NAME, _CHANGE)


def _files_of_ours(fd: int, path: Path) -> list[str]:
    """Return the files of earlier writers in a folder. Raises ForeignFile for any other."""
    names = sorted(os.listdir(fd))
    for name in names:
        try:
            problem = _foreignness(fd, name)
        except FileNotFoundError:  # the writer that has the lock removes its own
            continue
        except OSError as error:
            raise FolderUnusable(path / name, error.strerror or str(error), NAME) from error
        if problem:
            raise ForeignFile(
                path, "an empty folder or one of a shared index", problem, _CHANGE, NAME
            )
    if names and LOCK not in names:
        problem = f"{names[0]} without a lock beside it"
        raise ForeignFile(path, "an empty folder or one of a shared index", problem, _CHANGE, NAME)
    return [name for name in names if _ARRAY.fullmatch(name)]


def _foreignness(fd: int, name: str) -> str:
    """Return what shows that a file is not of a writer of ours; empty if nothing does."""
    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    problem = own_files.foreignness(found, stat.S_ISREG)
    if problem:
        return f"{name} ({problem})"
    if _ARRAY.fullmatch(name):
        return ""
    if name not in (LOCK, HEADER):
        return name
    opened = own_files.open_file(name, os.O_RDONLY, folder_fd=fd)
    try:
        content = os.read(opened, 64)
    finally:
        os.close(opened)
    if name == LOCK:
        return "" if _LOCK_MARK.startswith(content) else f"{name} with other content"
    word = int.from_bytes(content[8:16], sys.byteorder)
    return "" if word >> 8 == FORMAT_MARK else f"{name} with other content"
