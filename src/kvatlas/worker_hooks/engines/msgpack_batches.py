"""The batches that vLLM, SGLang and whoever follows them put on the wire, as plain fields.

    batch   [ts, events, rank?, ...]
    event   {"type": tag, field: value, ...}, or [tag, value, ...] in declared order,
            or either of them packed once more into a bin

Every event is taken apart on its own, so that one which cannot be read costs only itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import msgspec

from kvatlas.schemas.errors import BatchTooLarge, InvalidBlock, MalformedBatch
from kvatlas.worker_hooks.engines.adapter import Decoded, Rejected, unread_field
from kvatlas.worker_hooks.engines.objects import BadValue
from kvatlas.worker_hooks.raw_events import RawEvent

MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
#: of one batch, far beyond what a step of an engine does; what is beyond costs only itself
MAX_EVENTS = 65_536

_plain = msgspec.msgpack.Decoder()
_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
#: what a decoder says to bytes that it cannot read; TypeError is for keys that are no keys
_UNREADABLE = (msgspec.DecodeError, ValueError, TypeError, RecursionError)

#: what a reader makes of an event: raw events, and problems of parts that do not spoil the rest
Said = Iterator[RawEvent | BadValue]


class Fields(NamedTuple):
    """An event: its tag, its fields by name, and those that nobody knows."""

    tag: str
    values: dict[str, Any]
    unknown: tuple[tuple[str, Any], ...]


def decode_batch(
    payload: bytes,
    fields_of: Mapping[str, Sequence[str]],
    read: Callable[[Fields], Said],
    harmless: AbstractSet[str] = frozenset(),
) -> Decoded:
    """Return what `read` makes of each event of a batch.

    `fields_of` has each known tag's fields in declared order, `harmless` the names of others that
    change nothing about what a block is, wherever they are. What `read` raises as BadValue is the
    end of that event alone. Raises MalformedBatch, also for a map: no engine sends one as a batch.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BatchTooLarge(len(payload), MAX_PAYLOAD_BYTES)
    events, rank = _frame_parts(payload)
    said: list[RawEvent] = []
    positions: list[int] = []
    rejected: list[Rejected] = []
    if len(events) > MAX_EVENTS:
        rejected.append(Rejected(MAX_EVENTS, "too_many_events", f"{len(events)} in one batch"))
    for position, event in enumerate(events[:MAX_EVENTS]):
        try:
            fields = _fields(_unpacked(event), fields_of)
            for name, value in fields.unknown:
                if name not in harmless:
                    rejected.append(unread_field(position, fields.tag, name, value))
            for part in read(fields):
                if isinstance(part, BadValue):
                    rejected.append(Rejected(position, part.kind, str(part)))
                else:
                    said.append(part)
                    positions.append(position)
        except BadValue as error:
            rejected.append(Rejected(position, error.kind, str(error)))
        except (InvalidBlock, RecursionError) as error:
            rejected.append(Rejected(position, "malformed", str(error)))
    return Decoded(said, rejected, rank, tuple(positions))


def _frame_parts(payload: bytes) -> tuple[list[Any], int | None]:
    """Return the events, decoded or raw, and the rank."""
    try:
        batch = _plain.decode(payload)
        if not isinstance(batch, list):
            raise MalformedBatch(f"a batch is an array, not {type(batch).__name__}")
        events = batch[1] if len(batch) > 1 else None
        rank = batch[2] if len(batch) > 2 else None
    except _UNREADABLE:
        # something in it is no msgpack that we read: find out which event
        events, rank = _raw_parts(payload)
    if not isinstance(events, list):
        raise MalformedBatch("the second element of a batch is its list of events")
    return events, rank if type(rank) is int and 0 <= rank < 2**32 else None


def _raw_parts(payload: bytes) -> tuple[list[Any], Any]:
    try:
        parts = _raw_list.decode(payload)
        events = _raw_list.decode(parts[1])
    except _UNREADABLE as error:
        raise MalformedBatch(f"no batch of events: {error}") from error
    except IndexError as error:
        raise MalformedBatch("a batch without its list of events") from error
    return list(events), _raw_rank(parts)


def _raw_rank(parts: Sequence[msgspec.Raw]) -> Any:
    """Return the rank; None where it is missing or unreadable, which costs no event."""
    try:
        return _plain.decode(parts[2]) if len(parts) > 2 else None
    except _UNREADABLE:
        return None


def _unpacked(event: Any) -> Any:
    """Return an event that was packed once more, or left raw, as plain objects."""
    if not isinstance(event, bytes | msgspec.Raw):
        return event
    try:
        inner = _plain.decode(event)
    except _UNREADABLE as error:
        raise BadValue("malformed", f"no msgpack: {error}") from error
    return _unpacked(inner) if isinstance(event, msgspec.Raw) else inner


def _fields(event: Any, fields_of: Mapping[str, Sequence[str]]) -> Fields:
    match event:
        case {"type": str(tag), **values}:
            if tag not in fields_of:
                raise BadValue("unknown_event", f"type {tag[:40]!r}")
            known = fields_of[tag]
            unknown = tuple((str(name), values[name]) for name in values if name not in known)
            return Fields(tag, {str(name): value for name, value in values.items()}, unknown)
        case [str(tag), *given]:
            if tag not in fields_of:
                raise BadValue("unknown_event", f"type {tag[:40]!r}")
            known = fields_of[tag]
            beyond = enumerate(given[len(known) :], len(known))
            unknown = tuple((f"#{n}", value) for n, value in beyond)
            return Fields(tag, dict(zip(known, given, strict=False)), unknown)
    # its content stays out of the reason: it may be tokens
    reason = f"an event is a map with a type or a tagged array, not {type(event).__name__}"
    raise BadValue("malformed", reason)
