"""Batches of LMCache's coordinator: which chunk lies where, without a word about its tokens.

    {"instance_id", "incarnation", "seq", "event_type": store|delete|access|config,
     "tier": l1|l2, "backend", "shared", "ts", "entries": [key, ...]}

A key is an integer, bytes, hex digits or other text, alone or in an object as `key`, `chunk_hash`
or `hash`. With a `cache_salt` beside it, it is another key: the handle is `hash@salt`.
"""

from typing import Any

from kvatlas.schemas.errors import MalformedBatch
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.adapter import Decoded, Rejected, unread_fields
from kvatlas.worker_hooks.engines.objects import (
    BadValue,
    decode_any,
    engine_hash,
    integer,
    text,
)
from kvatlas.worker_hooks.raw_events import (
    EngineHash,
    RawCleared,
    RawEvent,
    RawRemoved,
    RawStored,
)

_TIERS = {"l1": Tier.dram, "l2": Tier.ssd}
#: that something was read, or is set so, changes no residency
_SILENT_TYPES = ("access", "config")
_KEY_FIELDS = ("key", "chunk_hash", "hash")
#: fields that are read or change nothing about what a chunk is, of a batch and of an entry; any
#: other makes the instance doubtful
_FIELDS = frozenset(
    [
        *("instance_id", "incarnation", "seq", "event_type", "tier", "backend", "shared", "ts"),
        "entries",
    ]
)
_ENTRY_FIELDS = frozenset(
    [
        *_KEY_FIELDS,
        *("cache_salt", "model", "model_name", "kv_rank", "world_size", "worker_id", "fmt"),
        *("size", "num_bytes", "ts"),
    ]
)


class LmcacheAdapter:
    """Reads what one LMCache instance tells its coordinator.

    A higher incarnation began with an empty l1; batches of a lower one are old news.
    """

    def __init__(self) -> None:
        self._incarnation: int | None = None

    def decode(self, payload: bytes) -> Decoded:
        value = decode_any(payload)
        batches = value if isinstance(value, list) else [value]
        if not batches or not any(isinstance(batch, dict) for batch in batches):
            raise MalformedBatch("no batch of LMCache's coordinator")
        events: list[tuple[int, RawEvent]] = []
        rejected: list[Rejected] = []
        for position, batch in enumerate(batches):
            try:
                events += [(position, event) for event in self._batch(position, batch, rejected)]
            except BadValue as error:
                rejected.append(Rejected(position, error.kind, str(error)))
        return Decoded([e for _, e in events], rejected, None, tuple(p for p, _ in events))

    def _batch(self, position: int, batch: Any, rejected: list[Rejected]) -> list[RawEvent]:
        if not isinstance(batch, dict):
            raise BadValue("malformed", "an event that is no object")
        kind = batch.get("event_type")
        if kind not in ("store", "delete") and kind not in _SILENT_TYPES:
            raise BadValue("unknown_event", f"event type {kind!r:.40}")
        incarnation = integer(batch, "incarnation", 0) or 0
        begins_anew = self._incarnation is not None and incarnation > self._incarnation
        if self._incarnation is not None and incarnation < self._incarnation:
            raise BadValue("stale_incarnation", f"incarnation {incarnation} is over")
        self._incarnation = incarnation
        rejected += unread_fields(position, str(kind), batch, _FIELDS)
        rejected += _unread_of_entries(position, batch.get("entries"))
        events: list[RawEvent] = [RawCleared(Tier.dram)] if begins_anew else []
        if kind in _SILENT_TYPES:
            return events
        try:
            hashes = self._keys(position, batch.get("entries"), rejected)
            tier = self._tier(position, batch, rejected)
        except BadValue as error:
            rejected.append(Rejected(position, error.kind, str(error)))
            return events
        if hashes:
            is_store = kind == "store"
            events.append(
                RawStored(hashes, None, b"", tier) if is_store else RawRemoved(hashes, tier)
            )
        return events

    def _keys(
        self, position: int, entries: Any, rejected: list[Rejected]
    ) -> tuple[EngineHash, ...]:
        if not isinstance(entries, list):
            raise BadValue("malformed", "entries are no list")
        hashes = []
        for entry in entries:
            try:
                hashes.append(_key(entry))
            except BadValue as error:
                rejected.append(Rejected(position, error.kind, str(error)))
        return tuple(hashes)

    def _tier(self, position: int, batch: dict[Any, Any], rejected: list[Rejected]) -> Tier:
        name = text(batch, "tier")
        if batch.get("shared") is True:
            return Tier.remote
        tier = _TIERS.get(name.lower()) if name else None
        if tier is None:
            rejected.append(Rejected(position, "unknown_medium", f"tier {name!r:.40}"))
            return Tier.other
        return tier


def _unread_of_entries(position: int, entries: Any) -> list[Rejected]:
    """Return the rejections of fields that nobody reads, each once however many entries have it."""
    beyond: dict[Any, Any] = {}
    for entry in entries if isinstance(entries, list) else ():
        while isinstance(entry, dict):
            for name in entry.keys() - _ENTRY_FIELDS:
                if beyond.get(name) is None:
                    beyond[name] = entry[name]
            inner = (entry.get(field) for field in _KEY_FIELDS)
            entry = next((each for each in inner if isinstance(each, dict)), None)
    return unread_fields(position, "entry", beyond, _ENTRY_FIELDS)


def _key(entry: Any) -> EngineHash:
    if not isinstance(entry, dict):
        return _handle(entry)
    named = [entry[field] for field in _KEY_FIELDS if entry.get(field) is not None]
    if not named:
        raise BadValue("bad_hash", "an entry without a key")
    # a key may itself be an object with the hash in it
    handle = _key(named[0]) if isinstance(named[0], dict) else _handle(named[0])
    salt = text(entry, "cache_salt")
    if salt is None:
        return handle
    head = handle if isinstance(handle, bytes) else handle.to_bytes(8, "big")
    return head + b"@" + salt.encode()


def _handle(value: Any) -> EngineHash:
    if not isinstance(value, str):
        return engine_hash(value)
    if not value or len(value) > 512:
        raise BadValue("bad_hash", "an empty or endless key")
    digits = value.removeprefix("0x")
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        return value.encode()
    return digest if digest and " " not in digits else value.encode()
