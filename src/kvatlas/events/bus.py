"""The ports of the bus: what publishers, followers, services and key holders may rely on.

    Bus              a connection: `async with` opens and closes it
      Publisher      ordered, pipelined, stored when acknowledged
      Subscription   what `follow`, `serve` and `watch` return; ends with its bus at the latest
      KeyValue       small values with compare-and-set, time to live and a watch

Adapters are `MemoryBus` (one process, faults on demand) and `NatsBus` (JetStream). All callbacks
are plain functions, run on the event loop in order, and must be quick. What a callback raises
is logged, and what it was called for counts as delivered.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Literal, Protocol, Self

from msgspec import Struct

from kvatlas.events.objects import ObjectStore
from kvatlas.schemas.conditions import Conditions


class Message(Struct, frozen=True, gc=False):
    """One message of a stream."""

    stream_sequence: int
    subject: str
    payload: bytes
    #: when the broker stored it, by the broker's clock, ns since 1970
    broker_ns: int


class StreamSpec(Struct, frozen=True):
    """A stream as we want it: file storage, kept by limits, the oldest goes first."""

    name: str
    #: subjects that it stores; no two streams of a broker may overlap
    subjects: tuple[str, ...]
    #: bytes kept; must fit the broker's storage, or it refuses the stream
    max_bytes: int
    #: age at which messages go; a reader that was away longer meets a hole
    max_age_seconds: float
    #: copies; 1 on one broker, 3 in a cluster (an even number gains nothing)
    replicas: int = 1
    #: how long the broker remembers message ids; we send none, so short is right
    duplicate_window_seconds: float = 2.0
    #: newest messages kept of each subject; 0 keeps all
    max_messages_per_subject: int = 0


class StreamDifference(Struct, frozen=True):
    """A limit of an existing stream that is not as asked for."""

    stream: str
    limit: str
    wanted: str
    found: str

    def __str__(self) -> str:
        differs = f"stream {self.stream}: {self.limit} is {self.found}, expected {self.wanted}"
        return f"{differs}; {self._change}"

    @property
    def _change(self) -> str:
        edit = f"nats stream edit {self.stream}"
        match self.limit:
            case "num_replicas":
                return f"change it ({edit} --replicas {self.wanted}) or log.replicas"
            case "max_bytes" | "max_age":
                flag = self.limit.replace("_", "-")
                unit = "s" if self.limit == "max_age" else ""
                setting = f"the log.*{self.limit}* setting of this stream"
                return f"change it ({edit} --{flag} {self.wanted}{unit}) or {setting}"
            case _:
                return f"its owner changes it ({edit}), or deletes it to have it made anew"


class Entry(Struct, frozen=True, gc=False):
    """The present value of a key; `revision` rises with each change of the bucket."""

    key: str
    value: bytes
    revision: int
    #: when it was written, by the broker's clock, ms since 1970; 0 where that is not known
    written_ms: int = 0


class KeyChange(Struct, frozen=True, gc=False):
    """A key was put (then `value` is set), was deleted, or reached the end of its time to live."""

    key: str
    value: bytes | None
    reason: Literal["put", "deleted", "expired"]
    revision: int


OnMessage = Callable[[Message], None]
OnHole = Callable[[int, int], None]
#: a broker cuts off whoever sends more than 4,096 bytes before a payload: subject, reply and sizes
MAX_SUBJECT_BYTES = 3_000

OnConnection = Callable[[bool], None]
OnRequest = Callable[[bytes], Awaitable[bytes]]


class Subscription(Protocol):
    """Something that runs until it is closed."""

    @property
    def num_healed(self) -> int:
        """How often it was set up again after a loss."""
        ...

    async def close(self) -> None:
        """End it; no callback runs afterwards. Closing twice is no error."""
        ...


class Publisher(Protocol):
    """Publishes in order, many messages under way at a time.

    Accepted messages are stored in order per subject; after an error, a lost answer or a new
    connection, all of a subject that is not acknowledged is sent again in order before anything
    newer, so a message may be stored twice but never after its first copy's successors only. The
    one exception: what was under way to the leader of a cluster just when another one took over
    may be stored behind newer messages that the other one got (ADR-0011).
    A message that the broker refuses for good is dropped, does not hold up its successors, and
    is reported once: by the next `publish` to its subject or by the next `flush`.
    """

    @property
    def num_unacked(self) -> int: ...

    @property
    def unacked_bytes(self) -> int: ...

    async def publish(self, subject: str, payload: bytes) -> None:
        """Accept a message. Waits only while the window (count and bytes) is full.

        A broker that is away is no error: the window fills, then this waits. Raises
        MessageTooLarge for this very message, by the limit of the broker that was there last, and
        another StreamRefused for a message that can never be stored, or when an earlier one of this
        subject was refused; then this message is not accepted.
        """
        ...

    async def flush(self) -> None:
        """Return when all that was accepted so far is stored; raises StreamRefused."""
        ...


class KeyValue(Protocol):
    """A bucket of keys. Keys are tokens joined by dots, see `subjects.escape_token`.

    A time to live has a resolution of about a second and is never shorter than one. Each write
    replaces the key's earlier time to live. All methods raise BusUnavailable when the broker is
    away or does not answer; the write may then have happened or not.
    """

    async def get(self, key: str) -> Entry | None:
        """Return the newest value, or None when there is none (never, deleted, expired)."""
        ...

    async def put(self, key: str, value: bytes, ttl_seconds: float | None = None) -> int:
        """Write whatever is there; return the revision."""
        ...

    async def create(self, key: str, value: bytes, ttl_seconds: float | None = None) -> int:
        """Write if there is no value; return the revision; raises KeyExists."""
        ...

    async def update(
        self, key: str, value: bytes, revision: int, ttl_seconds: float | None = None
    ) -> int:
        """Write if the key is at `revision`; return the new one; raises RevisionConflict."""
        ...

    async def delete(self, key: str, revision: int | None = None) -> None:
        """Delete, if given only at `revision` (raises RevisionConflict). No value is no error."""
        ...

    async def watch(self, on_change: Callable[[KeyChange], None]) -> Subscription:
        """Report each key's present state, then each change; revisions of a key only rise.

        Returns when the present state has been reported. Fast changes of one key may be merged
        into the last of them. After a lost connection a key that has gone meanwhile is reported
        as expired, so no end is missed.
        """
        ...


class Bus(Protocol):
    """A connection to a broker, and its owner: leaving it ends all that it handed out."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    @property
    def connected(self) -> bool: ...

    @property
    def conditions(self) -> Conditions:
        """What this connection finds wrong with the broker."""
        ...

    def on_connection(self, callback: OnConnection) -> None:
        """Call back with True at each later connect and with False at each loss."""
        ...

    async def declare_stream(self, stream: StreamSpec) -> tuple[StreamDifference, ...]:
        """Create the stream if there is none of its name.

        An existing one is never changed; what differs is returned and logged. Raises
        StreamRefused (storage, overlapping subjects) and BusUnavailable.
        """
        ...

    def publisher(self, stream_name: str) -> Publisher:
        """Return a new publisher to subjects of the stream; it lives as long as the bus."""
        ...

    async def follow(
        self,
        stream_name: str,
        from_sequence: int,
        on_message: OnMessage,
        on_hole: OnHole | None = None,
        subjects: str | None = None,
    ) -> Subscription:
        """Deliver the stream from a sequence on, in order, each stream sequence at most once.

        What was lost between broker and reader is read again. `on_hole(expected, got)` is called
        before the message `got` when the stream no longer has those between (limits, deletion),
        and with `got` < `expected` when the stream itself has gone back (its storage was lost):
        then delivery goes on at `got`. `subjects` takes a subset of the subjects (NATS
        wildcards); then only a hole before the stream's first message is told. Returns when the
        broker delivers; raises StreamRefused when there is no such stream.
        """
        ...

    async def first_sequence(self, stream_name: str) -> int:
        """Return the oldest kept sequence; last + 1 when nothing is kept."""
        ...

    @property
    def clock_offset_ns(self) -> int | None:
        """The broker's time less our monotonic clock, in ns; None before the end of a stream was
        asked for.

        `broker_ns` of messages is that time, and this host's clock may be any other.
        """
        ...

    async def last_sequence(self, stream_name: str) -> int:
        """Return the newest sequence ever given; 0 for a fresh stream.

        Of a cluster what the leader says that hears of a majority, never a node that is cut off;
        raises BusUnavailable while there is none.
        """
        ...

    def read_range(self, stream_name: str, first: int, last: int) -> AsyncGenerator[Message, None]:
        """Yield what is kept of `first`..`last`, in order, and end; never waits for new messages.

        All of it, or it raises BusUnavailable (a lost connection, a cluster of which no node can
        be read); a reader goes on after the last message that it got. Memory is bounded however
        slow the reader is.
        """
        ...

    async def request(self, subject: str, payload: bytes, timeout_seconds: float) -> bytes:
        """Return the answer of whoever serves the subject.

        Raises NoResponder, RequestTimedOut, BusUnavailable, and RequestFailed when the handler
        raised.
        """
        ...

    async def serve(self, subject: str, handler: OnRequest) -> Subscription:
        """Answer requests, many at a time, until closed; what a handler raises is answered.

        Returns when requests arrive. Open requests are cancelled by `close`.
        """
        ...

    async def announce(self, subject: str, payload: bytes) -> None:
        """Say something to whoever listens now; nothing of it is kept.

        Raises BusUnavailable when there is no broker. What is on its way may still be lost.
        """
        ...

    async def listen(self, subject: str, on_payload: Callable[[bytes], None]) -> Subscription:
        """Call back with what is announced on a subject, own announcements included.

        In order for each announcer. What is said while the broker is away is lost. Returns when
        announcements arrive.
        """
        ...

    def keys(self, bucket: str) -> KeyValue:
        """Return a bucket; it is created at its first use if there is none."""
        ...

    def objects(self, bucket: str) -> ObjectStore:
        """Return a bucket of objects; it is created at its first `put` if there is none."""
        ...
