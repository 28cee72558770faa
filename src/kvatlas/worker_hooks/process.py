"""What a sidecar needs of its operating system: the end of another process, and signals."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator

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
    """Call `stop` on SIGTERM, SIGINT and SIGHUP (a closed terminal) instead of ending at once."""
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop, f"signal {number.name}")
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


def leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    """Yield the errors of a group, however deep they are."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
