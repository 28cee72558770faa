"""How a process of ours is asked to end: at once, or after it has served on for a time.

    SIGTERM                 drain: it says that it leaves, serves on for `drain_seconds`, then ends
    a second one, SIGINT,   end: requests under way may end, new ones are refused
    SIGHUP, a part failed

Balancers and routers need the time between: they see that it leaves, and send their requests
elsewhere. Whoever stops its own children sends both signals (`end_at_once`).
"""

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, Literal

from kvatlas.common.child_processes import end_child
from kvatlas.worker_hooks.sidecar.process import signals_call
from kvatlas.worker_hooks.sidecar.stop_deadline import extend_stop

#: what `signals_call` passes for the signal that lets a process drain
DRAIN_REASON = f"signal {signal.SIGTERM.name}"
#: a second SIGTERM within this time is the first one on another way: supervisors signal whole
#: groups, and a parent its children
REPEAT_SECONDS = 0.5


class Stopped(asyncio.Event):
    """Set when a process has to end. While it still starts, that ends the task that starts it."""

    def __init__(self, starting: asyncio.Task[Any] | None = None) -> None:
        super().__init__()
        self._starting = starting
        self._timer: asyncio.TimerHandle | None = None
        self._asked_at = 0.0
        #: called once when the process is asked to drain; returns for how many seconds it does,
        #: 0 where nothing is served that others would have to find elsewhere
        self.drain: Callable[[], float] = lambda: 0.0

    @property
    def is_draining(self) -> bool:
        """Whether the process leaves, and serves on until it ends."""
        return self._timer is not None

    def ask(self, reason: str) -> None:
        """Take a signal: let the process drain for SIGTERM, end it for any other or a second."""
        loop = asyncio.get_running_loop()
        if reason == DRAIN_REASON and not self.is_set():
            if self._timer is None:
                self._asked_at, seconds = loop.time(), self.drain()
                if seconds > 0:
                    extend_stop(seconds)
                    self._timer = loop.call_later(seconds, self.set)
                    return
            elif loop.time() < self._asked_at + REPEAT_SECONDS:
                return
        self.set()

    def set(self) -> None:
        super().set()
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None

    async def wait(self) -> Literal[True]:
        self._starting = None
        return await super().wait()

    def close(self) -> None:
        """Forget the end of the drain: the process has ended before."""
        if self._timer is not None:
            self._timer.cancel()


@contextlib.asynccontextmanager
async def until_stopped() -> AsyncGenerator[Stopped, None]:
    """Yield what a signal sets; what it is set for while the process starts is no error."""
    task = asyncio.current_task()
    assert task is not None
    stopped = Stopped(task)
    async with signals_call(stopped.ask):
        try:
            yield stopped
        except asyncio.CancelledError:
            if not stopped.is_set():
                raise
        finally:
            stopped.close()


@contextlib.asynccontextmanager
async def stopping_with(
    ending: Coroutine[Any, Any, object], stopped: asyncio.Event
) -> AsyncGenerator[None, None]:
    """Stop the process when `ending` returns: half a role looks alive and is not."""
    task = asyncio.ensure_future(ending)
    task.add_done_callback(lambda ended: None if ended.cancelled() else stopped.set())
    try:
        yield
    finally:
        task.cancel()


async def end_at_once(process: Process, seconds: float, name: str) -> int:
    """Ask a child to end without a drain, also one that has not caught its signals yet.

    Returns its status when it has ended; after `seconds` it is killed.
    """
    return await end_child(process, seconds, name, (signal.SIGTERM, signal.SIGINT))
