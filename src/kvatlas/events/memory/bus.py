"""A bus within one process: for tests, simulators and demos without a broker.

    broker = MemoryBroker()
    async with broker.connect() as bus: ...

Connections of one broker see each other. A message is stored before `publish` returns, and
followers get it in the event loop's next round. What a broker and a network can do wrong happens
on demand: `broker.faults` at the stream, `bus.cut()` and `bus.restore()` at a connection.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Protocol, Self

from kvatlas.events.bus import (
    Message,
    OnConnection,
    OnHole,
    OnMessage,
    OnRequest,
    StreamDifference,
    StreamSpec,
)
from kvatlas.events.memory.keys import MemoryBucket, MemoryKeyValue
from kvatlas.events.memory.objects import MemoryObjects, ObjectBucket
from kvatlas.events.memory.stream import Faults, MemoryStream
from kvatlas.events.streams import subject_matches
from kvatlas.schemas.conditions import Conditions
from kvatlas.schemas.errors import (
    BusUnavailable,
    InvalidSubject,
    MessageTooLarge,
    NoResponder,
    RequestFailed,
    RequestTimedOut,
    StreamRefused,
)

MAX_PAYLOAD_BYTES = 8 << 20
MAX_UNACKED = 1024
MAX_UNACKED_BYTES = 16 << 20


class MemoryBroker:
    """What connections share. `clock` gives seconds for times to live and ages of messages.

    With a clock of your own, call `expire` after turning it; the default clock needs no call.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._is_clock_ours = clock is None
        self.clock = clock or time.monotonic
        self.faults = Faults()
        self._streams: dict[str, MemoryStream] = {}
        self._buckets: dict[str, MemoryBucket] = {}
        self._object_buckets: dict[str, ObjectBucket] = {}
        self._services: dict[str, list[_MemoryService]] = {}
        self._listeners: dict[str, list[_MemoryListener]] = {}

    def connect(self) -> "MemoryBus":
        """Return a new connection; enter it to use it."""
        return MemoryBus(self)

    def expire(self) -> None:
        """Let go what is too old by the clock: keys and messages."""
        for bucket in self._buckets.values():
            bucket.expire()
        for stream in self._streams.values():
            stream.trim()

    def release(self) -> None:
        """Store the delayed messages now."""
        for stream in self._streams.values():
            stream.release()

    def purge(self, stream_name: str, before_sequence: int) -> None:
        """Delete a stream's messages below a sequence."""
        self.stream(stream_name).purge(before_sequence)

    def stream(self, name: str) -> MemoryStream:
        """Return a declared stream; raises StreamRefused."""
        if name not in self._streams:
            raise StreamRefused(f"no stream {name}")
        return self._streams[name]

    def declare(self, spec: StreamSpec) -> StreamSpec:
        """Create the stream if there is none of its name; return the one there is."""
        if spec.name not in self._streams:
            self._streams[spec.name] = MemoryStream(spec, self.faults, self.now_ns)
        return self._streams[spec.name].spec

    def bucket(self, name: str) -> MemoryBucket:
        """Return a bucket, a new one if there is none."""
        if name not in self._buckets:
            self._buckets[name] = MemoryBucket(self.clock, self._is_clock_ours, self.now_ns)
        return self._buckets[name]

    def object_bucket(self, name: str) -> ObjectBucket:
        """Return a bucket of objects, a new one if there is none."""
        if name not in self._object_buckets:
            self._object_buckets[name] = ObjectBucket(self.now_ns)
        return self._object_buckets[name]

    def services(self, subject: str) -> "list[_MemoryService]":
        """Return who serves a subject, for reading and changing."""
        return self._services.setdefault(subject, [])

    def listeners(self, subject: str) -> "list[_MemoryListener]":
        """Return who listens on a subject, for reading and changing."""
        return self._listeners.setdefault(subject, [])

    def now_ns(self) -> int:
        """Return what time messages are stored at."""
        return time.time_ns() if self._is_clock_ours else int(self.clock() * 1e9)


class _Part(Protocol):
    def wake(self) -> None: ...

    async def close(self) -> None: ...


class MemoryBus:
    """The `Bus` within one process."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self.connected = self._is_closed = False
        self.conditions = Conditions()
        self._callbacks: list[OnConnection] = []
        self._publishers: list[MemoryPublisher] = []
        self._parts: set[_Part] = set()

    async def __aenter__(self) -> Self:
        self.restore()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_closed = True
        for part in tuple(self._parts):
            await part.close()
        for publisher in self._publishers:
            publisher.end()
        self._callbacks.clear()
        self.cut()

    def cut(self) -> None:
        """Lose the connection."""
        self._notify(False)

    def restore(self) -> None:
        """Have the connection again; what was accepted meanwhile is stored now."""
        self._notify(True)

    def _notify(self, connected: bool) -> None:
        if connected == self.connected:
            return
        self.connected = connected
        for publisher in self._publishers:
            publisher.wake()
        for part in tuple(self._parts):
            part.wake()
        for callback in tuple(self._callbacks):
            callback(connected)

    def on_connection(self, callback: OnConnection) -> None:
        self._callbacks.append(callback)

    async def declare_stream(self, stream: StreamSpec) -> tuple[StreamDifference, ...]:
        self.check_connected()
        found = self._broker.declare(stream)
        return tuple(
            StreamDifference(stream.name, limit, str(wanted), str(getattr(found, limit)))
            for limit in stream.__struct_fields__
            if (wanted := getattr(stream, limit)) != getattr(found, limit)
        )

    def publisher(self, stream_name: str) -> "MemoryPublisher":
        if self._is_closed:
            raise BusUnavailable("the bus is closed")
        publisher = MemoryPublisher(self, self._broker, stream_name)
        self._publishers.append(publisher)
        return publisher

    async def follow(
        self,
        stream_name: str,
        from_sequence: int,
        on_message: OnMessage,
        on_hole: OnHole | None = None,
        subjects: str | None = None,
    ) -> "MemoryFollower":
        stream = self._stream(stream_name)
        follower = MemoryFollower(self, stream, from_sequence, on_message, on_hole, subjects)
        self.own(follower)
        follower.wake()
        return follower

    async def first_sequence(self, stream_name: str) -> int:
        return self._stream(stream_name).first

    @property
    def clock_offset_ns(self) -> int | None:
        return self._broker.now_ns() - time.monotonic_ns()

    async def last_sequence(self, stream_name: str) -> int:
        return self._stream(stream_name).last

    async def read_range(
        self, stream_name: str, first: int, last: int
    ) -> AsyncGenerator[Message, None]:
        last = min(last, self._stream(stream_name).last)
        while (message := self._stream(stream_name).at_or_after(first)) is not None:
            if message.stream_sequence > last:
                return
            first = message.stream_sequence + 1
            yield message

    async def request(self, subject: str, payload: bytes, timeout_seconds: float) -> bytes:
        self.check_connected()
        services = [one for one in self._broker.services(subject) if one.is_reachable]
        if not services:
            raise NoResponder(f"nobody serves {subject}")
        try:
            async with asyncio.timeout(timeout_seconds):
                return await services[0].answer(payload)
        except TimeoutError as error:
            raise RequestTimedOut(f"{subject}: no answer within {timeout_seconds} s") from error

    async def serve(self, subject: str, handler: OnRequest) -> "_MemoryService":
        self.check_connected()
        service = _MemoryService(self, self._broker.services(subject), subject, handler)
        self.own(service)
        return service

    async def announce(self, subject: str, payload: bytes) -> None:
        self.check_connected()
        for listener in self._broker.listeners(subject):
            listener.receive(payload)

    async def listen(self, subject: str, on_payload: Callable[[bytes], None]) -> "_MemoryListener":
        self.check_connected()
        listener = _MemoryListener(self, self._broker.listeners(subject), on_payload)
        self.own(listener)
        return listener

    def keys(self, bucket: str) -> MemoryKeyValue:
        return MemoryKeyValue(self, self._broker.bucket(bucket))

    def objects(self, bucket: str) -> MemoryObjects:
        return MemoryObjects(self, self._broker.object_bucket(bucket))

    def own(self, part: _Part) -> None:
        """Close the part with the bus and wake it when the connection changes."""
        self._parts.add(part)

    def forget(self, part: _Part) -> None:
        """Let a closed part go."""
        self._parts.discard(part)

    def _stream(self, name: str) -> MemoryStream:
        self.check_connected()
        return self._broker.stream(name)

    def check_connected(self) -> None:
        """Raise BusUnavailable while the connection is cut."""
        if not self.connected:
            raise BusUnavailable("the memory broker is away")


class MemoryPublisher:
    """The `Publisher` within one process: its window fills only while the broker is away."""

    def __init__(self, bus: MemoryBus, broker: MemoryBroker, stream_name: str) -> None:
        self._bus, self._broker, self._stream_name = bus, broker, stream_name
        #: accepted and not yet taken by the broker
        self._waiting: deque[tuple[str, bytes]] = deque()
        self.num_unacked = self.unacked_bytes = 0
        self._refused: dict[str, StreamRefused] = {}
        self._progress = asyncio.Event()
        self._is_closed = False

    async def publish(self, subject: str, payload: bytes) -> None:
        self._check(subject, len(payload))
        while self.num_unacked and (
            self.num_unacked >= MAX_UNACKED or self.unacked_bytes + len(payload) > MAX_UNACKED_BYTES
        ):
            await self._next_progress()
        self.num_unacked += 1
        self.unacked_bytes += len(payload)
        self._waiting.append((subject, payload))
        self.wake()

    async def flush(self) -> None:
        while self.num_unacked:
            await self._next_progress()
        if self._refused:
            raise self._refused.popitem()[1]

    def wake(self) -> None:
        """Store what waits, if the broker is there."""
        while self._waiting and self._bus.connected:
            subject, payload = self._waiting.popleft()
            self._store(subject, payload)

    def end(self) -> None:
        """Stop; who waits gets BusUnavailable."""
        self._is_closed = True
        self._progress.set()

    def _check(self, subject: str, size: int) -> None:
        if self._is_closed:
            raise BusUnavailable("the bus is closed")
        if subject in self._refused:
            raise self._refused.pop(subject)
        if not subject or any(c in " \t\r\n*>" for c in subject):
            raise InvalidSubject(subject)
        if size > MAX_PAYLOAD_BYTES:
            raise MessageTooLarge(size, MAX_PAYLOAD_BYTES)

    def _store(self, subject: str, payload: bytes) -> None:
        def on_stored() -> None:
            self.num_unacked -= 1
            self.unacked_bytes -= len(payload)
            self._progress.set()

        try:
            self._broker.stream(self._stream_name).publish(subject, payload, on_stored)
        except StreamRefused as error:
            self._refused.setdefault(subject, error)
            on_stored()

    async def _next_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()
        if self._is_closed:
            raise BusUnavailable("the bus is closed")


class MemoryFollower:
    """The `Subscription` of `follow` within one process."""

    def __init__(
        self,
        bus: MemoryBus,
        stream: MemoryStream,
        from_sequence: int,
        on_message: OnMessage,
        on_hole: OnHole | None,
        subjects: str | None,
    ) -> None:
        self._bus, self._stream = bus, stream
        #: the sequence that comes next; all before it were delivered or told as a hole
        self._next_sequence = max(1, from_sequence)
        self._on_message, self._on_hole, self._subjects = on_message, on_hole, subjects
        self._round: asyncio.Handle | None = None
        self.num_healed = 0
        stream.followers.add(self)

    def wake(self) -> None:
        """Deliver in the event loop's next round."""
        if self._round is None and self._bus.connected:
            self._round = asyncio.get_running_loop().call_soon(self._deliver)

    async def close(self) -> None:
        self._stream.followers.discard(self)
        self._bus.forget(self)
        if self._round is not None:
            self._round.cancel()

    def _deliver(self) -> None:
        """Deliver one message and come back for the next, so that what raises stops nothing."""
        self._round = None
        if not self._bus.connected:
            return
        expected, last = self._next_sequence, self._stream.last
        message = self._stream.at_or_after(expected)
        if message is None and expected <= last + 1:
            return
        got = self._stream.first if message is None else message.stream_sequence
        self._next_sequence = got if message is None else got + 1
        self.wake()
        is_whole = self._subjects is None or got == self._stream.first
        if got != expected and is_whole and self._on_hole is not None:
            self._on_hole(expected, got)
        if message is not None and (
            self._subjects is None or subject_matches(self._subjects, message.subject)
        ):
            self._on_message(message)


class _MemoryListener:
    """The `Subscription` of `listen` within one process."""

    def __init__(
        self,
        bus: MemoryBus,
        listeners: "list[_MemoryListener]",
        on_payload: Callable[[bytes], None],
    ) -> None:
        self._bus, self._listeners, self._on_payload = bus, listeners, on_payload
        self._is_open = True
        self.num_healed = 0
        listeners.append(self)

    def receive(self, payload: bytes) -> None:
        """Call back in the event loop's next round."""
        if self._bus.connected:
            asyncio.get_running_loop().call_soon(self._deliver, payload)

    def wake(self) -> None:
        """Nothing waits here."""

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._listeners.remove(self)
            self._bus.forget(self)

    def _deliver(self, payload: bytes) -> None:
        if self._is_open:
            self._on_payload(payload)


class _MemoryService:
    """The `Subscription` of `serve` within one process."""

    def __init__(
        self, bus: MemoryBus, services: "list[_MemoryService]", subject: str, handler: OnRequest
    ) -> None:
        self._bus, self._services = bus, services
        self._subject, self._handler = subject, handler
        self._open: set[asyncio.Future[tuple[bytes | BaseException]]] = set()
        self.num_healed = 0
        services.append(self)

    @property
    def is_reachable(self) -> bool:
        return self._bus.connected

    def wake(self) -> None:
        """Nothing waits here."""

    async def close(self) -> None:
        if self in self._services:
            self._services.remove(self)
        self._bus.forget(self)
        for one in self._open:
            one.cancel()

    async def answer(self, payload: bytes) -> bytes:
        """Return what the handler returns; raises RequestFailed for what it raises."""
        # gathered, so that whatever the handler raises comes back as a value
        handling = asyncio.gather(self._handle(payload), return_exceptions=True)
        self._open.add(handling)
        try:
            (answer,) = await handling
        finally:
            self._open.discard(handling)
        if isinstance(answer, BaseException):
            text = f"{self._subject}: {type(answer).__name__}: {answer}"
            raise RequestFailed(text) from answer
        return answer

    async def _handle(self, payload: bytes) -> bytes:
        return await self._handler(payload)
