"""The processes of a storm, each started again under its name whenever it has ended.

A process dies with the storm (Linux), so that a storm that is killed leaves nothing behind. What
they say on stderr is in `<folder>/<name>.log`.
"""

import asyncio
import ctypes
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kvatlas.events.nats.embedded.server import EmbeddedServer
from kvatlas.schemas.errors import ServerNotStarted
from testkit.ports import kept_port

#: pause before what ended by itself is started again
RESTART_SECONDS = 0.5
STOP_SECONDS = 30.0
_SUPPORT = Path(__file__).parent.parent.parent
_PR_SET_PDEATHSIG = 1


class Child:
    """One role or worker; `command` is asked for at each start, with the number of the start."""

    def __init__(self, name: str, command: Callable[[int], list[str]], log: Path) -> None:
        self.name, self._command, self._log = name, command, log
        self._process: Process | None = None
        self._starting = asyncio.Lock()
        self.num_starts = 0
        #: exits that nobody asked for
        self.num_own_exits = 0
        #: killed, and not to be started by `keep_up`
        self._is_held = False

    @property
    def pid(self) -> int | None:
        """The process, None while there is none."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def start(self) -> None:
        """Start it unless it runs."""
        async with self._starting:
            if self.pid is None:
                await self._start()
            self._is_held = False

    async def _start(self) -> None:
        command = self._command(self.num_starts)
        self.num_starts += 1
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                preexec_fn=_dies_with_us(),
            )

    async def kill(self) -> None:
        """End it as a crash would, until it is started."""
        self._is_held = True
        if self.pid is not None and self._process is not None:
            self._process.kill()
            await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Send a signal if it runs."""
        if self.pid is not None and self._process is not None:
            self._process.send_signal(number)

    async def stop(self) -> int | None:
        """Ask it to end and wait; return its status, after a kill where that took too long."""
        self.send(signal.SIGTERM)
        if self._process is None:
            return None
        try:
            async with asyncio.timeout(STOP_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            await self.kill()
            return self._process.returncode

    async def keep_up(self) -> None:
        """Start it again whenever it ends by itself, as a supervisor would; until cancelled."""
        while True:
            if self.pid is None and not self._is_held:
                self.num_own_exits += 1
                await asyncio.sleep(RESTART_SECONDS)
                if not self._is_held:
                    await self.start()
            await asyncio.sleep(0.1)


class BrokerChild:
    """The broker, with the same handles as a Child."""

    name = "broker"

    def __init__(self, folder: Path) -> None:
        self.server = EmbeddedServer(folder, kept_port())
        self.num_own_exits = 0
        self._is_held = False

    @property
    def pid(self) -> int | None:
        """The process, None while there is none."""
        return self.server.pid

    async def start(self) -> None:
        """Start it on its port and data; a busy machine may need a second try."""
        for is_last in (False, False, True):
            try:
                await self.server.restart()
                self._is_held = False
                return
            except ServerNotStarted:
                if is_last:
                    raise

    async def kill(self) -> None:
        """End it as a crash would, until it is started."""
        self._is_held = True
        await self.server.kill()

    def send(self, number: signal.Signals) -> None:
        """Send a signal if it runs."""
        if (pid := self.pid) is not None:
            os.kill(pid, number)

    async def stop(self) -> int | None:
        """Ask it to end and wait."""
        await self.server.stop()
        return 0

    async def keep_up(self) -> None:
        """Start it again whenever it ends by itself; until cancelled."""
        while True:
            if self.pid is None and not self._is_held:
                self.num_own_exits += 1
                await self.start()
            await asyncio.sleep(0.1)


Target = Child | BrokerChild


@asynccontextmanager
async def kept_up(target: Target) -> AsyncGenerator[Target, None]:
    """Start a process and have it stopped at the end, whatever became of it."""
    await target.start()
    try:
        yield target
    finally:
        target.send(signal.SIGCONT)
        await target.stop()


def role_command(role: str, nats_url: str, *more: str) -> list[str]:
    """Return the command of a role of `kvatlas`."""
    return [sys.executable, "-P", "-m", "kvatlas", role, "--nats", nats_url, "--json", *more]


def _environment() -> dict[str, str]:
    paths = [str(_SUPPORT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _dies_with_us() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
