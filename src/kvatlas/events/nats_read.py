"""Reading a range of a stream: batches that we ask for, so a slow reader holds one batch only."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from secrets import token_hex

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from kvatlas.events.bus import Message
from kvatlas.events.nats_connection import NatsConnection
from kvatlas.events.nats_consumer import SWEEP_SECONDS, parse_reply
from kvatlas.schemas.errors import BusUnavailable

BATCH_MESSAGES = 1000
#: more than the largest message that our brokers take (8 MB), or that one is never sent
BATCH_BYTES = 16 << 20
#: consumers that are tried when the node of the one before is behind
TRIES, RETRY_SECONDS = 20, 0.2

#: no more messages, and a next one that would exceed the batch; 503 is a consumer that is not ready
ORDINARY_ENDS = ("404", "408", "409")

_ask = msgspec.json.encode({"batch": BATCH_MESSAGES, "max_bytes": BATCH_BYTES, "no_wait": True})


async def read_range(
    connection: NatsConnection, stream_name: str, first: int, last: int
) -> AsyncGenerator[Message, None]:
    """Yield the kept messages of a range; see `Bus.read_range`."""
    next_sequence = max(1, first)
    for tries_left in reversed(range(TRIES)):
        part = _Part(connection, stream_name, next_sequence)
        async with aclosing(part.read(last)) as messages:
            async for message in messages:
                next_sequence = message.stream_sequence + 1
                yield message
        if next_sequence > last or not await part.ended_early(next_sequence):
            return
        if tries_left:
            await asyncio.sleep(RETRY_SECONDS)
    raise BusUnavailable(f"the nodes that we were given are behind {stream_name}")


class _Part:
    """What one consumer, on one node of a cluster, has of a range."""

    def __init__(self, connection: NatsConnection, stream_name: str, first: int) -> None:
        self._connection, self._stream_name = connection, stream_name
        self._first = first
        self._consumer = f"kvatlas-{token_hex(8)}"
        self._made_by: Client | None = None
        #: the node of a cluster that the consumer is on
        self._node: str | None = None

    async def read(self, last: int) -> AsyncGenerator[Message, None]:
        """Yield up to `last`, or what the node has."""
        next_sequence, number = self._first, 1
        while next_sequence <= last:
            batch = await self._connection.call(f"read {self._stream_name}", self._next_batch)
            for message, message_number, num_pending in batch.messages:
                if message_number != number:
                    text = f"a message of {self._stream_name} was lost on its way"
                    raise BusUnavailable(text)
                number += 1
                if message.stream_sequence > last:
                    return
                next_sequence = message.stream_sequence + 1
                yield message
                if not num_pending:
                    return
            if not batch.messages:
                return

    async def ended_early(self, next_sequence: int) -> bool:
        """Say whether the stream has more than the node had, which is behind."""
        if self._node is None:
            return False
        info = await self._connection.call(
            f"look at {self._stream_name}",
            lambda client: client.jsm().stream_info(self._stream_name),
        )
        if info.cluster is None or info.cluster.leader is None:
            return True  # told by a node that led until now, which may be the one that is behind
        replicas = info.cluster.replicas or ()
        return info.state.last_seq >= next_sequence and any(
            replica.name == self._node and not replica.current for replica in replicas
        )

    async def _next_batch(self, client: Client) -> "_Batch":
        if self._made_by is None:
            config = _config(self._consumer, self._first)
            info = await client.jsm().add_consumer(self._stream_name, config)
            self._made_by, self._node = client, info.cluster.leader if info.cluster else None
        if client is not self._made_by:
            raise BusUnavailable("the connection was lost within a range")
        return await _read_batch(client, f"{self._stream_name}.{self._consumer}")


def _config(consumer: str, first: int) -> ConsumerConfig:
    return ConsumerConfig(
        name=consumer,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=first,
        ack_policy=AckPolicy.NONE,
        inactive_threshold=SWEEP_SECONDS,
        mem_storage=True,
        num_replicas=1,
    )


async def _read_batch(client: Client, stream_and_consumer: str) -> "_Batch":
    batch = _Batch()
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=batch.on_message)
    try:
        await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream_and_consumer}", _ask, inbox)
        await batch.is_full.wait()
    finally:
        with suppress(nats.errors.Error):
            await subscription.unsubscribe()
    if batch.refused:
        raise BusUnavailable(f"{stream_and_consumer} cannot be read: status {batch.refused}")
    return batch


class _Batch:
    """The answer to one request: messages, then a status unless the batch is full."""

    def __init__(self) -> None:
        #: (message, its number at the consumer, how many the consumer has after it)
        self.messages: list[tuple[Message, int, int]] = []
        self.is_full = asyncio.Event()
        #: the status that ended it, unless that is an ordinary end
        self.refused = ""

    async def on_message(self, message: Msg) -> None:
        if message.headers is not None and "Status" in message.headers and not message.data:
            status = message.headers["Status"]
            self.refused = "" if status in ORDINARY_ENDS else status
            self.is_full.set()
            return
        stream_sequence, number, broker_ns, num_pending = parse_reply(message.reply)
        whole = Message(stream_sequence, message.subject, message.data, broker_ns)
        self.messages.append((whole, number, num_pending))
        if not num_pending or len(self.messages) == BATCH_MESSAGES:
            self.is_full.set()
