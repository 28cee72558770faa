"""A folder for rings, sockets, pools or a broker's store, gone with its owner, however that ends.

The owner holds a lock on a file in it. What a killed owner left is taken away by the next one that
starts: a folder of ours whose lock nobody holds has no owner.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path

from kvatlas.common.own_files import create_file, foreignness, open_file, shortage
from kvatlas.schemas.errors import FolderUnusable

PREFIX = "kvatlas-"
LOCK = "owner.lock"
#: the lock of a broker whose store is in the folder; it may outlive the folder's owner
SERVER_LOCK = "lock"
#: what a lock says from the moment when it is held
MARK = b"kvatlas runtime folder\n"
#: as tempfile makes them, with what is in them before
_NAME = re.compile(re.escape(PREFIX) + r"([a-z]+-)?[a-z0-9_]{8}")
#: a page for the lock is what it takes to begin with
_PAGE = 4096


@contextlib.contextmanager
def runtime_folder(parent: Path | None = None, content: str = "") -> Generator[Path, None, None]:
    """Yield a fresh folder below `parent`, by default in shared memory where there is some.

    `content` becomes part of its name. Only this user gets at what is in it. Raises FolderUnusable.
    """
    parent = parent or shared_memory()
    sweep(parent)
    folder, lock = _made(parent, f"{PREFIX}{content}-" if content else PREFIX)
    owner_pid = os.getpid()
    try:
        yield folder
    finally:
        os.close(lock)
        if os.getpid() == owner_pid:  # a forked child that ends takes nothing of its parent along
            shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> list[Path]:
    """Remove folders of this user's owners that are gone; return them.

    One without a lock of ours is being made, or is none of ours.
    """
    try:
        names = [name for name in os.listdir(parent) if _NAME.fullmatch(name)]
    except OSError:
        return []
    swept = []
    for folder in (parent / name for name in sorted(names)):
        with contextlib.suppress(OSError):  # held, removed meanwhile, or not ours to read
            if _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)
                swept.append(folder)
    return swept


def shared_memory() -> Path:
    """Return the folder of shared memory, or of temporary files where the system has none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else temporary_folder()


def temporary_folder() -> Path:
    """Return the folder of temporary files. Raises FolderUnusable where none can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        asked = Path(os.environ.get("TMPDIR") or "/tmp")
        problem = f"{error.strerror}: name one that can be written to with TMPDIR"
        raise FolderUnusable(asked, problem, "temporary folder") from error


def _made(parent: Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder and its lock, which is held."""
    folder: Path | None = None
    lock = -1
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = create_file(folder / LOCK)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, MARK)
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        problem = (
            f"no folder can be made in it ({error.strerror}): {shortage(parent, _PAGE, error)}"
        )
        raise FolderUnusable(parent, problem) from error
    return folder, lock


def _is_left(folder: Path) -> bool:
    """Whether a folder is of an owner that is gone. Raises OSError where that cannot be seen."""
    if foreignness(folder.lstat(), stat.S_ISDIR):
        return False
    with contextlib.ExitStack() as opened:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        opened.callback(os.close, fd)
        lock = open_file(LOCK, os.O_RDWR | os.O_NONBLOCK, folder_fd=fd)
        opened.callback(os.close, lock)
        if foreignness(os.fstat(lock)) or os.pread(lock, len(MARK) + 1, 0) != MARK:
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError):
            server = open_file(SERVER_LOCK, os.O_RDWR | os.O_NONBLOCK, folder_fd=fd)
            opened.callback(os.close, server)
            fcntl.flock(server, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
