"""The command line in processes of its own."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

STOP_SECONDS = 60.0


class Ended(NamedTuple):
    """What a command that ended by itself left behind."""

    status: int
    out: str
    err: str


async def run_command(*arguments: str) -> Ended:
    """Run a command to its end."""
    command = [sys.executable, "-P", "-m", "kvatlas", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


@asynccontextmanager
async def running(*arguments: str) -> AsyncGenerator[dict[str, Any], None]:
    """Run a role; yield what it announces with --json, stop it as `started` does."""
    async with started(*arguments) as process:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert line, f"{arguments} ended with {await process.wait()}"
        yield json.loads(line) if line.startswith(b"{") else {"said": line.decode()}


@asynccontextmanager
async def started(*arguments: str) -> AsyncGenerator[Process, None]:
    """Start a role; stop it with SIGTERM and expect status 0."""
    command = [sys.executable, "-P", "-m", "kvatlas", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert process.stdout is not None
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        status = await asyncio.wait_for(process.wait(), STOP_SECONDS)
        await process.stdout.read()
    assert status == 0
