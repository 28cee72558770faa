"""What the adapters of JSON and of msgpack maps share: reading values that may lie."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvatlas.schemas.errors import InvalidBlock, MalformedBatch
from kvatlas.schemas.hashing import pack_tokens
from kvatlas.worker_hooks.raw_events import EngineHash

#: what a decoder says to bytes that it cannot read; TypeError is for keys that are no keys
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
_JSON_STARTS = frozenset(b"{[ \t\r\n")
_U64 = 0xFFFF_FFFF_FFFF_FFFF
_U64_LIMIT, _I64_MIN = 1 << 64, -(1 << 63)
MAX_DIGEST_BYTES = 64


class BadValue(ValueError):
    """A value that cannot be what its field says; `kind` is that of the rejection."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


def is_json(payload: bytes) -> bool:
    """Return whether a payload begins like a JSON object or list; no msgpack batch does."""
    return payload[:1] != b"" and payload[0] in _JSON_STARTS


def decode_any(payload: bytes) -> Any:
    """Return the value in a JSON or msgpack payload, or raise MalformedBatch."""
    try:
        return msgspec.json.decode(payload) if is_json(payload) else msgspec.msgpack.decode(payload)
    except _UNREADABLE as error:
        raise MalformedBatch(f"neither JSON nor msgpack: {error}") from error


def engine_hash(value: Any) -> EngineHash:
    """Return a hash as raw events carry it; raises BadValue."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not _I64_MIN <= value < _U64_LIMIT:
            raise BadValue("bad_hash", "a hash beyond 64 bits")
        return value & _U64
    if isinstance(value, bytes) and 0 < len(value) <= MAX_DIGEST_BYTES:
        return value
    raise BadValue("bad_hash", f"a hash of type {type(value).__name__}")


def engine_hashes(values: Any) -> tuple[EngineHash, ...]:
    """Return a list of hashes; raises BadValue, also for an empty one."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or not values:
        raise BadValue("bad_hash", "no list of hashes")
    # nearly every list is this one, and asking each of its values costs three times as much
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) < _U64_LIMIT:
        return tuple(values)
    return tuple(engine_hash(value) for value in values)


def packed_tokens(values: Any) -> bytes:
    """Return a list of token ids as u32 LE; raises BadValue for anything else."""
    if values is None:
        return b""
    if not isinstance(values, list | tuple):
        raise BadValue("malformed", "token ids are no list")
    # one pass over the tokens of every store: this is most of what reading a batch costs
    types = set(map(type, values))
    if str in types:
        raise BadValue("token_text", "token ids as text")
    if list in types or tuple in types:
        raise BadValue("token_pairs", "token ids in pairs")
    if types - {int}:
        raise BadValue("malformed", "token ids that are no integers")
    try:
        return pack_tokens(values)
    except InvalidBlock as error:
        raise BadValue("malformed", "token ids outside 32 bits") from error


def integer(fields: dict[Any, Any], key: str, default: int | None = None) -> int | None:
    """Return an integer field that may be missing or null; raises BadValue."""
    value = fields.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadValue("malformed", f"{key} is no integer")
    return value


def text(fields: dict[Any, Any], key: str) -> str | None:
    """Return a text field that may be missing, null or empty; raises BadValue."""
    value = fields.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise BadValue("malformed", f"{key} is no text")
    return value


def event_objects(value: Any) -> list[Any]:
    """Return the events of an object, a list of objects or a batch `[ts, events, rank]`."""
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list) and len(value) >= 2 and not isinstance(value[0], dict | list):
        value = value[1]
    if not isinstance(value, list):
        raise MalformedBatch("neither an object nor a list of them")
    return value
