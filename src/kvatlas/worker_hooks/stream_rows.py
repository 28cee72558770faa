"""Batches of the log as rows that people and scripts read: bytes as {"$bytes": hex}."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from kvatlas.events.bus import Bus, Message
from kvatlas.events.codec import decode
from kvatlas.events.streams import KV_EVENTS
from kvatlas.events.subjects import parse_events_subject
from kvatlas.schemas.errors import InvalidSubject, MalformedBatch
from kvatlas.worker_hooks.captures import jsonable


async def stream_rows(bus: Bus, worker: str | None) -> AsyncIterator[dict[str, Any]]:
    """Yield the batches of a worker, or of all, that the log keeps, then those to come.

    Never ends by itself. Raises BusUnavailable and StreamRefused.
    """
    first = await bus.first_sequence(KV_EVENTS)
    last = await bus.last_sequence(KV_EVENTS)
    async with aclosing(bus.read_range(KV_EVENTS, first, last)) as kept:
        async for message in kept:
            row = _row(message, worker)
            if row is not None:
                yield row
    # the callback cannot wait; what it leaves here is as much as the broker may push unread
    queue: asyncio.Queue[Message] = asyncio.Queue()
    following = await bus.follow(KV_EVENTS, last + 1, queue.put_nowait, subjects="kv.events.>")
    try:
        while True:
            row = _row(await queue.get(), worker)
            if row is not None:
                yield row
    finally:
        await following.close()


def _row(message: Message, worker: str | None) -> dict[str, Any] | None:
    try:
        _, instance = parse_events_subject(message.subject)
        if worker not in (None, instance.worker):
            return None
        batch = decode(message.payload).batch
    except (InvalidSubject, MalformedBatch):
        return None
    row: dict[str, Any] = {
        "stream_sequence": message.stream_sequence,
        "worker": batch.worker,
        "rank": batch.rank,
        "epoch": batch.epoch,
        "seq": batch.seq,
        "ts_ns": batch.ts_ns,
        "events": jsonable(msgspec.to_builtins(batch.events, builtin_types=(bytes,))),
    }
    return row
