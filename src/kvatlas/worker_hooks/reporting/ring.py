"""A bounded byte ring in a shared file: the engine appends, the sidecar takes.

    file    0  magic   capacity   writer lists                      written once
           64  head    dropped   beats                               written by the writer
          128  tail    told      listings wanted   asleep   beats    written by the reader
         4096  capacity bytes of records, a power of two

    record  length u32 | check u32 | payload, padded to 8 bytes; never wraps
    loss    the same with bit 31 of the length set; payload = records dropped since the beginning
    wrap    length 2**32-1: the next record starts at the beginning of the data

`head` and `tail` count bytes since the beginning, so that `head - tail` is what waits. Each cursor
is an aligned u64 which one side writes, last of all, in one store: an assignment to a memoryview of
format Q is one 8-byte copy. x86 keeps the order of stores and that of loads, so a reader that sees
`head` sees the record. ARM keeps neither; there `check` (low half of XXH3-64 of the payload, seeded
with the position) tells a record from what lay there before, and the reader looks again later. Its
store of `tail` depends on that comparison, so the writer never overwrites what is still being read.

`beats` count signs of life: of the writer's process, by a thread of its own, and of the reader, by
what reads; 0: it gives none.

The writer never waits. A record without room is dropped and counted; the next one with room is
preceded by one loss marker. If no next one comes, the reader finds the loss in `dropped`. A reader
that is restarted goes on at `tail`.

A reader that finds nothing may sleep until the writer writes to its pipe (`PATH.wake`). The writer
does so only while `asleep` is set. On both architectures its look at `asleep` may come before its
store of `head` is visible: then nobody wakes the reader, which therefore sleeps for a bounded time.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import struct
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvatlas.common.own_files import (
    FILE_MODE,
    create_file,
    foreignness,
    has_own,
    is_from_a_trusted_user,
    open_file,
    shortage,
    take_room,
)
from kvatlas.schemas.errors import ForeignFile, RingUnusable

DEFAULT_CAPACITY_BYTES = 16 * 1024 * 1024
_MAGIC = int.from_bytes(b"kvring01", "little")
_DATA = 4096
_LISTS = 2
_HEAD, _DROPPED, _BEATS = 8, 9, 10
_TAIL, _TOLD, _WANTED, _ASLEEP, _READER_BEATS = 16, 17, 18, 19, 20
_CHANGE = "name another path for the ring"
_LOSS_BIT = 1 << 31
_WRAP = 2**32 - 1
_U32 = 2**32 - 1
_MIN_CAPACITY = 4_096
#: records begin at multiples of 8
_ALIGNED = 2**64 - 8
#: looks at a record whose check does not match before all that waits is given up as lost
_MAX_LOOKS = 1000
#: bytes of the file whose locks say who writes and who reads
_WRITER_LOCK, _READER_LOCK = 0, 1


class Lost(NamedTuple):
    """So many records were dropped at this place."""

    num_records: int


def wake_path(path: Path) -> Path:
    """Return where the pipe of a ring's reader lies."""
    return path.with_name(path.name + ".wake")


def _make_pipe(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        if problem := foreignness(path.lstat(), stat.S_ISFIFO):
            raise ForeignFile(path, "nothing or a pipe", problem, _CHANGE)
        path.unlink()
    os.mkfifo(path, FILE_MODE)
    # for writing as well, so that it stays open whoever comes and goes
    return open_file(path, os.O_RDWR | os.O_NONBLOCK)


def _open_pipe(path: Path) -> int:
    """Return the writing end of a reader's pipe; raises OSError where there is no other end."""
    pipe = open_file(path, os.O_WRONLY | os.O_NONBLOCK)
    if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
        os.close(pipe)
        raise OSError(f"{path} is no pipe")
    return pipe


def _check(payload: bytes, position: int) -> int:
    return xxhash.xxh3_64_intdigest(payload, position) & _U32


def _padded(num_bytes: int) -> int:
    return (num_bytes + 7) & ~7


class _Ring:
    """The mapping that both ends share."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        with contextlib.ExitStack() as on_error:
            try:
                self._file = on_error.enter_context(open(open_file(path, os.O_RDWR), "r+b"))
                if not is_from_a_trusted_user(os.fstat(self._file.fileno())):
                    raise RingUnusable(path, "it is of another user")
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, lock)
                header = struct.unpack("=2Q", self._file.read(16))
                size = os.fstat(self._file.fileno()).st_size
                capacity = header[1]
                is_power = capacity >= _MIN_CAPACITY and not capacity & capacity - 1
                if header[0] != _MAGIC or not is_power or size != _DATA + capacity:
                    raise RingUnusable(path, "no ring of this version")
                self._map = mmap.mmap(self._file.fileno(), 0)
            except (OSError, ValueError, struct.error) as error:
                raise RingUnusable(path, str(error) or "in use by another process") from error
            on_error.pop_all()
        self.capacity: int = header[1]
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")
        self._mask: int = self.capacity - 1

    @property
    def waiting_bytes(self) -> int:
        """Bytes written and not yet taken."""
        return self._words[_HEAD] - self._words[_TAIL]

    @property
    def head(self) -> int:
        """Bytes written since the beginning."""
        return self._words[_HEAD]

    @property
    def beats(self) -> int:
        """Signs of life that the writer's process has given; 0 if it gives none."""
        return self._words[_BEATS]

    @property
    def reader_beats(self) -> int:
        """Signs of life that readers have given; 0 if none ever did."""
        return self._words[_READER_BEATS]

    @property
    def tail(self) -> int:
        """Bytes taken since the beginning."""
        return self._words[_TAIL]

    def close(self) -> None:
        """Unmap the file; idempotent."""
        self._words.release()
        self._bytes.release()
        self._map.close()
        self._file.close()


class RingWriter(_Ring):
    """The engine's end. One thread of one process appends."""

    @classmethod
    def create(
        cls, path: Path, capacity_bytes: int = DEFAULT_CAPACITY_BYTES, *, lists: bool = False
    ) -> "RingWriter":
        """Put a fresh ring at `path`, replacing one that lies there; open its writing end.

        `lists` promises that the writer appends all that it holds whenever the reader wants it.
        Raises RingUnusable, also where there is no room; ForeignFile where no ring lies there.
        """
        if capacity_bytes < _MIN_CAPACITY or capacity_bytes & capacity_bytes - 1:
            problem = f"{capacity_bytes} bytes, expected a power of two from {_MIN_CAPACITY}"
            raise RingUnusable(path, problem)
        num_bytes = _DATA + capacity_bytes
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            has_own(path, (struct.pack("=Q", _MAGIC),), "a ring", _CHANGE)
            with open(create_file(fresh), "r+b", buffering=0) as file:
                take_room(file.fileno(), num_bytes)
                file.write(struct.pack("=3Q", _MAGIC, capacity_bytes, lists))
            fresh.rename(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            problem = f"cannot be made ({error.strerror or error})"
            raise RingUnusable(path, f"{problem}: {shortage(path, num_bytes, error)}") from error
        return cls(path)

    def __init__(self, path: Path) -> None:
        super().__init__(path, _WRITER_LOCK)
        self._head = self._words[_HEAD]
        self._tail = self._words[_TAIL]
        self._dropped = self._words[_DROPPED]
        #: value of _dropped in the last loss marker; they differ while a loss has no marker
        self._marked = self._dropped
        self.max_record_bytes = self.capacity // 4
        #: writing end of the reader's pipe; -1 while it is not open
        self._pipe = -1

    def close(self) -> None:
        self._close_pipe()
        super().close()

    @property
    def num_dropped(self) -> int:
        """Records dropped since the ring was created."""
        return self._dropped

    @property
    def listings_wanted(self) -> int:
        """How often a reader has asked for all that the engine holds."""
        return self._words[_WANTED]

    def append(self, record: bytes) -> bool:
        """Add a record, or drop it and return False; O(bytes), never waits, never raises."""
        needed = _padded(len(record)) + 8
        if self._dropped != self._marked:
            needed += 16
        start = self._head
        left = self.capacity - (start & self._mask)
        if needed > left:
            needed += left
        if needed > self.capacity - (start - self._tail):
            self._tail = self._words[_TAIL]
            if needed > self.capacity - (start - self._tail):
                return self._drop()
        if len(record) > self.max_record_bytes:
            return self._drop()
        head = start
        if needed > left:
            self._words[(_DATA + (head & self._mask)) >> 3] = _WRAP | (head & _U32) << 32
            head += left
        if self._dropped != self._marked:
            head = self._put(head, self._dropped.to_bytes(8, "little"), _LOSS_BIT)
            self._marked = self._dropped
        self._head = self._put(head, record, 0)
        self._words[_HEAD] = self._head
        if self._words[_ASLEEP]:
            self._wake()
        return True

    def beat(self) -> None:
        """Give a sign of life. One thread of the process does, which may be another than appends.

        Raises ValueError once the ring is closed.
        """
        self._words[_BEATS] += 1

    def _wake(self) -> None:
        try:
            if self._pipe < 0:
                self._pipe = _open_pipe(wake_path(self.path))
            os.write(self._pipe, b"1")
        except OSError:  # full, so it wakes anyway; or without a reader, which then only sleeps
            self._close_pipe()

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def _put(self, head: int, payload: bytes, flag: int) -> int:
        at = _DATA + (head & self._mask)
        length = len(payload)
        self._words[at >> 3] = length | flag | _check(payload, head) << 32
        self._bytes[at + 8 : at + 8 + length] = payload
        return head + 8 + _padded(length)

    def _drop(self) -> bool:
        self._dropped += 1
        self._words[_DROPPED] = self._dropped
        return False


class RingReader(_Ring):
    """The sidecar's end. One reader at a time; a second one is refused."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _READER_LOCK)
        self._tail = self._words[_TAIL] & _ALIGNED
        self._num_looks = 0
        self._words[_ASLEEP] = 0
        self._pipe = -1
        try:
            self._pipe = _make_pipe(wake_path(path))
        except OSError as error:
            self.close()
            raise RingUnusable(path, f"no pipe beside it: {error}") from error
        except ForeignFile:
            self.close()
            raise

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        super().close()

    def has_writer(self) -> bool:
        """Return whether the writing process lives, in whatever namespace it does.

        Always False where both ends are in one process.
        """
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _WRITER_LOCK)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _WRITER_LOCK)
        return False

    def beat(self) -> None:
        """Give a sign of life, for the engine to see whether what reads has hung."""
        self._words[_READER_BEATS] += 1

    @property
    def writer_lists(self) -> bool:
        """Whether the writer answers `want_listing`."""
        return bool(self._words[_LISTS])

    def want_listing(self) -> None:
        """Ask the writer to append all that it holds."""
        self._words[_WANTED] += 1

    @property
    def pipe(self) -> int:
        """A descriptor that becomes readable when the writer wakes the reader."""
        return self._pipe

    def fall_asleep(self) -> bool:
        """Have the writer wake us from now on; False, and stay awake, if something waits."""
        self._words[_ASLEEP] = 1
        if self.waiting_bytes:
            self._words[_ASLEEP] = 0
        return self._words[_ASLEEP] == 1

    def wake_up(self) -> None:
        """Let the writer write in peace again."""
        self._words[_ASLEEP] = 0
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe, 4096)

    def read(self, max_bytes: int = 1024 * 1024) -> list[bytes | Lost]:
        """Take the records that wait, oldest first, until about `max_bytes`; never waits."""
        taken: list[bytes | Lost] = []
        head = self._words[_HEAD] & _ALIGNED
        if not 0 <= head - self._tail <= self.capacity:
            # no writer of ours wrote that: go on from there, or nothing would ever be read again
            self._tail = self._words[_TAIL] = head
            self._num_looks = 0
            return [Lost(1)]
        end = min(head, self._tail + max_bytes)
        tail = self._tail
        while tail < end:
            after = self._read_record(tail, head, taken)
            if after is None:
                after = self._poll_again(head, taken)
                if after is None:
                    break
            tail, self._num_looks = after, 0
        if tail != self._tail:
            self._tail = tail
            self._words[_TAIL] = tail
        if tail == head:
            self._count_unmarked_loss(head, taken)
        return taken

    def _read_record(self, tail: int, head: int, taken: list[bytes | Lost]) -> int | None:
        """Take one record and return where the next starts; None if it is not readable yet."""
        at = _DATA + (tail & self._mask)
        word = self._words[at >> 3]
        length, check = word & _U32, word >> 32
        if length == _WRAP and check == tail & _U32:
            return tail + _DATA + self.capacity - at
        size = length & ~_LOSS_BIT
        after = tail + 8 + _padded(size)
        if at + 8 + size > len(self._bytes) or after > head:
            return None
        payload = bytes(self._bytes[at + 8 : at + 8 + size])
        if _check(payload, tail) != check:
            return None
        if length & _LOSS_BIT:
            self._report_lost(int.from_bytes(payload[:8], "little"), taken)
        else:
            taken.append(payload)
        return after

    def _poll_again(self, head: int, taken: list[bytes | Lost]) -> int | None:
        self._num_looks += 1
        if self._num_looks < _MAX_LOOKS:
            return None
        taken.append(Lost(1))  # corrupt: nothing tells where the next record starts
        return head

    def _count_unmarked_loss(self, head: int, taken: list[bytes | Lost]) -> None:
        """Tell a loss that no record has followed; all that came before it has been taken."""
        dropped = self._words[_DROPPED]
        if dropped != self._words[_TOLD] and self._words[_HEAD] == head:
            self._report_lost(dropped, taken)

    def _report_lost(self, dropped: int, taken: list[bytes | Lost]) -> None:
        """Append the loss unless it was told already, with or without its marker."""
        told = self._words[_TOLD]
        if dropped > told:
            self._words[_TOLD] = dropped
            taken.append(Lost(dropped - told))
