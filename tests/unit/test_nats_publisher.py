"""The publisher and missing answers: the broker of these tests says what it is told."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.events.nats_connection import NatsConnection
from kvatlas.events.nats_publisher import NatsPublisher
from testkit.bus import eventually

START, APPEND, END = "0", "1", "3"


class ScriptedBroker:
    """A client and its connection: keeps what is published and answers when told."""

    max_payload = 1 << 20
    pending_data_size = 0

    def __init__(self) -> None:
        self.client = self
        #: (payload, reply subject) in the order in which they came
        self.got: list[tuple[bytes, str]] = []
        self._on_answer: Callable[[Msg], Awaitable[None]] | None = None

    def on_connection(self, _: Any) -> Callable[[], None]:
        return lambda: None

    on_refusal = on_connection

    def new_inbox(self) -> str:
        return "in"

    async def subscribe(self, _: str, cb: Callable[[Msg], Awaitable[None]]) -> None:
        self._on_answer = cb

    async def publish(self, _: str, payload: bytes, reply: str) -> None:
        self.got.append((payload, reply))

    async def answer(self, reply: str, text: str) -> None:
        assert self._on_answer is not None
        await self._on_answer(Msg(cast(Client, self), subject=reply, data=text.encode()))

    def of_batch(self, op: str) -> list[str]:
        """Return the reply subjects of a kind of message of batches."""
        return [reply for _, reply in self.got if reply.endswith(f".{op}.$FI")]

    async def until_batch(self, op: str) -> str:
        """Return the reply subject of the newest message of a kind, once there is one."""
        await eventually(lambda: bool(self.of_batch(op)))
        return self.of_batch(op)[-1]


@asynccontextmanager
async def a_publisher(broker: ScriptedBroker) -> AsyncIterator[NatsPublisher]:
    connection = cast(NatsConnection, broker)
    publisher = NatsPublisher(connection, "TEST", ack_seconds=0.2, busy_messages=2)
    publisher.start()
    await asyncio.sleep(0)
    try:
        yield publisher
    finally:
        await publisher.close()


async def open_batch(publisher: NatsPublisher, broker: ScriptedBroker) -> str:
    """Publish 1 and 2 one by one, then 3 and 4 in a batch; return the reply subject of 4."""
    for number in range(1, 5):
        await publisher.publish("test.a", b"%d" % number)
    for _, reply in tuple(broker.got):
        await broker.answer(reply, '{"stream":"TEST","seq":1}')
    start = await broker.until_batch(START)
    await broker.answer(start, '{"type":"ack","seq":0,"msgs":2}')
    return await broker.until_batch(APPEND)


async def test_newer_messages_wait_until_nothing_is_under_way() -> None:
    broker = ScriptedBroker()
    async with a_publisher(broker) as publisher:
        for number in range(1, 5):
            await publisher.publish("test.a", b"%d" % number)
        assert [payload for payload, _ in broker.got] == [b"1", b"2"]
        await broker.answer(broker.got[0][1], '{"stream":"TEST","seq":1}')
        assert not broker.of_batch(START)
        await broker.answer(broker.got[1][1], '{"stream":"TEST","seq":2}')
        await broker.until_batch(START)
        assert [payload for payload, _ in broker.got] == [b"1", b"2", b"3"]


async def test_an_end_without_an_answer_lets_what_waits_go_one_by_one() -> None:
    broker = ScriptedBroker()
    async with a_publisher(broker) as publisher:
        append = await open_batch(publisher, broker)
        await broker.answer(append, '{"type":"ack","seq":2,"msgs":2}')
        assert publisher.num_unacked == 0
        await broker.until_batch(END)
        await publisher.publish("test.a", b"5")
        assert broker.got[-1][0] == b""
        await eventually(lambda: broker.got[-1] == (b"5", "in.5"))
        assert publisher.num_failed_batches == 1


async def test_consent_that_never_comes_lets_all_go_one_by_one() -> None:
    broker = ScriptedBroker()
    async with a_publisher(broker) as publisher:
        for number in range(1, 6):
            await publisher.publish("test.a", b"%d" % number)
        for _, reply in tuple(broker.got):
            await broker.answer(reply, '{"stream":"TEST","seq":1}')
        await broker.until_batch(START)
        await eventually(lambda: publisher.num_failed_batches == 1)
        await eventually(lambda: broker.got[-1] == (b"5", "in.5"))
        assert broker.got[-3:] == [(b"3", "in.3"), (b"4", "in.4"), (b"5", "in.5")]


async def test_a_refusal_of_the_last_message_under_way_ends_the_draining() -> None:
    broker = ScriptedBroker()
    async with a_publisher(broker) as publisher:
        for number in range(1, 5):
            await publisher.publish("test.a", b"%d" % number)
        await broker.answer(broker.got[0][1], '{"stream":"TEST","seq":1}')
        await broker.answer(broker.got[1][1], '{"error":{"code":400,"description":"no"}}')
        async with asyncio.timeout(0.04):
            while not broker.of_batch(START):  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0)


async def test_answers_to_a_batch_that_is_over_mean_nothing() -> None:
    broker = ScriptedBroker()
    async with a_publisher(broker) as publisher:
        append = await open_batch(publisher, broker)
        await broker.answer(append, '{"error":{"code":400,"description":"batch is unknown"}}')
        assert publisher.num_unacked == 2
        await broker.answer(append, '{"stream":"TEST","seq":9,"batch":"x","count":2}')
        assert publisher.num_unacked == 2
        await eventually(lambda: broker.got[-1] == (b"4", "in.4"))
