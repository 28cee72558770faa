"""What every bus promises: order, holes, ranges, requests."""

import asyncio
import time
from collections.abc import Callable

import pytest

from kvatlas.events.bus import Bus, Message, StreamDifference
from kvatlas.schemas.errors import (
    BusUnavailable,
    InvalidSubject,
    MessageTooLarge,
    NoResponder,
    RequestFailed,
    RequestTimedOut,
    StreamRefused,
    UnknownDecision,
)
from testkit.bus import Collected, a_stream
from testkit.waiting import until

Connect = Callable[[], Bus]


async def publish(bus: Bus, count: int, subject: str = "test.a", first: int = 1) -> None:
    publisher = bus.publisher("TEST")
    for number in range(first, first + count):
        await publisher.publish(subject, b"%d" % number)
    await publisher.flush()


async def never(payload: bytes) -> bytes:
    await asyncio.Event().wait()
    return payload


def payloads(messages: list[Message]) -> list[int]:
    return [int(message.payload) for message in messages]


async def test_declaring_again_changes_nothing_and_reports_nothing(bus: Bus) -> None:
    assert await bus.declare_stream(a_stream()) == ()
    await publish(bus, 1)
    assert await bus.declare_stream(a_stream()) == ()
    assert await bus.last_sequence("TEST") == 1


async def test_other_limits_are_reported_and_left_alone(bus: Bus) -> None:
    await bus.declare_stream(a_stream(max_bytes=1 << 20))
    (difference,) = await bus.declare_stream(a_stream(max_bytes=2 << 20))
    assert difference == StreamDifference("TEST", "max_bytes", str(2 << 20), str(1 << 20))
    assert await bus.declare_stream(a_stream(max_bytes=1 << 20)) == ()


async def test_a_follower_gets_what_was_there_and_what_comes(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    await publish(bus, 3)
    got = Collected[Message]()
    await bus.follow("TEST", 1, got)
    await publish(bus, 3, first=4)
    messages = await got.count(6)
    assert payloads(messages) == [1, 2, 3, 4, 5, 6]
    assert [message.stream_sequence for message in messages] == [1, 2, 3, 4, 5, 6]
    assert {message.subject for message in messages} == {"test.a"}


async def test_broker_times_do_not_fall(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    await publish(bus, 20)
    got = Collected[Message]()
    await bus.follow("TEST", 1, got)
    times = [message.broker_ns for message in await got.count(20)]
    assert times == sorted(times)
    assert times[0] > 1_500_000_000 * 10**9


async def test_the_time_at_the_broker_is_that_of_its_messages(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    before_ns = await now_at(bus)
    await publish(bus, 1)
    (message,) = [each async for each in bus.read_range("TEST", 1, 1)]
    slack_ns = 10**9  # half of an exchange with a broker that waits for a busy machine
    assert before_ns - slack_ns <= message.broker_ns <= await now_at(bus) + slack_ns


async def now_at(bus: Bus) -> int:
    await bus.last_sequence("TEST")
    assert bus.clock_offset_ns is not None
    return time.monotonic_ns() + bus.clock_offset_ns


async def test_a_follower_starts_where_it_is_told(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    await publish(bus, 10)
    got = Collected[Message]()
    await bus.follow("TEST", 8, got)
    assert payloads(await got.count(3)) == [8, 9, 10]


async def test_several_followers_get_everything_each(connect: Connect) -> None:
    async with connect() as one, connect() as other:
        await one.declare_stream(a_stream())
        collected = [Collected[Message]() for _ in range(3)]
        await one.follow("TEST", 1, collected[0])
        await one.follow("TEST", 1, collected[1])
        await other.follow("TEST", 1, collected[2])
        await publish(one, 50)
        for got in collected:
            assert payloads(await got.count(50)) == list(range(1, 51))


async def test_a_pattern_takes_a_subset_in_order(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    holes = Collected[tuple[int, int]]()
    got = Collected[Message]()
    for number in range(1, 11):
        await publish(bus, 1, subject=f"test.{'ab'[number % 2]}.x", first=number)
    await bus.follow("TEST", 1, got, lambda *hole: holes(hole), subjects="test.b.*")
    await publish(bus, 1, subject="test.b.y", first=11)
    assert payloads(await got.count(6)) == [1, 3, 5, 7, 9, 11]
    assert holes.items == []


async def test_what_the_stream_no_longer_has_is_told_as_a_hole(bus: Bus) -> None:
    await bus.declare_stream(a_stream(max_bytes=10_000))
    publisher = bus.publisher("TEST")
    for _ in range(40):
        await publisher.publish("test.a", bytes(1000))
    await publisher.flush()
    first = await bus.first_sequence("TEST")
    assert first > 1
    holes, got = Collected[tuple[int, int]](), Collected[Message]()
    await bus.follow("TEST", 1, got, lambda *hole: holes(hole))
    messages = await got.count(41 - first)
    assert holes.items == [(1, first)]
    assert [message.stream_sequence for message in messages] == list(range(first, 41))


async def test_a_limit_a_subject_keeps_its_newest_messages(bus: Bus) -> None:
    spec = a_stream(max_messages_per_subject=2)
    await bus.declare_stream(spec)
    for number in range(1, 10):
        await publish(bus, 1, subject=f"test.{'abc'[number % 3]}", first=number)
    await publish(bus, 300, subject="test.a", first=10)
    kept = [4, 5, 7, 8, 308, 309]
    got = Collected[Message]()
    await bus.follow("TEST", 1, got)
    assert payloads(await got.count(6)) == kept
    assert payloads([message async for message in bus.read_range("TEST", 1, 999)]) == kept
    assert (await bus.first_sequence("TEST"), await bus.last_sequence("TEST")) == (4, 309)
    assert await bus.declare_stream(spec) == ()
    (difference,) = await bus.declare_stream(a_stream())
    assert difference.found == "2"


async def test_nothing_comes_after_close(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    got, other = Collected[Message](), Collected[Message]()
    subscription = await bus.follow("TEST", 1, got)
    await publish(bus, 1)
    await got.count(1)
    await subscription.close()
    await subscription.close()
    await publish(bus, 1, first=2)
    await bus.follow("TEST", 1, other)
    await other.count(2)
    assert payloads(got.items) == [1]


async def test_following_what_is_no_stream_is_refused(bus: Bus) -> None:
    with pytest.raises(StreamRefused):
        await bus.follow("NONE", 1, Collected[Message]())


async def test_a_payload_of_megabytes_arrives_whole(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    payload = bytes(range(256)) * (4 << 12)
    publisher = bus.publisher("TEST")
    await publisher.publish("test.a", payload)
    await publisher.publish("test.a", b"")
    await publisher.flush()
    got = Collected[Message]()
    await bus.follow("TEST", 1, got)
    assert [message.payload for message in await got.count(2)] == [payload, b""]


async def test_a_payload_over_the_limit_is_refused_and_harms_nobody(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    publisher = bus.publisher("TEST")
    await publisher.publish("test.a", b"1")
    with pytest.raises(MessageTooLarge) as refused:
        await publisher.publish("test.a", bytes((8 << 20) + 1))
    assert (refused.value.num_bytes, refused.value.limit) == ((8 << 20) + 1, 8 << 20)
    await publisher.publish("test.a", b"2")
    await publisher.flush()
    assert await bus.last_sequence("TEST") == 2


async def test_a_subject_that_cannot_be_published_to_is_invalid(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    publisher = bus.publisher("TEST")
    for subject in ("", "test.a b", "test.*", "test.>", "test.a\r\nPUB x 0"):
        with pytest.raises(InvalidSubject):
            await publisher.publish(subject, b"")


async def test_flush_leaves_nothing_unacknowledged(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    publisher = bus.publisher("TEST")
    for _ in range(3000):
        await publisher.publish("test.a", b"12345678")
    await publisher.flush()
    assert (publisher.num_unacked, publisher.unacked_bytes) == (0, 0)
    assert await bus.last_sequence("TEST") == 3000


async def test_sequences_of_an_empty_and_of_a_filled_stream(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    assert (await bus.first_sequence("TEST"), await bus.last_sequence("TEST")) == (1, 0)
    await publish(bus, 2)
    assert (await bus.first_sequence("TEST"), await bus.last_sequence("TEST")) == (1, 2)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 3, [1, 2, 3]),
        (0, 1, [1]),
        (2499, 9999, [2499, 2500]),
        (1, 2500, list(range(1, 2501))),
        (3, 2, []),
        (2501, 9999, []),
    ],
)
async def test_a_range_is_read_and_ends(
    bus: Bus, first: int, last: int, expected: list[int]
) -> None:
    await bus.declare_stream(a_stream())
    await publish(bus, 2500)
    got = [message async for message in bus.read_range("TEST", first, last)]
    assert payloads(got) == expected


async def test_a_range_of_an_empty_stream_is_empty(bus: Bus) -> None:
    await bus.declare_stream(a_stream())
    assert [message async for message in bus.read_range("TEST", 1, 10)] == []


async def test_a_request_is_answered(connect: Connect) -> None:
    async def double(payload: bytes) -> bytes:
        return payload * 2

    async with connect() as server, connect() as client:
        await server.serve("lease.a", double)
        assert await client.request("lease.a", b"ab", 30.0) == b"abab"
        assert await client.request("lease.a", b"", 30.0) == b""


async def test_a_handler_that_raises_answers_and_goes_on(connect: Connect) -> None:
    async def fussy(payload: bytes) -> bytes:
        if payload == b"bad":
            raise ValueError("no bad ones")
        return payload

    async with connect() as server, connect() as client:
        await server.serve("lease.a", fussy)
        with pytest.raises(RequestFailed, match=r"lease.a: ValueError: no bad ones"):
            await client.request("lease.a", b"bad", 30.0)
        assert await client.request("lease.a", b"good", 30.0) == b"good"


async def test_a_request_that_is_refused_leaves_no_line_in_the_log(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(payload: bytes) -> bytes:
        raise UnknownDecision(payload.decode())

    async with connect() as server, connect() as client:
        await server.serve("lease.a", refuse)
        caplog.clear()
        for _ in range(3):
            with pytest.raises(RequestFailed, match="UnknownDecision: no decision 'd1'"):
                await client.request("lease.a", b"d1", 30.0)
    assert [each for each in caplog.records if each.levelname != "DEBUG"] == []


async def test_requests_are_answered_side_by_side(connect: Connect) -> None:
    gate = asyncio.Event()

    async def wait_for_last(payload: bytes) -> bytes:
        if payload == b"last":
            gate.set()
        await gate.wait()
        return payload

    async with connect() as server, connect() as client:
        await server.serve("lease.a", wait_for_last)
        asked = [b"1", b"2", b"3", b"last"]
        requests = [client.request("lease.a", payload, 30.0) for payload in asked]
        assert await asyncio.gather(*requests) == asked


async def test_a_request_that_nobody_serves_fails_at_once(bus: Bus) -> None:
    with pytest.raises(NoResponder):
        await bus.request("lease.nobody", b"", 30.0)


async def test_a_closed_service_answers_no_more(connect: Connect) -> None:
    async def echo(payload: bytes) -> bytes:
        return payload

    async with connect() as bus:
        service = await bus.serve("lease.a", echo)
        assert await bus.request("lease.a", b"1", 30.0) == b"1"
        await service.close()
        with pytest.raises(NoResponder):
            await bus.request("lease.a", b"2", 30.0)


async def test_a_request_without_an_answer_times_out(connect: Connect) -> None:
    async with connect() as bus:
        await bus.serve("lease.a", never)
        with pytest.raises(RequestTimedOut):
            await bus.request("lease.a", b"", 0.05)


async def test_connected_tells_the_state(connect: Connect) -> None:
    bus = connect()
    states = [bus.connected]
    async with bus:
        states.append(bus.connected)
    states.append(bus.connected)
    assert states == [False, True, False]


async def test_a_closed_bus_refuses_work_and_leaves_no_task(connect: Connect) -> None:
    before = asyncio.all_tasks()
    async with connect() as bus:
        await bus.declare_stream(a_stream())
        publisher = bus.publisher("TEST")
        await publisher.publish("test.a", b"1")
        await bus.follow("TEST", 1, Collected[Message]())
        await bus.keys("kv_test").watch(lambda _: None)
    assert asyncio.all_tasks() == before
    with pytest.raises(BusUnavailable):
        await publisher.publish("test.a", b"2")
    with pytest.raises(BusUnavailable):
        bus.publisher("TEST")
    with pytest.raises(BusUnavailable):
        await bus.follow("TEST", 1, Collected[Message]())
    with pytest.raises(BusUnavailable):
        await bus.serve("lease.a", never)
    with pytest.raises(BusUnavailable):
        await bus.keys("kv_test").watch(lambda _: None)
    with pytest.raises(BusUnavailable):
        await bus.last_sequence("TEST")
    with pytest.raises(BusUnavailable):
        await bus.keys("kv_test").get("a")


async def test_what_is_announced_reaches_all_who_listen_in_order(connect: Connect) -> None:
    async with connect() as one, connect() as other:
        heard: list[bytes] = []
        also: list[bytes] = []
        await one.listen("siblings", heard.append)
        listener = await other.listen("siblings", also.append)
        for number in range(20):
            await one.announce("siblings", b"%d" % number)
        await until(lambda: len(heard) == 20 and len(also) == 20)
        assert heard == also == [b"%d" % number for number in range(20)]
        await listener.close()
        await listener.close()
        await one.announce("siblings", b"more")
        await one.announce("nobody", b"")
        await until(lambda: heard[-1] == b"more")
        assert also[-1] == b"19"


async def test_without_a_broker_nothing_is_announced(connect: Connect) -> None:
    bus = connect()
    async with bus:
        pass
    with pytest.raises(BusUnavailable):
        await bus.announce("siblings", b"")
