"""The log from its past: messages and holes in order, out of an archive or of the stream itself."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from heapq import merge

from kvatlas.events.archive import Archive, Hole
from kvatlas.events.bus import Bus, Message
from kvatlas.events.streams import KV_EVENTS
from kvatlas.schemas.errors import InvalidRequest

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def archived_log(archive: Archive, last: int) -> Iterator[Message | Hole]:
    """Yield what an archive has of the log up to a sequence, in order. Raises ArchiveUnavailable.

    A batch that was stored twice comes once. A hole may end behind `last`.
    """
    holes = [hole for hole in archive.holes(KV_EVENTS) if hole.first <= last]
    return merge(holes, archive.read_events(1, last), key=_position)


async def stream_log(bus: Bus, last: int) -> AsyncIterator[Message | Hole]:
    """Yield what the stream keeps of the log up to a sequence, in order. Raises BusUnavailable."""
    expected = 1
    async for message in bus.read_range(KV_EVENTS, 1, last):
        if message.stream_sequence > expected:
            yield Hole(expected, message.stream_sequence - 1)
        yield message
        expected = message.stream_sequence + 1
    if expected <= last:
        yield Hole(expected, last)


async def stream_sequence_at(bus: Bus, broker_ns: int) -> int:
    """Return the newest sequence of the log stored at or before a time; 0 for none.

    Reads about as many messages as the log's length has binary digits.
    """
    first, last = await bus.first_sequence(KV_EVENTS), await bus.last_sequence(KV_EVENTS)
    found = 0
    while first <= last:
        middle = (first + last) // 2
        message = await _at_or_after(bus, middle, last)
        if message is None or message.broker_ns > broker_ns:
            last = middle - 1
        else:
            found = message.stream_sequence
            first = found + 1
    return found


def parse_time(text: str) -> int:
    """Return a moment in ns since 1970: seconds since then, or ISO 8601, UTC unless it says else.

    Raises InvalidRequest.
    """
    with suppress(ArithmeticError, ValueError):
        return _within_int64(int(Decimal(text) * 10**9))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequest("time", f"{text!r} is neither ISO 8601 nor seconds") from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return _within_int64((moment - _EPOCH) // timedelta(microseconds=1) * 1000)


def _within_int64(ns: int) -> int:
    return max(-(2**63), min(ns, 2**63 - 1))


async def _at_or_after(bus: Bus, sequence: int, last: int) -> Message | None:
    async with aclosing(bus.read_range(KV_EVENTS, sequence, last)) as messages:
        async for message in messages:
            return message
    return None


def _position(item: Message | Hole) -> int:
    return item.first if isinstance(item, Hole) else item.stream_sequence
