"""Reading a range of a stream: batches that we ask for, so a slow reader holds one batch only."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
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

_ask = msgspec.json.encode({"batch": BATCH_MESSAGES, "max_bytes": BATCH_BYTES, "no_wait": True})


async def read_range(
    connection: NatsConnection, stream_name: str, first: int, last: int
) -> AsyncGenerator[Message, None]:
    """Yield the kept messages of a range; see `Bus.read_range`."""
    consumer = f"kvatlas-{token_hex(8)}"
    made_by: Client | None = None
    next_sequence, number = max(1, first), 1

    async def read(client: Client) -> "_Batch":
        nonlocal made_by
        if made_by is None:
            await client.jsm().add_consumer(stream_name, _config(consumer, next_sequence))
            made_by = client
        if client is not made_by:
            raise BusUnavailable("the connection was lost within a range")
        return await _read_batch(client, f"{stream_name}.{consumer}")

    while next_sequence <= last:
        batch = await connection.call(f"read {stream_name}", read)
        for message, message_number, num_pending in batch.messages:
            if message_number != number:
                raise BusUnavailable(f"a message of {stream_name} was lost on its way")
            number += 1
            if message.stream_sequence > last:
                return
            next_sequence = message.stream_sequence + 1
            yield message
            if not num_pending:
                return
        if not batch.messages:
            return


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

    def __init__(self) -> None:
        #: (message, its number at the consumer, how many the consumer has after it)
        self.messages: list[tuple[Message, int, int]] = []
        self.is_full = asyncio.Event()

    async def on_message(self, message: Msg) -> None:
        if message.headers is not None and "Status" in message.headers and not message.data:
            self.is_full.set()
            return
        stream_sequence, number, broker_ns, num_pending = parse_reply(message.reply)
        whole = Message(stream_sequence, message.subject, message.data, broker_ns)
        self.messages.append((whole, number, num_pending))
        if not num_pending or len(self.messages) == BATCH_MESSAGES:
            self.is_full.set()
