"""Dead letters: what stands in the log and could not be read, kept apart with the reason.

    KV_EVENTS  --unreadable-->  DeadLetter on kv.dead.<worker>.<stream sequence>  (KV_DEAD_LETTERS)

The message stays in the log too until that trims it: the letter outlives it, says why, and is found
without reading everything. There is one letter a message, whoever writes it and however often.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import NamedTuple

import msgspec
from msgspec import Struct

from kvatlas.events.bus import Bus, Message
from kvatlas.events.streams import KV_DEAD_LETTERS, KV_EVENTS
from kvatlas.events.subjects import dead_letter_subject, dead_letters_of, worker_of
from kvatlas.schemas.errors import MalformedLetter

#: major * 100 + minor. Readers refuse a newer major and accept every minor of theirs.
LETTER_VERSION = 100
#: of a payload; the rest is cut
MAX_KEPT_BYTES = 64 * 1024
MAX_REASON_CHARACTERS = 500
#: a replica that is slower than another writes its letters again behind the other's newest
LOOK_BACK = 64
#: `event` is a batch of which single events were skipped; the others are PayloadRejected's
KINDS = ("subject", "payload", "too_large", "version", "spoofed", "event")

_encoder = msgspec.msgpack.Encoder()


class DeadLetter(Struct, frozen=True, array_like=True, gc=False):
    """A message of the log that could not be read, wholly or in part.

    The payload is what stands in KV_EVENTS, up to MAX_KEPT_BYTES of it: hashes of blocks, and token
    ids (prompts) only where an operator has asked for `include_tokens`, so that they are there too.
    Whoever publishes garbage decides what is in it. New fields go to the end.
    """

    v: int
    #: of the message, in KV_EVENTS
    stream_sequence: int
    #: that it came on
    subject: str
    #: when the broker stored the message, ns since 1970 by its clock
    broker_ns: int
    #: one of KINDS
    kind: str
    reason: str
    #: name of the replica that wrote the letter
    by: str
    #: of the whole payload
    num_bytes: int
    payload: bytes

    @property
    def worker(self) -> str:
        """Whose subject it came on; empty where that tells none."""
        return worker_of(self.subject)

    @property
    def is_cut(self) -> bool:
        """Whether the payload is only the beginning of the message's."""
        return len(self.payload) < self.num_bytes


class Mark(NamedTuple):
    """Up to where the log has its letters: the newest message that one is about."""

    stream_sequence: int = 0
    broker_ns: int = 0

    def covers(self, message: Message) -> bool:
        """Say whether a message is not newer, by place and time: a log may have begun anew."""
        return (
            message.stream_sequence <= self.stream_sequence and message.broker_ns <= self.broker_ns
        )


def letter_about(message: Message, kind: str, reason: str, by: str) -> DeadLetter:
    """Return the letter about a message; what is too long of it and of the reason is cut."""
    if len(reason) > MAX_REASON_CHARACTERS:
        reason = f"{reason[: MAX_REASON_CHARACTERS - 3]}..."
    return DeadLetter(
        v=LETTER_VERSION,
        stream_sequence=message.stream_sequence,
        subject=message.subject,
        broker_ns=message.broker_ns,
        kind=kind,
        reason=reason,
        by=by,
        num_bytes=len(message.payload),
        payload=bytes(message.payload[:MAX_KEPT_BYTES]),
    )


def address_of(letter: DeadLetter) -> str:
    """Return the subject that the letter goes to."""
    return dead_letter_subject(letter.worker, letter.stream_sequence)


def encode_letter(letter: DeadLetter) -> bytes:
    """Return the payload of a letter's message."""
    return _encoder.encode(letter)


def decode_letter(payload: bytes) -> DeadLetter:
    """Return the letter in a payload, or raise MalformedLetter."""
    try:
        letter = msgspec.msgpack.decode(payload, type=DeadLetter)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedLetter(str(error)) from error
    if letter.v // 100 > LETTER_VERSION // 100:
        raise MalformedLetter(f"version {letter.v}, this reader knows up to {LETTER_VERSION}")
    return letter


async def newest_mark(bus: Bus) -> Mark:
    """Return the mark of the latest letters; that of nothing where there are none.

    Raises StreamRefused where there is no such stream, and BusUnavailable.
    """
    last = await bus.last_sequence(KV_DEAD_LETTERS)
    mark, first = Mark(), max(last - LOOK_BACK + 1, 1)
    async with aclosing(bus.read_range(KV_DEAD_LETTERS, first, last)) as latest:
        async for message in latest:
            with suppress(MalformedLetter):
                letter = decode_letter(message.payload)
                mark = max(mark, Mark(letter.stream_sequence, letter.broker_ns))
    return mark


async def read_letters(bus: Bus, worker: str | None = None) -> AsyncIterator[DeadLetter]:
    """Yield what letters there are, about one worker's messages or all; oldest written first.

    Leaves out what is no letter. Raises StreamRefused where there is no such stream, and
    BusUnavailable.
    """
    first = await bus.first_sequence(KV_DEAD_LETTERS)
    last = await bus.last_sequence(KV_DEAD_LETTERS)
    async with aclosing(bus.read_range(KV_DEAD_LETTERS, first, last)) as kept:
        async for message in kept:
            try:
                letter = decode_letter(message.payload)
            except MalformedLetter:
                continue
            if worker is None or letter.worker == worker:
                yield letter


async def whole_payload(bus: Bus, letter: DeadLetter) -> bytes:
    """Return all of the message while the log keeps it, else what the letter has of it."""
    if not letter.is_cut:
        return letter.payload
    at = letter.stream_sequence
    async with aclosing(bus.read_range(KV_EVENTS, at, at)) as kept:
        async for message in kept:
            if (message.subject, message.broker_ns) == (letter.subject, letter.broker_ns):
                return message.payload
    return letter.payload


def pattern_of(worker: str | None) -> str:
    """Return what to follow for letters about a worker's messages, or about all."""
    return "kv.dead.>" if worker is None else dead_letters_of(worker)
