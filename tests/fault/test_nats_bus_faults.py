"""A broker that is killed, frozen or cut off, and readers that are too slow."""

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvatlas.events.bus import KeyChange, Message
from kvatlas.events.leases import LeaseChange, LeaseKeeper, watch_leases
from kvatlas.events.nats import connection as nats_connection
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import EmbeddedServer, embedded_server
from kvatlas.events.nats.publishing.publisher import NatsPublisher
from kvatlas.schemas.errors import BusUnavailable
from kvatlas.schemas.ids import InstanceId
from testkit.bus import Collected, a_stream
from testkit.ports import kept_port
from testkit.proxy import Proxy, proxy_to
from testkit.waiting import until

W1 = InstanceId("w1", 0)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    tasks = asyncio.all_tasks()
    async with embedded_server(tmp_path, kept_port()) as server:
        yield server
    assert asyncio.all_tasks() <= tasks | {asyncio.current_task()}


@pytest.fixture
async def proxy(server: EmbeddedServer) -> AsyncIterator[Proxy]:
    async with proxy_to(server.url) as proxy:
        yield proxy


class Reader:
    """Keeps what a follower gets; knows what a SequenceTracker would make of it."""

    def __init__(self) -> None:
        self.messages = Collected[Message]()
        self.holes: list[tuple[int, int]] = []
        #: subject -> numbers as they were first met
        self.numbers: dict[str, list[int]] = defaultdict(list)
        self._met: set[tuple[str, int]] = set()

    def __call__(self, message: Message) -> None:
        number = int(message.payload)
        if (message.subject, number) not in self._met:
            self._met.add((message.subject, number))
            self.numbers[message.subject].append(number)
        self.messages(message)

    def on_hole(self, expected: int, got: int) -> None:
        self.holes.append((expected, got))

    async def until(self, subjects: int, count: int) -> None:
        await self.messages.until(lambda _: len(self._met) >= subjects * count)

    def assert_exactly_once_in_order(self, subjects: int, count: int) -> None:
        sequences = [message.stream_sequence for message in self.messages.items]
        assert sequences == list(range(1, len(sequences) + 1))
        assert self.holes == []
        assert len(self.numbers) == subjects
        for numbers in self.numbers.values():
            assert numbers == list(range(1, count + 1))


async def publish_numbers(
    bus: NatsBus, subjects: int, count: int, pause: int = 50
) -> NatsPublisher:
    """Publish 1..count to each subject; give way now and then, so that a run takes a while."""
    publisher = bus.publisher("TEST")
    for number in range(1, count + 1):
        for subject in range(subjects):
            await publisher.publish(f"test.w{subject}", b"%d" % number)
        if number % pause == 0:
            await asyncio.sleep(0.001)
    await publisher.flush()
    assert publisher.num_unacked == publisher.unacked_bytes == 0
    return publisher


async def test_a_broker_killed_again_and_again_loses_nothing(server: EmbeddedServer) -> None:
    reader = Reader()
    async with NatsBus(server.url) as bus, NatsBus(server.url) as far:
        await bus.declare_stream(a_stream())
        follower = await far.follow("TEST", 1, reader, reader.on_hole)
        publishing = asyncio.create_task(publish_numbers(bus, subjects=8, count=4000))
        for _ in range(3):
            await reader.messages.count(len(reader.messages.items) + 3000)
            await server.kill()
            assert not publishing.done()
            await server.restart()
        await publishing
        await reader.until(subjects=8, count=4000)
        reader.assert_exactly_once_in_order(subjects=8, count=4000)
        assert follower.num_healed >= 3


async def test_a_broker_killed_in_the_middle_of_batches_loses_nothing_that_it_answered(
    server: EmbeddedServer,
) -> None:
    reader = Reader()
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        number = 0
        for _ in range(4):
            while not publisher.is_in_batch or publisher.num_unacked < 100:
                number += 1
                await publisher.publish("test.w0", b"%d" % number)
                if number % 200 == 0:
                    await asyncio.sleep(0)
            answered = number - publisher.num_unacked
            await server.kill()
            await until(lambda: not bus.connected)
            await server.restart()
            async with NatsBus(server.url) as near:
                stored = [int(m.payload) async for m in near.read_range("TEST", 1, 99_999)]
            assert set(stored) >= set(range(1, answered + 1))
        await publisher.flush()
        await bus.follow("TEST", 1, reader, reader.on_hole)
        await reader.until(subjects=1, count=number)
        reader.assert_exactly_once_in_order(subjects=1, count=number)
        assert publisher.num_failed_batches == 0


async def test_a_network_that_breaks_again_and_again_loses_nothing(
    server: EmbeddedServer, proxy: Proxy
) -> None:
    reader = Reader()
    async with NatsBus(proxy.url) as bus, NatsBus(proxy.url) as far:
        await bus.declare_stream(a_stream())
        follower = await far.follow("TEST", 1, reader, reader.on_hole)
        publishing = asyncio.create_task(publish_numbers(bus, subjects=4, count=3000))
        for messages in (500, 1700, 4000, 6500, 9000):
            await reader.messages.count(messages)
            proxy.num_links = 0
            proxy.cut()
            await until(lambda: proxy.num_links >= 2)
        await publishing
        await reader.until(subjects=4, count=3000)
        reader.assert_exactly_once_in_order(subjects=4, count=3000)
        assert follower.num_healed > 0


async def test_a_broker_that_is_away_fills_the_window_and_then_holds_back(
    server: EmbeddedServer,
) -> None:
    states: list[bool] = []
    async with NatsBus(server.url, max_unacked=10) as bus:
        bus.on_connection(states.append)
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        await server.kill()
        await until(lambda: not bus.connected)
        for number in range(10):
            await publisher.publish("test.a", b"%d" % number)
        held = asyncio.create_task(publisher.publish("test.a", b"10"))
        done, _ = await asyncio.wait((held,), timeout=0.05)
        assert not done
        assert publisher.num_unacked == 10
        with pytest.raises(BusUnavailable):
            await bus.request("lease.a", b"", 0.05)
        await server.restart()
        await held
        await publisher.flush()
        got = [int(message.payload) async for message in bus.read_range("TEST", 1, 99)]
        assert got == list(range(11))
        assert states == [False, True]


async def test_a_window_of_bytes_holds_back_too(server: EmbeddedServer) -> None:
    async with NatsBus(server.url, max_unacked_bytes=1000) as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        await server.kill()
        await publisher.publish("test.a", bytes(900))
        held = asyncio.create_task(publisher.publish("test.a", bytes(5000)))
        done, _ = await asyncio.wait((held,), timeout=0.05)
        assert not done
        await server.restart()
        await held
        await publisher.flush()
        assert await bus.last_sequence("TEST") == 2


async def test_answers_that_never_come_make_the_window_go_again(
    server: EmbeddedServer, proxy: Proxy
) -> None:
    reader = Reader()
    async with NatsBus(proxy.url, ack_seconds=0.4) as bus, NatsBus(server.url) as near:
        await bus.declare_stream(a_stream())
        await near.follow("TEST", 1, reader, reader.on_hole)
        publisher = bus.publisher("TEST")
        await publisher.publish("test.w0", b"1")
        await publisher.flush()
        proxy.stall()
        for number in range(2, 6):
            await publisher.publish("test.w0", b"%d" % number)
        await until(lambda: publisher.num_resent >= 4)
        proxy.restore()
        await publisher.flush()
        await reader.until(subjects=1, count=5)
        reader.assert_exactly_once_in_order(subjects=1, count=5)


async def test_answers_to_a_batch_that_never_come_make_it_go_again(
    server: EmbeddedServer, proxy: Proxy
) -> None:
    reader = Reader()
    async with NatsBus(proxy.url, ack_seconds=0.4) as bus, NatsBus(server.url) as near:
        await bus.declare_stream(a_stream())
        await near.follow("TEST", 1, reader, reader.on_hole)
        publisher = bus.publisher("TEST")
        number = 0
        while not publisher.is_in_batch or publisher.num_unacked < 300:
            number += 1
            await publisher.publish("test.w0", b"%d" % number)
            if number % 200 == 0:
                await asyncio.sleep(0)
        proxy.stall()
        await until(lambda: publisher.num_failed_batches > 0)
        proxy.restore()
        await publisher.flush()
        await reader.until(subjects=1, count=number)
        reader.assert_exactly_once_in_order(subjects=1, count=number)


async def test_a_broker_that_is_away_while_a_batch_is_open_is_waited_for(
    server: EmbeddedServer,
) -> None:
    reader = Reader()
    async with NatsBus(server.url) as bus:
        await bus.declare_stream(a_stream())
        publishing = asyncio.create_task(publish_numbers(bus, subjects=2, count=6000, pause=500))
        for _ in range(2):
            await asyncio.sleep(0.05)  # somewhere in the middle
            await server.kill()
            await server.restart()
        publisher = await publishing
        assert publisher.num_batches > 0
        await bus.follow("TEST", 1, reader, reader.on_hole)
        await reader.until(subjects=2, count=6000)
        reader.assert_exactly_once_in_order(subjects=2, count=6000)


async def test_a_network_that_swallows_everything_is_given_up_and_left(
    server: EmbeddedServer, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_connection, "PING_SECONDS", 0.2)
    async with NatsBus(proxy.url) as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        proxy.stall()
        for _ in range(80):  # more than sockets hold, so that some of it stays unsent
            await publisher.publish("test.a", bytes(200_000))
        await until(lambda: not bus.connected)
        proxy.cut()
        proxy.restore()
        await publisher.flush()
        assert await bus.last_sequence("TEST") >= 80
        assert bus.connected


async def test_a_frozen_broker_is_waited_for(server: EmbeddedServer) -> None:
    reader = Reader()
    assert server.pid is not None
    async with NatsBus(server.url, ack_seconds=0.4) as bus:
        await bus.declare_stream(a_stream())
        await bus.follow("TEST", 1, reader, reader.on_hole)
        publishing = asyncio.create_task(publish_numbers(bus, subjects=2, count=2000))
        await reader.messages.count(500)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(BusUnavailable):
                await bus._connection.call("look", lambda client: client.request("x"), 0.3)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await publishing
        await reader.until(subjects=2, count=2000)
        reader.assert_exactly_once_in_order(subjects=2, count=2000)


@pytest.mark.parametrize("subjects", [None, "test.w0"])
async def test_a_slow_reader_with_little_room_reads_again(
    server: EmbeddedServer, subjects: str | None
) -> None:
    reader = Reader()

    def slow(message: Message) -> None:
        if message.stream_sequence % 100 == 0:
            # the loop stands still, as under a long callback: at first until it has had too much
            time.sleep(0.003 if num_healed() else 0.05)
        reader(message)

    def num_healed() -> int:
        return 0 if follower is None else follower.num_healed

    async with NatsBus(server.url) as bus, NatsBus(server.url, pending_messages=64) as far:
        await bus.declare_stream(a_stream())
        await publish_numbers(bus, subjects=2, count=1500)
        follower = None
        follower = await far.follow("TEST", 1, slow, reader.on_hole, subjects)
        await reader.until(subjects=1 if subjects else 2, count=1500)
        assert follower.num_healed > 0
        if subjects is None:
            reader.assert_exactly_once_in_order(subjects=2, count=1500)
        assert reader.numbers["test.w0"] == list(range(1, 1501))
        assert len(reader.messages.items) == (1500 if subjects else 3000)


async def test_the_dropped_end_of_a_stream_is_noticed_without_a_successor(
    server: EmbeddedServer,
) -> None:
    reader = Reader()

    def blocks_once(message: Message) -> None:
        if message.stream_sequence == 1:
            time.sleep(0.5)  # in which the broker fills what there is of room
        reader(message)

    async with NatsBus(server.url) as bus, NatsBus(server.url, pending_messages=16) as far:
        await bus.declare_stream(a_stream())
        await publish_numbers(bus, subjects=1, count=200)
        follower = await far.follow("TEST", 1, blocks_once, reader.on_hole)
        await reader.until(subjects=1, count=200)
        reader.assert_exactly_once_in_order(subjects=1, count=200)
        assert follower.num_healed > 0


async def test_a_service_is_there_again_after_the_broker(server: EmbeddedServer) -> None:
    async def echo(payload: bytes) -> bytes:
        return payload

    async with NatsBus(server.url) as bus, NatsBus(server.url) as client:
        service = await bus.serve("lease.a", echo)
        await server.kill()
        await server.restart()
        await until(lambda: service.num_healed > 0)
        assert await client.request("lease.a", b"1", 30.0) == b"1"


async def test_closing_the_bus_ends_who_waits_for_the_broker(server: EmbeddedServer) -> None:
    async def echo(payload: bytes) -> bytes:
        return payload

    async with NatsBus(server.url, max_unacked=1) as bus:
        await bus.declare_stream(a_stream())
        await server.kill()
        await until(lambda: not bus.connected)
        publisher = bus.publisher("TEST")
        await publisher.publish("test.a", b"1")
        waiting = [
            asyncio.create_task(waits)
            for waits in (
                bus.follow("TEST", 1, Reader()),
                bus.serve("lease.a", echo),
                bus.keys("kv_test").watch(lambda _: None),
                publisher.publish("test.a", b"2"),
                publisher.flush(),
                bus.last_sequence("TEST"),
            )
        ]
        done, _ = await asyncio.wait(waiting, timeout=0.05)
        assert not done
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [BusUnavailable] * len(waiting)


async def test_an_exchange_ends_with_its_connection(server: EmbeddedServer) -> None:
    asked = asyncio.Event()

    async def never(payload: bytes) -> bytes:
        asked.set()
        await asyncio.Event().wait()
        return payload

    async with NatsBus(server.url) as bus:
        await bus.serve("lease.a", never)
        request = asyncio.create_task(bus.request("lease.a", b"", 60.0))
        await asked.wait()
        await server.kill()
        with pytest.raises(BusUnavailable, match="the connection was lost"):
            await request


async def test_credentials_that_are_refused_later_are_tried_again(server: EmbeddedServer) -> None:
    users = 'authorization { user: admin, password: "%s" }'
    server.settings = users % "right"
    await server.restart()
    url = server.url.replace("nats://", "nats://admin:right@")
    async with NatsBus(url) as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        server.settings = users % "other"
        await server.restart()
        await publisher.publish("test.a", b"1")
        flushing = asyncio.create_task(publisher.flush())
        done, _ = await asyncio.wait((flushing,), timeout=0.3)
        assert not done
        assert publisher.num_unacked == 1
        server.settings = users % "right"
        await server.restart()
        await flushing
        assert await bus.last_sequence("TEST") == 1


async def test_keys_that_ended_while_a_watch_was_cut_off_are_reported(
    server: EmbeddedServer, proxy: Proxy
) -> None:
    async with NatsBus(server.url) as bus, NatsBus(proxy.url) as far:
        keys = bus.keys("kv_test")
        for key in ("kept", "changed", "deleted", "purged"):
            await keys.put(key, b"1")
        changes = Collected[KeyChange]()
        await far.keys("kv_test").watch(changes)
        proxy.refuse()
        await keys.put("changed", b"2")
        await keys.delete("deleted")
        # as if its mark had gone as well
        await bus._connection.call(
            "purge",
            lambda client: client.jsm().purge_stream("KV_kv_test", subject="$KV.kv_test.purged"),
        )
        await keys.put("fresh", b"1")
        proxy.restore()
        later = (await changes.count(8))[4:]
        assert {(c.key, c.reason, c.value) for c in later} == {
            ("changed", "put", b"2"),
            ("deleted", "deleted", None),
            ("fresh", "put", b"1"),
            ("purged", "expired", None),
        }


async def test_a_lease_outlives_a_broker_that_was_away_for_longer_than_its_time(
    server: EmbeddedServer,
) -> None:
    changes, fenced = Collected[LeaseChange](), Collected[Exception]()
    async with NatsBus(server.url) as bus, NatsBus(server.url) as far:
        await watch_leases(far.keys("kv_leases"), changes)
        keeper = LeaseKeeper(bus.keys("kv_leases"), W1, 5, fenced, ttl_seconds=1.0)
        async with keeper:
            await changes.count(2)
            await server.kill()
            num_changes = len(changes.items)
            await asyncio.sleep(1.2)  # the broker's clock has to pass the lease's end
            await server.restart()
            await changes.until(lambda items: "alive" in [c.kind for c in items[num_changes:]])
        await changes.until(lambda items: items[-1].kind == "released")
    assert {change.epoch for change in changes.items} == {5}
    assert fenced.items == []
