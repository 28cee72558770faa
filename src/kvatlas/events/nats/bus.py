"""The bus over NATS JetStream, with nats-py below and our own errors above."""

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol, Self

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig, StreamInfo
from nats.js.errors import BadRequestError, NotFoundError

from kvatlas.events.bus import (
    MAX_SUBJECT_BYTES,
    Message,
    OnConnection,
    OnHole,
    OnMessage,
    OnRequest,
    StreamDifference,
    StreamSpec,
)
from kvatlas.events.nats.buckets import Buckets, differences, report_differences
from kvatlas.events.nats.connection import NatsConnection
from kvatlas.events.nats.errors import STREAM_NAME_IN_USE
from kvatlas.events.nats.keys import NatsKeyValue
from kvatlas.events.nats.objects import NatsObjects
from kvatlas.events.nats.publishing.fast_ingest import BUSY_MESSAGES
from kvatlas.events.nats.publishing.publisher import (
    ACK_SECONDS,
    MAX_UNACKED,
    MAX_UNACKED_BYTES,
    NatsPublisher,
    Unstored,
)
from kvatlas.events.nats.publishing.store_watch import watch_stores
from kvatlas.events.nats.quorum import patient_info
from kvatlas.events.nats.reading.consumer import PENDING_BYTES, PENDING_MESSAGES
from kvatlas.events.nats.reading.follow import NatsFollower
from kvatlas.events.nats.reading.ranges import read_range
from kvatlas.events.nats.reading.subscription import NatsListener
from kvatlas.events.nats.service import ERROR_HEADER, NatsService
from kvatlas.schemas.conditions import Conditions
from kvatlas.schemas.errors import BusUnavailable, NoResponder, RequestFailed

#: limits of a stream that all its owners have to agree on
_CHECKED = (
    "subjects",
    "retention",
    "discard",
    "storage",
    "max_bytes",
    "max_msgs_per_subject",
    "max_age",
    "num_replicas",
    "duplicate_window",
)
#: version of the broker that has fast ingest, ADR-0007
BATCHES_SINCE = (2, 14)

_logger = logging.getLogger(__name__)


class _Part(Protocol):
    @property
    def is_closed(self) -> bool: ...

    async def close(self) -> None: ...


class NatsBus:
    """The `Bus` of NATS.

    `servers` is one address or several of one cluster (`nats://host:port`, comma-separated or a
    list). A node that does not answer for 10 s is left for another one that is known, given here
    or announced by the cluster (ADR-0014). A user is proven by a file, of credentials (JWT and
    seed) or with the seed of an nkey, which is read at each connect. `replicas` is for buckets that
    this bus has to create. What it finds wrong with the broker begins and ends `conditions`, by
    default some of its own that are logged.

    What a user must be allowed to publish, S being a stream and B a bucket; to its own inbox
    (`_INBOX.>`) and the subjects that it serves it must be allowed to subscribe:

        publisher     its subjects, $JS.API.STREAM.INFO.S
        follow        $JS.API.STREAM.INFO.S, $JS.API.CONSUMER.CREATE.S.>, $JS.FC.S.>
        read_range    $JS.API.CONSUMER.CREATE.S.>, $JS.API.CONSUMER.MSG.NEXT.S.>, and in a cluster
                      $JS.API.STREAM.INFO.S
        keys          $KV.B.>, $JS.API.STREAM.MSG.GET.KV_B; to watch, as follow of KV_B; to have
                      its replicas checked, $JS.API.STREAM.INFO.KV_B
        objects       $O.B.>, $JS.API.STREAM.INFO.OBJ_B, $JS.API.STREAM.MSG.GET.OBJ_B; to read
                      one, as follow of OBJ_B; to replace or delete, $JS.API.STREAM.PURGE.OBJ_B
        to make one   $JS.API.STREAM.CREATE.S, .KV_B or .OBJ_B, for whoever is there first
        serve         _INBOX.> (answers)
        announce, listen   the subject itself
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        wait_seconds: float | None = None,
        name: str = "kvatlas",
        creds_file: Path | None = None,
        nkey_file: Path | None = None,
        tls: ssl.SSLContext | None = None,
        replicas: int = 1,
        conditions: Conditions | None = None,
        max_unacked: int = MAX_UNACKED,
        max_unacked_bytes: int = MAX_UNACKED_BYTES,
        ack_seconds: float = ACK_SECONDS,
        busy_messages: int = BUSY_MESSAGES,
        pending_messages: int = PENDING_MESSAGES,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        self._connection = NatsConnection(
            servers.split(",") if isinstance(servers, str) else servers,
            name=name,
            creds_file=creds_file,
            nkey_file=nkey_file,
            tls=tls,
            conditions=conditions,
        )
        self._wait_seconds = wait_seconds
        self._buckets = Buckets(self._connection, replicas)
        self._max_unacked, self._max_unacked_bytes = max_unacked, max_unacked_bytes
        self._ack_seconds = ack_seconds
        self._busy_messages = busy_messages
        self._pending_messages, self._pending_bytes = pending_messages, pending_bytes
        self._is_open = self._is_closed = False
        self._watch: asyncio.Task[None] | None = None
        #: all that was handed out; closed with the bus, last first
        self._parts: list[_Part] = []

    @classmethod
    async def connect(
        cls,
        servers: str | Sequence[str],
        wait_seconds: float | None = None,
        *,
        name: str = "kvatlas",
        creds_file: Path | None = None,
        nkey_file: Path | None = None,
        tls: ssl.SSLContext | None = None,
        replicas: int = 1,
    ) -> Self:
        """Return a connected bus, whose caller closes it; see `open`."""
        bus = cls(
            servers,
            wait_seconds=wait_seconds,
            name=name,
            creds_file=creds_file,
            nkey_file=nkey_file,
            tls=tls,
            replicas=replicas,
        )
        await bus.open()
        return bus

    async def open(self) -> None:
        """Connect, however long the broker takes to come, or `wait_seconds` at most.

        Raises BusUnavailable, and InvalidSetting when the broker refuses the credentials.
        """
        if not self._is_open:
            await self._connection.open(self._wait_seconds)
            self._is_open = True
            watching = watch_stores(self.unstored, self.conditions)
            self._watch = asyncio.create_task(watching)

    async def close(self) -> None:
        """End all that this bus handed out, then the connection."""
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait((self._watch,))
        await self._buckets.close()
        while self._parts:
            await self._parts.pop().close()
        await self._connection.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def conditions(self) -> Conditions:
        """What this bus finds wrong with the broker."""
        return self._connection.conditions

    @property
    def where(self) -> str:
        """The addresses of its broker, without credentials."""
        return self._connection.where

    @property
    def connected(self) -> bool:
        return self._connection.client is not None

    def on_connection(self, callback: OnConnection) -> None:
        # in its own turn, so that what it raises ends nothing of ours
        def in_turn(is_connected: bool) -> None:
            asyncio.get_running_loop().call_soon(callback, is_connected)

        self._connection.on_connection(in_turn)

    async def declare_stream(self, stream: StreamSpec) -> tuple[StreamDifference, ...]:
        wanted = _config(stream)

        async def declare(client: Client) -> StreamInfo:
            manager = client.jsm()
            # an older broker refuses a stream with a setting that it does not know
            wanted.allow_batched = _knows_batches(client) or None
            try:
                return await manager.stream_info(stream.name)
            except NotFoundError:
                pass
            try:
                return await manager.add_stream(wanted)
            except BadRequestError as error:
                if error.err_code != STREAM_NAME_IN_USE:
                    raise
                return await manager.stream_info(stream.name)

        info = await self._connection.call(f"declare {stream.name}", declare)
        found = differences(wanted, info.config, _CHECKED)
        report_differences(self._connection, stream.name, found)
        return found

    def unstored(self) -> dict[str, Unstored]:
        """Return the streams of which our publishers see nothing stored, while it answers."""
        now, found = asyncio.get_running_loop().time(), dict[str, Unstored]()
        for part in self._parts:
            if isinstance(part, NatsPublisher) and (unstored := part.unstored(now)) is not None:
                name = part.stream_name
                found[name] = max(unstored, found.get(name, unstored))
        return found

    def publisher(self, stream_name: str) -> NatsPublisher:
        publisher = NatsPublisher(
            self._connection,
            stream_name,
            self._max_unacked,
            self._max_unacked_bytes,
            self._ack_seconds,
            self._busy_messages,
        )
        self._own(publisher)
        publisher.start()
        return publisher

    async def follow(
        self,
        stream_name: str,
        from_sequence: int,
        on_message: OnMessage,
        on_hole: OnHole | None = None,
        subjects: str | None = None,
    ) -> NatsFollower:
        follower = NatsFollower(
            self._connection,
            stream_name,
            from_sequence,
            on_message,
            on_hole,
            subjects,
            self._pending_messages,
            self._pending_bytes,
        )
        self._own(follower)
        await follower.start()
        return follower

    async def first_sequence(self, stream_name: str) -> int:
        state = (await self._info(stream_name)).state
        return state.first_seq if state.messages else state.last_seq + 1

    @property
    def clock_offset_ns(self) -> int | None:
        return self._connection.clock.offset_ns

    async def last_sequence(self, stream_name: str) -> int:
        return (await self._info(stream_name)).state.last_seq

    def read_range(self, stream_name: str, first: int, last: int) -> AsyncGenerator[Message, None]:
        return read_range(self._connection, stream_name, first, last)

    async def request(self, subject: str, payload: bytes, timeout_seconds: float) -> bytes:
        if len(subject) > MAX_SUBJECT_BYTES:
            raise NoResponder(f"nobody listens on a subject of {len(subject)} bytes")
        answer = await self._connection.call(
            f"request to {subject}",
            lambda client: client.request(subject, payload, timeout_seconds),
            timeout_seconds,
            is_to_peer=True,
        )
        if answer.headers is not None and ERROR_HEADER in answer.headers:
            raise RequestFailed(f"{subject}: {answer.headers[ERROR_HEADER]}")
        return answer.data

    async def serve(self, subject: str, handler: OnRequest) -> NatsService:
        service = NatsService(self._connection, subject, handler)
        self._own(service)
        await service.start()
        return service

    async def announce(self, subject: str, payload: bytes) -> None:
        await self._connection.call(
            f"announcement on {subject}",
            lambda client: client.publish(subject, payload),
            is_to_peer=True,
        )

    async def listen(self, subject: str, on_payload: Callable[[bytes], None]) -> NatsListener:
        async def arrived(client: Client, message: Msg) -> None:
            on_payload(message.data)

        listener = NatsListener(self._connection, subject, arrived)
        self._own(listener)
        await listener.start()
        return listener

    def keys(self, bucket: str) -> NatsKeyValue:
        return NatsKeyValue(self._connection, bucket, self._buckets, self._own)

    def objects(self, bucket: str) -> NatsObjects:
        return NatsObjects(self._connection, bucket, self._buckets, self._own)

    def _own(self, part: _Part) -> None:
        if self._is_closed:
            raise BusUnavailable("the bus is closed")
        self._parts = [one for one in self._parts if not one.is_closed]
        self._parts.append(part)

    async def _info(self, stream_name: str) -> StreamInfo:
        return await self._connection.call(
            f"look at {stream_name}",
            lambda client: patient_info(client, stream_name, clock=self._connection.clock),
        )


def _config(stream: StreamSpec) -> StreamConfig:
    return StreamConfig(
        name=stream.name,
        subjects=list(stream.subjects),
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        max_bytes=stream.max_bytes,
        max_msgs_per_subject=stream.max_messages_per_subject or -1,
        max_age=stream.max_age_seconds,
        num_replicas=stream.replicas,
        duplicate_window=min(stream.duplicate_window_seconds, stream.max_age_seconds),
        allow_direct=True,
    )


def _knows_batches(client: Client) -> bool:
    version = client.connected_server_version
    try:
        return (version.major, version.minor) >= BATCHES_SINCE
    except ValueError:
        return False  # a build of somebody's own, with a version of their own
