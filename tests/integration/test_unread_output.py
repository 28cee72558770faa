"""Processes whose stdout and stderr have no reader, or one that does not read."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

import aiohttp
import pytest

from kvatlas.worker_hooks.sidecar.stop_deadline import OVERDUE_STATUS
from testkit.commands import STOP_SECONDS
from testkit.ports import kept_port
from testkit.waiting import WAIT_SECONDS, until_told

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@contextmanager
def full_pipe() -> Generator[int, None, None]:
    """Yield where nothing more fits: written to until it is full, and read by nothing."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    try:
        while True:
            os.write(writes, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(writes, True)
    try:
        yield writes
    finally:
        os.close(reads)
        os.close(writes)


@contextmanager
def closed_pipe() -> Generator[int, None, None]:
    """Yield where a process wrote to that reads no more."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        yield writes
    finally:
        os.close(writes)


@pytest.mark.parametrize("pipe", [full_pipe, closed_pipe])
async def test_a_fleet_serves_and_ends_though_nothing_reads_its_output(
    pipe: Callable[[], AbstractContextManager[int]],
) -> None:
    port = kept_port()
    arguments = ("serve", "--workers", "1", "--port", str(port), "--json")
    command = [sys.executable, "-P", "-m", "kvatlas", *arguments, "--set", "router.drain_seconds=0"]
    with pipe() as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
        try:

            async def is_ready() -> bool:
                assert process.returncode is None
                try:
                    async with (
                        aiohttp.ClientSession() as session,
                        session.get(f"http://127.0.0.1:{port}/readyz") as response,
                    ):
                        return response.status == 200
                except aiohttp.ClientError:
                    return False

            await until_told(is_ready)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), STOP_SECONDS) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


HANGING = """
import asyncio, json, sys
from kvatlas.worker_hooks.sidecar.process import signals_call
from kvatlas.worker_hooks.sidecar.stop_deadline import limit_stop

async def hang():
    limit_stop("a test", 0.1)
    async with signals_call(lambda reason: None):
        print(json.dumps("ready"), flush=True)
        while True:
            pass

asyncio.run(hang())
"""


@pytest.mark.parametrize("pipe", [full_pipe, closed_pipe])
def test_a_deadline_holds_though_nothing_reads_its_line(
    pipe: Callable[[], AbstractContextManager[int]],
) -> None:
    command = [sys.executable, "-P", "-c", HANGING]
    with (
        pipe() as output,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output) as process,
    ):
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == "ready"
        process.terminate()
        try:
            assert process.wait(WAIT_SECONDS) == OVERDUE_STATUS
        finally:
            process.kill()
