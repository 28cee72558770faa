"""The codec of wire 101, as it was. Never to be edited: see README.md."""

from typing import NamedTuple, get_args

import msgspec
from msgspec import Raw

from wire_101.messages import (
    WIRE_VERSION,
    ControlRecord,
    EventBatch,
    KvEvent,
    RejectedEvent,
)


class MalformedBatch(ValueError):
    """A payload is no event batch; the text says where."""


class BatchTooLarge(MalformedBatch):
    """A payload has more bytes than a batch may have."""

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"a batch of {num_bytes} bytes, the limit is {limit_bytes}")
        self.num_bytes, self.limit_bytes = num_bytes, limit_bytes


class UnsupportedVersion(MalformedBatch):
    """A payload was written by a newer major version."""

    def __init__(self, found: int, supported: int) -> None:
        super().__init__(f"wire version {found}, this reader knows up to {supported}")
        self.found, self.supported = found, supported


MAX_BATCH_BYTES = 8 * 1024 * 1024

_KNOWN_TAGS = frozenset(kind.__struct_config__.tag for kind in get_args(KvEvent))
#: what a decoder says to bytes that it cannot read, too deeply nested ones included
_UNREADABLE = (msgspec.DecodeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(EventBatch)
_versions = msgspec.msgpack.Decoder(list[Raw])
_integers = msgspec.msgpack.Decoder(int)
_events: msgspec.msgpack.Decoder[KvEvent] = msgspec.msgpack.Decoder(KvEvent)
_anything = msgspec.msgpack.Decoder()
_controls = msgspec.msgpack.Decoder(ControlRecord)


class DecodedBatch(NamedTuple):
    """A batch, and the events of it that this reader had to skip."""

    batch: EventBatch
    rejected: tuple[RejectedEvent, ...] = ()


def encode(batch: EventBatch | ControlRecord) -> bytes:
    """Return the payload of one bus message."""
    return _encoder.encode(batch)


def decode(payload: bytes) -> DecodedBatch:
    """Return the batch in a payload.

    Events with an unknown tag or wrong fields are skipped and reported in `rejected`. Raises
    BatchTooLarge, UnsupportedVersion, or MalformedBatch when the envelope itself is wrong.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise BatchTooLarge(len(payload), MAX_BATCH_BYTES)
    try:
        batch = _batches.decode(payload)
    except _UNREADABLE as error:
        _refuse_newer_major(payload)
        return _decode_event_by_event(payload, error)
    if batch.v // 100 > WIRE_VERSION // 100:
        raise UnsupportedVersion(batch.v, WIRE_VERSION)
    return DecodedBatch(batch)


def decode_control(payload: bytes) -> ControlRecord:
    """Return the control record in a payload, or raise MalformedBatch or UnsupportedVersion."""
    if len(payload) > MAX_BATCH_BYTES:
        raise BatchTooLarge(len(payload), MAX_BATCH_BYTES)
    _refuse_newer_major(payload)
    try:
        return _controls.decode(payload)
    except _UNREADABLE as error:
        raise MalformedBatch(str(error)) from error


def _refuse_newer_major(payload: bytes) -> None:
    try:
        fields = _versions.decode(payload)
        version = _integers.decode(fields[0]) if fields else 0
    except _UNREADABLE as error:
        raise MalformedBatch(str(error)) from error
    if version // 100 > WIRE_VERSION // 100:
        raise UnsupportedVersion(version, WIRE_VERSION)


def _decode_event_by_event(payload: bytes, first_error: Exception) -> DecodedBatch:
    try:
        fields = _versions.decode(payload)
        raw_events = msgspec.msgpack.decode(fields[6], type=tuple[Raw, ...])
        envelope = _encoder.encode([*fields[:6], []])
        batch = _batches.decode(envelope)
    except (*_UNREADABLE, IndexError) as error:
        raise MalformedBatch(str(first_error)) from error
    events: list[KvEvent] = []
    rejected: list[RejectedEvent] = []
    for position, raw in enumerate(raw_events):
        try:
            events.append(_events.decode(raw))
        except _UNREADABLE as error:
            rejected.append(RejectedEvent(position, _kind(raw), str(error)))
    return DecodedBatch(msgspec.structs.replace(batch, events=tuple(events)), tuple(rejected))


def _kind(raw: Raw) -> str:
    """Return the tag of an event if it is one of ours, so that metrics stay bounded."""
    try:
        match _anything.decode(raw):
            case [str(tag), *_]:
                return tag if tag in _KNOWN_TAGS else "unknown"
            case _:
                return "malformed"
    except _UNREADABLE:
        return "malformed"
