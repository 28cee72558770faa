"""The log from its past: messages and holes in order, out of an archive or of the stream itself."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from datetime import time as clock_time
from decimal import Decimal
from heapq import merge

from kvatlas.events.archive.port import Archive, Hole
from kvatlas.events.bus import Bus, Message
from kvatlas.events.streams import KV_EVENTS
from kvatlas.schemas.errors import InvalidRequest

#: how a moment may be written, for people
TIME_FORMS = (
    "a time of day here (14:00, 14:00:30), how long ago (-10m, -1h30m, -2d), a date and time"
    " (2026-11-30T14:00+01:00, in UTC without an offset), or seconds since 1970"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBER = r"\d{1,9}(?:\.\d{1,6})?"
_AGO = re.compile(
    rf"-(?=\d)(?:(?P<days>{_NUMBER})d)?(?:(?P<hours>{_NUMBER})h)?"
    rf"(?:(?P<minutes>{_NUMBER})m(?:in)?)?(?:(?P<seconds>{_NUMBER})s?)?"
)


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


def parse_time(text: str, now: datetime | None = None) -> int:
    """Return a moment in ns since 1970, by one of TIME_FORMS; `now` is with its time zone.

    A time of day is the last one that was: 14:00 is yesterday's in the morning. Raises
    InvalidRequest, which names the forms.
    """
    text, now = text.strip(), now or datetime.now().astimezone()
    with suppress(ArithmeticError, ValueError):
        if not text.startswith(("+", "-")):
            return _within_int64(int(Decimal(text) * 10**9))
    with suppress(OverflowError):
        if text and (ago := _AGO.fullmatch(text)):
            units = {unit: float(number) for unit, number in ago.groupdict().items() if number}
            return _nanoseconds(now - timedelta(**units))
        if (of_day := _time_of_day(text)) is not None:
            moment = datetime.combine(now.date(), of_day, of_day.tzinfo or now.tzinfo)
            return _nanoseconds(moment if moment <= now else moment - timedelta(days=1))
        with suppress(ValueError):
            moment = datetime.fromisoformat(text)
            return _nanoseconds(moment if moment.tzinfo else moment.replace(tzinfo=UTC))
    raise InvalidRequest("time", f"expected {TIME_FORMS}; found {text!r:.60}")


def _time_of_day(text: str) -> clock_time | None:
    with suppress(ValueError):
        return clock_time.fromisoformat(text) if ":" in text else None
    return None


def _nanoseconds(moment: datetime) -> int:
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
