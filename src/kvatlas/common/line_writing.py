"""Lines for stdout and stderr, written by a thread: a reader that is slow or gone holds up nothing.

write --bounded queue--> thread --os.write--> pipe, terminal, file
         | full: dropped, counted, and said in the next line that is written
"""

import atexit
import contextlib
import io
import os
import select
import threading
import time
from collections import deque
from typing import TextIO

#: of lines that wait for their reader; what comes then is dropped and counted
MAX_WAITING_BYTES = 1 << 20
#: how long a process that ends waits for the reader of its last lines
END_SECONDS = 1.0


class LineWriter:
    """Writes lines to a descriptor in their order; from any thread, and from signal handlers.

    No call waits for the reader but `flush`, and none raises: what cannot be written, such as to a
    pipe without a reader or on a full disk, is dropped and counted.
    """

    def __init__(self, fd: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._fd, self._limit = fd, max_waiting_bytes
        # reentrant: a signal handler may write while its thread does
        self._changed = threading.Condition(threading.RLock())
        #: each with the number of lines that were dropped before it
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._num_bytes = 0
        #: lines dropped since one was taken
        self._num_unsaid = 0
        self._thread: threading.Thread | None = None
        #: lines that will never be written
        self.num_dropped = 0

    def write(self, line: str) -> None:
        """Take a line, with its end, and return at once."""
        content = line.encode(errors="backslashreplace")
        with self._changed:
            # one line is taken however long it is
            if self._waiting and self._num_bytes + len(content) > self._limit:
                self._drop(1)
                return
            if self._thread is None and not self._has_started():
                self._drop(1)
                return
            self._waiting.append((self._num_unsaid, content))
            self._num_bytes += len(content)
            self._num_unsaid = 0
            self._changed.notify_all()

    def flush(self, seconds: float = END_SECONDS) -> bool:
        """Wait until all lines are written or dropped, but no longer; return whether they are."""
        end_at = time.monotonic() + seconds
        with self._changed:
            while self._waiting:
                if not self._changed.wait(end_at - time.monotonic()):
                    return not self._waiting
        return True

    def _has_started(self) -> bool:
        """Start the thread; an interpreter that ends starts none any more."""
        thread = threading.Thread(target=self._run, name="lines", daemon=True)
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._thread = thread
        return self._thread is not None

    def _drop(self, num_unsaid: int) -> None:
        self.num_dropped += 1
        self._num_unsaid += num_unsaid

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                num_before, content = self._waiting[0]  # stays until it is written: `flush` looks
            note = f"{num_before} lines were dropped here: nothing read them\n"
            is_written = _written(self._fd, (note.encode() if num_before else b"") + content)
            with self._changed:
                self._waiting.popleft()
                self._num_bytes -= len(content)
                if not is_written:
                    self._drop(1 + num_before)
                self._changed.notify_all()


def _written(fd: int, content: bytes) -> bool:
    """Write all of it, however long that takes; return whether somebody took it."""
    while content:
        try:
            content = content[os.write(fd, content) :]
        except BlockingIOError:  # a pipe that is shared with a process that does not wait
            select.select((), (fd,), ())
        except OSError:
            return False
    return True


_writers: dict[int, LineWriter] = {}


def writer_to(fd: int) -> LineWriter:
    """Return this process's writer to a descriptor; it is flushed when the process ends."""
    writer = _writers.get(fd)
    if writer is None:
        writer = _writers[fd] = LineWriter(fd)
        atexit.register(writer.flush)
    return writer


def num_dropped_lines() -> int:
    """Return how many lines of this process were never written."""
    return sum(writer.num_dropped for writer in tuple(_writers.values()))


def write_line(stream: TextIO | None, line: str) -> None:
    """Write a line to stdout or stderr without waiting for who reads it; None where it is closed.

    A stream in memory, as tests put in their place, has it when this returns.
    """
    if stream is None:
        return
    try:
        fd = stream.fileno()
    except (io.UnsupportedOperation, ValueError, AttributeError):
        stream.write(f"{line}\n")
        stream.flush()
        return
    writer_to(fd).write(f"{line}\n")
