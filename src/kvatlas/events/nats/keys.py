"""Keys of a JetStream bucket: compare-and-set, time to live, and a watch that misses no end.

A bucket is the stream `KV_<bucket>` with the subjects `$KV.<bucket>.<key>`, one message each, as
every NATS client knows it. We speak to the stream, because nats-py's own API has no time to
live on updates and does not tell an expiry from a deletion:

    value        a message, with `Nats-TTL` if it has a time to live
    deletion     `KV-Operation: PURGE` (or DEL by others); ours vanish after MARKER_SECONDS
    expiry       `Nats-Marker-Reason: MaxAge`, written by the broker, vanishes alike
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from datetime import datetime
from math import ceil
from typing import Literal

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import (
    ConsumerConfig,
    ConsumerInfo,
    DeliverPolicy,
    DiscardPolicy,
    RawStreamMsg,
    StorageType,
    StreamConfig,
)
from nats.js.errors import NotFoundError
from nats.js.manager import JetStreamManager

from kvatlas.events.bus import Entry, KeyChange
from kvatlas.events.nats.buckets import Buckets
from kvatlas.events.nats.connection import EXCHANGE_SECONDS, NatsConnection
from kvatlas.events.nats.errors import WRONG_LAST_SEQUENCE, may_be_retried
from kvatlas.events.nats.publishing.publisher import PublishAck, decode_ack
from kvatlas.events.nats.quorum import told_by_leader
from kvatlas.events.nats.reading.consumer import PushConsumer
from kvatlas.schemas.errors import (
    BusUnavailable,
    InvalidSubject,
    KeyExists,
    NoResponder,
    RevisionConflict,
    StreamRefused,
)

#: how long the broker keeps the mark of an end; a watcher that is away longer compares instead
MARKER_SECONDS = 60.0
#: a cluster elects a leader in 4 to 10 s and answers nothing that it was asked before: ask again
#: soon and for so long, which is what a lease has left when it has to be renewed
TRY_SECONDS, RETRY_SECONDS, LEADER_SECONDS = 1.0, 0.2, 10.0

OnChange = Callable[[KeyChange], None]

_EXPECTED_REVISION = "Nats-Expected-Last-Subject-Sequence"


class NatsKeyValue:
    """The `KeyValue` of NATS."""

    def __init__(
        self,
        connection: NatsConnection,
        bucket: str,
        buckets: Buckets,
        on_watch: Callable[["KeyWatch"], None],
    ) -> None:
        self._connection = connection
        self._stream_name = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."
        self._buckets = buckets
        self._on_watch = on_watch

    async def get(self, key: str) -> Entry | None:
        found = await self._newest(key)
        if found is None or _reason(found.headers) != "put":
            return None
        written_ms = int(found.time.timestamp() * 1e3) if found.time else 0
        return Entry(key, found.data or b"", found.seq or 0, written_ms)

    async def put(self, key: str, value: bytes, ttl_seconds: float | None = None) -> int:
        return await self._write(key, value, _ttl(ttl_seconds))

    async def create(self, key: str, value: bytes, ttl_seconds: float | None = None) -> int:
        try:
            return await self.update(key, value, 0, ttl_seconds)
        except RevisionConflict as error:
            # What is there may be the mark of an end.
            found = await self._newest(key)
            if found is None or _reason(found.headers) == "put":
                raise KeyExists(key) from error
        try:
            return await self.update(key, value, found.seq or 0, ttl_seconds)
        except RevisionConflict as error:
            raise KeyExists(key) from error

    async def update(
        self, key: str, value: bytes, revision: int, ttl_seconds: float | None = None
    ) -> int:
        return await self._write(key, value, _ttl(ttl_seconds), revision)

    async def delete(self, key: str, revision: int | None = None) -> None:
        purge = {"KV-Operation": "PURGE", "Nats-Rollup": "sub", **_ttl(MARKER_SECONDS)}
        await self._write(key, b"", purge, revision)

    async def watch(self, on_change: OnChange) -> "KeyWatch":
        self._buckets.check(self._config())
        watch = KeyWatch(self._connection, self._stream_name, self._prefix, on_change)
        self._on_watch(watch)
        try:
            await watch.start()
        except StreamRefused:
            await self._create_bucket()
            await watch.start()
        await watch.caught_up()
        return watch

    async def _newest(self, key: str) -> RawStreamMsg | None:
        subject = self._subject(key)
        self._buckets.check(self._config())

        async def read(client: Client) -> RawStreamMsg | None:
            try:
                # answered by the leader, so that what we wrote ourselves is seen
                return await client.jsm().get_msg(self._stream_name, subject=subject)
            except NotFoundError:
                return None  # no such key, or no bucket yet

        patience = _Patience(self._connection)
        while True:
            try:
                return await self._connection.call(f"get {key}", read, patience.seconds)
            except BusUnavailable:
                if patience.is_over:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _write(
        self, key: str, value: bytes, headers: dict[str, str], revision: int | None = None
    ) -> int:
        subject = self._subject(key)
        if revision is not None:
            headers[_EXPECTED_REVISION] = str(revision)
        self._buckets.check(self._config())

        async def write(client: Client) -> PublishAck:
            return decode_ack((await client.request(subject, value, 60.0, headers=headers)).data)

        ack = await self._stored(f"write {key}", write)
        if ack.error is None:
            return ack.seq
        if ack.error.err_code in WRONG_LAST_SEQUENCE:
            raise RevisionConflict(key, revision or 0)
        text = f"{self._stream_name} refuses {key}: {ack.error.description}"
        raise BusUnavailable(text) if may_be_retried(ack.error.code) else StreamRefused(text)

    async def _stored(
        self, what: str, write: Callable[[Client], Awaitable[PublishAck]]
    ) -> PublishAck:
        """Write once the bucket is there and, in a cluster, has a leader.

        What nobody took is tried again. What was not answered is not: it may have happened.
        """
        patience, has_bucket = _Patience(self._connection), False
        while True:
            try:
                return await self._connection.call(what, write)
            except NoResponder:
                if patience.is_over:
                    raise
            try:
                if not has_bucket:
                    await self._create_bucket(patience.seconds)
                    has_bucket = True
                    continue
            except BusUnavailable:
                if patience.is_over:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _create_bucket(self, patience_seconds: float = EXCHANGE_SECONDS) -> None:
        await self._buckets.create(self._config(), patience_seconds)

    def _config(self) -> StreamConfig:
        return StreamConfig(
            name=self._stream_name,
            subjects=[f"{self._prefix}>"],
            max_msgs_per_subject=1,
            discard=DiscardPolicy.NEW,
            storage=StorageType.FILE,
            num_replicas=self._buckets.replicas,
            deny_delete=True,
            allow_rollup_hdrs=True,
            allow_direct=True,
            allow_msg_ttl=True,
            subject_delete_marker_ttl=MARKER_SECONDS,
        )

    def _subject(self, key: str) -> str:
        if not all(key.split(".")) or any(c in " \t\r\n*>" for c in key):
            raise InvalidSubject(key)
        return self._prefix + key


class _Patience:
    """How long an exchange is tried again, and how long each try may take."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._clock = asyncio.get_running_loop().time
        self._ends_at = self._clock() + LEADER_SECONDS

    @property
    def seconds(self) -> float:
        """For one try; where there is no connection it is that which is waited for."""
        return EXCHANGE_SECONDS if self._connection.client is None else TRY_SECONDS

    @property
    def is_over(self) -> bool:
        """Whether another try is of no use."""
        return self._connection.client is None or self._clock() >= self._ends_at


class KeyWatch(PushConsumer):
    """The `Subscription` of `watch`.

    Each consumer starts with the last message of every key. Those that were reported already
    are left out; a key that was alive and is not among them has ended while we were away.
    """

    def __init__(
        self, connection: NatsConnection, stream_name: str, prefix: str, on_change: OnChange
    ) -> None:
        super().__init__(
            connection,
            stream_name,
            self._from_last_of_each,
            self._on_delivery,
            on_made=self._on_start,
            on_idle=self._catch_up,
        )
        self._prefix, self._on_change = prefix, on_change
        #: newest stream sequence that was reported; a later consumer repeats what is below
        self._last_sequence = 0
        #: key -> revision of each key that was reported with a value and not with its end
        self._alive: dict[str, int] = {}
        #: keys that the present consumer has named, until it has named all
        self._met: set[str] | None = None
        self._created: datetime | None = None
        self._has_caught_up = asyncio.Event()

    async def caught_up(self) -> None:
        """Return when the present state has been reported."""
        await self._has_caught_up.wait()

    async def _from_last_of_each(self, manager: JetStreamManager) -> ConsumerConfig:
        info = told_by_leader(await manager.stream_info(self._stream_name))
        if info.created != self._created:
            self._created, self._last_sequence = info.created, 0
        self._last_sequence = min(self._last_sequence, info.state.last_seq)
        self._met = set()
        return ConsumerConfig(
            deliver_policy=DeliverPolicy.LAST_PER_SUBJECT, filter_subject=f"{self._prefix}>"
        )

    def _on_start(self, info: ConsumerInfo) -> None:
        if not info.num_pending and not (info.delivered and info.delivered.consumer_seq):
            # not here: what the callback raises would end the consumer
            asyncio.get_running_loop().call_soon(self._catch_up)

    def _on_delivery(
        self, message: Msg, stream_sequence: int, _broker_ns: int, num_pending: int
    ) -> None:
        key = message.subject.removeprefix(self._prefix)
        if self._met is not None:
            self._met.add(key)
        try:
            if stream_sequence > self._last_sequence:
                self._last_sequence = stream_sequence
                self._report(key, message, stream_sequence)
        finally:
            if not num_pending:
                self._catch_up()

    def _report(self, key: str, message: Msg, revision: int) -> None:
        reason = _reason(message.headers)
        if reason == "put":
            self._alive[key] = revision
        else:
            self._alive.pop(key, None)
        value = message.data if reason == "put" else None
        self._on_change(KeyChange(key, value, reason, revision))

    def _catch_up(self) -> None:
        met, self._met = self._met, None
        self._has_caught_up.set()
        if met is None:
            return
        with ExitStack() as reports:  # each runs, whatever another one raises
            for key in [key for key in self._alive if key not in met]:
                change = KeyChange(key, None, "expired", self._alive.pop(key))
                reports.callback(self._on_change, change)


def _reason(headers: Mapping[str, str] | None) -> Literal["put", "deleted", "expired"]:
    if headers is None:
        return "put"
    if headers.get("Nats-Marker-Reason") == "MaxAge":
        return "expired"
    return "deleted" if "Nats-Marker-Reason" in headers or "KV-Operation" in headers else "put"


def _ttl(seconds: float | None) -> dict[str, str]:
    if seconds is None:
        return {}
    return {"Nats-TTL": f"{max(1000, ceil(1000 * seconds))}ms"}
