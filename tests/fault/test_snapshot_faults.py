"""Snapshots whose writers, brokers and bytes fail: a start is slower then, and never wrong."""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvatlas.events.codec import encode
from kvatlas.events.nats import objects as nats_objects
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import EmbeddedServer, embedded_server
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.snapshots.writing import (
    SNAPSHOTS_BUCKET,
    TURN,
    TURNS_BUCKET,
    SnapshotSettings,
)
from kvatlas.schemas.errors import Unavailable
from testkit import uploader_main
from testkit.builders import a_batch, stored, subject_of, up
from testkit.ports import kept_port
from testkit.waiting import WAIT_SECONDS, until, until_told

BY_HAND = SnapshotSettings(seconds=3_600.0, messages=1)
STREAM = f"OBJ_{SNAPSHOTS_BUCKET}"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with embedded_server(tmp_path / "nats", kept_port()) as server:
        yield server


@pytest.fixture
async def bus(server: EmbeddedServer) -> AsyncIterator[NatsBus]:
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(events_stream(max_bytes=64 << 20))
        yield bus


async def publish(bus: NatsBus, first: int, last: int) -> None:
    publisher = bus.publisher(KV_EVENTS)
    for seq in range(first, last + 1):
        batch = a_batch(up(), stored(seq, seq + 1), seq=seq)
        await publisher.publish(subject_of(batch), encode(batch))
    await publisher.flush()


def a_service(bus: NatsBus) -> IndexService:
    return IndexService(bus, IndexState(FlatRadixIndex(max_bytes=64 << 20)), snapshots=BY_HAND)


async def snapshot_now(bus: NatsBus) -> str:
    """Have a fresh index take a snapshot of the log as it is; return its name."""
    await bus.keys(TURNS_BUCKET).delete(TURN)
    async with a_service(bus) as service:
        async with asyncio.timeout(WAIT_SECONDS):
            await service.wait_ready()
        assert service._writer is not None
        assert await service._writer.poll()
    return (await bus.objects(SNAPSHOTS_BUCKET).entries())[0].name


async def started_from(bus: NatsBus) -> tuple[str | None, str]:
    """Return what a fresh index starts from and its digest when it is ready."""
    async with a_service(bus) as service:
        async with asyncio.timeout(WAIT_SECONDS):
            await service.wait_ready()
        return service.loaded.name if service.loaded else None, service.state.state_digest()


async def digest_of_the_log(bus: NatsBus) -> str:
    async with IndexService(bus, IndexState(FlatRadixIndex(max_bytes=64 << 20))) as service:
        async with asyncio.timeout(WAIT_SECONDS):
            await service.wait_ready()
        return service.state.state_digest()


async def num_chunks(bus: NatsBus) -> int:
    client = bus._connection.client
    assert client is not None
    info = await client.jsm().stream_info(STREAM, f"$O.{SNAPSHOTS_BUCKET}.C.>")
    return sum((info.state.subjects or {}).values())


async def test_a_writer_that_is_killed_leaves_no_half_snapshot(
    bus: NatsBus, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(bus, 1, 50)
    whole = await snapshot_now(bus)
    main = Path(uploader_main.__file__)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(main), server.url, SNAPSHOTS_BUCKET, f"{51:020}-00"),
        stdout=PIPE,
        env=dict(os.environ, PYTHONPATH=str(main.parent.parent)),
    )
    assert process.stdout is not None
    for _ in range(3):
        await process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    await process.communicate()

    objects = bus.objects(SNAPSHOTS_BUCKET)
    assert [entry.name for entry in await objects.entries()] == [whole]
    assert await started_from(bus) == (whole, await digest_of_the_log(bus))

    left = await num_chunks(bus)
    await objects.put("next", [b"x"])
    assert await num_chunks(bus) == left + 1, "it may still be uploading"
    monkeypatch.setattr(nats_objects, "ORPHAN_SECONDS", 0.0)
    await objects.put("next", [b"y"])
    assert await num_chunks(bus) < left, "what nobody will end is removed"
    assert [entry.name for entry in await objects.entries()] == ["next", whole]


async def test_a_broker_that_is_killed_in_the_middle_of_an_upload_costs_that_one(
    bus: NatsBus, server: EmbeddedServer
) -> None:
    await publish(bus, 1, 50)
    whole = await snapshot_now(bus)
    objects = bus.objects(SNAPSHOTS_BUCKET)
    before = await num_chunks(bus)
    uploading = asyncio.create_task(objects.put("new", [bytes(1 << 20)] * 400))

    async def has_begun() -> bool:
        return await num_chunks(bus) > before + 1

    await until_told(has_begun)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    await asyncio.sleep(0.05)  # a chunk is under way that nobody will acknowledge
    await server.kill()
    await until(lambda: not bus.connected)
    await server.start()
    (outcome,) = await asyncio.gather(uploading, return_exceptions=True)
    assert isinstance(outcome, Unavailable)
    await until(lambda: bus.connected)
    assert [entry.name for entry in await objects.entries()] == [whole]
    assert await started_from(bus) == (whole, await digest_of_the_log(bus))


async def test_an_index_that_starts_while_the_broker_restarts_is_right(
    bus: NatsBus, server: EmbeddedServer
) -> None:
    """The connection goes away in the middle of reading the snapshot; it is read on."""
    await publish(bus, 1, 50)
    await snapshot_now(bus)
    truth = await digest_of_the_log(bus)
    starting = asyncio.create_task(started_from(bus))
    await asyncio.sleep(0.02)  # somewhere in the middle; what it hits differs from run to run
    await server.kill()
    await server.start()
    (found,) = await asyncio.gather(starting, return_exceptions=True)
    assert isinstance(found, Unavailable) or found[1] == truth  # type: ignore[index]


@pytest.mark.parametrize("lost", ["a chunk", "all chunks", "a byte", "the end"])
async def test_a_snapshot_that_lost_something_is_named_and_the_older_one_used(
    bus: NatsBus, caplog: pytest.LogCaptureFixture, lost: str
) -> None:
    await publish(bus, 1, 50)
    older = await snapshot_now(bus)
    await publish(bus, 51, 90)
    newest = await snapshot_now(bus)
    await damage(bus, newest, lost)
    await publish(bus, 91, 100)
    with caplog.at_level(logging.WARNING):
        found = await started_from(bus)
    assert found == (older, await digest_of_the_log(bus))
    (line,) = [each.getMessage() for each in caplog.records if "of no use" in each.getMessage()]
    assert newest in line


async def damage(bus: NatsBus, name: str, lost: str) -> None:
    client = bus._connection.client
    assert client is not None
    objects, manager = bus.objects(SNAPSHOTS_BUCKET), client.jsm()
    content = bytearray()

    def take(chunk: bytes) -> bool:
        content.extend(chunk)
        return True

    await objects.get(name, take)
    match lost:
        case "a byte":
            content[len(content) // 2] ^= 1
            await objects.put(name, [content])
        case "the end":
            await objects.put(name, [content[:-1000]])
        case "all chunks":
            meta = await objects._meta(name)
            assert meta is not None
            await manager.purge_stream(STREAM, subject=f"$O.{SNAPSHOTS_BUCKET}.C.{meta.nuid}")
        case _:
            # larger than a chunk, so that one can be missing
            await objects.put(name, [content, bytes(1 << 20)])
            meta = await objects._meta(name)
            assert meta is not None
            subject = f"$O.{SNAPSHOTS_BUCKET}.C.{meta.nuid}"
            await manager.purge_stream(STREAM, subject=subject, keep=meta.chunks - 1)
