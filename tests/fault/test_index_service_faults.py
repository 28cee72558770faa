"""An index whose broker is killed, and whose messages are poison."""

import asyncio
from pathlib import Path

from kvatlas.events.codec import encode
from kvatlas.events.leases import LeaseKeeper
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import KV_EVENTS, LEASES_BUCKET, events_stream
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.schemas.ids import InstanceId
from testkit.builders import a_batch, hashes, stored, subject_of, up
from testkit.ports import kept_port
from testkit.waiting import WAIT_SECONDS, until

W1 = InstanceId("w1", 0)


async def test_an_index_outlives_its_broker(tmp_path: Path) -> None:
    """It answers while the broker is away, goes on behind it, and buries nobody meanwhile."""
    settings = IndexServiceLimits(
        poll_seconds=0.05, lease_ended_seconds=0.1, lease_settling_seconds=3.0
    )
    async with embedded_server(tmp_path, kept_port()) as server, NatsBus(server.url) as bus:
        await bus.declare_stream(events_stream(max_bytes=64 << 20))
        publisher = bus.publisher(KV_EVENTS)
        keys = bus.keys(LEASES_BUCKET)
        async with (
            LeaseKeeper(keys, W1, 1, lambda fenced: None, ttl_seconds=1.0),
            IndexService(bus, IndexState(ReferenceIndex()), settings=settings) as service,
        ):
            batch = a_batch(up(), stored(1))
            await publisher.publish(subject_of(batch), encode(batch))
            await until(lambda: service.state.stream_sequence == 1)
            await server.kill()
            await until(lambda: service.lag.seconds_since_contact > 1.5)
            assert not service.connected
            assert len(service.index.match(hashes(1))) == 1
            batch = a_batch(stored(2), seq=2)
            await publisher.publish(subject_of(batch), encode(batch))
            await server.start()
            async with asyncio.timeout(WAIT_SECONDS):
                await publisher.flush()
            await until(lambda: service.state.stream_sequence == 2)
            await until(lambda: service.lag.seconds_since_contact < 0.5)
            assert [m.num_blocks for m in service.index.match(hashes(1, 2))] == [2]
            assert service.state.stats().controls == 0
