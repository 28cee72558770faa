"""The index service and the archiver on a real broker, from publish to replay."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvatlas.events.archive.archiver import Archiver
from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.codec import decode_control, encode
from kvatlas.events.leases import LeaseKeeper
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import (
    KV_EVENTS,
    LEASES_BUCKET,
    decisions_stream,
    events_stream,
)
from kvatlas.events.subjects import inventory_subject
from kvatlas.hindsight.replay import replay_archive, replay_stream
from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import ControlRecord, EventBatch
from testkit.builders import a_batch, digests, hashes, inventory, stored, subject_of, up
from testkit.waiting import WAIT_SECONDS, until

W1 = InstanceId("w1", 0)
FAST = IndexServiceLimits(poll_seconds=0.05, lease_ended_seconds=0.1, lease_settling_seconds=0.0)


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with embedded_server(tmp_path / "nats") as server:
        yield server.url


@pytest.fixture
async def bus(url: str) -> AsyncIterator[NatsBus]:
    async with NatsBus(url) as bus:
        await bus.declare_stream(events_stream(max_bytes=64 << 20))
        await bus.declare_stream(decisions_stream(max_bytes=64 << 20))
        yield bus


async def publish(bus: NatsBus, *batches: EventBatch | ControlRecord) -> None:
    publisher = bus.publisher(KV_EVENTS)
    for batch in batches:
        await publisher.publish(subject_of(batch), encode(batch))
    await publisher.flush()


async def test_late_and_early_readers_archive_and_stream_agree(
    bus: NatsBus, url: str, tmp_path: Path
) -> None:
    database = f"sqlite:///{tmp_path}/archive.db"
    async with AsyncExitStack() as stack:
        early = await stack.enter_async_context(IndexService(bus, IndexState(FlatRadixIndex())))
        archive = stack.enter_context(SqlArchive(database))
        archiver = await stack.enter_async_context(Archiver(bus, archive))
        for seq in range(1, 301):
            await publish(
                bus,
                a_batch(up(), stored(seq, seq + 1), seq=seq),
                a_batch(up(), stored(seq), worker="w2", seq=seq),
            )
        other_bus = await stack.enter_async_context(NatsBus(url))
        late = await stack.enter_async_context(
            IndexService(other_bus, IndexState(ReferenceIndex()))
        )
        async with asyncio.timeout(WAIT_SECONDS):
            await late.wait_ready()
            await archiver.caught_up()
        await until(lambda: early.state.stream_sequence == 600)
        digests = {early.state.state_digest(), late.state.state_digest()}
        digests.add((await replay_archive(database)).state_digest)
        digests.add((await replay_stream(bus, make_index=ReferenceIndex)).state_digest)
        assert len(digests) == 1
        assert early.lag.stream_sequences == 0
        assert early.convergence_ms()["p50"] >= 0


async def test_a_worker_that_dies_is_gone_everywhere_by_one_record(bus: NatsBus) -> None:
    async with (
        IndexService(bus, IndexState(ReferenceIndex()), name="one", settings=FAST) as one,
        IndexService(bus, IndexState(ReferenceIndex()), name="two", settings=FAST) as two,
    ):
        keeper = LeaseKeeper(bus.keys(LEASES_BUCKET), W1, 5, lambda fenced: None, ttl_seconds=1.0)
        await keeper.__aenter__()
        await publish(bus, a_batch(up(), stored(1), epoch=5))
        await until(lambda: len(one.index.match(hashes(1))) == 1)
        assert keeper._task is not None
        keeper._task.cancel()  # the worker is killed: nobody renews, nobody gives it back
        for service in (one, two):
            await until(lambda service=service: service.index.match(hashes(1)) == [])  # type: ignore[misc]
        messages = [message async for message in bus.read_range(KV_EVENTS, 2, 9)]
        records = {decode_control(message.payload).instance for message in messages}
        assert records == {W1}
        assert one.state.state_digest() == two.state.state_digest()


async def test_a_gap_is_healed_by_the_owner(bus: NatsBus) -> None:
    async def answer(_payload: bytes) -> bytes:
        await publish(bus, a_batch(inventory(1, 2, as_of=3), *digests(1, 2), seq=4))
        return b""

    await bus.serve(inventory_subject(W1), answer)
    async with IndexService(bus, IndexState(ReferenceIndex()), settings=FAST) as service:
        await publish(bus, a_batch(up(), stored(1)), a_batch(stored(3), seq=3))

        def found() -> list[tuple[Trust, int]]:
            return [(m.trust, m.num_blocks) for m in service.index.match(hashes(1, 2))]

        await until(lambda: found() == [(Trust.exact, 2)])
        assert service.state.stats().gaps == 1
