"""F76 with a real cluster: its leader is killed under load. Runs with KVATLAS_SLOW=1 only.

What runs always: test_cluster.py, and a single broker that answers nobody for a while in
integration/test_numbered_faults_stalls.py.
"""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from kvatlas.events.codec import encode
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.schemas.errors import BusUnavailable
from kvatlas.schemas.fleet import Trust
from testkit.builders import a_batch, removed, stored, subject_of, up
from testkit.cluster import WAIT_SECONDS, nats_cluster
from testkit.waiting import until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not os.environ.get("KVATLAS_SLOW"), reason="KVATLAS_SLOW=1 runs it"),
]


async def publish_for_a_while(bus: NatsBus, worker: str, is_over: asyncio.Event) -> int:
    """Store and remove blocks until told to stop; return how many batches that took."""
    publisher, seq = bus.publisher(KV_EVENTS), 0
    while not is_over.is_set() or seq < 100:
        seq += 1
        events = [up()] if seq == 1 else [stored(seq), removed(max(seq - 7, 1))]
        batch = a_batch(*events, worker=worker, seq=seq)
        await publisher.publish(subject_of(batch), encode(batch))
        await asyncio.sleep(0.005)
    await publisher.flush()
    return seq


async def test_f76_a_leader_that_is_killed_under_load_is_a_delay_that_shows_and_no_gap(
    tmp_path: Path,
) -> None:
    async with nats_cluster(tmp_path) as cluster, NatsBus(cluster.urls, replicas=3) as bus:
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                with suppress(BusUnavailable):  # it has only just formed
                    await bus.declare_stream(events_stream(max_bytes=64 << 20, replicas=3))
                    break
        leader = await cluster.leader(KV_EVENTS)
        async with (
            NatsBus(leader.url, replicas=3) as near,
            IndexService(near, IndexState(ReferenceIndex())) as one,
            IndexService(bus, IndexState(FlatRadixIndex())) as two,
        ):
            is_over = asyncio.Event()
            sides = ((bus, "w0"), (near, "w1"), (bus, "w2"))
            tasks = [asyncio.create_task(publish_for_a_while(*side, is_over)) for side in sides]
            await until(lambda: one.state.stream_sequence > 100, WAIT_SECONDS)
            await leader.server.kill()
            for service in (one, two):
                await until(lambda s=service: s.lag.seconds_since_contact > 1.0, WAIT_SECONDS)  # type: ignore[misc]
            await leader.server.start()
            at = two.state.stream_sequence
            await until(lambda: two.state.stream_sequence > at + 20, WAIT_SECONDS)
            is_over.set()
            counts = await asyncio.wait_for(asyncio.gather(*tasks), WAIT_SECONDS)
            last = await bus.last_sequence(KV_EVENTS)
            for service in (one, two):
                await until(lambda s=service: s.state.stream_sequence == last, WAIT_SECONDS)  # type: ignore[misc]
                await until(lambda s=service: s.lag.seconds_since_contact < 1.0, WAIT_SECONDS)  # type: ignore[misc]
                views = service.state.instances()
                assert [(view.seq, view.trust) for view in views] == [
                    (count, Trust.exact) for count in counts
                ]
                assert service.state.stats().gaps == 0
            assert one.state.state_digest() == two.state.state_digest()
