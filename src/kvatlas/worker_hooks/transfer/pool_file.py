"""The file under a serve pool: its layout, its mapping and the lock between its processes.

      0 +---------------------------------------------------------------------+
        | header    magic, version, num_slots, block_bytes, num_bounce, owner |
   2048 |           num_held[2]: how many slots each journal has seen         |
   4096 +---------------------------------------------------------------------+
        | slots     num_slots x 40 B: hash 16 B | checksum u64 |              |
        |           lease_until_ns u64 | place << 8 | state u64               |
        +---------------------------------------------------------------------+
        | journals  2 x num_slots x u32: slots in the order they became held, |
        |           by commit (engine) and by fill (sidecar); rings           |
   page +---------------------------------------------------------------------+
        | blocks    num_slots + num_bounce places of block_bytes              |
        +---------------------------------------------------------------------+

Numbers are in the machine's byte order: the file never leaves its host.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from kvatlas.common.own_files import (
    NO_ROOM,
    create_file,
    has_own,
    is_from_a_trusted_user,
    open_file,
    shortage,
    take_room,
)
from kvatlas.schemas.errors import (
    FolderUnusable,
    InvalidSetting,
    PoolInUse,
    PoolTooLarge,
    PoolUnreadable,
)

MAGIC, VERSION = b"KVATPOOL", 1
#: what a pool begins with while it is made
_UNFINISHED = b"KVATMAKE"
_CHANGE = "name another path for the pool"
HEADER = struct.Struct("=8sIIQIIQ")
COUNTERS_OFFSET, SLOTS_OFFSET, PAGE = 2048, 4096, 4096
SLOT_BYTES = 40
#: between two tries for the lock while another process holds it
_LOCK_RETRY_SECONDS = 20e-6


class PoolLayout(Struct, frozen=True):
    """Where things lie in a pool file."""

    num_slots: int
    block_bytes: int
    num_bounce: int

    @property
    def journals_offset(self) -> int:
        return SLOTS_OFFSET + self.num_slots * SLOT_BYTES

    @property
    def blocks_offset(self) -> int:
        return _page_up(self.journals_offset + 2 * 4 * self.num_slots)

    @property
    def num_places(self) -> int:
        return self.num_slots + self.num_bounce

    @property
    def file_bytes(self) -> int:
        return _page_up(self.blocks_offset + self.num_places * self.block_bytes)


class PoolFile:
    """A mapped pool file. The mapping lives as long as anything refers to it, even closed."""

    def __init__(self, path: Path, fd: int, layout: PoolLayout, is_owner: bool) -> None:
        self.path, self.layout, self.is_owner = path, layout, is_owner
        self.memory = mmap.mmap(fd, layout.file_bytes)
        self._fd = fd
        self._threads = threading.Lock()

    @property
    def address(self) -> int:
        """Where this process has the file mapped."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    @contextlib.contextmanager
    def locked(self, wait_seconds: float) -> Iterator[bool]:
        """Hold the pool's lock, or yield False when it is not to be had in time.

        The kernel releases the lock when its holder dies. It is `flock`, which belongs to the open
        file: a POSIX lock would be lost whenever any descriptor of the file is closed in the
        process.
        """
        deadline = time.monotonic() + wait_seconds
        if not self._threads.acquire(timeout=wait_seconds):
            yield False
            return
        try:
            has_lock = self._try_lock()
            while not has_lock and time.monotonic() < deadline:
                time.sleep(_LOCK_RETRY_SECONDS)
                has_lock = self._try_lock()
            try:
                yield has_lock
            finally:
                if has_lock:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def close(self) -> None:
        """Close the descriptor; the owner also removes the name. Maps stay. Idempotent."""
        with self._threads:
            if self._fd < 0:
                return
            if self.is_owner:
                self._unlink_own()
            os.close(self._fd)
            self._fd = -1

    def _unlink_own(self) -> None:
        """Remove the name unless it is another file's by now."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.lstat(), os.fstat(self._fd)):
                self.path.unlink()

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def default_folder() -> Path:
    """Return where pools lie: shared memory, or the temporary folder where there is none."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def pool_path(name: str, folder: Path | None = None) -> Path:
    """Return the path of the pool of this name."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    return (folder or default_folder()) / f"kvatlas-{safe}.pool"


def create_pool_file(path: Path, layout: PoolLayout) -> PoolFile:
    """Make the file with all its pages; replace one whose owner is dead.

    Pages are taken now, so that a full /dev/shm is an error here and no SIGBUS later. Raises
    InvalidSetting, PoolInUse, PoolTooLarge, FolderUnusable, and ForeignFile for what is no pool.
    """
    if layout.num_slots < 1 or layout.block_bytes < 1 or layout.num_bounce < 0:
        raise InvalidSetting("pool", "create", f"{layout} has no room for a block")
    try:
        if has_own(path, (MAGIC, _UNFINISHED), "a serve pool", _CHANGE):
            with contextlib.suppress(FileNotFoundError, PoolUnreadable):
                pid, started = _owner_of(path)
                if pid and _start_of(pid) == started:
                    raise PoolInUse(path, pid)
            path.unlink(missing_ok=True)
        fd = create_file(path)
    except OSError as error:
        problem = f"no serve pool can be made in it ({error.strerror or error})"
        text = f"{problem}: {shortage(path, layout.file_bytes, error)}"
        raise FolderUnusable(path.parent, text) from error
    try:
        _fill(fd, path, layout)
        return PoolFile(path, fd, layout, is_owner=True)
    except BaseException:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise


def _fill(fd: int, path: Path, layout: PoolLayout) -> None:
    """Take all pages of a new file and write what it begins with."""
    pid = os.getpid()
    header = HEADER.pack(
        MAGIC,
        VERSION,
        layout.num_slots,
        layout.block_bytes,
        layout.num_bounce,
        pid,
        _start_of(pid),
    )
    try:
        os.pwrite(fd, _UNFINISHED, 0)
        take_room(fd, layout.file_bytes)
    except OSError as error:
        if error.errno in NO_ROOM:
            lacking = shortage(path, layout.file_bytes)
            raise PoolTooLarge(path, layout.file_bytes, lacking) from error
        raise
    os.pwrite(fd, header[8:], 8)
    slots = b"".join(bytes(32) + struct.pack("=Q", n << 8) for n in range(layout.num_slots))
    os.pwrite(fd, slots, SLOTS_OFFSET)  # slot n at place n, empty
    os.pwrite(fd, MAGIC, 0)  # last: until then nobody attaches


def attach_pool_file(path: Path) -> PoolFile:
    """Map a pool that another process owns, or raise PoolUnreadable."""
    try:
        fd = open_file(path, os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise PoolUnreadable(path, str(error)) from error
    try:
        if not is_from_a_trusted_user(os.fstat(fd)):
            raise PoolUnreadable(path, "it is of another user")
        _, _, num_slots, block_bytes, num_bounce, _, _ = _read_header(fd, path)
        layout = PoolLayout(num_slots, block_bytes, num_bounce)
        size = os.fstat(fd).st_size
        if size != layout.file_bytes:
            raise PoolUnreadable(path, f"{size} bytes, expected {layout.file_bytes}")
        return PoolFile(path, fd, layout, is_owner=False)
    except BaseException:
        os.close(fd)
        raise


def _page_up(offset: int) -> int:
    return -(-offset // PAGE) * PAGE


def _read_header(fd: int, path: Path) -> tuple[bytes, int, int, int, int, int, int]:
    header = os.pread(fd, HEADER.size, 0)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise PoolUnreadable(path, "no serve pool, or not made yet")
    fields: tuple[bytes, int, int, int, int, int, int] = HEADER.unpack(header)
    if fields[1] != VERSION:
        raise PoolUnreadable(path, f"layout version {fields[1]}, this code knows {VERSION}")
    return fields


def _owner_of(path: Path) -> tuple[int, int]:
    fd = open_file(path, os.O_RDONLY)
    try:
        *_, pid, started = _read_header(fd, path)
    finally:
        os.close(fd)
    return pid, started


def _start_of(pid: int) -> int:
    """Return when a process started (ticks since boot), which tells it from a later one of its pid.

    -1 when there is no such process; 0 where the system has no /proc.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return -1 if Path("/proc/self").exists() else 0
    except ProcessLookupError:
        return -1
    return int(stat.rpartition(")")[2].split()[19])
