"""Disks that are full and have room again: it is said, and everything goes on by itself."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.keeper import EmbeddedKeeper
from kvatlas.events.nats.embedded.server import EmbeddedServer, embedded_server
from kvatlas.events.nats.publishing import store_watch
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.schemas.conditions import BROKER_UNHEALTHY, LOG_NOT_STORED, ConditionChange, Conditions
from testkit.commands import running
from testkit.disks import fill, small_disk
from testkit.waiting import until, until_told

DISK_MB = 32
SUBJECT = "kv.events.model.w1.0"
STREAM = events_stream(max_bytes=8 << 20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", DISK_MB) as folder:
        yield folder


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_watch, "NOT_STORED_SECONDS", 0.5)


@asynccontextmanager
async def kept(server: EmbeddedServer, conditions: Conditions) -> AsyncIterator[EmbeddedKeeper]:
    keeper = EmbeddedKeeper(server, conditions, check_seconds=0.1)
    task = asyncio.create_task(keeper.run())
    try:
        yield keeper
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def test_the_embedded_broker_says_that_its_disk_is_full_and_goes_on_once_there_is_room(
    disk: Path,
) -> None:
    conditions, changes = Conditions(), list[ConditionChange]()
    conditions.on_change(changes.append)
    async with (
        embedded_server(disk / "nats") as server,
        kept(server, conditions) as keeper,
        NatsBus(server.url, conditions=conditions) as bus,
    ):
        await bus.declare_stream(STREAM)
        publisher = bus.publisher(KV_EVENTS)
        for _ in range(10):
            await publisher.publish(SUBJECT, os.urandom(1 << 15))
        await publisher.flush()
        assert conditions.present == ()

        ballast = fill(disk)
        for _ in range(10):
            await publisher.publish(SUBJECT, os.urandom(1 << 15))
        await until(lambda: {BROKER_UNHEALTHY, LOG_NOT_STORED} <= conditions.reasons.keys())
        assert "no space left on device" in conditions.reasons[BROKER_UNHEALTHY]
        assert "whether its disk is full" in conditions.reasons[LOG_NOT_STORED]
        assert publisher.num_unacked
        assert keeper.num_restarts == 0

        ballast.unlink()
        await publisher.flush()
        await until(lambda: not conditions.present)
        assert keeper.num_restarts == 1
        assert await bus.last_sequence(KV_EVENTS) >= 20
        begun = [each.condition.name for each in changes if not each.is_over]
        assert begun.count(LOG_NOT_STORED) == 1


async def test_a_broker_that_dies_while_its_disk_is_full_starts_once_there_is_room(
    disk: Path,
) -> None:
    conditions = Conditions()
    async with embedded_server(disk / "nats") as server, kept(server, conditions):
        ballast = fill(disk)
        await server.kill()
        await until(lambda: BROKER_UNHEALTHY in conditions.reasons or server.pid is not None)
        ballast.unlink()
        async with NatsBus(server.url) as bus:
            await bus.declare_stream(STREAM)
        await until(lambda: not conditions.present)


async def test_what_no_stream_stores_is_said_until_there_is_one(tmp_path: Path) -> None:
    async with embedded_server(tmp_path) as server, NatsBus(server.url) as bus:
        publisher = bus.publisher(KV_EVENTS)
        await publisher.publish(SUBJECT, b"1")
        await until(lambda: LOG_NOT_STORED in bus.conditions.reasons)
        expected = "KV_EVENTS: no stream stores it: is JetStream enabled there?"
        assert bus.conditions.reasons == {LOG_NOT_STORED: expected}
        await bus.declare_stream(STREAM)
        await publisher.flush()
        await until(lambda: not bus.conditions.present)


async def test_a_subject_that_is_stored_shows_nothing_while_another_is_refused(
    tmp_path: Path,
) -> None:
    """A message that is wrong is its sender's trouble, and no trouble of the log."""
    async with embedded_server(tmp_path) as server, NatsBus(server.url) as bus:
        await bus.declare_stream(STREAM)
        publisher, begun = bus.publisher(KV_EVENTS), list[str]()
        bus.conditions.on_change(lambda change: begun.append(change.condition.name))
        await publisher.publish("kv.other.x", b"1")
        for _ in range(20):
            await publisher.publish(SUBJECT, b"1")
            await asyncio.sleep(0.05)
        assert begun == []


async def test_an_archive_on_a_full_disk_is_not_ready_and_loses_nothing(
    tmp_path: Path, disk: Path
) -> None:
    archive = f"sqlite:///{disk}/kvatlas.db"
    async with (
        embedded_server(tmp_path / "nats") as server,
        NatsBus(server.url) as bus,
        running("archive", "--nats", server.url, "--archive", archive, "--json") as addresses,
        aiohttp.ClientSession(addresses["health"]) as session,
    ):

        async def status(path: str = "/readyz") -> tuple[int, str]:
            async with session.get(path) as answer:
                return answer.status, await answer.text()

        async def is_status(expected: int) -> bool:
            return (await status())[0] == expected

        assert (await status("/healthz"))[0] == 200
        await until_told(lambda: is_status(200))
        publisher = bus.publisher(KV_EVENTS)
        ballast = fill(disk)
        for _ in range(20):
            await publisher.publish(SUBJECT, os.urandom(1 << 15))
        await publisher.flush()
        await until_told(lambda: is_status(503))
        assert "what comes waits in the log" in (await status())[1]
        assert 'kv_condition{condition="archive_not_written"} 1.0' in (await status("/metrics"))[1]
        ballast.unlink()
        await until_told(lambda: is_status(200))

        async def is_archived() -> bool:
            found = json.loads((await status())[1])
            return bool(found["cursors"][KV_EVENTS] == 20)

        await until_told(is_archived)
        assert "kv_archive_stream_sequence" in (await status("/metrics"))[1]
    with SqlArchive(archive, must_exist=True) as opened:
        assert len(list(opened.read_events(1, 20))) == 20
