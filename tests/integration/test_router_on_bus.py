"""The router on a live index: events come by a bus, decisions leave by it, the bus goes away."""

from pathlib import Path

import httpx

from kvatlas.events.bus import Message
from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS, decisions_stream, events_stream
from kvatlas.events.subjects import events_subject
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index.reference import ReferenceIndex
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.router.http.app import create_app
from kvatlas.router.recorder import StreamDecisionLog
from kvatlas.router.service import RouterService
from kvatlas.schemas.fleet import NamespaceDescriptor, WorkerInfo
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import WIRE_VERSION, BlockStored, EventBatch, WorkerUp
from kvatlas.schemas.routing import decode_decision, encode_decision
from kvatlas.schemas.settings import RouterSettings
from testkit.bus import Collected
from testkit.fleet import FINGERPRINT, MODEL, Fleet, a_prompt, a_request
from testkit.waiting import until

PROMPT = a_prompt(64)
DESCRIPTOR = NamespaceDescriptor(16)
ASK = {"model": MODEL, "token_ids": PROMPT}


def first_batch() -> EventBatch:
    hasher = BlockHasher(DESCRIPTOR.namespace(MODEL, None, None))
    events = (
        WorkerUp(WorkerInfo("http://w1", (MODEL,), DESCRIPTOR, FINGERPRINT)),
        BlockStored(hasher.root, hasher.chain(PROMPT)),
    )
    return EventBatch(WIRE_VERSION, "w1", 0, 1, 1, 0, events)


async def test_a_decision_about_a_million_tokens_costs_no_other_on_a_broker_as_it_comes(
    tmp_path: Path,
) -> None:
    fleet = Fleet()
    for worker, block_tokens in (("w1", 16), ("w2", 32)):
        fleet.up(worker, block_tokens=block_tokens)
    async with (
        embedded_server(tmp_path, settings="max_payload: 1MB") as server,
        NatsBus(server.url) as bus,
    ):
        await bus.declare_stream(decisions_stream())
        recorded: Collected[Message] = Collected()
        await bus.follow(KV_DECISIONS, 1, recorded)
        async with StreamDecisionLog(bus.publisher(KV_DECISIONS), RouterSettings()) as log:
            router = fleet.router(log=log)
            ids = [
                router.route(a_request(a_prompt(num_tokens))).decision_id
                for num_tokens in (64, 1_000_000, 64)
            ]
        found = [decode_decision(message.payload) for message in await recorded.count(3)]
        assert [each.id for each in found] == ids
        assert [each.left_out for each in found] == [(), ("groups.chain",), ()]
        assert (log.num_published, log.num_cut, log.num_dropped) == (3, 1, 0)
        whole = router.decision(ids[1])
        assert len(encode_decision(whole)) > 1 << 20
        assert found[1].question == whole.question


async def test_a_router_lives_on_its_bus_and_outlives_it() -> None:
    settings, batch = RouterSettings(seed=1), first_batch()
    async with MemoryBroker().connect() as bus:
        await bus.declare_stream(events_stream())
        await bus.declare_stream(decisions_stream())
        state = IndexState(ReferenceIndex())
        async with (
            IndexService(bus, state, settings=IndexServiceLimits(poll_seconds=0.01)) as index,
            StreamDecisionLog(bus.publisher(KV_DECISIONS), settings) as log,
        ):
            router = RouterService(index.index, index, settings, log=log)
            transport = httpx.ASGITransport(create_app(router))
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                await bus.publisher(KV_EVENTS).publish(
                    events_subject(MODEL, InstanceId("w1", 0)), encode(batch)
                )
                await until(lambda: state.stream_sequence == 1)
                assert (await client.get("/readyz")).status_code == 200

                recorded: Collected[Message] = Collected()
                await bus.follow(KV_DECISIONS, 1, recorded)
                routed = (await client.post("/v1/route", json=ASK)).json()
                assert (routed["worker"], routed["match_tokens"]) == ("w1", 64)
                [message] = await recorded.count(1)
                assert decode_decision(message.payload).id == routed["decision_id"]

                bus.cut()
                await until(lambda: index.lag.seconds_since_contact > 0.05)
                alone = (await client.post("/v1/route", json=ASK)).json()
                assert (alone["worker"], alone["connected"]) == ("w1", False)
                assert alone["index_age_ms"] > 50
                assert (await client.get("/readyz")).status_code == 200
                bus.restore()
                await recorded.count(2)
                assert log.num_dropped == 0
