"""The broker's fast ingest (NATS ADR-50, server 2.14+): when it is used, and what its answers mean.

    single --busy--> draining --nothing under way--> opening --accepted--> open --lull--> closing
       ^                |  ^                            |                   |                |
       |<-- few wait ---'  '----------------------------+--- all stored ----+----------------'
       '<-- rest --------------- an error, a gap, no answer: whatever is wrong, wherever

    single     each message is answered by itself
    draining   what was sent is being answered, newer messages wait, so that none overtakes another
    opening    the batch's first message is under way, the others wait for the broker's consent
    open       messages go at once; the broker answers every `flow` messages
    closing    the batch's end is under way, newer messages wait

A message of a batch carries the reply subject `<prefix><flow>.fail.<place>.<op>.$FI`. An answer
that names a place says that all up to there is stored, as the answer to a single message does. A
batch ends at the first message that is missing. Pure: `NatsPublisher` sends.
"""

from enum import Enum
from typing import NamedTuple

from msgspec import Struct
from msgspec.json import Decoder

#: from so many unanswered messages on a batch pays; 0 never uses one. Few open batches that have
#: little to do, and each takes two round trips; many leave the cheaper way unused
BUSY_MESSAGES = 64
#: a batch without a new message for one to two of these is ended, so that `flush` need not wait
IDLE_SECONDS = 0.02
#: and one without an answer for so many of them: its publisher is not busy any more
LULL_TICKS = 12
#: after anything went wrong, each message is answered by itself for so long
REST_SECONDS = 10.0
#: answers that a full window asks for
ANSWERS_IN_WINDOW = 4
#: the broker takes 16 bits; beyond a few hundred the cost of answers is gone anyway
MAX_FLOW = 512
#: messages too large for a longer flow cost the same one by one
MIN_FLOW = 8

#: ends the reply subjects of all batches, and no others
SUFFIX = ".$FI"
_START, _APPEND, _END = 0, 1, 3


class ApiError(Struct):
    """The error of an answer of JetStream; `code` is like HTTP's."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class BatchAnswer(Struct):
    """What the broker says about a batch.

    `type` is `ack` (all up to the place `seq` is stored, the next answer comes after `msgs` more),
    `gap` or `err` (news only; the last answer follows), or empty in the last answer, of which
    `count` is the last place that is stored. A broker that knows no batches says nothing of these.
    """

    type: str = ""
    seq: int = 0
    msgs: int = 0
    count: int | None = None
    error: ApiError | None = None


decode_answer = Decoder(BatchAnswer).decode


class IngestPhase(Enum):
    """See above."""

    single = 1
    draining = 2
    opening = 3
    open = 4
    closing = 5


class AnswerEffect(NamedTuple):
    """What an answer means: numbers of messages that are stored, and why the batch is over."""

    stored: range
    failure: str = ""


class FastIngest:
    """Where a publisher's messages stand on their way through batches.

    A batch takes consecutive numbers of the publisher's window. Everything that `take` has not
    told as stored when a batch fails has to be sent again.
    """

    def __init__(
        self,
        busy_messages: int = BUSY_MESSAGES,
        max_unacked: int = 1024,
        max_unacked_bytes: int = 16 << 20,
    ) -> None:
        self.busy_messages = busy_messages
        self._max_unacked, self._max_unacked_bytes = max_unacked, max_unacked_bytes
        self.phase = IngestPhase.single
        #: the number of the batch's first message
        self._first = 0
        #: places sent and known to be stored: 0 <= stored <= sent
        self.sent = self.stored = 0
        #: places from one answer to the next
        self.flow = 1
        #: the reply subject up to the place
        self._reply = ""
        #: the broker has answered the first message
        self.is_accepted = False
        #: the batch is to be ended as soon as it is open
        self.is_ending = False
        self._resting_until = 0.0
        #: at the last tick
        self._last_sent = self._last_stored = self._quiet_ticks = 0
        self.num_batches = self.num_failures = 0

    # --- when -------------------------------------------------------------------------------

    def wants_batch(self, num_unacked: int, unacked_bytes: int, now: float) -> bool:
        """Say whether a batch pays, for what waits and its sizes."""
        return (
            0 < self.busy_messages <= num_unacked
            and self._flow(num_unacked, unacked_bytes) >= min(MIN_FLOW, self.busy_messages)
            and now >= self._resting_until
        )

    def still_wants_batch(self, num_waiting: int) -> bool:
        """Say whether a batch pays when nothing is under way and so many wait."""
        return num_waiting >= max(self.busy_messages // 4, 1)

    def _flow(self, num_unacked: int, unacked_bytes: int) -> int:
        """Return how many places may go unanswered, so that the window always gets an answer."""
        by_count = self._max_unacked // ANSWERS_IN_WINDOW
        by_bytes = self._max_unacked_bytes * num_unacked // (ANSWERS_IN_WINDOW * unacked_bytes + 1)
        return min(MAX_FLOW, by_count, by_bytes)

    # --- what to send -----------------------------------------------------------------------

    def drain(self) -> None:
        """Let newer messages wait until nothing is under way."""
        self.phase = IngestPhase.draining

    def open(self, prefix: str, first: int, num_waiting: int, waiting_bytes: int) -> None:
        """Begin a batch with the message `first`; answers come to subjects below `prefix`."""
        self.phase = IngestPhase.opening
        self.flow = max(self._flow(num_waiting, waiting_bytes), 1)
        self._reply = f"{prefix}{self.flow}.fail."
        self._first, self.sent, self.stored = first, 0, 0
        self._last_sent = self._last_stored = self._quiet_ticks = 0
        self.is_accepted = self.is_ending = False
        self.num_batches += 1

    def next_reply(self) -> str:
        """Return the reply subject of the batch's next message, which has to be sent now."""
        self.sent = place = self.sent + 1
        return f"{self._reply}{place}.{_APPEND if place > 1 else _START}{SUFFIX}"

    def end(self) -> str:
        """End the batch; return the reply subject of an empty message, which is not stored."""
        self.phase = IngestPhase.closing
        return f"{self._reply}{self.sent + 1}.{_END}{SUFFIX}"

    # --- what comes back --------------------------------------------------------------------

    def apply(self, answer: BatchAnswer | None) -> AnswerEffect:
        """Take an answer to the present batch; None is that of a broker where nobody stores it."""
        if answer is None:
            return AnswerEffect(range(0), "nobody stores it")
        if answer.error is not None:
            return AnswerEffect(range(0), answer.error.description or f"error {answer.error.code}")
        if answer.type == "ack":
            self.is_accepted = True
            self.flow = answer.msgs or self.flow
            return AnswerEffect(self._store(answer.seq))
        if answer.type:
            return AnswerEffect(range(0))
        if answer.count is None:
            return AnswerEffect(self._store(1), "the broker knows no batches")
        return self._take_last(answer.count)

    def _take_last(self, count: int) -> AnswerEffect:
        stored = self._store(count)
        if self.phase is not IngestPhase.closing or self.stored < self.sent:
            return AnswerEffect(stored, f"the batch ended after {count} of {self.sent}")
        self.phase = IngestPhase.draining
        return AnswerEffect(stored)

    def _store(self, place: int) -> range:
        """Note that all up to a place is stored; return the numbers that were not before."""
        before, self.stored = self.stored, min(max(self.stored, place), self.sent)
        return range(self._first + before, self._first + self.stored)

    def tick(self) -> None:
        """Note that IDLE_SECONDS have gone by; a batch with too little to do is to be ended."""
        is_idle = self.sent == self._last_sent
        self._quiet_ticks = self._quiet_ticks + 1 if self.stored == self._last_stored else 0
        self._last_sent, self._last_stored = self.sent, self.stored
        if is_idle or self._quiet_ticks >= LULL_TICKS:
            self.is_ending = True

    def hurry(self) -> None:
        """End the batch if the publisher waits for an answer that is not due."""
        if self.sent - self.stored < self.flow:
            self.is_ending = True

    def fail(self, now: float) -> None:
        """Give batches up for a while; what is not stored goes one by one."""
        self.phase = IngestPhase.single
        self.num_failures += 1
        self._resting_until = now + REST_SECONDS

    def forget(self) -> None:
        """Go one by one: the connection is gone, and the batch with it; or a batch does not pay."""
        self.phase = IngestPhase.single
