"""What a sidecar needs of its operating system: the end of another process, and signals."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial
from types import FrameType

from kvatlas.worker_hooks.sidecar.stop_deadline import begin_stop

#: how often is looked where nobody tells
LOOK_SECONDS = 0.5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


async def process_ended(pid: int) -> None:
    """Return when the process has ended, reaped or not; at once if there is none."""
    if not hasattr(os, "pidfd_open"):
        await until_not(lambda: _is_there(pid))
        return
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def until_not(condition: Callable[[], bool]) -> None:
    """Return when the condition is no longer true."""
    while condition():  # noqa: ASYNC110 - another process decides
        await asyncio.sleep(LOOK_SECONDS)


def _is_there(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@contextlib.asynccontextmanager
async def signals_call(stop: Callable[[str], None]) -> AsyncGenerator[None, None]:
    """Call `stop` on SIGTERM, SIGINT and SIGHUP (a closed terminal) instead of ending at once.

    The loop calls it. The process's deadline runs from the signal on, also where the loop is busy
    and hears of none: therefore the handlers are the interpreter's and not the loop's.
    """
    loop = asyncio.get_running_loop()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        reason = f"signal {signal.Signals(number).name}"
        begin_stop(reason)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends already
            loop.call_soon_threadsafe(partial(stop, reason))

    before = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group, however deep they are."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
