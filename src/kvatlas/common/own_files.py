"""Files and folders of our own: made for this user alone; what others have made is left as it is.

Whatever deletes, empties or replaces a file asks here first whether the file is ours. Links are not
followed on the way, so that one that was put there beforehand leads nowhere.
"""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from kvatlas.schemas.errors import FolderUnusable, ForeignFile

#: of files that may hold tokens, blocks or events, and of folders that hold such files
FILE_MODE, FOLDER_MODE = 0o600, 0o700
#: by which a file is known that has no fixed beginning
_MAX_BEGINNING = 65_536
#: of what there is not enough of
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
#: from the most telling to the least
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISREG, "a file"),
)


# --- files --------------------------------------------------------------------------------------


def create_file(path: str | Path, flags: int = os.O_RDWR, *, folder_fd: int | None = None) -> int:
    """Return a descriptor of a new file; raises FileExistsError for anything at `path`, OSError."""
    flags |= os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.open(path, flags, FILE_MODE, dir_fd=folder_fd)


def open_file(path: str | Path, flags: int, *, folder_fd: int | None = None) -> int:
    """Return a descriptor of a file, made if `flags` say so. Raises OSError, for a link as well."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, FILE_MODE, dir_fd=folder_fd)


def take_room(fd: int, num_bytes: int) -> None:
    """Make a file at least this long, with room for all of it now. Raises OSError.

    Room that is lacking would otherwise end the process at a write to the file's mapping (SIGBUS).
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
    elif os.fstat(fd).st_size < num_bytes:
        os.ftruncate(fd, num_bytes)


def free_bytes(folder: Path | int) -> int:
    """Return how many bytes may still be written below a folder, or one's descriptor.

    Raises OSError.
    """
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def shortage(path: Path, num_bytes: int, error: OSError | None = None) -> str:
    """Return, for a message, what a file system lacks, and what to change.

    `error` is what an attempt ended with, no room unless it says otherwise.
    """
    folder = path if path.is_dir() else path.parent
    text = f"{num_bytes} bytes are needed in {folder}"
    with contextlib.suppress(OSError):
        text += f", {free_bytes(folder)} are free"
    if error is not None and error.errno not in NO_ROOM:
        return f"{text}: give this user the right to write there"
    if folder.is_relative_to("/dev/shm"):
        return f"{text}: make /dev/shm larger (containers: --shm-size), or ask for less"
    return f"{text}: make room there"


def is_from_a_trusted_user(found: os.stat_result) -> bool:
    """Whether a file is this user's or root's; others could change it while it is mapped.

    Root, to whom all may be given to read, trusts every owner.
    """
    return found.st_uid in (os.geteuid(), 0) or os.geteuid() == 0


def foreignness(found: os.stat_result, is_kind: Callable[[int], bool] = stat.S_ISREG) -> str:
    """Return what makes a file other than one of ours, empty if nothing does.

    `is_kind` is one of the functions `stat.S_IS...`.
    """
    kind = next((name for is_one, name in _KINDS if is_one(found.st_mode)), "a device")
    wanted = next(name for is_one, name in _KINDS if is_one is is_kind)
    if kind != wanted:
        return kind
    if found.st_uid != os.geteuid():
        return f"{kind} of user {found.st_uid}"
    return ""


def has_own(path: Path, starts: Sequence[bytes], what: str, change: str) -> bool:
    """Whether a file of ours lies at `path`: it begins with one of `starts`, or is empty.

    False where nothing is. Raises ForeignFile, which says `what` was expected and what to
    `change`, for anything else, and OSError for a file that cannot be read.
    """
    try:
        problem = foreignness(path.lstat())
    except FileNotFoundError:
        return False
    if not problem:
        fd = open_file(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            content = os.pread(fd, max(map(len, starts), default=0), 0)
        finally:
            os.close(fd)
        if content and not content.startswith(tuple(starts)):
            problem = "a file with other content"
    if problem:
        raise ForeignFile(path, f"nothing or {what}", problem, change)
    return True


def open_output(path: Path, is_ours: Callable[[bytes], bool], what: str, change: str) -> int:
    """Return a descriptor to write a file from its beginning, new or one that may go.

    A file that is there may go when it is empty, or `is_ours` says yes to its first bytes. A pipe
    or a character device is written to as it is, also through a link such as /dev/stdout. Raises
    ForeignFile for anything else, which stays as it is; OSError.
    """
    with contextlib.suppress(FileExistsError):
        return create_file(path, os.O_WRONLY)
    found = path.lstat()
    is_link = stat.S_ISLNK(found.st_mode)
    if is_link:
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
    if stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
    problem = "a symbolic link" if is_link else foreignness(found)
    if not problem:
        fd = open_file(path, os.O_RDWR)
        content = os.pread(fd, _MAX_BEGINNING, 0)
        if not foreignness(os.fstat(fd)) and (not content or is_ours(content)):
            os.fchmod(fd, FILE_MODE)
            os.ftruncate(fd, 0)
            return fd
        os.close(fd)
        problem = "a file with other content"
    raise ForeignFile(path, f"nothing or {what}", problem, change)


def has_stale_socket(path: Path, change: str) -> bool:
    """Whether a socket lies at `path` that nothing listens on; False where nothing is.

    Raises ForeignFile for anything else, with `is_in_use` where something listens.
    """
    try:
        problem = foreignness(path.lstat(), stat.S_ISSOCK)
    except FileNotFoundError:
        return False
    is_in_use = not problem and _is_listened_on(path)
    if problem or is_in_use:
        problem = problem or "a socket in use"
        expected = "nothing or a socket that nothing listens on"
        raise ForeignFile(path, expected, problem, change, is_in_use=is_in_use)
    return True


def _is_listened_on(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # its queue is full, or it is of another kind
            return True
        return True


# --- folders ------------------------------------------------------------------------------------


def open_own_folder(path: Path, name: str, change: str) -> int:
    """Return a descriptor of a folder of this user's, made if it is not there.

    `name` is the setting or flag that has named it. Raises ForeignFile where it is a link, another
    user's, or one that others may write to, and FolderUnusable.
    """
    with contextlib.suppress(FileExistsError), _used(path, name):
        path.mkdir(mode=FOLDER_MODE, parents=True)
    check_own_folder(path, name, change)
    with _used(path, name):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_folder(os.fstat(fd), path, name, change)  # it may be another one by now
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_own_folder(path: Path, name: str, change: str) -> None:
    """Raise as `open_own_folder` does for a folder that is there; make nothing."""
    with contextlib.suppress(FileNotFoundError), _used(path, name):
        _check_folder(path.lstat(), path, name, change)


def _check_folder(found: os.stat_result, path: Path, name: str, change: str) -> None:
    problem = foreignness(found, stat.S_ISDIR)
    if not problem and found.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        problem = f"one that other users may write to (mode {mode:o})"
    if problem:
        raise ForeignFile(path, "a folder that only this user writes to", problem, change, name)


@contextlib.contextmanager
def _used(path: Path, name: str) -> Generator[None, None, None]:
    try:
        yield
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        raise FolderUnusable(path, error.strerror or str(error), name) from error
