"""What a sidecar needs of its operating system: the end of another process, and signals."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable

#: how often a process is looked at where the system cannot tell of its end
LOOK_SECONDS = 0.5


async def process_ended(pid: int) -> None:
    """Return when the process has ended, reaped or not; at once if there is none."""
    if not hasattr(os, "pidfd_open"):
        await _no_longer_there(pid)
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


async def _no_longer_there(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            await asyncio.sleep(LOOK_SECONDS)


@contextlib.asynccontextmanager
async def signals_call(stop: Callable[[str], None]) -> AsyncGenerator[None, None]:
    """Call `stop` on SIGTERM and SIGINT instead of ending the process."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, f"signal {number.name}")
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
