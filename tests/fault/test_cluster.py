"""Three brokers that are one, of which one dies, is cut off, is full or slow: exact, or not at all.

What is measured (how long nobody could publish) is printed, `pytest -rP` shows it, and nothing is
asserted about it. Tests that take more than a few seconds longer than an election run with
KVATLAS_SLOW=1 only.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from kvatlas.events.bus import Message, StreamSpec
from kvatlas.events.codec import encode
from kvatlas.events.leases import (
    RENEWALS_PER_TTL,
    TTL_SECONDS,
    LeaseKeeper,
    LeaseValue,
    lease_key,
)
from kvatlas.events.nats import nodes as nats_nodes
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_EVENTS, LEASES_BUCKET, events_stream
from kvatlas.events.subjects import parse_events_subject
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.schemas.errors import BusUnavailable, StreamRefused
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.hashing import HashAlgorithm
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import KvEvent, NamespaceSeen
from testkit.builders import MODEL, ROOT, a_batch, digest, removed, stored, subject_of, up
from testkit.cluster import WAIT_SECONDS, Cluster, Node, nats_cluster
from testkit.cluster_traffic import Reader, Writer, asking, report, running
from testkit.disks import small_disk
from testkit.fold import Fold
from testkit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
slow = pytest.mark.skipif(not os.environ.get("KVATLAS_SLOW"), reason="KVATLAS_SLOW=1 runs it")

STREAM = events_stream(max_bytes=64 << 20, replicas=3)
EPOCH = 5
DISK_MB = 12


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with nats_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def cuttable(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with nats_cluster(tmp_path, with_cutters=True) as cluster:
        yield cluster


async def declare(bus: NatsBus, stream: StreamSpec = STREAM) -> None:
    """Make a stream; a cluster that has just formed may leave a first request unanswered."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                await bus.declare_stream(stream)
            except BusUnavailable:
                continue
            except StreamRefused as error:
                if "peer offline" not in str(error):
                    raise
                await asyncio.sleep(0.1)
            else:
                return


@pytest.mark.parametrize("who", ["leader", "follower"])
async def test_a_killed_node_loses_nothing_that_was_answered(cluster: Cluster, who: str) -> None:
    reader, other_reader = Reader(), Reader()
    async with (
        NatsBus(cluster.urls) as bus,
        NatsBus(cluster.urls, busy_messages=0) as plain_bus,
        NatsBus(cluster.urls) as far,
    ):
        await declare(bus)
        leader = await cluster.leader(KV_EVENTS)
        killed = leader if who == "leader" else cluster.others(leader)[0]
        follower = await far.follow(KV_EVENTS, 1, reader, reader.on_hole)
        await bus.follow(KV_EVENTS, 1, other_reader, other_reader.on_hole)
        busy = Writer(bus, "a", "b", "c", burst=40, pause_seconds=0.05)
        plain = Writer(plain_bus, "d", "e", burst=2, pause_seconds=0.01)
        async with asking(far, reader) as asker, running(busy, plain):
            await reader.further(1000)
            await killed.server.kill()
            await reader.further(2000)
            await killed.server.start()
            await cluster.until_healthy()
            await reader.further(500)
        published = busy.published | plain.published
        for each in (reader, other_reader):
            await each.has_all(published)
            each.assert_exact(published)
        report(f"{who} killed", reader, busy, plain)
        assert asker.outdated == []
        assert asker.told
        print("healed", follower.num_healed, "batches", busy.publisher.num_batches)


async def test_a_client_of_a_node_that_was_cut_off_is_stored_in_order(cuttable: Cluster) -> None:
    """The leader is cut off with a client that knows no other node, and accepts nothing meanwhile.

    What the client published is stored when the cut has healed. Both sides read the same, and
    neither is told an end of the log that is out of date.
    """
    reader, near_reader = Reader(), Reader()
    async with NatsBus(cuttable.urls) as first:
        await declare(first)
    leader = await cuttable.leader(KV_EVENTS)
    majority = [node.url for node in cuttable.others(leader)]
    async with NatsBus(leader.url) as cut_off, NatsBus(majority) as bus:
        await bus.follow(KV_EVENTS, 1, reader, reader.on_hole)
        await cut_off.follow(KV_EVENTS, 1, near_reader, near_reader.on_hole)
        alone = Writer(cut_off, "alone", burst=2, pause_seconds=0.02)
        others = Writer(bus, "a", "b", burst=4, pause_seconds=0.02)
        async with (
            asking(cut_off, reader) as near,
            asking(bus, reader) as far,
            running(alone, others),
        ):
            await reader.further(200)
            cuttable.isolate(leader)
            before = (-1, -1)
            while before != (now := (alone.num_acked, len(near_reader.messages))):
                before = now  # what was under way when it was cut may still arrive
                await asyncio.sleep(0.5)
            await reader.further(1000)
            assert (alone.num_acked, len(near_reader.messages)) == before
            cuttable.heal()
            await near_reader.further(200)
        published = alone.published | others.published
        for each in (reader, near_reader):
            await each.has_all(published)
        report("leader cut off, majority", reader, others)
        report("leader cut off, minority", near_reader, alone)
    assert near.outdated == far.outdated == []
    assert near.told
    assert far.told
    for each in (reader, near_reader):
        each.assert_exact(published)
    both = min(len(reader.log), len(near_reader.log))  # a repetition may still be on its way
    assert reader.log[:both] == near_reader.log[:both]


@asynccontextmanager
async def bus_at(cluster: Cluster, node: Node) -> AsyncIterator[NatsBus]:
    """A bus that knows all nodes, connected to one of them."""
    while True:
        async with NatsBus(cluster.urls) as bus:
            if bus._connection.at == node.url:
                yield bus
                return


async def test_a_client_leaves_a_node_that_is_cut_off(
    cuttable: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows of other nodes; its messages are stored in order before the cut heals."""
    monkeypatch.setattr(nats_nodes, "FIRST_PATIENCE_SECONDS", 5.0)
    reader = Reader()
    async with NatsBus(cuttable.urls) as first:
        await declare(first)
    leader = await cuttable.leader(KV_EVENTS)
    async with bus_at(cuttable, leader) as bus:
        await bus.follow(KV_EVENTS, 1, reader, reader.on_hole)
        writers = (
            Writer(bus, "a", burst=2, pause_seconds=0.02),
            Writer(bus, "b", "c", burst=40, pause_seconds=0.05),
        )
        async with running(*writers):
            await reader.further(500)
            cuttable.isolate(leader)
            await asyncio.sleep(0.5)  # what was under way when it was cut
            await reader.further(1000)
            assert bus._connection.num_given_up == 1
            assert bus._connection.at != leader.url
        published = writers[0].published | writers[1].published
        await reader.has_all(published)
        report("left a node", reader, *writers)
        reader.assert_exact(published)


class Sidecar:
    """Speaks for an instance: stores and removes blocks, and says what is held."""

    def __init__(self, bus: NatsBus, worker: str) -> None:
        self._publisher = bus.publisher(KV_EVENTS)
        self.instance = InstanceId(worker, 0)
        self._random = random.Random(worker)
        self._held: set[int] = set()
        self._seq = 0
        self._is_over = False

    async def run(self) -> None:
        await self._publish(up(), NamespaceSeen(ROOT, MODEL, 4, HashAlgorithm.xxh3_128))
        while not self._is_over:
            await self._publish(*self._change())
            await asyncio.sleep(0.005)
        await self._publish(digest(*self._held))
        await self._publisher.flush()

    def finish(self) -> None:
        self._is_over = True

    def _change(self) -> list[KvEvent]:
        gone = set(self._random.sample(sorted(self._held), len(self._held) // 4))
        new = {self._random.randrange(1, 10_000) for _ in range(20)}
        self._held = (self._held - gone) | new
        return [removed(*gone), stored(*new), digest(*self._held)]

    async def _publish(self, *events: KvEvent) -> None:
        self._seq += 1
        batch = a_batch(*events, worker=self.instance.worker, epoch=EPOCH, seq=self._seq)
        await self._publisher.publish(subject_of(batch), encode(batch))


async def test_two_indexes_are_exact_and_alike_after_the_leader_was_killed(
    cluster: Cluster,
) -> None:
    async with NatsBus(cluster.urls, replicas=3) as bus:
        await declare(bus)
        leader = await cluster.leader(KV_EVENTS)
        async with (
            NatsBus(leader.url, replicas=3) as near,
            NatsBus(cluster.urls, replicas=3) as far,
            IndexService(near, IndexState(ReferenceIndex())) as one,
            IndexService(far, IndexState(ReferenceIndex())) as two,
        ):
            sidecars = [Sidecar(bus if n % 2 else near, f"w{n}") for n in range(4)]
            tasks = [asyncio.create_task(sidecar.run()) for sidecar in sidecars]
            await until(lambda: one.state.stream_sequence > 200, WAIT_SECONDS)
            await leader.server.kill()
            killed_at, sequence = time.monotonic(), one.state.stream_sequence
            await until(lambda: one.state.stream_sequence > sequence + 20, WAIT_SECONDS)
            print(f"index goes on after {time.monotonic() - killed_at:.2f} s, {one.lag}")
            await leader.server.start()
            for sidecar in sidecars:
                sidecar.finish()
            await asyncio.wait_for(asyncio.gather(*tasks), WAIT_SECONDS)
            last = await bus.last_sequence(KV_EVENTS)
            for service in (one, two):
                await until(lambda s=service: s.state.stream_sequence == last, WAIT_SECONDS)  # type: ignore[misc]
            views = [service.state.instances() for service in (one, two)]
            assert [view.trust for view in views[0] + views[1]] == [Trust.exact] * 8
            assert one.state.state_digest() == two.state.state_digest()
            log: list[Message] = []
            await bus.follow(KV_EVENTS, 1, log.append)
            await until(lambda: len(log) == last, WAIT_SECONDS)
        folds = {sidecar.instance: Fold(sidecar.instance) for sidecar in sidecars}
        for message in log:
            folds[parse_events_subject(message.subject)[1]].take_payload(message.payload)
        assert [fold.gaps for fold in folds.values()] == [[]] * 4


async def test_only_the_dead_are_declared_dead_when_nobody_can_renew_a_lease_for_a_while(
    cluster: Cluster,
) -> None:
    """The outage begins just before renewals are due, which leaves least of the leases."""
    living = [InstanceId(f"w{n}", 0) for n in range(4)]
    dead = InstanceId("dead", 0)
    async with NatsBus(cluster.urls, replicas=3) as bus:
        await declare(bus)
        leases = bus.keys(LEASES_BUCKET)
        publisher = bus.publisher(KV_EVENTS)
        for instance in (*living, dead):
            batch = a_batch(up(), worker=instance.worker, epoch=EPOCH)
            await publisher.publish(subject_of(batch), encode(batch))
        await publisher.flush()
        await leases.put(lease_key(dead), msgspec.msgpack.encode(LeaseValue(EPOCH)), 8.0)
        leader = await cluster.leader(f"KV_{LEASES_BUCKET}")
        async with AsyncExitStack() as stack:
            near = await stack.enter_async_context(NatsBus(leader.url, replicas=3))
            far = await stack.enter_async_context(
                NatsBus([node.url for node in cluster.others(leader)], replicas=3)
            )
            for instance in living:
                keeper = LeaseKeeper(leases, instance, EPOCH, lambda fenced: None)
                await stack.enter_async_context(keeper)
            services = [
                await stack.enter_async_context(
                    IndexService(each, IndexState(ReferenceIndex()), name=name)
                )
                for name, each in (("near", near), ("far", far))
            ]
            await asyncio.sleep(TTL_SECONDS / RENEWALS_PER_TTL - 0.1)
            await leader.server.kill()
            killed_at = time.monotonic()
            for service in services:
                await until(lambda s=service: len(s.state.fleet.alive()) < 5, WAIT_SECONDS)  # type: ignore[misc]
            print(f"declared dead after {time.monotonic() - killed_at:.2f} s")
            # by then each lease of the living would have ended as well
            await asyncio.sleep(max(killed_at + TTL_SECONDS - time.monotonic(), 0))
            for service in services:
                assert sorted(service.state.fleet.alive()) == [(one, EPOCH) for one in living]


@pytest.fixture
async def scarce(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """A cluster whose first node has little room: a full disk, or a limit of its configuration.

    With a real disk the node believes to have more, so that writing fails in the middle.
    """
    with ExitStack() as disks:

        def more(number: int, folder: Path) -> str:
            if number:
                return ""
            if request.param == "disk":
                disks.enter_context(small_disk(folder / "streams", DISK_MB))
            room = 1024 if request.param == "disk" else DISK_MB
            return f'jetstream {{ store_dir: "{folder}/streams", max_file_store: {room}MB }}\n'

        async with nats_cluster(tmp_path, more=more) as cluster:
            yield cluster


async def publish_much(bus: NatsBus) -> dict[str, int]:
    """Publish twice as much as the small disk takes; return what."""
    publisher = bus.publisher(KV_EVENTS)
    count = 2 * DISK_MB * 4
    for number in range(1, count + 1):
        await publisher.publish("kv.events.model.a.0", b"%d" % number + b" " * (256 << 10))
    async with asyncio.timeout(WAIT_SECONDS):
        await publisher.flush()
    return {"kv.events.model.a.0": count}


@pytest.mark.parametrize("scarce", [pytest.param("disk", marks=slow), "limit"], indirect=True)
async def test_a_full_node_holds_up_neither_writers_nor_readers(scarce: Cluster) -> None:
    """The full node leads the stream at first; a reader whose consumer is on it has to move."""
    full = scarce.nodes[0]
    readers = [Reader() for _ in range(3)]
    async with NatsBus(scarce.urls, replicas=3) as bus:
        await declare(bus, msgspec.structs.replace(STREAM, max_bytes=-1))
        await led_by(scarce, full, bus)
        for reader in readers:
            await bus.follow(KV_EVENTS, 1, reader, reader.on_hole)
        published = await publish_much(bus)
        for reader in readers:
            await reader.has_all(published)
            reader.assert_complete(published)  # a refusal in the middle may cost the order
        report("full node", readers[0])


@pytest.mark.parametrize("scarce", [pytest.param("disk", marks=slow), "limit"], indirect=True)
async def test_a_range_is_read_whole_though_a_node_is_full(scarce: Cluster) -> None:
    async with NatsBus([node.url for node in scarce.nodes[1:]], replicas=3) as bus:
        await declare(bus, msgspec.structs.replace(STREAM, max_bytes=-1))
        published = await publish_much(bus)
        for _ in range(6):  # each on a node of the broker's choice
            assert await read_all(bus) == published


async def read_all(bus: NatsBus) -> dict[str, int]:
    """Read the whole log; return what was published, all of which has to be there."""
    reader = Reader()
    async for message in bus.read_range(KV_EVENTS, 1, 999):
        reader(message)
    found = {subject: max(numbers) for subject, numbers in reader.numbers.items()}
    reader.assert_complete(found)
    return found


@slow
@pytest.mark.parametrize("scarce", ["disk"], indirect=True)
async def test_a_client_of_a_full_node_reads_whole_ranges_or_is_told(scarce: Cluster) -> None:
    """The node may answer for itself only, with what it had when it was full; then it is left."""
    async with bus_at(scarce, scarce.nodes[0]) as bus:
        await declare(bus)
        published = await publish_much(bus)
        num_whole = 0
        while num_whole < 6:
            try:
                assert await read_all(bus) == published
                assert await bus.last_sequence(KV_EVENTS) >= sum(published.values())
            except BusUnavailable:
                continue
            num_whole += 1


async def led_by(cluster: Cluster, node: Node, bus: NatsBus) -> None:
    """Let a node lead the log."""
    async with asyncio.timeout(WAIT_SECONDS):
        while await cluster.leader(KV_EVENTS) is not node:
            await step_down(bus)
            await asyncio.sleep(0.2)


async def step_down(bus: NatsBus) -> None:
    """Have the leader of the log give way to another, as it does before it is restarted."""
    with suppress(BusUnavailable):  # while there is none nobody answers
        await bus.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{KV_EVENTS}", b"", 1.0)


async def test_a_leader_that_gives_way_again_and_again_loses_nothing(cluster: Cluster) -> None:
    """As in a rolling restart, where the next leader is there before anybody notices.

    What is under way just then may be overtaken: ADR-0011.
    """
    reader = Reader()
    async with NatsBus(cluster.urls) as bus, NatsBus(cluster.urls, busy_messages=0) as plain_bus:
        await declare(bus)
        await bus.follow(KV_EVENTS, 1, reader, reader.on_hole)
        busy = Writer(bus, "a", "b", "c", burst=40, pause_seconds=0.05)
        plain = Writer(plain_bus, "d", "e", burst=2, pause_seconds=0.002)
        async with running(busy, plain):
            for _ in range(5):
                await reader.further(500)
                await step_down(bus)
        published = busy.published | plain.published
        await reader.has_all(published)
        report("leader stepped down", reader, busy, plain)
        reader.assert_complete(published)


@pytest.mark.parametrize("who", ["leader", pytest.param("follower", marks=slow)])
async def test_a_slow_node_loses_nothing(cluster: Cluster, who: str) -> None:
    """A disk that hangs now and then cannot be made here: the node is stopped in pulses instead."""
    reader = Reader()
    async with NatsBus(cluster.urls) as bus:
        await declare(bus)
        leader = await cluster.leader(KV_EVENTS)
        node = leader if who == "leader" else cluster.others(leader)[0]
        async with NatsBus([each.url for each in cluster.others(node)]) as far:
            await far.follow(KV_EVENTS, 1, reader, reader.on_hole)
            busy = Writer(far, "a", "b", burst=40, pause_seconds=0.05)
            plain = Writer(bus, "c", burst=2, pause_seconds=0.01)
            async with running(busy, plain):
                for _ in range(4):
                    await reader.further(300)
                    with node.frozen():
                        await asyncio.sleep(0.7)
            published = busy.published | plain.published
            await reader.has_all(published)
            report(f"slow {who}", reader, busy, plain)
            reader.assert_exact(published)
