"""Pipelined publishing to JetStream: no future, no timer and no header per message.

Each message carries the reply subject `<inbox>.<number>`; the broker's acknowledgement comes back
to one subscription, which takes the number out of the window. In trouble the window is sent again:

    error or no answer    the message's subject stalls: newer messages of it wait in the window
                          until all of the subject that is unacknowledged has been sent in order
    new connection        the same for all subjects

A message keeps its number when it is sent again, so any answer to any copy counts.

A busy publisher goes through batches of the broker's fast ingest instead, which cost half as much
(nats_fast_ingest.py decides, ADR-0007). Messages under way are then all of a batch or all single.
Whatever is wrong with a batch is trouble of all subjects, and they go one by one for a while.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from secrets import token_hex

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.events.bus import MAX_SUBJECT_BYTES
from kvatlas.events.nats_connection import NatsConnection
from kvatlas.events.nats_errors import DRIVER_ERRORS, may_be_retried
from kvatlas.events.nats_fast_ingest import (
    BUSY_MESSAGES,
    IDLE_SECONDS,
    SUFFIX,
    ApiError,
    FastIngest,
    Phase,
    decode_answer,
)
from kvatlas.events.streams import subject_matches
from kvatlas.schemas.errors import BusUnavailable, InvalidSubject, StreamRefused

MAX_UNACKED = 1024
#: larger windows are slower: 64 KB messages do 10 k/s with 16 MB under way and 4 k/s with 64 MB
MAX_UNACKED_BYTES = 16 << 20
ACK_SECONDS = 5.0
#: an answer is late after this many looks at the window
LOOKS = 4
#: doubled at each try that helps nobody
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.05, 1.0
#: from this pause on we ask whether the stream stores the subject at all
ASK_RETRY_SECONDS = 0.2

_logger = logging.getLogger(__name__)
_no_subject = re.compile(r"^$|[\s*>]")
_denied_publish = re.compile(r'permissions violation for publish to "([^"]+)"')


class PublishAck(msgspec.Struct):
    """The broker's answer to a message for a stream."""

    seq: int = 0
    error: ApiError | None = None


decode_ack = msgspec.json.Decoder(PublishAck).decode


class _Unacked(msgspec.Struct):
    subject: str
    payload: bytes
    #: the look at the window before which it was sent last; None before it was sent at all
    look: int | None = None


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
        self._stream_name = stream_name
        self._max_unacked, self._max_unacked_bytes = max_unacked, max_unacked_bytes
        self._ack_seconds = ack_seconds
        #: number -> message, in the order of numbers, which is the order of acceptance
        self._unacked: dict[int, _Unacked] = {}
        self._unacked_bytes = 0
        self._last_number = 0
        #: subjects to be sent again; each is also in _stalled
        self._failed: set[str] = set()
        #: subjects of which nothing newer is sent until the window's part has been sent again
        self._stalled: set[str] = set()
        self._refused: dict[str, StreamRefused] = {}
        #: to which new messages go at once; None: not before all of the window has been sent
        self._client: Client | None = None
        #: whose inbox gets our answers, and that inbox
        self._listening: Client | None = None
        self._reply = ""
        self._ingest = FastIngest(busy_messages, max_unacked, max_unacked_bytes)
        #: below it come the answers to the present batch
        self._batch_prefix = ""
        #: of the batch's newest message, which its end is published to
        self._batch_subject = ""
        #: the look at the window before which that end was sent
        self._end_look = 0
        self._num_flushing = 0
        self._look, self._next_look_at = 0, 0.0
        self._retry_seconds = FIRST_RETRY_SECONDS
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self.is_closed = False
        self._task: asyncio.Task[None] | None = None
        self._stop_listening: list[Callable[[], None]] = []
        #: messages sent more than once
        self.num_resent = 0

    @property
    def is_in_batch(self) -> bool:
        """Whether new messages go into an open batch at once."""
        return self._ingest.phase is Phase.open

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
        return len(self._unacked)

    @property
    def unacked_bytes(self) -> int:
        """Bytes of their payloads."""
        return self._unacked_bytes

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
        size = len(payload)
        self._check(subject, size)
        while self._unacked and (
            len(self._unacked) >= self._max_unacked
            or self._unacked_bytes + size > self._max_unacked_bytes
        ):
            self._hurry()
            await self._next_progress()
        self._last_number = number = self._last_number + 1
        self._unacked[number] = unacked = _Unacked(subject, payload)
        self._unacked_bytes += size
        client, phase = self._client, self._ingest.phase
        if client is None or subject in self._stalled:
            return
        if phase is Phase.open:
            await self._append(client, number, unacked)
        elif phase is Phase.single:
            await self._send(client, number, unacked, f"{self._reply}{number}")
            self._look_for_business()

    async def flush(self) -> None:
        last = self._last_number
        self._num_flushing += 1
        if self._ingest.phase is Phase.open:
            self._work.set()
        try:
            while self._unacked and next(iter(self._unacked)) <= last:
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
            raise StreamRefused(f"a message of {size} bytes, the broker takes {limit}")

    async def _next_progress(self) -> None:
        if not self.is_closed:
            self._progress.clear()
            await self._progress.wait()
        if self.is_closed:
            raise BusUnavailable("the bus is closed")

    async def _send(self, client: Client, number: int, unacked: _Unacked, reply: str) -> None:
        self.num_resent += unacked.look is not None
        unacked.look = self._look
        try:
            await client.publish(unacked.subject, unacked.payload, reply)
        except nats.errors.MaxPayloadError:
            limit = client.max_payload
            self._refuse(number, f"{len(unacked.payload)} bytes, the broker takes {limit}")
        except DRIVER_ERRORS:
            return  # the connection is going; all is sent again on the next one

    async def _on_answer(self, message: Msg) -> None:
        if message.subject.endswith(SUFFIX):
            self._on_batch_answer(message)
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
        unacked = self._unacked.pop(number, None)
        if unacked is not None:
            self._unacked_bytes -= len(unacked.payload)
            self._progress.set()
            if self._ingest.phase is Phase.draining:
                self._work.set()

    def _on_error(self, number: int, error: ApiError) -> None:
        unacked = self._unacked.get(number)
        if unacked is None:
            return
        if not may_be_retried(error.code):
            self._refuse(number, error.description)
        elif unacked.subject not in self._failed:
            level = logging.WARNING if self._retry_seconds == FIRST_RETRY_SECONDS else logging.DEBUG
            text = error.description or "nobody stores it"
            _logger.log(level, "%s: %s; trying again", unacked.subject, text)
            self._fail(unacked.subject)

    def _fail(self, subject: str) -> None:
        if self._ingest.phase is not Phase.single:
            self._leave_batches(f"a message to {subject} is not stored")
            return
        self._failed.add(subject)
        self._stalled.add(subject)
        self._work.set()

    def _refuse(self, number: int, reason: str) -> None:
        if (unacked := self._unacked.get(number)) is not None:
            text = f"{self._stream_name} refuses a message to {unacked.subject}: {reason}"
            self._refused.setdefault(unacked.subject, StreamRefused(text))
            self._forget(number)

    def _on_denied(self, text: str) -> None:
        if (found := _denied_publish.search(text)) is not None:
            self._refuse_all(found[1], "permission denied")
            if self._ingest.phase not in (Phase.single, Phase.draining):
                self._leave_batches(f"permission denied for {found[1]}")

    def _refuse_all(self, lower_subject: str, reason: str) -> None:
        for number, unacked in tuple(self._unacked.items()):
            if unacked.look is not None and unacked.subject.lower() == lower_subject:
                self._refuse(number, reason)

    def _on_connection(self, _is_connected: bool) -> None:
        self._client = self._listening = None
        self._ingest.forget()
        self._work.set()

    async def _run(self) -> None:
        while True:
            await self._wait_for_work()
            self._look_for_lost_answers()
            client = self._connection.client
            if client is None:
                continue
            if self._client is not client:
                await self._begin(client)
            elif self._failed:
                await self._retry(client)
            elif self._ingest.phase is not Phase.single:
                await self._go_on(client)

    async def _wait_for_work(self) -> None:
        is_open = self._ingest.phase is Phase.open
        seconds = self._ack_seconds / LOOKS
        try:
            async with asyncio.timeout(min(seconds, IDLE_SECONDS) if is_open else seconds):
                await self._work.wait()
        except TimeoutError:
            if is_open:
                self._ingest.tick()
        self._work.clear()

    def _look_for_lost_answers(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._next_look_at or self._client is None or self._client.pending_data_size:
            return  # what is not even sent needs no second copy
        self._next_look_at = now + self._ack_seconds / LOOKS
        self._look += 1
        late = [
            unacked.subject
            for unacked in self._unacked.values()
            if unacked.look is not None and unacked.look <= self._look - LOOKS
        ]
        phase = self._ingest.phase
        is_end_late = phase is Phase.closing and self._end_look <= self._look - LOOKS
        if is_end_late or (late and phase is not Phase.single):
            self._leave_batches("answers are late")
            return
        for subject in late:
            self._fail(subject)

    async def _begin(self, client: Client) -> None:
        if self._listening is not client and not await self._listen(client):
            return  # lost again already; the next connection wakes us
        self._failed.clear()
        await self._send_window(client, None)
        if client is self._connection.client:
            self._stalled = set(self._failed)
            self._client = client

    async def _listen(self, client: Client) -> bool:
        inbox = client.new_inbox()
        try:
            await client.subscribe(f"{inbox}.>", cb=self._on_answer)
        except DRIVER_ERRORS:
            return False
        self._reply, self._listening = f"{inbox}.", client
        return True

    async def _retry(self, client: Client) -> None:
        await asyncio.sleep(self._retry_seconds)
        if self._retry_seconds >= ASK_RETRY_SECONDS:
            await self._refuse_strays()
        self._retry_seconds = min(2 * self._retry_seconds, LAST_RETRY_SECONDS)
        again, self._failed = frozenset(self._failed), set()
        if self._client is client:
            await self._send_window(client, again)
            self._stalled -= again - self._failed

    async def _send_window(self, client: Client, subjects: frozenset[str] | None) -> None:
        """Send the window's part in order, and what is accepted meanwhile as well."""
        sent = 0
        while numbers := [
            number
            for number, unacked in self._unacked.items()
            if number > sent and (subjects is None or unacked.subject in subjects)
        ]:
            for sent in numbers:
                if (unacked := self._unacked.get(sent)) is not None:
                    await self._send(client, sent, unacked, f"{self._reply}{sent}")

    async def _refuse_strays(self) -> None:
        """Refuse what the stream does not store: nobody answers it, however often it is sent."""
        try:
            info = await self._connection.call(
                f"look at {self._stream_name}",
                lambda client: client.jsm().stream_info(self._stream_name),
                LAST_RETRY_SECONDS,
            )
        except (BusUnavailable, StreamRefused):
            return  # away, or not declared yet: what is sent again will tell
        patterns = info.config.subjects or []
        for subject in tuple(self._failed):
            if not any(subject_matches(pattern, subject) for pattern in patterns):
                self._refuse_all(subject.lower(), "no subject of this stream")

    # --- batches: see nats_fast_ingest.py ---------------------------------------------------

    def _look_for_business(self) -> None:
        """Leave the single way, if so much waits that a batch pays."""
        num_unacked = len(self._unacked)
        if (
            num_unacked >= self._ingest.busy_messages
            and not self._stalled
            and not self._num_flushing
            and self._ingest.wants_batch(
                num_unacked, self._unacked_bytes, asyncio.get_running_loop().time()
            )
        ):
            self._ingest.drain()

    def _hurry(self) -> None:
        if self._ingest.phase is Phase.open:
            self._ingest.hurry()
            if self._ingest.is_ending:
                self._work.set()

    async def _go_on(self, client: Client) -> None:
        match self._ingest.phase:
            case Phase.draining:
                await self._end_draining(client)
            case Phase.opening if self._ingest.is_accepted:
                await self._fill(client)
            case Phase.open if self._ingest.is_ending or self._num_flushing:
                self._end_look = self._look
                with suppress(*DRIVER_ERRORS):
                    await client.publish(self._batch_subject, b"", self._ingest.end())
            case _:
                pass  # an answer has to come first

    async def _end_draining(self, client: Client) -> None:
        """Open a batch, or go back to the single way, once nothing is under way."""
        first, oldest = next(iter(self._unacked.items()), (0, None))
        if oldest is not None and oldest.look is not None:
            return
        if oldest is None or not self._ingest.still_wants_batch(len(self._unacked)):
            await self._send_window(client, None)
            self._ingest.forget()
            return
        self._batch_prefix = f"{self._reply}{token_hex(8)}."
        self._ingest.open(self._batch_prefix, first, len(self._unacked), self._unacked_bytes)
        await self._append(client, first, oldest)

    async def _fill(self, client: Client) -> None:
        """Send what waits into the batch, and what is accepted meanwhile as well; then it is open.

        Nothing of it had been sent before.
        """
        while waiting := [
            (number, unacked) for number, unacked in self._unacked.items() if unacked.look is None
        ]:
            for number, unacked in waiting:
                if self._ingest.phase is not Phase.opening:
                    return
                await self._append(client, number, unacked)
        if self._ingest.phase is Phase.opening:
            self._ingest.phase = Phase.open
            self._work.set()

    async def _append(self, client: Client, number: int, unacked: _Unacked) -> None:
        self._batch_subject = unacked.subject
        await self._send(client, number, unacked, self._ingest.next_reply())

    def _on_batch_answer(self, message: Msg) -> None:
        if not message.subject.startswith(self._batch_prefix):
            return  # of a batch that is over
        if self._ingest.phase is Phase.single:
            return
        taken = self._ingest.take(decode_answer(message.data) if message.data else None)
        for number in taken.stored:
            self._forget(number)
        if taken.failure:
            self._leave_batches(taken.failure)
        else:
            self._retry_seconds = FIRST_RETRY_SECONDS
            if self._ingest.phase is not Phase.open:
                self._work.set()

    def _leave_batches(self, reason: str) -> None:
        """Send all that is not known to be stored again, one by one."""
        _logger.info("%s: %s; publishing without batches", self._stream_name, reason)
        self._ingest.fail(asyncio.get_running_loop().time())
        self._client = None
        self._work.set()
