"""The port of an engine's format, and what its adapters answer with."""

from typing import NamedTuple, Protocol

from kvatlas.worker_hooks.raw_events import RawEvent


class Rejected(NamedTuple):
    """An event, or a part of one, that became nothing, and why.

    `kind` is from a small fixed set, for counters (`unknown_event`, `malformed`, `bad_hash`, ...);
    `reason` is for people and quotes no token.
    """

    position: int
    kind: str
    reason: str


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
