"""An archiver that is killed in the middle of its work loses nothing and repeats nothing."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.codec import encode
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.hindsight.replay import replay
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from testkit import archiver_main
from testkit.builders import a_batch, stored, subject_of

NUM_BATCHES = 4_000


@asynccontextmanager
async def archiver_process(
    broker_url: str, database_url: str, num_transactions: int = 0
) -> AsyncIterator[Process]:
    """Run one that stands still after so many transactions (0: never)."""
    main = Path(archiver_main.__file__)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(main),
        broker_url,
        database_url,
        str(num_transactions),
        stdout=PIPE,
        env=dict(os.environ, PYTHONPATH=str(main.parent.parent)),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_an_archiver_killed_again_and_again_is_exact(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/archive.db"
    killed_at = []
    async with embedded_server(tmp_path / "nats") as server, NatsBus(server.url) as bus:
        await bus.declare_stream(events_stream(max_bytes=64 << 20))
        publisher = bus.publisher(KV_EVENTS)
        for number in range(NUM_BATCHES):
            batch = a_batch(
                stored(number, number + 1), worker=f"w{number % 7}", seq=1 + number // 7
            )
            await publisher.publish(subject_of(batch), encode(batch))
        await publisher.flush()

        for num_transactions in (1, 3, 10, 20):
            # it is killed in the middle of further ones, or behind the last of them
            async with archiver_process(server.url, database, num_transactions + 3) as process:
                assert process.stdout is not None
                for _ in range(num_transactions):
                    killed_at.append(int(await process.stdout.readline()))
                process.send_signal(signal.SIGKILL)
                assert await process.wait() == -signal.SIGKILL
        async with archiver_process(server.url, database) as process:
            assert process.stdout is not None
            async with asyncio.timeout(60):
                *told, done = (await process.stdout.read()).split()
            assert (done, await process.wait()) == (b"done", 0)

        assert killed_at == sorted(killed_at), "no start goes back behind what was written"
        async with IndexService(bus, IndexState(ReferenceIndex())) as live:
            async with asyncio.timeout(60):
                await live.wait_ready()
            with SqlArchive(database, must_exist=True) as archive:
                kept = [message async for message in bus.read_range(KV_EVENTS, 1, NUM_BATCHES)]
                assert list(archive.read_events(1, NUM_BATCHES)) == kept
                assert archive.cursor(KV_EVENTS) == int(told[-1]) == NUM_BATCHES
                assert archive.holes(KV_EVENTS) == []
                replayed = replay(archive, make_index=ReferenceIndex)
                assert replayed.state_digest == live.state.state_digest()
