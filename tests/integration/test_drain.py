"""Processes that are asked to end: they say so first, and serve on meanwhile."""

import asyncio
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.codec import encode
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import KV_EVENTS
from testkit.builders import a_batch, subject_of, up
from testkit.commands import STOP_SECONDS, started
from testkit.processes import until_ended
from testkit.waiting import until_told

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ASK = {"model": "reference", "token_ids": list(range(100, 420))}
LONG = ("--set", "router.drain_seconds=600", "--set", "sidecar.drain_seconds=600")


async def asked(method: str, url: str, body: object = None) -> tuple[int, dict[str, object]]:
    """Ask over a connection of its own."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, json=body) as response,
    ):
        return response.status, await response.json(content_type=None)


async def test_a_fleet_leaves_part_by_part_and_answers_meanwhile() -> None:
    arguments = ("serve", "--routers", "2", "--workers", "2", "--port", "0", "--json", *LONG)
    async with started(*arguments) as process:
        assert process.stdout is not None
        addresses = msgspec.json.decode(await process.stdout.readline())
        router = addresses["router"]

        async def workers() -> dict[str, dict[str, object]]:
            _, answer = await asked("GET", f"{addresses['router_1']}/v1/workers")
            found = msgspec.convert(answer["workers"], list[dict[str, object]])
            return {str(each["worker"]): each for each in found}

        leaving = (await workers())["w0"]["base_url"]
        worker = process_of(process.pid, "w0")
        worker.terminate()

        async def is_left_out() -> bool:
            return (await workers())["w0"]["trust"] == "gone"

        await until_told(is_left_out)
        assert await asked("GET", f"{leaving}/health") == (503, {"status": "draining"})
        body = {"model": "reference", "prompt": [1, 2, 3], "max_tokens": 1}
        status, _ = await asked("POST", f"{leaving}/v1/completions", body)
        assert status == 200
        worker.send_signal(signal.SIGINT)
        await until_ended(worker)

        process.terminate()
        for name in ("router_1", "router_2", "indexer"):

            async def says_so(url: str = addresses[name]) -> bool:
                status, answer = await asked("GET", f"{url}/readyz")
                return status == 503 and "draining" in str(answer["detail"])

            await until_told(says_so)
        for _ in range(8):
            status, answer = await asked("POST", f"{router}/v1/route", ASK)
            assert (status, answer["worker"]) == (200, "w1")
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), STOP_SECONDS)


async def test_an_archive_says_that_it_leaves_and_writes_what_the_log_has(tmp_path: Path) -> None:
    file = tmp_path / "archive.db"
    async with embedded_server(tmp_path / "nats") as broker, NatsBus(broker.url) as bus:
        arguments = ("--nats", broker.url, "--archive", f"sqlite:///{file}", "--json")
        async with started("archive", *arguments, "--set", "archive.port=0") as process:
            assert process.stdout is not None
            health = msgspec.json.decode(await process.stdout.readline())["health"]
            assert (await asked("GET", f"{health}/readyz"))[0] == 200
            with closing(sqlite3.connect(file, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")  # another writer: the archive has to wait
                batch, publisher = a_batch(up()), bus.publisher(KV_EVENTS)
                await publisher.publish(subject_of(batch), encode(batch))
                await publisher.flush()
                last = await bus.last_sequence(KV_EVENTS)
                process.terminate()

                async def says_so() -> bool:
                    status, answer = await asked("GET", f"{health}/readyz")
                    return status == 503 and "draining" in str(answer["detail"])

                await until_told(says_so)
                other.execute("ROLLBACK")
            assert await asyncio.wait_for(process.wait(), STOP_SECONDS) == 0
    with SqlArchive(f"sqlite:///{file}", must_exist=True) as archive:
        assert archive.cursor(KV_EVENTS) == last


def process_of(parent_pid: int, worker: str) -> psutil.Process:
    """Return the process of a worker."""
    for process in psutil.Process(parent_pid).children():
        if process.cmdline()[-1:] and worker in process.cmdline():
            return process
    raise AssertionError(f"no process of {worker}")
