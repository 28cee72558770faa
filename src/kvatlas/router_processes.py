"""Routers as processes of their own beside one index, for `kvatlas serve --routers N`.

    this process: broker, index, archive      child 1..N: a router that reads the index in memory
                  folds the log                           and listens on the port that all share

A router that ends is started again, unless this process drains: then all do. All of them end with
this process.
"""

import asyncio
import contextlib
import json
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

from kvatlas.http_server import bound_socket
from kvatlas.schemas.errors import RouterNotStarted
from kvatlas.schemas.settings import Settings, environment_of, variable_of
from kvatlas.stopping import end_at_once

#: how long a router may take until it listens, its kernels perhaps to be compiled
START_SECONDS = 60.0
#: what requests under way may take once it is asked to stop; then it is killed
STOP_SECONDS = 15.0
#: between the end of a router and its next start
RESTART_SECONDS = 1.0

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
    count: int, settings: Settings, nats_url: str, index_folder: Path, port: int
) -> "AsyncGenerator[RouterProcesses, None]":
    """Run the routers while the block runs; all of them listen when it begins.

    One that is started again has another URL of its own, which is logged.
    Raises RouterNotStarted.
    """
    host = settings.router.host
    environment = _environment(settings, nats_url, index_folder, port)
    routers = [_Router(environment) for _ in range(count)]
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


class _Router:
    """One router process, started again when it ends."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        #: where only this one answers
        self.url = ""
        self._process: Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it listens. Raises RouterNotStarted."""
        await self._launch()
        self._watch = asyncio.create_task(self._keep_up())

    def drain(self) -> None:
        """Let it say that it leaves, serve on for its time and end for good."""
        if self._watch is not None:
            self._watch.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def stop(self) -> None:
        """End it for good, and at once."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait((self._watch,))
        process = self._process
        if process is None or process.returncode is not None:
            return
        end_at_once(process)
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            _logger.warning("router %d did not stop in %s s: killed", process.pid, STOP_SECONDS)
            process.kill()
            await process.wait()

    async def _launch(self) -> None:
        command = [sys.executable, "-P", "-m", "kvatlas", "router", "--json"]
        process = await asyncio.create_subprocess_exec(
            *command, "--parent-pid", str(os.getpid()),
            stdin=DEVNULL, stdout=PIPE, env=self._environment,
        )  # fmt: skip
        self._process = process
        assert process.stdout
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        except TimeoutError:
            process.kill()
            raise RouterNotStarted(f"no router within {START_SECONDS} s") from None
        if not line:
            raise RouterNotStarted(f"a router ended with status {await process.wait()}")
        self.url = json.loads(line)["own"]

    async def _keep_up(self) -> None:
        while True:
            assert self._process
            status = await self._process.wait()
            _logger.error("a router has ended with status %d and is started again", status)
            await asyncio.sleep(RESTART_SECONDS)
            try:
                await self._launch()
            except (RouterNotStarted, OSError) as error:
                _logger.error("%s", error)
            else:
                _logger.info("the router is back at %s", self.url)


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
