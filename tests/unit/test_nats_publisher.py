"""The publisher and missing answers: the broker of these tests says what it is told."""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.events.nats.connection import NatsConnection
from kvatlas.events.nats.publishing.publisher import NatsPublisher
from kvatlas.schemas.errors import BusUnavailable, StreamRefused
from testkit.waiting import WAIT_SECONDS, until

START, APPEND, END = "0", "1", "3"


class ScriptedBroker:
    """A client and its connection: keeps what is published and answers when told."""

    max_payload = 1 << 20
    pending_data_size = 0

    def __init__(self) -> None:
        self.num_turns = 0
        #: (payload, reply subject) in the order in which they came
        self.got: list[tuple[bytes, str]] = []
        #: question -> how often it was said to be unanswered since it was answered
        self.unanswered_looks: dict[str, int] = defaultdict(int)
        self._on_connection: list[Callable[[bool], None]] = []
        self._on_answer: Callable[[Msg], Awaitable[None]] | None = None

    @property
    def client(self) -> "ScriptedBroker":
        """Asked for once in each turn of the publisher's task."""
        self.num_turns += 1
        return self

    def on_connection(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        self._on_connection.append(callback)
        return lambda: None

    def on_refusal(self, _: Any) -> Callable[[], None]:
        return lambda: None

    def reconnect(self) -> None:
        """Lose the connection and have another one at once."""
        for callback in self._on_connection:
            callback(True)

    def answered(self, what: str) -> None:
        self.unanswered_looks[what] = 0

    def unanswered(self, what: str, _: float) -> None:
        self.unanswered_looks[what] += 1

    async def call(self, what: str, *_: Any) -> None:
        raise BusUnavailable(what)

    def new_inbox(self) -> str:
        return "in"

    async def subscribe(self, _: str, cb: Callable[[Msg], Awaitable[None]]) -> None:
        self._on_answer = cb

    async def publish(self, _: str, payload: bytes, reply: str) -> None:
        self.got.append((payload, reply))

    async def answer(self, reply: str, text: str) -> None:
        assert self._on_answer is not None
        await self._on_answer(Msg(cast(Client, self), subject=reply, data=text.encode()))

    async def store(self, *numbers: int) -> None:
        """Answer single messages as stored."""
        for number in numbers:
            await self.answer(f"in.{number}", '{"stream":"TEST","seq":1}')

    async def lose_leader(self, *numbers: int) -> None:
        """Answer single messages as a node does that knows nobody who stores them."""
        for number in numbers:
            await self.answer(f"in.{number}", "")

    @property
    def sent(self) -> list[int]:
        """The numbers of what came, as the tests name their messages."""
        return [int(payload) for payload, _ in self.got]

    def of_batch(self, op: str) -> list[str]:
        """Return the reply subjects of a kind of message of batches."""
        return [reply for _, reply in self.got if reply.endswith(f".{op}.$FI")]

    async def until_batch(self, op: str) -> str:
        """Return the reply subject of the newest message of a kind, once there is one."""
        await until(lambda: bool(self.of_batch(op)))
        return self.of_batch(op)[-1]


@asynccontextmanager
async def a_publisher(
    broker: ScriptedBroker, ack_seconds: float = 0.2, busy_messages: int = 2
) -> AsyncIterator[NatsPublisher]:
    connection = cast(NatsConnection, broker)
    publisher = NatsPublisher(
        connection, "TEST", ack_seconds=ack_seconds, busy_messages=busy_messages
    )
    publisher.start()
    await asyncio.sleep(0)
    try:
        yield publisher
    finally:
        await publisher.close()


async def turns_of_the_loop() -> None:
    """Let tasks that have been woken do what they can, however long the machine takes."""
    for _ in range(100):
        await asyncio.sleep(0)


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
    async with a_publisher(broker, ack_seconds=60.0) as publisher:
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
        await until(lambda: broker.got[-1] == (b"5", "in.5"))
        assert publisher.num_failed_batches == 1


async def test_consent_that_never_comes_lets_all_go_one_by_one() -> None:
    broker = ScriptedBroker()
    async with a_publisher(broker) as publisher:
        for number in range(1, 6):
            await publisher.publish("test.a", b"%d" % number)
        for _, reply in tuple(broker.got):
            await broker.answer(reply, '{"stream":"TEST","seq":1}')
        await broker.until_batch(START)
        await until(lambda: publisher.num_failed_batches == 1)
        await until(lambda: broker.got[-1] == (b"3", "in.3"))
        await broker.store(3)
        await until(lambda: broker.got[-1] == (b"5", "in.5"))
        assert broker.got[-3:] == [(b"3", "in.3"), (b"4", "in.4"), (b"5", "in.5")]


async def test_a_refusal_of_the_last_message_under_way_ends_the_draining() -> None:
    broker = ScriptedBroker()
    async with a_publisher(broker, ack_seconds=60.0) as publisher:
        for number in range(1, 5):
            await publisher.publish("test.a", b"%d" % number)
        await broker.answer(broker.got[0][1], '{"stream":"TEST","seq":1}')
        await turns_of_the_loop()
        await broker.answer(broker.got[1][1], '{"error":{"code":400,"description":"no"}}')
        await turns_of_the_loop()  # at once, not when it is looked next
        assert broker.of_batch(START)


async def test_answers_to_a_batch_that_is_over_mean_nothing() -> None:
    broker = ScriptedBroker()
    async with a_publisher(broker) as publisher:
        append = await open_batch(publisher, broker)
        await broker.answer(append, '{"error":{"code":400,"description":"batch is unknown"}}')
        assert publisher.num_unacked == 2
        await broker.answer(append, '{"stream":"TEST","seq":9,"batch":"x","count":2}')
        assert publisher.num_unacked == 2
        await until(lambda: broker.got[-1] == (b"3", "in.3"))
        await broker.store(3)
        await until(lambda: broker.got[-1] == (b"4", "in.4"))


# --- order in trouble, see window.py --------------------------------------------------------


def single(
    broker: ScriptedBroker, ack_seconds: float = 60.0
) -> AbstractAsyncContextManager[NatsPublisher]:
    """A publisher without batches, which takes an answer for lost only after long."""
    return a_publisher(broker, ack_seconds, busy_messages=0)


async def publish(publisher: NatsPublisher, *numbers: int, subject: str = "test.a") -> None:
    for number in numbers:
        await publisher.publish(subject, b"%d" % number)


async def until_quiet(publisher: NatsPublisher, broker: ScriptedBroker, first: int) -> int:
    """Publish on until nothing is sent any more; return the first number that was held back."""
    async with asyncio.timeout(WAIT_SECONDS):
        for number in itertools.count(first):
            await publish(publisher, number)
            if broker.sent[-1] != number:
                return number
            await asyncio.sleep(0.01)
    raise AssertionError


async def test_after_a_while_without_an_answer_nothing_newer_is_sent() -> None:
    broker = ScriptedBroker()
    async with single(broker) as publisher:
        held = await until_quiet(publisher, broker, 1)
        await publish(publisher, 1, subject="test.other")
        assert broker.sent == [*range(1, held), 1]


async def test_an_answer_ends_the_quiet_and_nothing_is_repeated() -> None:
    broker = ScriptedBroker()
    async with single(broker) as publisher:
        held = await until_quiet(publisher, broker, 1)
        await publish(publisher, held + 1)
        await broker.store(1)
        await until(lambda: broker.sent[-1] == held + 1)
        await publish(publisher, held + 2)
        assert broker.sent == list(range(1, held + 3))
        assert publisher.num_resent == 0


async def test_an_answer_to_a_newer_message_in_the_quiet_has_the_older_one_sent_again() -> None:
    """It was lost, else it had been answered before."""
    broker = ScriptedBroker()
    async with single(broker) as publisher:
        held = await until_quiet(publisher, broker, 1)
        await broker.store(2)
        await until(lambda: broker.sent[-1] == 1)
        await broker.store(*range(3, held), 1)
        await until(lambda: broker.sent[-1] == held)
        assert broker.sent == [*range(1, held), 1, held]


async def test_after_an_error_the_oldest_goes_again_alone_until_it_is_stored() -> None:
    broker = ScriptedBroker()
    async with single(broker) as publisher:
        await publish(publisher, 1, 2, 3)
        await broker.lose_leader(1, 2, 3)
        await publish(publisher, 4)
        for tries in (1, 2):
            await until(lambda tries=tries: broker.sent[3:] == [1] * tries)  # type: ignore[misc]
            await broker.lose_leader(1)
        await until(lambda: broker.sent[3:] == [1, 1, 1])
        await publish(publisher, 5)
        await broker.store(3)  # of no help to its elders
        await asyncio.sleep(0.02)
        assert broker.sent[6:] == []
        await broker.store(1)
        await until(lambda: broker.sent[6:] == [2, 4, 5])
        await publish(publisher, 6)
        assert broker.sent[9:] == [6]


async def test_old_errors_mean_nothing_once_the_oldest_is_on_its_way_again() -> None:
    broker = ScriptedBroker()
    async with single(broker) as publisher:
        await publish(publisher, 1, 2, 3)
        await broker.lose_leader(1)
        await until(lambda: broker.sent[3:] == [1])
        await broker.lose_leader(2, 3)
        await broker.store(1)
        await until(lambda: broker.sent[3:] == [1, 2, 3])


async def test_an_answer_that_never_comes_has_the_oldest_sent_again_and_again() -> None:
    broker = ScriptedBroker()
    async with single(broker, ack_seconds=0.2) as publisher:
        await publish(publisher, 1, 2)
        await until(lambda: broker.sent[2:] == [1, 1])
        await broker.store(2)
        assert publisher.num_unacked == 1
        await broker.store(1)
        assert publisher.num_unacked == 0


async def test_a_new_connection_gets_the_oldest_of_each_subject_first() -> None:
    broker = ScriptedBroker()
    async with single(broker) as publisher:
        await publish(publisher, 1, 3)
        await publish(publisher, 2, 4, subject="test.b")
        broker.reconnect()
        await until(lambda: broker.sent[4:] == [1, 2])
        await publish(publisher, 5)
        await publish(publisher, 6, subject="test.new")
        assert broker.sent[4:] == [1, 2, 6]
        await broker.store(3)  # the number of test.b's oldest
        await until(lambda: broker.sent[7:] == [4])
        await broker.store(1)
        await until(lambda: broker.sent[8:] == [3, 5])


async def test_a_refusal_of_the_oldest_lets_the_rest_go() -> None:
    broker = ScriptedBroker()
    async with single(broker) as publisher:
        await publish(publisher, 1, 2)
        await broker.lose_leader(1)
        await until(lambda: broker.sent[2:] == [1])
        await broker.answer("in.1", '{"error":{"code":400,"description":"no"}}')
        await until(lambda: broker.sent[2:] == [1, 2])
        await broker.store(2)
        with pytest.raises(StreamRefused, match="no"):
            await publisher.flush()


async def test_silence_is_counted_while_something_waits_for_an_answer() -> None:
    broker = ScriptedBroker()
    async with single(broker, ack_seconds=0.2) as publisher:
        await publish(publisher, 1)
        await until(lambda: [*broker.unanswered_looks.values()] == [5])
        await broker.store(1)
        await until(lambda: [*broker.unanswered_looks.values()] == [0])


async def test_an_answer_in_the_pause_before_a_repetition_leaves_nothing_to_do() -> None:
    broker = ScriptedBroker()
    async with single(broker) as publisher:
        await publish(publisher, 1)
        await broker.lose_leader(1)
        await broker.store(1)
        turns = broker.num_turns
        await asyncio.sleep(0.2)
        assert broker.num_turns < turns + 10
        assert broker.sent == [1]
