"""The port of an engine's format, and what its adapters answer with."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol

from kvatlas.worker_hooks.raw_events import RawEvent

#: kind of a field of a known event that has a value, that nobody reads and that the adapter does
#: not list as harmless: it may change what a block is, so it makes the instance doubtful. `reason`
#: is the field's name, `TAG.NAME`
UNKNOWN_FIELD = "unknown_field"
#: the same without a value: whatever it is for, it is not in use
EMPTY_FIELD = "empty_field"
MAX_FIELD_CHARACTERS = 40


class Rejected(NamedTuple):
    """An event, or a part of one, that became nothing, and why.

    `kind` is from a small fixed set, for counters (`unknown_event`, `malformed`, `bad_hash`, ...);
    `reason` is for people and quotes no token.
    """

    position: int
    kind: str
    reason: str


def unread_field(position: int, where: str, name: Any, value: Any) -> Rejected:
    """Return how a field is rejected that nobody reads."""
    kind = EMPTY_FIELD if value is None else UNKNOWN_FIELD
    return Rejected(position, kind, f"{where}.{name}"[:MAX_FIELD_CHARACTERS])


def unread_fields(
    position: int, where: str, fields: Mapping[Any, Any], read: AbstractSet[str]
) -> list[Rejected]:
    """Return the rejections of all fields of an object but those that are read or harmless."""
    names = fields.keys() - read
    return [unread_field(position, where, name, fields[name]) for name in sorted(names, key=str)]


class Decoded(NamedTuple):
    """What one batch of an engine says, in its order."""

    events: list[RawEvent]
    rejected: list[Rejected]
    #: data-parallel rank that the batch names
    rank: int | None = None
    #: of each event, the position in the batch of what it came from
    positions: tuple[int, ...] = ()


class EngineAdapter(Protocol):
    """Reads the batches of one instance, in order.

    It may remember what it has told (such as groups), nothing of which blocks exist.
    """

    def decode(self, payload: bytes) -> Decoded:
        """Return the events of a batch; one that cannot be read costs only itself.

        Raises MalformedBatch where the whole payload is no batch of this engine, nothing else.
        """
        ...
