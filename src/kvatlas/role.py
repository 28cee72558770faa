"""A process of ours from its first moment on: it can be stopped, and asked what it waits for.

stopped        set by a signal, by the parent's end or by a part that fails
wait           what keeps it from being of use
conditions     what is wrong while it goes on (schemas/conditions.py), begun and ended by any part
parts          what it is made of; they end behind the faces, the last first
faces          what others see of it: HTTP servers (see face.py)
announcement   where those are, on stdout
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Literal

from kvatlas.face import Announcement, Wait
from kvatlas.schemas.conditions import Conditions, log_changes
from kvatlas.worker_hooks.process import process_ended, signals_call
from kvatlas.worker_hooks.stop_deadline import begin_stop_with, end_of

_logger = logging.getLogger(__name__)


class Role:
    """What all roles of this process have; see the module."""

    def __init__(self, stopped: "Stopped", announcement: "Announcement") -> None:
        self.stopped, self.announcement = stopped, announcement
        self.conditions = Conditions()
        log_changes(self.conditions, _logger)
        self.wait = Wait(conditions=self.conditions)
        self.parts = contextlib.AsyncExitStack()
        self.faces = contextlib.AsyncExitStack()


@contextlib.asynccontextmanager
async def role(as_json: bool, parent_pid: int = 0) -> AsyncGenerator[Role, None]:
    """Run a role: until a signal comes, or the parent process ends (0: no matter)."""
    async with until_stopped() as stopped:
        with Announcement(as_json) as announcement:
            found = Role(stopped, announcement)
            async with found.parts, found.faces:
                if parent_pid:
                    begin_stop_with(end_of(parent_pid))
                    ending = stopping_with(process_ended(parent_pid), stopped)
                    await found.parts.enter_async_context(ending)
                yield found


class Stopped(asyncio.Event):
    """Set when a role has to end. While the role still starts, that ends its start."""

    def __init__(self, starting: asyncio.Task[Any]) -> None:
        super().__init__()
        self._starting: asyncio.Task[Any] | None = starting

    def set(self) -> None:
        super().set()
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None

    async def wait(self) -> Literal[True]:
        self._starting = None
        return await super().wait()


@contextlib.asynccontextmanager
async def until_stopped() -> AsyncGenerator[Stopped, None]:
    """Yield what a signal sets; what it is set for while the role starts is no error."""
    task = asyncio.current_task()
    assert task is not None
    stopped = Stopped(task)
    async with signals_call(lambda _: stopped.set()):
        try:
            yield stopped
        except asyncio.CancelledError:
            if not stopped.is_set():
                raise


@contextlib.asynccontextmanager
async def stopping_with(
    ending: Coroutine[Any, Any, object], stopped: asyncio.Event
) -> AsyncGenerator[None, None]:
    """Stop the role when `ending` returns: half a role looks alive and is not."""
    task = asyncio.ensure_future(ending)
    task.add_done_callback(lambda ended: None if ended.cancelled() else stopped.set())
    try:
        yield
    finally:
        task.cancel()
