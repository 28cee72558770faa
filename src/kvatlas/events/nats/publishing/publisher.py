"""Pipelined publishing to JetStream: no future, no timer and no header per message.

Each message carries the reply subject `<inbox>.<number>`; the broker's acknowledgement comes back
to one subscription, which takes the number out of the window. What is not acknowledged is sent
again, of each subject the oldest first and alone until it is answered (window.py decides):

    error or no answer    the message's subject stalls: newer messages of it wait in the window
    new connection        all subjects that have messages in the window stall

A message keeps its number when it is sent again, so any answer to any copy counts.

A busy publisher goes through batches of the broker's fast ingest instead, which cost half as much
(fast_ingest.py decides, batches.py sends, ADR-0007).
"""

import asyncio
import itertools
import logging
import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.events.bus import MAX_SUBJECT_BYTES
from kvatlas.events.nats.connection import NatsConnection
from kvatlas.events.nats.errors import DRIVER_ERRORS, may_be_retried
from kvatlas.events.nats.publishing.batches import Batches
from kvatlas.events.nats.publishing.fast_ingest import (
    BUSY_MESSAGES,
    IDLE_SECONDS,
    SUFFIX,
    ApiError,
    FastIngest,
    IngestPhase,
)
from kvatlas.events.nats.publishing.window import Step, Unacked, Window
from kvatlas.events.nats.quorum import info_of_leader
from kvatlas.events.streams import subject_matches
from kvatlas.schemas.errors import BusUnavailable, InvalidSubject, MessageTooLarge, StreamRefused

MAX_UNACKED = 1024
#: larger windows are slower: 64 KB messages do 10 k/s with 16 MB under way and 4 k/s with 64 MB
MAX_UNACKED_BYTES = 16 << 20
ACK_SECONDS = 5.0
#: doubled at each try that helps nobody
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.05, 1.0
#: from this pause on we ask whether the stream stores the subject at all
ASK_RETRY_SECONDS = 0.2

_logger = logging.getLogger(__name__)
_numbers = itertools.count(1)
_no_subject = re.compile(r"^$|[\s*>]")
_denied_publish = re.compile(r'permissions violation for publish to "([^"]+)"')


class PublishAck(msgspec.Struct):
    """The broker's answer to a message for a stream."""

    seq: int = 0
    error: ApiError | None = None


decode_ack = msgspec.json.Decoder(PublishAck).decode


class Unstored(NamedTuple):
    """For how long nothing that was published has been stored, in s, and the broker's reason."""

    seconds: float
    reason: str


#: what a broker whose disk is full does: nats-server 2.15 logs the reason and answers nothing
_NO_ACK = (
    "the broker acknowledges nothing: look at its log, and whether its disk is full; "
    "restart it when there is room"
)


class NatsPublisher:
    """The `Publisher` of NATS. Runs from `start` until `close`."""

    def __init__(
        self,
        connection: NatsConnection,
        stream_name: str,
        max_unacked: int = MAX_UNACKED,
        max_unacked_bytes: int = MAX_UNACKED_BYTES,
        ack_seconds: float = ACK_SECONDS,
        busy_messages: int = BUSY_MESSAGES,
    ) -> None:
        self._connection = connection
        self.stream_name = stream_name
        self._max_unacked, self._max_unacked_bytes = max_unacked, max_unacked_bytes
        self._window = Window(ack_seconds)
        self._messages = self._window.messages
        self._refused: dict[str, StreamRefused] = {}
        #: to which new messages go at once; None: not before our inbox is there
        self._client: Client | None = None
        self._reply = ""
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self._ingest = FastIngest(busy_messages, max_unacked, max_unacked_bytes)
        self._batches = Batches(
            stream_name, self._window, self._ingest, self._send, self._forget, self._work.set
        )
        self._num_flushing = 0
        self._next_look_at = 0.0
        #: what the connection is told that we wait for
        self._waiting_for = f"publishing to {stream_name} ({next(_numbers)})"
        #: messages out of the window, whatever became of them, at the last look
        self._num_done = 0
        #: messages that JetStream has refused for good, now and when one was last stored
        self._num_rejected = self._num_rejected_before = 0
        #: messages stored at the last look; since when none was though some were to be
        self._num_stored = 0
        self._unstored_since: float | None = None
        #: why, in the words of the broker; empty when it says nothing
        self._reason = ""
        self._retry_seconds = FIRST_RETRY_SECONDS
        #: before it what failed is not sent again; None: at once
        self._retry_at: float | None = None
        self.is_closed = False
        self._task: asyncio.Task[None] | None = None
        self._stop_listening: list[Callable[[], None]] = []
        #: messages sent more than once
        self.num_resent = 0

    @property
    def is_in_batch(self) -> bool:
        """Whether new messages go into an open batch at once."""
        return self._ingest.phase is IngestPhase.open

    @property
    def num_batches(self) -> int:
        """Batches begun."""
        return self._ingest.num_batches

    @property
    def num_failed_batches(self) -> int:
        """Batches that ended otherwise than we ended them."""
        return self._ingest.num_failures

    @property
    def num_unacked(self) -> int:
        """Messages accepted that are not known to be stored."""
        return len(self._messages)

    @property
    def unacked_bytes(self) -> int:
        """Bytes of their payloads."""
        return self._window.num_bytes

    def unstored(self, now: float) -> Unstored | None:
        """Return for how long nothing has been stored while the broker was there; None: it is."""
        if self._unstored_since is None or self._client is None:
            return None
        return Unstored(now - self._unstored_since, self._reason or _NO_ACK)

    def start(self) -> None:
        """Begin to send what is accepted."""
        self._stop_listening = [
            self._connection.on_connection(self._on_connection),
            self._connection.on_refusal(self._on_denied),
        ]
        self._work.set()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; what is unacknowledged may be stored or not, and who waits gets BusUnavailable."""
        self.is_closed = True
        self._progress.set()
        for stop in self._stop_listening:
            stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def publish(self, subject: str, payload: bytes) -> None:
        size, window = len(payload), self._window
        self._check(subject, size)
        while self._messages and (
            len(self._messages) >= self._max_unacked
            or window.num_bytes + size > self._max_unacked_bytes
        ):
            self._batches.hurry()
            await self._next_progress()
        window.last_number = number = window.last_number + 1
        self._messages[number] = unacked = Unacked(subject, payload)
        window.num_bytes += size
        client, phase = self._client, self._ingest.phase
        if client is None or subject in window.stalled:
            return
        if phase is IngestPhase.open:
            await self._batches.append(client, number, unacked)
        elif phase is IngestPhase.single:
            await self._send(client, number, unacked, f"{self._reply}{number}")
            if not self._num_flushing:
                self._batches.look_for_business()

    async def flush(self) -> None:
        messages, last = self._messages, self._window.last_number
        self._num_flushing += 1
        if self._ingest.phase is IngestPhase.open:
            self._work.set()
        try:
            while messages and next(iter(messages)) <= last:
                await self._next_progress()
        finally:
            self._num_flushing -= 1
        if self._refused:
            raise self._refused.popitem()[1]

    def _check(self, subject: str, size: int) -> None:
        if self.is_closed:
            raise BusUnavailable("the bus is closed")
        if subject in self._refused:
            raise self._refused.pop(subject)
        if _no_subject.search(subject):
            raise InvalidSubject(subject)
        if len(subject) > MAX_SUBJECT_BYTES:
            raise StreamRefused(f"a subject of {len(subject)} bytes, at most {MAX_SUBJECT_BYTES}")
        limit = self._connection.max_payload
        if size > limit:
            raise MessageTooLarge(size, limit)

    async def _next_progress(self) -> None:
        if not self.is_closed:
            self._progress.clear()
            await self._progress.wait()
        if self.is_closed:
            raise BusUnavailable("the bus is closed")

    async def _send(self, client: Client, number: int, unacked: Unacked, reply: str) -> None:
        self.num_resent += unacked.look is not None
        unacked.look = self._window.look
        try:
            await client.publish(unacked.subject, unacked.payload, reply)
        except nats.errors.MaxPayloadError:
            limit = client.max_payload
            self._refuse(number, f"{len(unacked.payload)} bytes, the broker takes {limit}")
        except DRIVER_ERRORS:
            return  # the connection is going; all is sent again on the next one

    # --- answers ----------------------------------------------------------------------------

    async def _on_answer(self, message: Msg) -> None:
        if message.subject.endswith(SUFFIX):
            if self._batches.on_answer(message):
                self._retry_seconds = FIRST_RETRY_SECONDS
            return
        number = int(message.subject.rpartition(".")[2])
        answer = message.data
        if not answer or b'"error"' in answer:
            error = decode_ack(answer).error if answer else ApiError(503)
            if error is not None:
                self._on_error(number, error)
                return
        self._forget(number)
        self._retry_seconds = FIRST_RETRY_SECONDS

    def _forget(self, number: int) -> None:
        if (unacked := self._messages.pop(number, None)) is None:
            return
        window = self._window
        window.num_bytes -= len(unacked.payload)
        self._progress.set()
        if window.stalled:
            window.note_answer(unacked.subject, number)
            self._work.set()
        elif self._ingest.phase is IngestPhase.draining:
            self._work.set()

    def _on_error(self, number: int, error: ApiError) -> None:
        self._reason = error.description or "no stream stores it: is JetStream enabled there?"
        if not may_be_retried(error.code):
            self._num_rejected += number in self._messages
            self._refuse(number, error.description)
        elif self._window.fails(number):
            subject = self._messages[number].subject
            level = logging.WARNING if self._retry_seconds == FIRST_RETRY_SECONDS else logging.DEBUG
            text = error.description or "nobody stores it"
            _logger.log(level, "%s: %s; trying again", subject, text)
            self._fail(subject)

    def _fail(self, subject: str) -> None:
        if self._ingest.phase is not IngestPhase.single:
            self._batches.leave(f"a message to {subject} is not stored")
            return
        if self._retry_at is None:
            self._retry_at = asyncio.get_running_loop().time() + self._retry_seconds
        self._window.fail(subject)
        self._work.set()

    def _refuse(self, number: int, reason: str) -> None:
        if (unacked := self._messages.get(number)) is not None:
            text = f"{self.stream_name} refuses a message to {unacked.subject}: {reason}"
            self._refused.setdefault(unacked.subject, StreamRefused(text))
            self._forget(number)

    def _on_denied(self, text: str) -> None:
        if (found := _denied_publish.search(text)) is not None:
            self._refuse_all(found[1], "permission denied")
            if self._ingest.phase not in (IngestPhase.single, IngestPhase.draining):
                self._batches.leave(f"permission denied for {found[1]}")

    def _refuse_all(self, lower_subject: str, reason: str) -> None:
        for number, unacked in tuple(self._messages.items()):
            if unacked.look is not None and unacked.subject.lower() == lower_subject:
                self._refuse(number, reason)

    # --- the task that sends what `publish` did not ------------------------------------------

    def _on_connection(self, _is_connected: bool) -> None:
        self._client = None
        self._unstored_since = None
        self._ingest.forget()
        self._work.set()

    async def _run(self) -> None:
        while True:
            await self._wait_for_work()
            client = self._connection.client
            if client is None:
                continue
            if self._client is not client:
                await self._begin(client)
                continue
            self._check_timeouts(client)
            if self._ingest.phase is not IngestPhase.single:
                await self._batches.go_on(client, self._reply, self._num_flushing > 0)
            if self._window.stalled:
                await self._heal(client)
            else:
                self._retry_at = None

    async def _wait_for_work(self) -> None:
        is_open = self._ingest.phase is IngestPhase.open
        try:
            async with asyncio.timeout(self._seconds_to_wait(is_open)):
                await self._work.wait()
        except TimeoutError:
            if is_open:
                self._ingest.tick()
        self._work.clear()

    def _seconds_to_wait(self, is_open: bool) -> float:
        if is_open:
            return min(self._window.look_seconds, IDLE_SECONDS)
        if self._client is None:
            return self._window.look_seconds
        next_at = min(self._next_look_at, self._retry_at or self._next_look_at)
        return max(next_at - asyncio.get_running_loop().time(), 0.0)

    def _check_timeouts(self, client: Client) -> None:
        now, window = asyncio.get_running_loop().time(), self._window
        if now < self._next_look_at:
            return
        if client.pending_data_size:  # what is not even sent needs no second copy
            self._next_look_at = now + window.look_seconds / 4
            return
        self._next_look_at = now + window.look_seconds
        if self._ingest.phase is IngestPhase.single:
            for subject in window.look_around():
                self._fail(subject)
        else:
            window.look += 1
            if self._batches.is_late():
                self._batches.leave("answers are late")
        self._note_silence(now)
        self._note_stored(now)

    def _note_silence(self, now: float) -> None:
        """Tell the connection whether its node is of any use."""
        window = self._window
        num_done = window.last_number - len(self._messages)
        if num_done != self._num_done or window.oldest_look is None:
            self._num_done = num_done
            self._connection.answered(self._waiting_for)
        else:
            self._connection.unanswered(self._waiting_for, now - window.look_seconds)

    def _note_stored(self, now: float) -> None:
        """Keep since when nothing is stored, a refusal included: it may be that of all messages."""
        window = self._window
        num_stored = window.last_number - len(self._messages) - self._num_rejected
        if num_stored != self._num_stored:
            self._num_stored, self._unstored_since, self._reason = num_stored, None, ""
            self._num_rejected_before = self._num_rejected
        elif window.oldest_look is not None or self._num_rejected != self._num_rejected_before:
            if self._unstored_since is None:
                self._unstored_since = now - window.look_seconds
        else:
            self._unstored_since = None

    async def _begin(self, client: Client) -> None:
        inbox = client.new_inbox()
        try:
            await client.subscribe(f"{inbox}.>", cb=self._on_answer)
        except DRIVER_ERRORS:
            return  # lost again already; the next connection wakes us
        if client is self._connection.client:
            self._reply, self._client = f"{inbox}.", client
            self._window.fail_all()
            self._retry_at, self._retry_seconds = None, FIRST_RETRY_SECONDS
            self._work.set()

    async def _heal(self, client: Client) -> None:
        """Send what stalled subjects have to send by now."""
        if released := self._window.in_step(Step.released):
            await self._send_released(client, released)
        if self._retry_at is None:
            await self._probe(client)
        elif self._retry_at <= asyncio.get_running_loop().time():
            if self._retry_seconds >= ASK_RETRY_SECONDS:
                await self._refuse_strays()
            self._retry_at = None
            self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
            await self._probe(client)

    async def _send_released(self, client: Client, subjects: frozenset[str]) -> None:
        """Send all that is left, and what is accepted meanwhile as well; then they are free."""
        window, sent = self._window, 0
        while numbers := window.to_send(subjects, sent):
            for sent in numbers:
                unacked = self._messages.get(sent)
                if unacked is not None and window.is_released(unacked):
                    await self._send(client, sent, unacked, f"{self._reply}{sent}")
        window.free(subjects)

    async def _probe(self, client: Client) -> None:
        for number in self._window.probes():
            if (unacked := self._messages.get(number)) is not None:
                await self._send(client, number, unacked, f"{self._reply}{number}")

    async def _refuse_strays(self) -> None:
        """Refuse what the stream does not store: nobody answers it, however often it is sent."""
        try:
            info = await self._connection.call(
                f"look at {self.stream_name}",
                lambda client: info_of_leader(client, self.stream_name),
                LAST_RETRY_SECONDS,
            )
        except StreamRefused:
            self._connection.answered(self._waiting_for)  # not declared yet
            return
        except BusUnavailable:
            return  # away: what is sent again will tell
        self._connection.answered(self._waiting_for)
        patterns = info.config.subjects or []
        for subject in self._window.in_step(Step.failed):
            if not any(subject_matches(pattern, subject) for pattern in patterns):
                self._refuse_all(subject.lower(), "no subject of this stream")
