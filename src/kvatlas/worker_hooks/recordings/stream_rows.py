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
from kvatlas.schemas.kv_events import EventBatch
from kvatlas.worker_hooks.recordings.captures import BadLine, Capture, jsonable

#: of the wire, see WIRE_VERSION
FIRST_VERSION = 100

_fields = msgspec.msgpack.Decoder(list[msgspec.Raw])
_version = msgspec.msgpack.Decoder(int)


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
    return _row_of(batch, message.stream_sequence)


def own_batches(capture: Capture) -> Capture | None:
    """Return payloads of our own log, such as `dead-letters --payload` writes, as its batches.

    What cannot be read of them is in `rejected`. None where the file has anything else.
    """
    if not capture.frames or not all(_is_own(frame.payload) for frame in capture.frames):
        return None
    rows: list[dict[str, Any]] = []
    bad: list[BadLine] = []
    for number, frame in enumerate(capture.frames, 1):
        try:
            batch, skipped = decode(frame.payload)
        except MalformedBatch as error:
            bad.append(BadLine("malformed_batch", f"payload {number}: {error}"))
            continue
        rows.append(_row_of(batch, number))
        for event in skipped:
            kind = "unknown_event" if event.kind == "unknown" else "malformed_event"
            where = f"payload {number}, event {event.position} ({event.kind})"
            bad.append(BadLine(kind, f"{where}: {event.reason}"))
    return Capture([], capture.damage, (*capture.rejected, *bad), tuple(rows))


def _is_own(payload: bytes) -> bool:
    """Say whether a payload begins as ours do: with the version, where engines have a time."""
    try:
        fields = _fields.decode(payload)
        return bool(fields) and _version.decode(fields[0]) >= FIRST_VERSION
    except (msgspec.DecodeError, RecursionError):
        return False


def _row_of(batch: EventBatch, stream_sequence: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "stream_sequence": stream_sequence,
        "worker": batch.worker,
        "rank": batch.rank,
        "epoch": batch.epoch,
        "seq": batch.seq,
        "ts_ns": batch.ts_ns,
        "events": jsonable(msgspec.to_builtins(batch.events, builtin_types=(bytes,))),
    }
    return row
