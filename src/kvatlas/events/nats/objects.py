"""Objects of a JetStream bucket: chunks first, then the one message that makes them an object.

A bucket is the stream `OBJ_<bucket>`, as every NATS client knows it:

    $O.<bucket>.C.<id>          the chunks of one upload, in order
    $O.<bucket>.M.<base64 name> what the object is: its id, size, number of chunks

We speak to the stream, because nats-py's own API reads into one growing `bytes`, which copies an
object once a chunk, and never ends when the connection is lost. Our ids begin with the time, so
that chunks which never became an object can be told and removed.
"""

import asyncio
import logging
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from hashlib import sha256
from secrets import token_hex
from string import hexdigits
from typing import NamedTuple

import msgspec
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

from kvatlas.common.few_lines import FewLines
from kvatlas.events.nats.buckets import Buckets
from kvatlas.events.nats.connection import NatsConnection
from kvatlas.events.nats.errors import may_be_retried
from kvatlas.events.nats.publishing.publisher import PublishAck, decode_ack
from kvatlas.events.nats.quorum import patient_info
from kvatlas.events.nats.reading.consumer import PushConsumer
from kvatlas.events.objects import ORPHAN_SECONDS, Buffer, ObjectEntry, Take, check_name, chunks_of
from kvatlas.schemas.errors import (
    BusUnavailable,
    InvalidSubject,
    NoResponder,
    NotFound,
    StreamRefused,
)

#: larger chunks keep the event loop longer; half of what a broker takes by default at most
CHUNK_BYTES = 256 << 10
#: an object of which nothing comes for so long is given up
PATIENCE_SECONDS = 20.0
#: of chunks on their way to a reader that is busy
PENDING_MESSAGES, PENDING_BYTES = 1 << 10, 64 << 20
_REPLACE = {"Nats-Rollup": "sub"}

_logger = logging.getLogger(__name__)


class _Options(msgspec.Struct):
    max_chunk_size: int = CHUNK_BYTES


class _Meta(msgspec.Struct, omit_defaults=True):
    """What every NATS client writes about an object."""

    name: str
    nuid: str = ""
    bucket: str = ""
    size: int = 0
    chunks: int = 0
    digest: str = ""
    mtime: str = ""
    deleted: bool = False
    options: _Options | None = None


class _Found(NamedTuple):
    meta: _Meta
    #: of the message that made it an object
    stream_sequence: int
    stored_ns: int


def _is_ours(name: str) -> bool:
    """Say whether an object can be asked for; a bucket may hold what others have put there."""
    try:
        check_name(name)
    except InvalidSubject:
        return False
    return True


class NatsObjects:
    """The `ObjectStore` of NATS."""

    def __init__(
        self,
        connection: NatsConnection,
        bucket: str,
        buckets: Buckets,
        on_read: Callable[[PushConsumer], None],
    ) -> None:
        self._connection = connection
        self._bucket, self._stream_name = bucket, f"OBJ_{bucket}"
        self._chunks, self._metas = f"$O.{bucket}.C.", f"$O.{bucket}.M."
        self._buckets = buckets
        self._on_read = on_read
        #: what stands where objects do and is none
        self._others = FewLines(_logger)

    async def put(self, name: str, parts: Iterable[Buffer]) -> None:
        check_name(name)
        await self._create_bucket()
        await self._remove_orphans()
        replaced = await self._meta(name)
        meta = _Meta(name, _new_id(), self._bucket, options=_Options())
        content = sha256()
        try:
            for chunk in chunks_of(parts, min(CHUNK_BYTES, self._connection.max_payload // 2)):
                content.update(chunk)
                await self._publish(self._chunks + meta.nuid, chunk)
                meta.size += len(chunk)
                meta.chunks += 1
            meta.digest = f"SHA-256={urlsafe_b64encode(content.digest()).decode()}"
            meta.mtime = datetime.now(UTC).isoformat()
            await self._publish(self._meta_subject(name), msgspec.json.encode(meta), _REPLACE)
        except BaseException:
            # shielded: whoever cancels an upload does not want its chunks to stay
            await asyncio.shield(self._purge_quietly(self._chunks + meta.nuid))
            raise
        if replaced is not None:
            await self._purge_quietly(self._chunks + replaced.nuid)

    async def get(self, name: str, take: Take) -> None:
        check_name(name)
        meta = await self._meta(name)
        if meta is None:
            raise NotFound(f"no object {name} in {self._bucket}")
        if meta.size:
            subject = self._chunks + meta.nuid
            reading = _Reading(self._connection, self._stream_name, subject, meta.chunks, take)
            self._on_read(reading.consumer)
            if not await reading.run():
                raise NotFound(f"object {name} in {self._bucket} is not whole")

    async def entries(self) -> list[ObjectEntry]:
        self._buckets.check(self._config())
        subjects = await self._subjects(self._metas)
        found = [await self._meta_at(subject) for subject in subjects]
        there = [
            each
            for each in found
            if each is not None and not each.meta.deleted and _is_ours(each.meta.name)
        ]
        return [
            ObjectEntry(each.meta.name, each.meta.size, each.stored_ns)
            for each in sorted(there, key=lambda each: -each.stream_sequence)
        ]

    async def delete(self, name: str) -> None:
        check_name(name)
        meta = await self._meta(name)
        if meta is not None:
            await self._purge(self._meta_subject(name))
            await self._purge(self._chunks + meta.nuid)

    # --- what is in the stream ------------------------------------------------------------------

    async def _meta(self, name: str) -> _Meta | None:
        found = await self._meta_at(self._meta_subject(name))
        return None if found is None or found.meta.deleted else found.meta

    async def _meta_at(self, subject: str) -> _Found | None:
        async def read(client: Client) -> RawStreamMsg | None:
            try:
                return await client.jsm().get_msg(self._stream_name, subject=subject)
            except NotFoundError:
                return None

        message = await self._connection.call(f"look at {subject}", read)
        if message is None:
            return None
        try:
            meta = msgspec.json.decode(message.data or b"", type=_Meta)
        except (msgspec.DecodeError, RecursionError) as error:
            self._others.warn("no object at %s: %s", subject, error)
            return None
        stored_ns = int(message.time.timestamp() * 1e9) if message.time else 0
        return _Found(meta, message.seq or 0, stored_ns)

    async def _subjects(self, prefix: str) -> list[str]:
        async def read(client: Client) -> list[str]:
            try:
                info = await client.jsm().stream_info(self._stream_name, f"{prefix}>")
            except NotFoundError:
                return []  # no bucket yet
            return list(info.state.subjects or ())

        return await self._connection.call(f"look at {self._stream_name}", read)

    async def _remove_orphans(self) -> None:
        """Remove old chunks of ours that belong to no object: their writer was killed."""
        metas = [await self._meta_at(subject) for subject in await self._subjects(self._metas)]
        known = {found.meta.nuid for found in metas if found is not None}
        clock = self._connection.clock
        await self._connection.call(
            f"look at {self._stream_name}",
            lambda client: patient_info(client, self._stream_name, clock=clock),
        )
        for subject in await self._subjects(self._chunks):
            upload = subject.removeprefix(self._chunks)
            if upload in known or not _is_upload_id(upload):
                continue
            # by the broker's clock both: the writer's may be hours off
            offset_ns, stored_ns = clock.offset_ns, await self._stored_ns(subject)
            if offset_ns is None or stored_ns is None:
                continue
            if time.monotonic_ns() + offset_ns - stored_ns > ORPHAN_SECONDS * 1e9:
                await self._purge(subject)

    async def _stored_ns(self, subject: str) -> int | None:
        """Return when the broker stored the newest message of a subject; None without any."""

        async def read(client: Client) -> RawStreamMsg | None:
            try:
                return await client.jsm().get_msg(self._stream_name, subject=subject)
            except NotFoundError:
                return None

        message = await self._connection.call(f"look at {subject}", read)
        if message is None or message.time is None:
            return None
        return int(message.time.timestamp() * 1e9)

    # --- changes ----------------------------------------------------------------------------------

    async def _publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> None:
        async def publish(client: Client) -> PublishAck:
            return decode_ack((await client.request(subject, payload, 60.0, headers=headers)).data)

        try:
            ack = await self._connection.call(f"store in {self._stream_name}", publish)
        except NoResponder as error:
            raise BusUnavailable(f"there is no {self._stream_name} any more") from error
        if ack.error is not None:
            text = f"{self._stream_name} refuses an object: {ack.error.description}"
            raise BusUnavailable(text) if may_be_retried(ack.error.code) else StreamRefused(text)

    async def _purge(self, subject: str) -> None:
        async def purge(client: Client) -> None:
            await client.jsm().purge_stream(self._stream_name, subject=subject)

        await self._connection.call(f"purge {subject}", purge)

    async def _purge_quietly(self, subject: str) -> None:
        try:
            await self._purge(subject)
        except (BusUnavailable, StreamRefused) as error:
            _logger.warning("chunks stay behind until a later upload: %s", error)

    def _config(self) -> StreamConfig:
        return StreamConfig(
            name=self._stream_name,
            subjects=[f"{self._chunks}>", f"{self._metas}>"],
            discard=DiscardPolicy.NEW,
            storage=StorageType.FILE,
            num_replicas=self._buckets.replicas,
            allow_rollup_hdrs=True,
            allow_direct=True,
        )

    async def _create_bucket(self) -> None:
        self._buckets.check(self._config())

        async def is_there(client: Client) -> bool:
            try:
                await client.jsm().stream_info(self._stream_name)
            except NotFoundError:
                return False
            return True

        if not await self._connection.call(f"look at {self._stream_name}", is_there):
            await self._buckets.create(self._config())

    def _meta_subject(self, name: str) -> str:
        return self._metas + urlsafe_b64encode(name.encode()).decode()


class _Reading:
    """One object on its way to a reader."""

    def __init__(
        self,
        connection: NatsConnection,
        stream_name: str,
        subject: str,
        num_chunks: int,
        take: Take,
    ) -> None:
        self._subject, self._num_left, self._take = subject, num_chunks, take
        self._next_sequence = 1
        #: whether all was handed over that was wanted
        self._done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.consumer = PushConsumer(
            connection,
            stream_name,
            self._plan,
            self._on_chunk,
            self._on_made,
            self._on_idle,
            PENDING_MESSAGES,
            PENDING_BYTES,
        )

    async def run(self) -> bool:
        """Return whether the object was whole, as far as it was wanted."""
        await self.consumer.start()
        try:
            while not self._done.done():
                num_left = self._num_left
                await asyncio.wait((self._done,), timeout=PATIENCE_SECONDS)
                if not self._done.done() and num_left == self._num_left:
                    raise BusUnavailable(f"nothing of {self._subject} has come for a while")
        finally:
            await self.consumer.close()
        return self._done.result()

    async def _plan(self, _: JetStreamManager) -> ConsumerConfig:
        return ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self._next_sequence,
            filter_subject=self._subject,
        )

    def _on_made(self, info: ConsumerInfo) -> None:
        if not info.num_pending and not (info.delivered and info.delivered.consumer_seq):
            self._end(False)

    def _on_chunk(
        self, message: Msg, stream_sequence: int, _broker_ns: int, num_pending: int
    ) -> None:
        if self._done.done():
            return
        self._next_sequence = stream_sequence + 1
        self._num_left -= 1
        if not self._take(message.data) or not self._num_left:
            self._end(True)
        elif not num_pending:
            self._end(False)

    def _on_idle(self) -> None:
        """Nothing is under way; what is missing has been deleted."""
        self._end(False)

    def _end(self, is_whole: bool) -> None:
        if not self._done.done():
            self._done.set_result(is_whole)


def _new_id() -> str:
    return f"{time.time_ns():016x}{token_hex(8)}"


def _is_upload_id(upload: str) -> bool:
    """Say whether we have given this name, and no other client."""
    return len(upload) == 32 and all(each in hexdigits for each in upload)
