"""Reading a range of a stream: batches that we ask for, so a slow reader holds one batch only.

In a cluster a consumer is on one node, which may have less than the stream (behind, full), or go
away. So the end of the range is asked of the stream's leader, and where a consumer ends before it
another one goes on, on a node of the cluster's choice, until all is read that is kept.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from secrets import token_hex

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, StreamState

from kvatlas.events.bus import Message
from kvatlas.events.nats.connection import EXCHANGE_SECONDS, NatsConnection
from kvatlas.events.nats.quorum import patient_info
from kvatlas.events.nats.reading.consumer import SWEEP_SECONDS, parse_reply
from kvatlas.schemas.errors import BusUnavailable, RequestTimedOut

BATCH_MESSAGES = 1000
#: more than the largest message that our brokers take (8 MB), or that one is never sent
BATCH_BYTES = 16 << 20
#: a cluster whose consumers bring nothing new for so long is given up, an election being shorter
STALLED_SECONDS, RETRY_SECONDS = 10.0, 0.2
#: a consumer that is to be made on a node that cannot is never answered: ask for another one soon
FIRST_PATIENCE_SECONDS = 1.0

#: no more messages; 503 and most of 409 are about the consumer, which is gone or not ready
ORDINARY_ENDS = ("404", "408")
#: a 409 that is about the batch: the next message would exceed it
BATCH_IS_FULL = "Message Size Exceeds MaxBytes"

_ask = msgspec.json.encode({"batch": BATCH_MESSAGES, "max_bytes": BATCH_BYTES, "no_wait": True})


async def read_range(
    connection: NatsConnection, stream_name: str, first: int, last: int
) -> AsyncGenerator[Message, None]:
    """Yield the kept messages of a range, all of them or raise; see `Bus.read_range`."""
    clock = asyncio.get_running_loop().time
    next_sequence, end = max(1, first), 0
    stalled_at = clock() + STALLED_SECONDS
    while next_sequence <= last:
        part = await _opened(connection, stream_name, next_sequence)
        if part.is_in_cluster and not end:
            # Not before there is a consumer: making one takes a majority of the cluster.
            end = min(last, (await _state(connection, stream_name)).last_seq)
        async with aclosing(part.read(last)) as messages:
            async for message in messages:
                next_sequence = message.stream_sequence + 1
                stalled_at = clock() + STALLED_SECONDS
                yield message
        if not part.ended_because:
            if not part.is_in_cluster or next_sequence > end:
                return
            state = await _state(connection, stream_name, with_deleted=True)
            if not _keeps(state, next_sequence, end):
                return
        if clock() >= stalled_at:
            text = part.ended_because or "the nodes that we were given are behind"
            raise BusUnavailable(f"{stream_name} cannot be read beyond {next_sequence - 1}: {text}")
        await asyncio.sleep(RETRY_SECONDS)


async def _opened(connection: NatsConnection, stream_name: str, first: int) -> "_Part":
    patience = FIRST_PATIENCE_SECONDS
    while True:
        part = _Part(connection, stream_name, first)
        try:
            await part.open(patience)
        except RequestTimedOut:
            if patience >= EXCHANGE_SECONDS:
                raise
            patience = min(2 * patience, EXCHANGE_SECONDS)
        else:
            return part


async def _state(
    connection: NatsConnection, stream_name: str, *, with_deleted: bool = False
) -> StreamState:
    info = await connection.call(
        f"look at {stream_name}",
        lambda client: patient_info(client, stream_name, with_deleted=with_deleted),
    )
    return info.state


def _keeps(state: StreamState, first: int, last: int) -> bool:
    """Say whether a stream has any message of a range."""
    if not state.messages:
        return False
    first, last = max(first, state.first_seq), min(last, state.last_seq)
    return last - first + 1 > sum(first <= gone <= last for gone in state.deleted or ())


class _Part:
    """What one consumer, on one node of a cluster, has of a range."""

    def __init__(self, connection: NatsConnection, stream_name: str, first: int) -> None:
        self._connection, self._stream_name = connection, stream_name
        self._first = first
        self._consumer = f"kvatlas-{token_hex(8)}"
        self._made_by: Client | None = None
        self.is_in_cluster = False
        #: why it ended, if not because its node has no more
        self.ended_because = ""

    async def open(self, patience_seconds: float) -> None:
        """Make the consumer."""
        await self._connection.call(f"read {self._stream_name}", self._make, patience_seconds)

    async def _make(self, client: Client) -> None:
        config = _config(self._consumer, self._first)
        info = await client.jsm().add_consumer(self._stream_name, config)
        self._made_by, self.is_in_cluster = client, info.cluster is not None

    async def read(self, last: int) -> AsyncGenerator[Message, None]:
        """Yield up to `last`, or what the node has."""
        next_sequence, number = self._first, 1
        while next_sequence <= last:
            batch = await self._next_batch()
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
            if not batch.messages or batch.refused:
                self.ended_because = batch.refused
                return

    async def _next_batch(self) -> "_Batch":
        try:
            return await self._connection.call(f"read {self._stream_name}", self._ask_for_batch)
        except RequestTimedOut:
            if not self.is_in_cluster:
                raise
            return _Batch("its node answers nothing")

    async def _ask_for_batch(self, client: Client) -> "_Batch":
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
    return batch


class _Batch:
    """The answer to one request: messages, then a status unless the batch is full."""

    def __init__(self, refused: str = "") -> None:
        #: (message, its number at the consumer, how many the consumer has after it)
        self.messages: list[tuple[Message, int, int]] = []
        self.is_full = asyncio.Event()
        #: what ended it, unless that is an ordinary end
        self.refused = refused

    async def on_message(self, message: Msg) -> None:
        if message.headers is not None and "Status" in message.headers and not message.data:
            status = message.headers["Status"]
            reason = message.headers.get("Description", "")
            if status not in ORDINARY_ENDS and reason != BATCH_IS_FULL:
                self.refused = f"{status} {reason}".rstrip()
            self.is_full.set()
            return
        stream_sequence, number, broker_ns, num_pending = parse_reply(message.reply)
        whole = Message(stream_sequence, message.subject, message.data, broker_ns)
        self.messages.append((whole, number, num_pending))
        if not num_pending or len(self.messages) == BATCH_MESSAGES:
            self.is_full.set()
