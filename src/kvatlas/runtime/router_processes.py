"""Routers as processes of their own beside one index, for `kvatlas serve --routers N`.

    this process: broker, index, archive      child 1..N: a router that reads the index in memory
                  folds the log                           and listens on the port that all share

A router that ends, or answers no more, is started again, unless this process drains: then all do.
All of them end with this process.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from urllib.parse import urlsplit

from kvatlas.common.child_processes import ChildLimits, Supervisor, kill_child, signal_child
from kvatlas.runtime.http_server import bound_socket
from kvatlas.runtime.stopping import end_at_once
from kvatlas.schemas.conditions import ROUTER_DOWN, Conditions
from kvatlas.schemas.errors import RouterNotStarted
from kvatlas.schemas.settings import Settings, environment_of, variable_of

#: how long a router may take until it listens, its kernels perhaps to be compiled
START_SECONDS = 60.0
#: what requests under way may take once it is asked to stop; then it is killed
STOP_SECONDS = 15.0

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def kept_port(host: str, port: int) -> Generator[int, None, None]:
    """Keep a port (0 takes a free one) for those who share it while they come and go.

    Raises InvalidSetting for a port that cannot be had.
    """
    # a port that somebody else shares could be bound once more, and its requests would be split
    with bound_socket(host, port, is_port_shared=False):
        pass
    # never listens
    with bound_socket(host, port, is_port_shared=True) as keeper:
        yield keeper.getsockname()[1]


@contextlib.asynccontextmanager
async def router_processes(
    count: int,
    settings: Settings,
    nats_url: str,
    index_folder: Path,
    port: int,
    conditions: Conditions,
) -> "AsyncGenerator[RouterProcesses, None]":
    """Run the routers while the block runs; all of them listen when it begins.

    One that is started again has another URL of its own, which is logged; while it is down, that is
    one of the conditions.
    Raises RouterNotStarted.
    """
    host = settings.router.host
    environment = _environment(settings, nats_url, index_folder, port)
    routers = [_Router(number, environment, conditions) for number in range(1, count + 1)]
    try:
        await asyncio.gather(*(router.start() for router in routers))
        shown = f"[{host}]" if ":" in host else host
        yield RouterProcesses(f"http://{shown}:{port}", routers)
    finally:
        await asyncio.gather(*(router.stop() for router in routers))


class RouterProcesses:
    """Routers that run: their common URL, and each one's own."""

    def __init__(self, url: str, routers: "list[_Router]") -> None:
        self.url, self._routers = url, routers
        self.owned = [router.url for router in routers]

    def drain(self) -> None:
        """Let all of them drain, and start none again."""
        for router in self._routers:
            router.drain()


class _RouterProcess:
    """One router, as its supervisor needs it."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name, self._environment = name, environment
        #: where only this one answers
        self.url = ""
        self.process: Process | None = None

    async def start(self) -> None:
        command = [sys.executable, "-P", "-m", "kvatlas", "router", "--json"]
        process = await asyncio.create_subprocess_exec(
            *command, "--parent-pid", str(os.getpid()),
            stdin=DEVNULL, stdout=PIPE, env=self._environment,
        )  # fmt: skip
        self.process = process
        assert process.stdout
        line = await process.stdout.readline()
        if not line:
            raise RouterNotStarted(f"a router ended with status {await process.wait()}")
        self.url = json.loads(line)["own"]
        _logger.info("%s (process %d) is at %s", self.name, process.pid, self.url)

    async def ended(self) -> int:
        assert self.process
        return await self.process.wait()

    async def answers(self) -> bool:
        return await is_healthy(self.url)

    async def kill(self) -> None:
        if self.process is not None:
            await kill_child(self.process)


class _Router:
    """One router process, started again when it ends or answers no more."""

    def __init__(self, number: int, environment: dict[str, str], conditions: Conditions) -> None:
        self._process = _RouterProcess(f"router {number}", environment)
        self._condition, self._conditions = f"{ROUTER_DOWN}_{number}", conditions
        limits = ChildLimits(start_seconds=START_SECONDS)
        self._supervisor = Supervisor(self._process, self._process.name, limits, self._on_change)
        self._watch: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where only this one answers."""
        return self._process.url

    async def start(self) -> None:
        """Return when it listens. Raises RouterNotStarted."""
        try:
            await self._supervisor.start()
        except TimeoutError:
            raise RouterNotStarted(f"no router within {START_SECONDS} s") from None
        self._watch = asyncio.create_task(self._supervisor.run())

    def drain(self) -> None:
        """Let it say that it leaves, serve on for its time and end for good."""
        if self._watch is not None:
            self._watch.cancel()
        if self._process.process is not None:
            signal_child(self._process.process, signal.SIGTERM)

    async def stop(self) -> None:
        """End it for good, and at once."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait((self._watch,))
        if self._process.process is not None:
            await end_at_once(self._process.process, STOP_SECONDS, self._process.name)

    def _on_change(self, reason: str) -> None:
        if reason:
            self._conditions.begin(self._condition, reason)
        else:
            self._conditions.end(self._condition)


async def is_healthy(url: str) -> bool:
    """Ask a process of ours over HTTP whether it lives; raises OSError where nothing listens."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        writer.write(f"GET /healthz HTTP/1.1\r\nHost: {at.netloc}\r\n\r\n".encode())
        return (await reader.readline()).split(b" ")[1:2] == [b"200"]
    finally:
        writer.close()


def _environment(
    settings: Settings, nats_url: str, index_folder: Path, port: int
) -> dict[str, str]:
    """Return the environment of a router."""
    own: dict[str, object] = {
        "nats.url": nats_url,
        "indexer.shared_folder": index_folder,
        "router.port": port,
        "router.is_port_shared": "true",
    }
    shared = environment_of(settings, "nats", "log", "fleet", "router")
    return {**os.environ, **shared, **{variable_of(key): str(value) for key, value in own.items()}}
