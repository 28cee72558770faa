"""The archiver: follows the streams and writes them into an archive, in a thread.

    stream --follow--> bounded queue --append in one transaction with the cursor--> Archive
                          | full: ignore what comes, and when it is empty
                          +-- follow again after the last one taken

Nothing is dropped: what is not in the archive is still in the stream, and the cursor says where.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

import msgspec
from msgspec import Struct

from kvatlas.common.few_lines import FewLines
from kvatlas.events.archive.port import Archive, BatchKey, DecisionRecord, EventRecord, Hole
from kvatlas.events.bus import Bus, Message, Subscription
from kvatlas.events.codec import decode
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS
from kvatlas.events.subjects import parse_events_subject
from kvatlas.schemas.conditions import ARCHIVE_NOT_WRITTEN, Conditions, log_changes
from kvatlas.schemas.errors import (
    ArchiveMismatch,
    ArchiveUnavailable,
    BusUnavailable,
    InvalidSubject,
    MalformedBatch,
    StreamRefused,
)

MAX_DECISION_ID = 200
_INT64 = 2**63

_logger = logging.getLogger(__name__)


class ArchiverSettings(Struct, frozen=True):
    """How much waits for the archive, and how long it is waited for."""

    #: messages and bytes that wait per stream; too few follow the stream anew all the time
    max_queued: int = 20_000
    max_queued_bytes: int = 64 * 1024 * 1024
    #: messages per transaction; many commit faster and hold other writers longer
    max_batch: int = 2_000
    #: pause before an archive that did not answer is tried again, doubled up to ten times this
    retry_seconds: float = 0.5


class Archiver:
    """Keeps an archive at the end of its streams for as long as it is entered.

    Starts behind what the archive has, and leaves when all that it had received is written. An
    archive that is away, or on a full disk, is tried again and again (`num_failures`), which is a
    condition meanwhile, and the stream keeps what comes. Entering raises ArchiveMismatch when the
    archive holds another log, ArchiveUnavailable, BusUnavailable and StreamRefused. A log that
    begins anew ends it, which `failure` tells and leaving raises; leaving raises ArchiveUnavailable
    when the rest cannot be written, which then comes with the next start.
    """

    def __init__(
        self,
        bus: Bus,
        archive: Archive,
        *,
        streams: Sequence[str] = (KV_EVENTS, KV_DECISIONS),
        settings: ArchiverSettings | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        self._bus, self._archive = bus, archive
        self._settings = settings or ArchiverSettings()
        if conditions is None:
            conditions = Conditions()
            log_changes(conditions, _logger)
        self._conditions = conditions
        self._feeds = [_Feed(name, self._settings, self._wake) for name in streams]
        self._news = asyncio.Event()
        #: messages that are no decisions
        self._others = FewLines(_logger)
        self._closing = asyncio.Event()
        self._progress = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.failure: BaseException | None = None
        #: set once nothing is written any more: left, or failed
        self.ended = asyncio.Event()
        self.num_failures = 0
        #: messages and holes that were written, repeated ones included
        self.num_written = 0

    async def __aenter__(self) -> Self:
        for feed in self._feeds:
            cursor = await asyncio.to_thread(self._archive.cursor, feed.stream_name)
            await self._check_same_log(feed.stream_name, cursor)
            feed.stored = cursor
            feed.next_sequence = cursor + 1
        try:
            for feed in self._feeds:
                await feed.follow(self._bus)
        except BaseException:
            await self._unfollow()
            raise
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._on_end)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closing.set()
        self._wake()
        await self._unfollow()
        if self._task is not None:
            await asyncio.wait((self._task,))
        await self._unfollow()
        if self.failure is not None:
            raise self.failure

    async def caught_up(self) -> None:
        """Return when all that is in the streams now is in the archive.

        Raises `failure`, and ArchiveUnavailable when the archiver is left meanwhile.
        """
        ends = [await self._bus.last_sequence(feed.stream_name) for feed in self._feeds]
        while any(feed.stored < end for feed, end in zip(self._feeds, ends, strict=True)):
            if self.failure is not None:
                raise self.failure
            if self._closing.is_set():
                raise ArchiveUnavailable("the archiver has been left")
            self._progress.clear()
            await self._progress.wait()

    async def finish(self, seconds: float) -> None:
        """Wait for what is in the streams now, but no longer, and for no broker that is away.

        What has been read is written when the archiver is left, the rest after its next start.
        Raises as `caught_up`.
        """
        with contextlib.suppress(TimeoutError, BusUnavailable):
            async with asyncio.timeout(seconds):
                await self.caught_up()

    @property
    def cursors(self) -> dict[str, int]:
        """Stream name -> sequence up to which it is in the archive."""
        return {feed.stream_name: feed.stored for feed in self._feeds}

    def _wake(self) -> None:
        self._news.set()

    async def _unfollow(self) -> None:
        for feed in self._feeds:
            await feed.unfollow()

    async def _check_same_log(self, stream_name: str, cursor: int) -> None:
        """Raise ArchiveMismatch unless the stream goes on where the archive ends."""
        end = await self._bus.last_sequence(stream_name)
        if cursor > end:
            archived = f"{self._archive} has it up to {cursor}"
            raise ArchiveMismatch(f"{stream_name} ends at {end}, {archived}")
        kept = await asyncio.to_thread(self._kept_at, stream_name, cursor)
        if kept is None:
            return
        async for message in self._bus.read_range(stream_name, cursor, cursor):
            if message != kept:
                raise ArchiveMismatch(f"message {cursor} of {stream_name} is not {self._archive}'s")

    def _kept_at(self, stream_name: str, sequence: int) -> Message | None:
        if stream_name == KV_EVENTS:
            return next(self._archive.read_events(sequence, sequence), None)
        newest = self._archive.decisions(sequence + 1, 1)
        return newest[0] if newest and newest[0].stream_sequence == sequence else None

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            for feed in self._feeds:
                while taken := feed.drain():
                    await self._write(feed, taken)
                if feed.failure is not None:
                    raise feed.failure
                if feed.is_full:
                    await self._follow_again(feed)
            if self._closing.is_set() and not any(feed.queue for feed in self._feeds):
                return

    async def _follow_again(self, feed: "_Feed") -> None:
        """Read what came while there was no room, unless this is about to end."""
        await feed.unfollow()
        closing = asyncio.create_task(self._closing.wait())
        following: asyncio.Task[None] | None = None
        try:
            while not self._closing.is_set():
                following = asyncio.create_task(feed.follow(self._bus))
                await asyncio.wait((following, closing), return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    break
                try:
                    following.result()
                    self._conditions.end(ARCHIVE_NOT_WRITTEN, source=f"follow {feed.stream_name}")
                    return
                except (BusUnavailable, StreamRefused) as error:
                    reason = f"{feed.stream_name} is not followed: {error}"
                    self._note_trouble(reason, f"follow {feed.stream_name}")
                await self._pause(self._settings.retry_seconds)
        finally:
            closing.cancel()
            if following is not None and not following.done():
                following.cancel()
                await asyncio.wait((following,))

    async def _write(self, feed: "_Feed", taken: "list[Message | Hole]") -> None:
        pause = self._settings.retry_seconds
        while True:
            try:
                await asyncio.to_thread(
                    _append, self._archive, feed.stream_name, taken, self._others
                )
                break
            except ArchiveUnavailable as error:
                self.num_failures += 1
                if self._closing.is_set():
                    raise
                self._note_trouble(str(error), feed.stream_name)
            await self._pause(pause)
            pause = min(2 * pause, 10 * self._settings.retry_seconds)
        self._conditions.end(ARCHIVE_NOT_WRITTEN, source=feed.stream_name)
        self.num_written += len(taken)
        feed.stored = _end(taken[-1])
        self._progress.set()

    def _note_trouble(self, reason: str, source: str) -> None:
        waits = "what comes waits in the log"
        self._conditions.begin(ARCHIVE_NOT_WRITTEN, f"{reason}; {waits}", source=source)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            pass

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self.ended.set()
        if not task.cancelled() and (failure := task.exception()) is not None:
            _logger.error("the archiver has ended: %s", failure)
            self.failure = failure
        self._progress.set()


class _Feed:
    """One stream on its way into the archive."""

    def __init__(
        self, stream_name: str, settings: ArchiverSettings, on_news: Callable[[], None]
    ) -> None:
        self.stream_name = stream_name
        self._settings, self._on_news = settings, on_news
        #: what follows `stored` in the stream, without a hole that is not told as one
        self.queue: deque[Message | Hole] = deque()
        self._queued_bytes = 0
        #: the sequence behind the queue's last
        self.next_sequence = 1
        self.stored = 0
        #: something came while there was no room: it has to be followed anew
        self.is_full = False
        self.failure: ArchiveMismatch | None = None
        self._subscription: Subscription | None = None

    async def follow(self, bus: Bus) -> None:
        """Receive what follows the queue."""
        self.is_full = False
        self._subscription = await bus.follow(
            self.stream_name, self.next_sequence, self._on_message, self._on_hole
        )

    async def unfollow(self) -> None:
        """Receive nothing more."""
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None

    def drain(self) -> list[Message | Hole]:
        """Remove and return the oldest of the queue."""
        taken: list[Message | Hole] = []
        while self.queue and len(taken) < self._settings.max_batch:
            item = self.queue.popleft()
            taken.append(item)
            self._queued_bytes -= len(item.payload) if isinstance(item, Message) else 0
        return taken

    def _on_message(self, message: Message) -> None:
        if self._has_room(len(message.payload)):
            self._queued_bytes += len(message.payload)
            self.queue.append(message)
            self.next_sequence = message.stream_sequence + 1
        self._on_news()

    def _on_hole(self, expected: int, got: int) -> None:
        if got < expected:
            text = f"{self.stream_name} has begun anew: it goes on at {got}, expected {expected}"
            self.failure = ArchiveMismatch(text)
        elif self._has_room(0):
            self.queue.append(Hole(expected, got - 1))
            self.next_sequence = got
        self._on_news()

    def _has_room(self, num_bytes: int) -> bool:
        if (
            len(self.queue) >= self._settings.max_queued
            or self._queued_bytes + num_bytes > self._settings.max_queued_bytes
        ) and self.queue:
            self.is_full = True
        return not self.is_full and self.failure is None


def _append(
    archive: Archive, stream_name: str, taken: list[Message | Hole], others: FewLines
) -> None:
    holes = [item for item in taken if isinstance(item, Hole)]
    messages = [item for item in taken if isinstance(item, Message)]
    cursor = _end(taken[-1])
    if stream_name == KV_EVENTS:
        events = [EventRecord(message, _batch_key(message)) for message in messages]
        archive.append_events(events, holes, cursor)
        return
    decisions = [
        DecisionRecord(message, decision_id)
        for message in messages
        if (decision_id := _decision_id(message, others)) is not None
    ]
    archive.append_decisions(decisions, holes, cursor)


def _end(item: Message | Hole) -> int:
    return item.last if isinstance(item, Hole) else item.stream_sequence


def _batch_key(message: Message) -> BatchKey | None:
    """Return what a batch is known by; None for what does not count as a batch of its instance."""
    if not message.subject.startswith("kv.events."):
        return None
    try:
        batch = decode(message.payload).batch
        if parse_events_subject(message.subject)[1] != batch.instance:
            return None
    except (MalformedBatch, InvalidSubject):
        return None
    if batch.epoch >= _INT64 or batch.seq >= _INT64:
        return None
    return BatchKey(batch.worker, batch.rank, batch.epoch, batch.seq)


class _DecisionHead(Struct):
    id: str


_heads = msgspec.msgpack.Decoder(_DecisionHead)


def _decision_id(message: Message, others: FewLines) -> str | None:
    try:
        decision_id = _heads.decode(message.payload).id
    except (msgspec.DecodeError, RecursionError):
        decision_id = ""
    if decision_id.isprintable() and 0 < len(decision_id) <= MAX_DECISION_ID:
        return decision_id
    others.warn("message %d is no decision", message.stream_sequence)
    return None
