"""Workers and readers of two minors of the wire on one bus, while workers are upgraded one by one.

An older release is the frozen wire (support/wire_100, testkit/release_100.py).
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from kvatlas.events.bus import Bus
from kvatlas.events.codec import decode, encode
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import BatchArrived, stimulus_of
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import WIRE_VERSION, NamespacesOverBudget
from testkit.builders import a_batch, subject_of
from testkit.engine_words import tokens_of
from testkit.release_100 import BusOf100, OldWorker, read_by_100
from testkit.sidecars import DESCRIPTOR, Beside, beside, sidecar_options
from testkit.waiting import until
from wire_100 import codec as codec_100

MODEL = "m"
NAMES = ("w1", "w2", "w3")
FAST = IndexServiceLimits(
    poll_seconds=0.05, inventory_jitter_seconds=0.0, inventory_retry_seconds=0.2
)
PLAIN = BlockHasher(DESCRIPTOR.namespace(MODEL, None, None))
TENANT = BlockHasher(DESCRIPTOR.namespace(MODEL, None, "tenant"))
#: what the tenant may tell at once, and what it tells
BURST, FLOOD = 20, range(1, 41)

minors = pytest.mark.parametrize("wire_version", [100, 101, WIRE_VERSION])


@pytest.fixture(params=["memory", "nats"])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    """Give what connects to one fresh broker that has the log."""
    async with AsyncExitStack() as stack:
        connect: Callable[[], Bus] = MemoryBroker().connect
        if request.param == "nats":
            server = await stack.enter_async_context(embedded_server(tmp_path / "nats"))
            connect = partial(NatsBus, server.url)
        async with connect() as bus:
            await bus.declare_stream(events_stream())
            yield connect


class Rollout:
    """Workers of both releases, and a reader of each."""

    def __init__(self, connect: Any, folder: Path, wire_version: int) -> None:
        self._connect, self._folder, self._wire_version = connect, folder, wire_version
        self._stack = AsyncExitStack()
        self.old: dict[str, OldWorker] = {}
        self.new: dict[str, Beside] = {}

    async def __aenter__(self) -> "Rollout":
        self.bus: Bus = await self._stack.enter_async_context(self._connect())
        for name in NAMES:
            self.old[name] = OldWorker(self.bus, name, MODEL, DESCRIPTOR.block_tokens)
            await self.old[name].start()
        self.reader = IndexService(self.bus, IndexState(FlatRadixIndex()), settings=FAST)
        self.bus_of_100 = BusOf100(self.bus)
        bus_of_100 = cast("Bus", self.bus_of_100)
        self.old_reader = IndexService(bus_of_100, IndexState(ReferenceIndex()), settings=FAST)
        for reader in self.readers:
            await self._stack.enter_async_context(reader)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def readers(self) -> tuple[IndexService, IndexService]:
        return self.reader, self.old_reader

    async def upgrade(self, name: str, **options: object) -> Beside:
        """Replace a worker by one of today's, which begins a new epoch."""
        await self.old.pop(name).stop()
        chosen = sidecar_options(
            self._folder, name, num_slots=0, wire_version=self._wire_version, **options
        )
        sidecar = beside(chosen, self._connect())
        self.new[name] = await self._stack.enter_async_context(sidecar)
        return self.new[name]

    async def all_store(self, *blocks: int) -> None:
        tokens = tokens_of(*blocks)
        for old in self.old.values():
            await old.store(PLAIN.root, PLAIN.chain(tokens))
            await old.tell_digests()
        for new in self.new.values():
            new.hook.stored(blocks, None, tokens)
            await new.channel.flush()

    async def at_rest(self) -> None:
        """Return when both readers have read the same log to its end, and call all exact."""
        last = await self.bus.last_sequence(KV_EVENTS)

        def is_so() -> bool:
            one, two = (reader.state for reader in self.readers)
            return (
                min(one.stream_sequence, two.stream_sequence) >= last
                and one.stream_sequence == two.stream_sequence
                and all(self.trust_of(name) == {Trust.exact} for name in NAMES)
            )

        await until(is_so)
        one, two = (reader.state.state_digest() for reader in self.readers)
        assert one == two

    def trust_of(self, name: str) -> set[Trust]:
        views = [reader.index.instance(InstanceId(name, 0)) for reader in self.readers]
        return {Trust.gone if view is None else view.trust for view in views}

    def held(self, *blocks: int, hasher: BlockHasher = PLAIN) -> list[dict[str, int]]:
        """Return at both readers how many leading blocks of a chain each worker holds."""
        chain = hasher.chain(tokens_of(*blocks))
        return [
            {match.instance.worker: match.num_blocks for match in reader.index.match(chain)}
            for reader in self.readers
        ]

    async def log(self) -> list[Any]:
        last = await self.bus.last_sequence(KV_EVENTS)
        return [message async for message in self.bus.read_range(KV_EVENTS, 1, last)]


@minors
async def test_workers_are_upgraded_one_by_one_and_all_readers_agree(
    broker: Any, tmp_path: Path, wire_version: int
) -> None:
    async with Rollout(broker, tmp_path, wire_version) as rollout:
        await rollout.all_store(1, 2, 3)
        await rollout.at_rest()
        for number, name in enumerate(NAMES):
            await rollout.upgrade(name)
            await rollout.all_store(1, 2, 3, 4 + number)
            await rollout.at_rest()
            assert rollout.held(1, 2, 3, 4 + number) == 2 * [dict.fromkeys(NAMES, 4)]
            for old in rollout.old.values():
                old.lose()  # a gap is healed across releases: the new reader asks the old worker
            await rollout.all_store(9)
            await rollout.at_rest()
        written = {decode(message.payload).batch.v for message in await rollout.log()}
        assert written == {100, wire_version}
        assert rollout.bus_of_100.num_skipped == 0


def states_after_each(
    log: list[Any], name: str, *, is_old: bool
) -> Iterator[tuple[IndexState, list[Any]]]:
    """Fold a log again as a reader does, and yield its state after each batch of a worker."""
    state = IndexState(ReferenceIndex())
    for message in log:
        stimulus = stimulus_of(message)
        if is_old and isinstance(stimulus, BatchArrived):
            at, broker_ns = message.stream_sequence, message.broker_ns
            stimulus = BatchArrived(at, broker_ns, read_by_100(message.payload))
        state.handle(stimulus)
        if isinstance(stimulus, BatchArrived) and stimulus.decoded.batch.worker == name:
            yield state, list(stimulus.decoded.rejected)


@minors
async def test_a_muted_namespace_is_told_to_each_reader_in_its_own_words(
    broker: Any, tmp_path: Path, wire_version: int
) -> None:
    w1 = InstanceId("w1", 0)
    async with Rollout(broker, tmp_path, wire_version) as rollout:
        worker = await rollout.upgrade(
            "w1", namespace_burst_blocks=float(BURST), namespace_blocks_per_second=1.0
        )
        await rollout.all_store(1, 2)
        for block in FLOOD:
            worker.hook.stored([1000 + block], None, tokens_of(block), cache_salt="tenant")
            if block == BURST + 1:
                await worker.channel.flush()
        await worker.channel.flush()
        await until(
            lambda: all(
                len(rollout.held(block, hasher=TENANT)[at]) == 1 for at in (0, 1) for block in FLOOD
            )
        )
        await rollout.at_rest()
        assert rollout.held(1, 2) == 2 * [dict.fromkeys(NAMES, 2)]
        log = await rollout.log()

    told = {type(event) for m in log if m.subject.endswith("w1.0") for event in _events_of(m)}
    assert (NamespacesOverBudget in told) == (wire_version > 100)

    # today's reader knows at each moment which namespace it may not call exact
    views = [s.instance(w1) for s, _ in states_after_each(log, "w1", is_old=False)]
    if wire_version > 100:
        assert {TENANT.root} in [set(view.muted) for view in views if view]
        assert all(view.trust is Trust.exact for view in views if view and view.info)
    else:
        assert any("over its budget" in str(view.trust_reasons) for view in views if view)

    # a reader of 100 is told by a doubt, or skips the event: never the batch, nor what is beside it
    skipped = 0
    reasons = ""
    for state, rejected in states_after_each(log, "w1", is_old=True):
        view = state.instance(w1)
        assert view is not None
        skipped += len(rejected)
        reasons += str(view.trust_reasons)
        if wire_version > 100:
            assert view.trust is not Trust.degraded, view.trust_reasons
    assert ("over its budget" in reasons) == (wire_version == 100)
    assert (skipped > 0) == (wire_version > 100)


def _events_of(message: Any) -> tuple[Any, ...]:
    return decode(message.payload).batch.events


async def test_a_newer_major_is_refused_by_name_by_readers_of_both(
    broker: Any, tmp_path: Path
) -> None:
    async with broker() as bus:
        batch = a_batch()
        newer = encode(type(batch)(200, *batch.instance, 1, 1, 0, batch.events))
        publisher = bus.publisher(KV_EVENTS)
        await publisher.publish(subject_of(batch), newer)
        await publisher.flush()
        async with IndexService(bus, IndexState(ReferenceIndex()), settings=FAST) as service:
            await until(lambda: service.state.stream_sequence == 1)
            (rejected,) = service.index.stats().rejected
            assert (rejected.kind, rejected.count) == ("version", 1)
        with pytest.raises(codec_100.UnsupportedVersion, match="200"):
            read_by_100(newer)
