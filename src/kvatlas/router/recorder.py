"""Keeps decisions: the newest in memory, all of them in the log, never in a request's way."""

import asyncio
import contextlib
from collections import OrderedDict, deque
from typing import NamedTuple, Protocol, Self

import msgspec

from kvatlas.events.bus import Publisher
from kvatlas.events.subjects import decisions_subject
from kvatlas.router.decision.candidate_table import DeferredQuestion
from kvatlas.schemas.errors import BusUnavailable, MessageTooLarge, StreamRefused
from kvatlas.schemas.routing import Decision, encode_decision
from kvatlas.schemas.settings import RouterSettings

#: estimates of what a decision takes in memory: alone, for each score in it, and for each candidate
#: of its question as an object
OUTLINE_BYTES, SCORE_BYTES, CANDIDATE_BYTES = 4_096, 1_024, 384


class DecisionLog(Protocol):
    """Where decisions go."""

    @property
    def num_waiting(self) -> int:
        """Decisions that have not left for the log yet."""
        ...

    @property
    def num_dropped(self) -> int:
        """Decisions that will never be in the log."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Estimated memory of the decisions that are kept whole."""
        ...

    @property
    def num_reduced(self) -> int:
        """Kept decisions that were reduced to their outline, for want of bytes."""
        ...

    @property
    def num_cut(self) -> int:
        """Decisions in the log with parts left out, since the broker takes no message so large."""
        ...

    def record(self, decision: Decision, question: DeferredQuestion | None = None) -> None:
        """Take a decision. Returns at once; what does not fit is dropped and counted.

        `question` makes that of the decision when somebody looks at it, if it is not in it yet.
        """
        ...

    def find(self, decision_id: str) -> Decision | None:
        """Return a recent decision, whole; None where it is no longer kept so."""
        ...

    def outline(self, decision_id: str) -> Decision | None:
        """Return a recent decision, maybe without chains, candidates and its question's. O(1)."""
        ...


class Recorded(NamedTuple):
    """A decision, what makes its question if it has none yet, and what both take in memory."""

    outline: Decision
    question: DeferredQuestion | None
    num_bytes: int

    def whole(self) -> Decision:
        """Return the decision with its question. O(candidates)."""
        if self.question is None:
            return self.outline
        return msgspec.structs.replace(self.outline, question=self.question())


def recorded(decision: Decision, question: DeferredQuestion | None = None) -> Recorded:
    """Return a decision with an estimate of its bytes: what grows with a request is counted."""
    num_bytes = OUTLINE_BYTES + SCORE_BYTES * len(decision.candidates)
    for group in decision.groups:
        num_bytes += len(group.chain)
    if question is None:
        num_bytes += CANDIDATE_BYTES * len(decision.question.candidates)
    else:
        num_bytes += question.num_bytes
    return Recorded(decision, question, num_bytes)


def without_chains(decision: Decision) -> Decision:
    """Return a decision without what grows with the prompt; any policy can be run again on it."""
    groups = tuple(msgspec.structs.replace(group, chain=b"") for group in decision.groups)
    return msgspec.structs.replace(decision, groups=groups, left_out=("groups.chain",))


def _outline_of(decision: Decision) -> Decision:
    """Return a decision without all that grows with its request or its fleet."""
    question = msgspec.structs.replace(decision.question, candidates=())
    return msgspec.structs.replace(
        decision,
        question=question,
        is_question_complete=False,
        candidates=(),
        groups=(),
        chosen_group=0,
        left_out=("groups", "candidates", "question.candidates"),
    )


#: what is offered to the log of a decision that is too large for it, the fullest first
_REDUCED = (without_chains, _outline_of)


class MemoryDecisionLog:
    """The newest decisions, and no log behind it.

    Whole are those that fit into `max_kept_decision_bytes`, the newest first. Of the other newest
    `max_kept_decisions` an outline is kept, which is what reports of their end need.
    """

    num_waiting = num_dropped = num_cut = 0

    def __init__(self, settings: RouterSettings) -> None:
        self._limit = settings.max_kept_decisions
        self._limit_bytes = settings.max_kept_decision_bytes
        #: both oldest first, and all of `_outlines` older than those here
        self._whole: OrderedDict[str, Recorded] = OrderedDict()
        self._outlines: OrderedDict[str, Decision] = OrderedDict()
        self._num_bytes = 0
        self._num_reduced = 0

    def __len__(self) -> int:
        return len(self._whole) + len(self._outlines)

    @property
    def kept_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_reduced(self) -> int:
        return self._num_reduced

    def record(self, decision: Decision, question: DeferredQuestion | None = None) -> None:
        self.keep(recorded(decision, question))

    def keep(self, made: Recorded) -> None:
        """Take a decision as `record` does, its size known."""
        self._whole[made.outline.id] = made
        self._num_bytes += made.num_bytes
        while self._num_bytes > self._limit_bytes:
            self._num_reduced += 1
            oldest = self._pop_whole()
            self._outlines[oldest.id] = _outline_of(oldest)
        if len(self) > self._limit:
            if self._outlines:
                self._outlines.popitem(last=False)
            else:
                self._pop_whole()

    def find(self, decision_id: str) -> Decision | None:
        found = self._whole.get(decision_id)
        return found and found.whole()

    def outline(self, decision_id: str) -> Decision | None:
        found = self._whole.get(decision_id)
        return self._outlines.get(decision_id) if found is None else found.outline

    def _pop_whole(self) -> Decision:
        _, oldest = self._whole.popitem(last=False)
        self._num_bytes -= oldest.num_bytes
        return oldest.outline


class StreamDecisionLog:
    """Publishes decisions to their stream from a bounded queue; also keeps the newest in memory.

    While the broker is away the queue fills, to `max_unrecorded_decisions` or
    `max_unrecorded_decision_bytes`; then new decisions are dropped and counted. Leaving
    the context publishes what waits, for at most `drain_seconds`, and counts the rest as dropped.
    What is larger than the broker takes is published with parts left out (Decision.left_out).
    """

    def __init__(
        self, publisher: Publisher, settings: RouterSettings, drain_seconds: float = 2.0
    ) -> None:
        self._publisher, self._drain_seconds = publisher, drain_seconds
        self._limit = settings.max_unrecorded_decisions
        self._limit_bytes = settings.max_unrecorded_decision_bytes
        self._kept = MemoryDecisionLog(settings)
        self._waiting: deque[Recorded] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self.num_published = 0
        self._num_dropped = self._num_cut = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_cut(self) -> int:
        return self._num_cut

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    @property
    def kept_bytes(self) -> int:
        return self._kept.kept_bytes

    @property
    def num_reduced(self) -> int:
        return self._kept.num_reduced

    def record(self, decision: Decision, question: DeferredQuestion | None = None) -> None:
        made = recorded(decision, question)
        self._kept.keep(made)
        num_bytes = self._waiting_bytes + made.num_bytes
        if len(self._waiting) >= self._limit or num_bytes > self._limit_bytes or self._is_closing:
            self._num_dropped += 1
            return
        self._waiting.append(made)
        self._waiting_bytes = num_bytes
        self._arrived.set()

    def find(self, decision_id: str) -> Decision | None:
        return self._kept.find(decision_id)

    def outline(self, decision_id: str) -> Decision | None:
        return self._kept.outline(decision_id)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="decision log")
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_closing = True
        self._arrived.set()
        assert self._task is not None
        try:
            async with asyncio.timeout(self._drain_seconds):
                await asyncio.shield(self._task)
        except TimeoutError:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._num_dropped += len(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                await self._publish(self._waiting[0].whole())
                self._waiting_bytes -= self._waiting.popleft().num_bytes
            if self._is_closing:
                await self._flush()
                return

    async def _publish(self, decision: Decision) -> None:
        try:
            for reduced in (None, *_REDUCED):
                offered = decision if reduced is None else reduced(decision)
                with contextlib.suppress(MessageTooLarge):
                    self.num_published += await self._is_taken(offered)
                    self._num_cut += reduced is not None
                    return
        except BusUnavailable:
            pass
        self._num_dropped += 1

    async def _is_taken(self, decision: Decision) -> bool:
        """Offer a decision to the log; one that is refused is counted. Raises MessageTooLarge."""
        subject, payload = decisions_subject(decision.model), encode_decision(decision)
        try:
            await self._publisher.publish(subject, payload)
        except MessageTooLarge:
            raise
        except StreamRefused:
            # Told of an earlier decision or of this one: only a second try tells which.
            self._num_dropped += 1
            try:
                await self._publisher.publish(subject, payload)
            except MessageTooLarge:
                raise
            except StreamRefused:
                return False
        return True

    async def _flush(self) -> None:
        try:
            await self._publisher.flush()
        except (BusUnavailable, StreamRefused):
            self._num_dropped += 1
