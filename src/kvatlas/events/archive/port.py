"""The port of the archive: the log and the decisions, kept for as long as one likes.

Adapters are `MemoryArchive` and `SqlArchive`. All methods are plain calls that may take a disk's
or a database's time: a service calls them in a thread, one at a time per archive object.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, Self

from msgspec import Struct

from kvatlas.events.bus import Message

#: damaged rows that are kept in words; further ones are only counted
MAX_EXAMPLES = 10
#: damaged rows that are told apart; from there on one that is read again counts again
MAX_KNOWN = 100_000


class BatchKey(NamedTuple):
    """What a batch is known by, whatever stream sequence its copies have."""

    worker: str
    rank: int
    epoch: int
    seq: int


class EventRecord(Struct, frozen=True):
    """A message of the log; `key` is None unless it is a batch that can be read."""

    message: Message
    key: BatchKey | None


class DecisionRecord(Struct, frozen=True):
    """A message of the decisions' stream, and the id of the decision in it."""

    message: Message
    decision_id: str


class Hole(NamedTuple):
    """Stream sequences that the archive did not get, both ends included."""

    first: int
    last: int


class DamagedRow(NamedTuple):
    """A row with a value that no archiver writes; `key` names it, such as `id 'x'`."""

    table: str
    key: str
    problem: str

    def __str__(self) -> str:
        return f"table {self.table}, row {self.key}: {self.problem}"


class DamagedRows:
    """The damaged rows that were met: how many, and the first of them."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()
        self.num_rows = 0
        self.examples: list[DamagedRow] = []

    def note(self, row: DamagedRow) -> None:
        """Count a row, once however often it is read."""
        name = row.table, row.key
        if name in self._known:
            return
        if len(self._known) < MAX_KNOWN:
            self._known.add(name)
        self.num_rows += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(row)

    def lines(self) -> list[str]:
        """Return them as text, the last line with how many more there are."""
        lines = [f"damaged   {row}" for row in self.examples]
        more = self.num_rows - len(self.examples)
        return [*lines, f"damaged   and {more} more rows"] if more else lines


class Cut(NamedTuple):
    """How far an archive reached at one moment; 0 for nothing."""

    #: of the log, as `cursor` says it
    cursor: int
    #: the newest message of the log; beyond the cursor only where something went wrong
    last_event: int
    #: stream sequence of the newest decision
    last_decision: int


class Archive(Protocol):
    """Keeps messages with the position up to which their stream has been read.

    Everything of one append is there or nothing of it is, its cursor included, and appending it
    again changes nothing: a batch is known by its key, any other message by its stream sequence, a
    decision by its id. A cursor never goes back. All methods raise ArchiveUnavailable. As text
    it is where it lies, without a password.

    What another program has damaged hides nothing else: such a row is noted in `damaged` when it
    is met, and read with empty values in place of the damaged ones.
    """

    damaged: DamagedRows

    def append_events(
        self, records: Sequence[EventRecord], holes: Sequence[Hole], cursor: int
    ) -> None:
        """Keep messages of KV_EVENTS up to `cursor`."""
        ...

    def append_decisions(
        self, records: Sequence[DecisionRecord], holes: Sequence[Hole], cursor: int
    ) -> None:
        """Keep messages of KV_DECISIONS up to `cursor`."""
        ...

    def cursor(self, stream_name: str) -> int:
        """Return the sequence up to which a stream is in here; 0 for none of it."""
        ...

    def cut(self) -> Cut:
        """Return how far everything reaches now, all of one moment.

        An archive only grows, so what lies within a cut stays as it is while appends go on.
        """
        ...

    def read_events(self, first: int, last: int) -> Iterator[Message]:
        """Yield the kept messages of the log in `first`..`last`, in stream order.

        Memory is bounded. Appends may go on meanwhile.
        """
        ...

    def holes(self, stream_name: str) -> list[Hole]:
        """Return what is missing of a stream up to its cursor, in order."""
        ...

    def sequence_at(self, broker_ns: int) -> int:
        """Return the newest sequence of the log stored at or before a time; 0 for none."""
        ...

    def decision(self, decision_id: str) -> Message:
        """Return the message of a decision; raises UnknownDecision."""
        ...

    def decisions(self, before: int, limit: int) -> list[Message]:
        """Return up to `limit` decisions below a stream sequence, newest first."""
        ...

    def look_for_damage(self) -> int:
        """Note all damaged rows in `damaged`, and return how many rows there are."""
        ...

    def close(self) -> None:
        """Give everything back; closing twice is no error."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
