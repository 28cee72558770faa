"""What others see of a process: an HTTP server from its first moment on, and a line on stdout."""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Self

from kvatlas.common.line_writing import write_line
from kvatlas.events.nats.bus import NatsBus
from kvatlas.router.http.app import RouterApp
from kvatlas.router.http.archive_app import ArchiveApp
from kvatlas.router.http.server.limits import HttpLimits
from kvatlas.router.http.startup import StartupApp
from kvatlas.runtime.http_server import Served, http_server
from kvatlas.schemas.conditions import Conditions
from kvatlas.schemas.printable import printable, printable_json
from kvatlas.schemas.settings import RouterSettings

#: how long a broker may be away before it is said where the process can be asked about it
ANNOUNCE_SECONDS = 2.0


class StartupProgress:
    """What a role waits for and for how long; for a broker, once it is known which."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, conditions: Conditions | None = None
    ) -> None:
        #: what is wrong meanwhile, which is shown with what is waited for
        self.conditions = conditions or Conditions()
        self._clock, self._since = clock, clock()
        self._step = "starting"
        self._bus: NatsBus | None = None

    @property
    def connected(self) -> bool:
        """Whether the broker is there."""
        return self._bus is not None and self._bus.connected

    @property
    def reason(self) -> str:
        """What is waited for."""
        step = self._step
        if self._bus is not None and not self._bus.connected:
            step = f"no broker at {self._bus.where}: trying"
        waiting = f"{step} for {self._clock() - self._since:.0f} s"
        return "; ".join((waiting, *self.conditions.reasons.values()))

    def begin(self, step: str) -> None:
        """Go on to the next thing."""
        self._step, self._since = step, self._clock()

    def begin_with(self, bus: NatsBus) -> None:
        """Go on to wait for a broker; from now on it may be away."""
        self._bus = bus
        self.begin(f"looking at the streams of {bus.where}")


class HealthServer:
    """An HTTP server that says what its role waits for, and then shows an application.

    On a port that others share it listens only once there is one: until then they answer.
    """

    def __init__(
        self,
        wait: StartupProgress,
        at: RouterSettings,
        port: int,
        limits: HttpLimits,
        *,
        is_port_shared: bool = False,
        decides: bool = True,
    ) -> None:
        self._wait, self._at, self._port, self._limits = wait, at, port, limits
        self._is_port_shared, self._decides = is_port_shared, decides
        self._stack = contextlib.AsyncExitStack()
        self._served: Served | None = None
        self._app: RouterApp | ArchiveApp | None = None
        self.url = ""

    @property
    def serves(self) -> bool:
        """Whether an application answers here, not only what the role waits for."""
        return self._app is not None and self._served is not None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def serve(self, shown: RouterApp | ArchiveApp | None = None) -> None:
        """Answer with an application, by default with what the role waits for.

        Raises InvalidSetting for a port that cannot be had.
        """
        self._app = shown
        app = shown or StartupApp(self._wait, self._at.policy, decides=self._decides)
        if self._served is not None:
            self._served.app = app
            return
        at = self._at
        listening = http_server(at.host, self._port, at, self._limits, self._is_port_shared)
        server = await self._stack.enter_async_context(listening)
        self._served = await self._stack.enter_async_context(server.serving(app))
        self.url = server.url

    def drain(self) -> None:
        """End each connection with its next answer, so that clients find another process."""
        if self._served is not None:
            self._served.end_connections()

    async def close(self) -> None:
        """Listen no more; requests under way may end first."""
        await self._stack.aclose()
        self._served = None


class Announcement:
    """Says once where things are: when they can be used, or soon if there is no broker."""

    def __init__(self, as_json: bool) -> None:
        self._as_json, self._is_said = as_json, False
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def soon(self, wait: StartupProgress, **addresses: str) -> None:
        """Say it after a moment, unless it has been said or there is a broker by then."""

        def say() -> None:
            if not wait.connected:
                self.now(**addresses)

        self._timer = asyncio.get_running_loop().call_later(ANNOUNCE_SECONDS, say)

    def now(self, **addresses: str) -> None:
        """Say it, unless it has been said; what is empty is left out."""
        if self._is_said:
            return
        self._is_said = True
        found = {name: address for name, address in addresses.items() if address}
        if self._as_json:
            write_line(sys.stdout, printable_json(json.dumps(found)))
            return
        for name, address in found.items():
            write_line(sys.stdout, printable(f"{name:<8} {address}"))
