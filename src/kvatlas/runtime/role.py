"""A process of ours from its first moment on: it can be stopped, and asked what it waits for.

stopped        set by a signal, by the parent's end or by a part that fails (see stopping.py)
wait           what keeps it from being of use
conditions     what is wrong while it goes on (schemas/conditions.py), begun and ended by any part
parts          what it is made of; they end behind the faces, the last first
faces          what others see of it: HTTP servers (see health_server.py)
announcement   where those are, on stdout
"""

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable

from kvatlas.router.http.server.limits import HttpLimits
from kvatlas.runtime.health_server import Announcement, HealthServer, StartupProgress
from kvatlas.runtime.http_server import process_limits
from kvatlas.runtime.stopping import Stopped, stopping_with, until_stopped
from kvatlas.schemas.conditions import DRAINING, Conditions, log_changes
from kvatlas.schemas.settings import RouterSettings
from kvatlas.worker_hooks.sidecar.process import process_ended
from kvatlas.worker_hooks.sidecar.stop_deadline import begin_stop_with, end_of

_logger = logging.getLogger(__name__)


class ProcessRole:
    """What all roles of this process have; see the module."""

    def __init__(
        self, stopped: Stopped, announcement: Announcement, drain_seconds: float = 0.0
    ) -> None:
        self.stopped, self.announcement = stopped, announcement
        self._drain_seconds = drain_seconds
        self.conditions = Conditions()
        log_changes(self.conditions, _logger)
        self.wait = StartupProgress(conditions=self.conditions)
        self.parts = contextlib.AsyncExitStack()
        self.faces = contextlib.AsyncExitStack()
        self._shown: list[HealthServer] = []
        #: called when the role begins to drain: what others of its processes have to know
        self.on_drain: list[Callable[[], None]] = []
        stopped.drain = self._drain
        self._http_limits: HttpLimits | None = None

    def http_limits(self, settings: RouterSettings) -> HttpLimits:
        """Return the limits of all HTTP servers of this process, made of the first settings."""
        if self._http_limits is None:
            self._http_limits = process_limits(settings)
        return self._http_limits

    async def show(self, face: HealthServer, *, outlives_parts: bool = False) -> HealthServer:
        """Own a face, which says when the role drains.

        It is closed before the parts end, or with `outlives_parts` after those entered from now on.
        """
        self._shown.append(face)
        return await (self.parts if outlives_parts else self.faces).enter_async_context(face)

    def begin_drain(self, reason: str) -> None:
        """Say everywhere that the role leaves."""
        self.conditions.begin(DRAINING, f"the process is draining: {reason}", is_blocking=True)
        for face in self._shown:
            face.drain()
        for begin in self.on_drain:
            begin()

    def _drain(self) -> float:
        """Begin to drain where others see it; return how long the role serves on."""
        serves = any(face.serves for face in self._shown) or bool(self.on_drain)
        if not serves or not self._drain_seconds:
            return 0.0
        self.begin_drain(f"asked to end, it serves on for {self._drain_seconds:g} s")
        return self._drain_seconds


@contextlib.asynccontextmanager
async def role(
    as_json: bool, parent_pid: int = 0, drain_seconds: float = 0.0
) -> AsyncGenerator[ProcessRole, None]:
    """Run a role: until a signal comes, or the parent process ends (0: no matter).

    On SIGTERM its faces say that they drain, and serve on for `drain_seconds`.
    """
    async with until_stopped() as stopped:
        with Announcement(as_json) as announcement:
            found = ProcessRole(stopped, announcement, drain_seconds)
            async with found.parts, found.faces:
                if parent_pid:
                    begin_stop_with(end_of(parent_pid))
                    ending = stopping_with(process_ended(parent_pid), stopped)
                    await found.parts.enter_async_context(ending)
                yield found
