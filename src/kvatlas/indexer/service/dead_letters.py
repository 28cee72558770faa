"""Writes dead letters: which messages get one, how many there may be, and the way to their stream.

    stimulus --poison_of--> Poison --LetterBudget--> bounded queue --run--> KV_DEAD_LETTERS

Never in the fold's way: what does not fit into budget or queue is dropped and counted.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from kvatlas.common.token_bucket import TokenBucket
from kvatlas.events.bus import Bus, Message
from kvatlas.events.dead_letters import (
    DeadLetter,
    Mark,
    address_of,
    encode_letter,
    letter_about,
    newest_mark,
)
from kvatlas.events.streams import KV_DEAD_LETTERS
from kvatlas.indexer.fold.stimuli import BatchArrived, PayloadRejected, Stimulus
from kvatlas.schemas.errors import BusUnavailable, InvalidSubject, StreamRefused

#: (worker, kind) pairs that have a bucket; whoever is left out has a full one
MAX_BUCKETS = 1024
#: of the events of a batch, whose reasons a letter gives
MAX_NAMED_EVENTS = 3
#: one line about letters that are refused in this time
QUIET_SECONDS = 60.0

_logger = logging.getLogger(__name__)


class DeadLetterSettings(Struct, frozen=True):
    """How many letters one replica writes; all that is more is dropped and counted."""

    letters_per_second: float = 100.0
    #: at once, such as after a deployment that went wrong
    burst: float = 1_000.0
    #: part of both that one kind of one worker may take; 1 lets one worker's flood hide the others
    share: float = 0.25
    #: that wait for the broker, and the bytes of their payloads
    max_waiting: int = 1_024
    max_waiting_bytes: int = 16 << 20


class UnreadableMessage(NamedTuple):
    """Why a message gets a letter."""

    worker: str
    kind: str
    reason: str


def unreadable_message_of(stimulus: Stimulus) -> UnreadableMessage | None:
    """Return why a message gets a letter, None for one that could be read.

    An event with an unknown tag is of a newer minor version, which is in order.
    """
    if isinstance(stimulus, PayloadRejected):
        return UnreadableMessage(stimulus.worker, stimulus.kind, stimulus.reason)
    if not isinstance(stimulus, BatchArrived) or not stimulus.decoded.rejected:
        return None
    batch, skipped = stimulus.decoded
    bad = [event for event in skipped if event.kind != "unknown"]
    if not bad:
        return None
    named = "; ".join(
        f"{event.position} ({event.kind}): {event.reason}" for event in bad[:MAX_NAMED_EVENTS]
    )
    more = f"; {len(bad) - MAX_NAMED_EVENTS} more" if len(bad) > MAX_NAMED_EVENTS else ""
    num_events = len(batch.events) + len(skipped)
    reason = f"{len(bad)} of {num_events} events skipped: {named}{more}"
    return UnreadableMessage(batch.worker, "event", reason)


class DeadLetterBudget:
    """Token buckets: one for all letters, and one for each kind of each worker within it."""

    def __init__(self, settings: DeadLetterSettings) -> None:
        self._settings = settings
        self._all = TokenBucket.full(settings.letters_per_second, settings.burst, now_ns=0)
        #: (worker, kind) -> its share; least recently used first
        self._shares: OrderedDict[tuple[str, str], TokenBucket] = OrderedDict()

    def spend(self, worker: str, kind: str, now: float) -> bool:
        """Take one letter out of both buckets if each has one; return whether. `now` in s."""
        now_ns, key = round(now * 1e9), (worker, kind)
        share = self._shares.pop(key, None) or self._full_share(now_ns)
        self._shares[key] = share
        if len(self._shares) > MAX_BUCKETS:
            self._shares.popitem(last=False)
        if min(self._all.fill(now_ns), share.fill(now_ns)) < 1:
            return False
        return self._all.spend(1, now_ns) and share.spend(1, now_ns)

    def _full_share(self, now_ns: int) -> TokenBucket:
        settings = self._settings
        rate, burst = settings.letters_per_second * settings.share, settings.burst * settings.share
        return TokenBucket.full(rate, burst, now_ns)


class DeadLetterWriter:
    """Takes messages that cannot be read, and publishes a letter about each while it runs.

    `put` returns at once. While the broker is away letters wait, as many as the settings allow;
    what waits when the writer ends is lost, and written by the next one that reads the log.
    """

    def __init__(
        self,
        bus: Bus,
        name: str,
        settings: DeadLetterSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus, self._name, self._settings, self._clock = bus, name, settings, clock
        self._budget = DeadLetterBudget(settings)
        self._mark = Mark()
        self._waiting: deque[DeadLetter] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._warned_at = -QUIET_SECONDS
        #: letters that stand in the stream, by kind
        self.num_written: Counter[str] = Counter()
        #: messages that will have no letter of this replica
        self.num_dropped = 0

    @property
    def num_waiting(self) -> int:
        """Letters that the broker has not stored yet."""
        return len(self._waiting)

    async def begin(self, log_end: int) -> None:
        """Learn what has a letter already; `log_end` is the newest sequence of the log.

        Where that cannot be learnt, letters about what the log holds are written once more.
        """
        try:
            mark = await newest_mark(self._bus)
        except (StreamRefused, BusUnavailable) as error:
            _logger.warning("the dead letters cannot be read: %s", error)
            return
        # whatever a letter says, what is still to come has none
        self._mark = mark._replace(stream_sequence=min(mark.stream_sequence, log_end))

    def put(self, message: Message, poison: UnreadableMessage) -> None:
        """Take a message, unless it has a letter already."""
        if self._mark.covers(message):
            return
        settings = self._settings
        has_room = (
            len(self._waiting) < settings.max_waiting
            and self._waiting_bytes < settings.max_waiting_bytes
        )
        if not has_room or not self._budget.spend(poison.worker, poison.kind, self._clock()):
            self.num_dropped += 1
            return
        letter = letter_about(message, poison.kind, poison.reason, self._name)
        self._waiting.append(letter)
        self._waiting_bytes += len(letter.payload)
        self._arrived.set()

    async def run(self) -> None:
        """Publish what waits, until cancelled; no outage ends it."""
        publisher = self._bus.publisher(KV_DEAD_LETTERS)
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                letter = self._waiting[0]
                try:
                    # one by one: a refusal does not tell whose it is
                    await publisher.publish(address_of(letter), encode_letter(letter))
                    await publisher.flush()
                    self.num_written[letter.kind] += 1
                except (StreamRefused, InvalidSubject, BusUnavailable) as error:
                    self.num_dropped += 1
                    self._warn(letter, error)
                self._waiting.popleft()
                self._waiting_bytes -= len(letter.payload)

    def _warn(self, letter: DeadLetter, error: Exception) -> None:
        now = self._clock()
        if now - self._warned_at >= QUIET_SECONDS:
            self._warned_at = now
            at = letter.stream_sequence
            _logger.warning("no letter about message %d of the log: %s", at, error)
