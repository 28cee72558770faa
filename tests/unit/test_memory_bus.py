"""The faults of the memory broker: each happens when it is asked for, and only then."""

import asyncio

import pytest

from kvatlas.events.bus import Message, Publisher
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.memory.stream import Faults
from kvatlas.events.streams import (
    KV_DEAD_LETTERS,
    KV_DECISIONS,
    KV_EVENTS,
    dead_letters_stream,
    decisions_stream,
    events_stream,
    subject_matches,
)
from kvatlas.schemas.errors import BusUnavailable, StreamRefused
from testkit.bus import Collected, a_stream


async def publish(bus: MemoryBus, *payloads: bytes) -> None:
    publisher = bus.publisher("TEST")
    for payload in payloads:
        await publisher.publish("test.a", payload)


async def payloads(bus: MemoryBus) -> list[bytes]:
    return [message.payload async for message in bus.read_range("TEST", 1, 1000)]


async def test_a_dropped_message_is_a_hole_in_the_stream() -> None:
    broker = MemoryBroker()
    got, holes = Collected[Message](), Collected[tuple[int, int]]()
    async with broker.connect() as bus:
        await bus.declare_stream(a_stream())
        await bus.follow("TEST", 1, got, lambda *hole: holes(hole))
        await publish(bus, b"1")
        broker.faults.drop_next = 2
        await publish(bus, b"2", b"3", b"4")
        assert [m.payload for m in await got.count(2)] == [b"1", b"4"]
        assert holes.items == [(2, 4)]
    assert broker.faults == Faults()


async def test_a_duplicated_message_is_stored_twice() -> None:
    broker = MemoryBroker()
    async with broker.connect() as bus:
        await bus.declare_stream(a_stream())
        broker.faults.duplicate_next = 1
        await publish(bus, b"1", b"2")
        assert await payloads(bus) == [b"1", b"1", b"2"]


async def test_a_delayed_message_lands_after_its_successor() -> None:
    broker = MemoryBroker()
    async with broker.connect() as bus:
        await bus.declare_stream(a_stream())
        broker.faults.delay_next = 2
        await publish(bus, b"1", b"2")
        assert await payloads(bus) == []
        await publish(bus, b"3")
        assert await payloads(bus) == [b"3", b"1", b"2"]


async def test_flush_waits_for_what_is_delayed() -> None:
    broker = MemoryBroker()
    async with broker.connect() as bus:
        await bus.declare_stream(a_stream())
        broker.faults.delay_next = 1
        publisher = bus.publisher("TEST")
        await publisher.publish("test.a", b"1")
        flushing = asyncio.create_task(publisher.flush())
        done, _ = await asyncio.wait((flushing,), timeout=0.01)
        assert not done
        broker.release()
        await flushing
        assert await payloads(bus) == [b"1"]


async def test_a_cut_connection_keeps_what_it_accepts_until_it_is_restored() -> None:
    broker = MemoryBroker()
    states: list[bool] = []
    got = Collected[Message]()
    async with broker.connect() as bus, broker.connect() as far:
        bus.on_connection(states.append)
        await bus.declare_stream(a_stream())
        await far.follow("TEST", 1, got)
        bus.cut()
        publisher = bus.publisher("TEST")
        await publisher.publish("test.a", b"1")
        assert publisher.num_unacked == 1
        with pytest.raises(BusUnavailable):
            await bus.last_sequence("TEST")
        bus.restore()
        await publisher.flush()
        assert [m.payload for m in await got.count(1)] == [b"1"]
    assert states == [False, True]


async def test_a_cut_follower_goes_on_where_it_was() -> None:
    broker = MemoryBroker()
    got = Collected[Message]()
    async with broker.connect() as bus, broker.connect() as far:
        await bus.declare_stream(a_stream())
        await far.follow("TEST", 1, got)
        await publish(bus, b"1")
        await got.count(1)
        far.cut()
        await publish(bus, b"2", b"3")
        far.restore()
        assert [m.payload for m in await got.count(3)] == [b"1", b"2", b"3"]


async def test_a_full_window_holds_back_while_the_broker_is_away() -> None:
    async with MemoryBroker().connect() as bus:
        await bus.declare_stream(a_stream())
        bus.cut()
        publisher = bus.publisher("TEST")
        filling = asyncio.create_task(_fill(publisher))
        done, _ = await asyncio.wait((filling,), timeout=0.05)
        assert not done
        assert publisher.num_unacked == 1024
        bus.restore()
        await filling
        await publisher.flush()
        assert await bus.last_sequence("TEST") == 1100


async def _fill(publisher: Publisher) -> None:
    for _ in range(1100):
        await publisher.publish("test.a", b"")


async def test_old_messages_go_with_the_clock() -> None:
    now = 0.0
    broker = MemoryBroker(clock=lambda: now)
    async with broker.connect() as bus:
        await bus.declare_stream(a_stream(max_age_seconds=10.0))
        await publish(bus, b"1")
        now = 8.0
        await publish(bus, b"2")
        now = 11.0
        broker.expire()
        assert await payloads(bus) == [b"2"]
        assert await bus.first_sequence("TEST") == 2


async def test_a_purged_stream_starts_later() -> None:
    broker = MemoryBroker()
    async with broker.connect() as bus:
        await bus.declare_stream(a_stream())
        await publish(bus, b"1", b"2", b"3")
        broker.purge("TEST", before_sequence=3)
        assert await payloads(bus) == [b"3"]


async def test_a_subject_outside_the_stream_is_refused() -> None:
    async with MemoryBroker().connect() as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        await publisher.publish("elsewhere", b"")
        with pytest.raises(StreamRefused, match="does not store elsewhere"):
            await publisher.flush()


def test_our_streams_store_our_subjects_and_share_none() -> None:
    specs = (events_stream(), decisions_stream(), dead_letters_stream())
    assert [spec.name for spec in specs] == [KV_EVENTS, KV_DECISIONS, KV_DEAD_LETTERS]
    for subject in ("kv.events.m.w.0", "kv.control.w.0", "kv.decisions.m", "kv.dead.w.1"):
        stored = [
            spec.name
            for spec in specs
            if any(subject_matches(pattern, subject) for pattern in spec.subjects)
        ]
        assert len(stored) == 1


@pytest.mark.parametrize(
    ("pattern", "subject", "matches"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*.c", "a.b.c", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.*.>", "a.b", False),
    ],
)
def test_patterns_match_as_the_broker_does(pattern: str, subject: str, matches: bool) -> None:
    assert subject_matches(pattern, subject) == matches
