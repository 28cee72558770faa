"""Three brokers that are one, of which one dies, is cut off, is full or slow: exact, or not at all.

What is measured (how long nobody could publish) is printed, `pytest -rP` shows it, and nothing is
asserted about it. Tests that take more than a few seconds longer than an election run with
KVATLAS_SLOW=1 only.
"""

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

from kvatlas.events.bus import Message
from kvatlas.events.nats_bus import NatsBus
from kvatlas.events.streams import KV_EVENTS, events_stream
from testkit.cluster import WAIT_SECONDS, Cluster, nats_cluster
from testkit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]
slow = pytest.mark.skipif(not os.environ.get("KVATLAS_SLOW"), reason="KVATLAS_SLOW=1 runs it")

STREAM = events_stream(max_bytes=64 << 20, replicas=3)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with nats_cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
async def cuttable(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with nats_cluster(tmp_path, with_cutters=True) as cluster:
        yield cluster


class Reader:
    """Keeps what a follower gets and when."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.times: list[float] = []
        self.holes: list[tuple[int, int]] = []
        #: subject -> numbers as they were first met
        self.numbers: dict[str, list[int]] = defaultdict(list)
        self._met: set[tuple[str, int]] = set()

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        self.times.append(time.monotonic())
        number = int(message.payload)
        if (message.subject, number) not in self._met:
            self._met.add((message.subject, number))
            self.numbers[message.subject].append(number)

    def on_hole(self, expected: int, got: int) -> None:
        self.holes.append((expected, got))

    @property
    def num_repeated(self) -> int:
        return len(self.messages) - len(self._met)

    @property
    def log(self) -> list[tuple[int, str, bytes]]:
        return [(one.stream_sequence, one.subject, one.payload) for one in self.messages]

    async def further(self, count: int) -> None:
        """Return when so many more have come."""
        wanted = len(self.messages) + count
        await until(lambda: len(self.messages) >= wanted, WAIT_SECONDS)

    async def at_end_of(self, bus: NatsBus) -> None:
        last = await bus.last_sequence(KV_EVENTS)
        await until(lambda: len(self.messages) >= last, WAIT_SECONDS)

    def assert_complete(self, published: dict[str, int]) -> None:
        """Check that each sequence came once and no number is missing."""
        sequences = [message.stream_sequence for message in self.messages]
        assert sequences == list(range(1, len(sequences) + 1))
        assert self.holes == []
        numbers = {subject: sorted(numbers) for subject, numbers in self.numbers.items()}
        assert numbers == {s: list(range(1, last + 1)) for s, last in published.items()}

    def assert_exact(self, published: dict[str, int]) -> None:
        """Check besides that each subject's numbers only rise."""
        self.assert_complete(published)
        assert all(numbers == sorted(numbers) for numbers in self.numbers.values())

    @property
    def num_overtaken(self) -> int:
        """How many messages were stored after a newer one of their subject."""
        return sum(
            sum(number < newest for number, newest in zip(ns, accumulate(ns, max), strict=True))
            for ns in self.numbers.values()
        )

    @property
    def pauses(self) -> tuple[float, float]:
        """For how long nothing was stored, and for how long nothing came."""
        stored = [message.broker_ns / 1e9 for message in self.messages]
        return _longest_pause(stored), _longest_pause(self.times)


def _longest_pause(times: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(times))


class Writer:
    """Publishes 1, 2, 3, ... to each of some subjects until it is told to stop."""

    def __init__(self, bus: NatsBus, *names: str, burst: int, pause_seconds: float) -> None:
        self.publisher = bus.publisher(KV_EVENTS)
        #: subject -> the last number accepted
        self.published = {f"kv.events.model.{name}.0": 0 for name in names}
        self._burst, self._pause_seconds = burst, pause_seconds
        self._is_over = False

    async def run(self) -> None:
        while not self._is_over:
            for _ in range(self._burst):
                for subject in self.published:
                    self.published[subject] += 1
                    await self.publisher.publish(subject, b"%d" % self.published[subject])
            await asyncio.sleep(self._pause_seconds)

    async def finish(self) -> None:
        self._is_over = True
        await self.publisher.flush()


@asynccontextmanager
async def running(*writers: Writer) -> AsyncIterator[None]:
    """Run writers, and see all that they published stored at the end."""
    tasks = [asyncio.create_task(writer.run()) for writer in writers]
    try:
        yield
        async with asyncio.timeout(WAIT_SECONDS):
            for writer, task in zip(writers, tasks, strict=True):
                await writer.finish()
                await task
                await writer.publisher.flush()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def report(what: str, reader: Reader, *writers: Writer) -> None:
    sent_again = [writer.publisher.num_resent for writer in writers]
    stored, came = reader.pauses
    print(
        f"{what}: nothing stored for {stored:.2f} s, nothing came for {came:.2f} s; "
        f"{len(reader.messages)} messages, {reader.num_repeated} stored twice, "
        f"{reader.num_overtaken} overtaken; sent again {sent_again}"
    )


@pytest.mark.parametrize("who", ["leader", "follower"])
async def test_a_killed_node_loses_nothing_that_was_answered(cluster: Cluster, who: str) -> None:
    reader, other_reader = Reader(), Reader()
    async with (
        NatsBus(cluster.urls) as bus,
        NatsBus(cluster.urls, busy_messages=0) as plain_bus,
        NatsBus(cluster.urls) as far,
    ):
        await bus.declare_stream(STREAM)
        leader = await cluster.leader(KV_EVENTS)
        killed = leader if who == "leader" else cluster.others(leader)[0]
        follower = await far.follow(KV_EVENTS, 1, reader, reader.on_hole)
        await bus.follow(KV_EVENTS, 1, other_reader, other_reader.on_hole)
        busy = Writer(bus, "a", "b", "c", burst=40, pause_seconds=0.05)
        plain = Writer(plain_bus, "d", "e", burst=2, pause_seconds=0.01)
        async with running(busy, plain):
            await reader.further(1000)
            await killed.server.kill()
            await reader.further(2000)
            await killed.server.start()
            await cluster.until_healthy()
            await reader.further(500)
        published = busy.published | plain.published
        for each in (reader, other_reader):
            await each.at_end_of(bus)
            each.assert_exact(published)
        report(f"{who} killed", reader, busy, plain)
        print("healed", follower.num_healed, "batches", busy.publisher.num_batches)


async def test_a_node_that_is_cut_off_with_its_client_accepts_nothing(cuttable: Cluster) -> None:
    """The client stays at the node, which led the stream, and is not told that it is alone."""
    cluster = cuttable
    reader, near_reader = Reader(), Reader()
    async with NatsBus(cluster.urls) as first:
        await first.declare_stream(STREAM)
    leader = await cluster.leader(KV_EVENTS)
    majority = [node.url for node in cluster.others(leader)]
    async with NatsBus(leader.url) as cut_off, NatsBus(majority) as bus:
        await bus.follow(KV_EVENTS, 1, reader, reader.on_hole)
        await cut_off.follow(KV_EVENTS, 1, near_reader, near_reader.on_hole)
        alone = Writer(cut_off, "alone", burst=2, pause_seconds=0.02)
        others = Writer(bus, "a", "b", burst=2, pause_seconds=0.02)
        async with running(alone, others):
            await reader.further(200)
            cluster.isolate(leader)
            await asyncio.sleep(0.5)  # what was under way when it was cut
            acked = alone.published["kv.events.model.alone.0"] - alone.publisher.num_unacked
            read = len(near_reader.messages)
            await reader.further(1000)
            during = alone.published["kv.events.model.alone.0"] - alone.publisher.num_unacked
            assert (during, len(near_reader.messages)) == (acked, read)
            cluster.heal()
            await near_reader.further(200)
        for each in (reader, near_reader):
            await each.at_end_of(bus)
            each.assert_complete(alone.published | others.published)
        assert reader.log == near_reader.log
        for subject in others.published:
            assert reader.numbers[subject] == sorted(reader.numbers[subject])
        report("leader cut off, majority", reader, others)
        report("leader cut off, minority", near_reader, alone)
