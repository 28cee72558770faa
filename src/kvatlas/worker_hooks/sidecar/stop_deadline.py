"""The latest moment at which a process that was asked to stop has ended.

    signal, end of the parent --begin--> a thread --after `seconds`--> one line on stderr, _exit

The thread needs nothing of the event loop: a loop that never waits hears neither signals nor its
parent's end, and an executor's thread that hangs keeps an interpreter from ending.
"""

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from kvatlas.common.line_writing import writer_to

#: exit status of a process that did not end in time by itself
OVERDUE_STATUS = 4
#: how often the end of a parent is looked for
LOOK_SECONDS = 0.5


class StopDeadline:
    """Ends this process `seconds` after the first `begin`, unless it has ended by then.

    `what_is_lost` says what the process still had to do; it is asked by another thread.
    """

    def __init__(self, name: str, seconds: float, leave: Callable[[int], None] = os._exit) -> None:
        self._name, self._seconds, self._leave = name, seconds, leave
        self.what_is_lost: Callable[[], str] = str
        self._main = threading.current_thread()
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._reason: str | None = None
        self._more_seconds = 0.0

    @property
    def reason(self) -> str | None:
        """Why the process stops; None while it was not asked to."""
        return self._reason

    def begin(self, reason: str) -> None:
        """Let the time run; only the first reason counts. From any thread or signal handler."""
        if not self._lock.acquire(blocking=False):
            return  # it has begun, or a handler has interrupted this very call
        if self._reason is None:
            self._reason = reason
            self._start(self._end_late)
            return  # the lock stays taken: there is one beginning
        self._lock.release()

    def extend(self, seconds: float) -> None:
        """Let the process take so many seconds more, while it drains on purpose."""
        self._more_seconds += seconds

    def begin_when(self, has_ended: Callable[[], bool]) -> None:
        """Begin when a condition holds, such as that the parent has ended; looks on by itself."""

        def look() -> None:
            while not self._is_over.wait(LOOK_SECONDS):
                if has_ended():
                    self.begin("its parent ended")
                    return

        self._start(look)

    def cancel(self) -> None:
        """Let the process live on; for those that are no process of their own."""
        self._is_over.set()

    def _start(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name="stop deadline", daemon=True).start()

    def _end_late(self) -> None:
        if self._is_over.wait(self._seconds) or self._is_over.wait(self._more_seconds):
            return
        lost = self.what_is_lost()
        line = (
            f"{self._name}: expected to stop within {self._seconds:g} s after {self._reason}, "
            f"found at {self._place()}: ends now{f'; lost: {lost}' if lost else ''}\n"
        )
        # not `print`: the thread that hangs may hold the stream; and what reads it may hang as well
        stderr = writer_to(2)
        stderr.write(line)
        stderr.flush()
        self._leave(OVERDUE_STATUS)

    def _place(self) -> str:
        """Return where the main thread is."""
        frame = sys._current_frames().get(self._main.ident or 0)
        if frame is None:
            return "its end"
        code = frame.f_code
        return f"{Path(code.co_filename).name}:{frame.f_lineno} ({code.co_name})"


_of_this_process: StopDeadline | None = None


def limit_stop(name: str, seconds: float) -> StopDeadline:
    """Give this process a deadline for its stop; for the entry points of processes."""
    global _of_this_process
    _of_this_process = StopDeadline(name, seconds)
    return _of_this_process


def extend_stop(seconds: float) -> None:
    """Let this process's stop take so many seconds more, if it has a deadline."""
    if _of_this_process is not None:
        _of_this_process.extend(seconds)


def begin_stop_with(has_ended: Callable[[], bool]) -> None:
    """Let the time of this process's deadline run, if it has one, when a condition holds."""
    if _of_this_process is not None:
        _of_this_process.begin_when(has_ended)


def end_of(pid: int) -> Callable[[], bool]:
    """Return what says whether a process has ended, reaped or not."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda: True
    except (AttributeError, OSError):
        return lambda: not _is_there(pid)
    poll = select.poll()
    poll.register(fd, select.POLLIN)  # the descriptor lives as long as this process
    return lambda: bool(poll.poll(0))


def _is_there(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def begin_stop(reason: str) -> None:
    """Let the time of this process's deadline run, if it has one."""
    if _of_this_process is not None:
        _of_this_process.begin(reason)
