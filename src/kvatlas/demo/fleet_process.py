"""A whole fleet as a child process: `kvatlas serve --workers N`, watched and stopped from here."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from msgspec import Struct

from kvatlas.runtime.stopping import end_at_once
from kvatlas.schemas.errors import FleetNotStarted

START_SECONDS = 90.0
STOP_SECONDS = 20.0


class FleetAddress(Struct, frozen=True):
    """Where a running fleet is: its router, its broker, its process."""

    router_url: str
    nats_url: str
    pid: int

    async def get(self, path: str) -> Any:
        """Return the JSON that the router answers to a GET."""
        return await get_json(f"{self.router_url}{path}")


async def get_json(url: str) -> Any:
    """Return the JSON that a server answers to a GET."""
    async with aiohttp.ClientSession(raise_for_status=True) as client, client.get(url) as answer:
        return await answer.json()


@asynccontextmanager
async def fleet_process(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> AsyncIterator[FleetAddress]:
    """Run `kvatlas serve` with the arguments until the block ends; yield once it is ready.

    Secrets belong into the `environment`, which is added to this process's own.
    """
    command = [sys.executable, "-P", "-m", "kvatlas", "serve", "--json", *arguments]
    command += ["--parent-pid", str(os.getpid())]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=PIPE, stderr=PIPE, env={**os.environ, **(environment or {})}
    )
    errors: list[str] = []
    drain = asyncio.create_task(_drain(process, errors))
    try:
        yield await _address(process, errors)
    finally:
        await end_at_once(process, STOP_SECONDS, "the fleet")
        await drain


async def _address(process: Process, errors: list[str]) -> FleetAddress:
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        said = json.loads(line)
        return FleetAddress(said["router"], said["nats"], process.pid)
    except (TimeoutError, ValueError, KeyError) as error:
        raise FleetNotStarted("the fleet did not start: " + "\n".join(errors[-20:])) from error


async def _drain(process: Process, errors: list[str]) -> None:
    """Keep the last lines of the child's log, so that its pipe never fills."""
    assert process.stderr is not None
    async for line in process.stderr:
        errors.append(line.decode(errors="replace").rstrip())
        del errors[:-200]
