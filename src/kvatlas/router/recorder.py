"""Keeps decisions: the newest in memory, all of them in the log, never in a request's way."""

import asyncio
from collections import OrderedDict, deque
from typing import NamedTuple, Protocol, Self

import msgspec

from kvatlas.events.bus import Publisher
from kvatlas.events.subjects import decisions_subject
from kvatlas.router.slate import LateQuestion
from kvatlas.schemas.errors import BusUnavailable, StreamRefused
from kvatlas.schemas.routing import Decision, encode_decision
from kvatlas.schemas.settings import RouterSettings


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

    def record(self, decision: Decision, question: LateQuestion | None = None) -> None:
        """Take a decision. Returns at once; what does not fit is dropped and counted.

        `question` makes that of the decision when somebody looks at it, if it is not in it yet.
        """
        ...

    def find(self, decision_id: str) -> Decision | None:
        """Return a recent decision, whole."""
        ...

    def outline(self, decision_id: str) -> Decision | None:
        """Return a recent decision, maybe without the candidates of its question. O(1)."""
        ...


class Recorded(NamedTuple):
    """A decision, and what makes its question if it has none yet."""

    outline: Decision
    question: LateQuestion | None

    def whole(self) -> Decision:
        """Return the decision with its question. O(candidates)."""
        if self.question is None:
            return self.outline
        return msgspec.structs.replace(self.outline, question=self.question())


class MemoryDecisionLog:
    """The newest `max_kept_decisions` decisions, and no log behind it."""

    num_waiting = num_dropped = 0

    def __init__(self, settings: RouterSettings) -> None:
        self._limit = settings.max_kept_decisions
        self._kept: OrderedDict[str, Recorded] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def record(self, decision: Decision, question: LateQuestion | None = None) -> None:
        self._kept[decision.id] = Recorded(decision, question)
        if len(self._kept) > self._limit:
            self._kept.popitem(last=False)

    def find(self, decision_id: str) -> Decision | None:
        found = self._kept.get(decision_id)
        return found and found.whole()

    def outline(self, decision_id: str) -> Decision | None:
        found = self._kept.get(decision_id)
        return found and found.outline


class StreamDecisionLog:
    """Publishes decisions to their stream from a bounded queue; also keeps the newest in memory.

    While the broker is away the queue fills, then new decisions are dropped and counted. Leaving
    the context publishes what waits, for at most `drain_seconds`, and counts the rest as dropped.
    """

    def __init__(
        self, publisher: Publisher, settings: RouterSettings, drain_seconds: float = 2.0
    ) -> None:
        self._publisher, self._drain_seconds = publisher, drain_seconds
        self._limit = settings.max_unrecorded_decisions
        self._kept = MemoryDecisionLog(settings)
        self._waiting: deque[Recorded] = deque()
        self._arrived = asyncio.Event()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self.num_published = 0
        self._num_dropped = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_dropped(self) -> int:
        return self._num_dropped

    def record(self, decision: Decision, question: LateQuestion | None = None) -> None:
        self._kept.record(decision, question)
        if len(self._waiting) >= self._limit or self._is_closing:
            self._num_dropped += 1
            return
        self._waiting.append(Recorded(decision, question))
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

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                await self._publish(self._waiting[0].whole())
                self._waiting.popleft()
            if self._is_closing:
                await self._flush()
                return

    async def _publish(self, decision: Decision) -> None:
        subject, payload = decisions_subject(decision.model), encode_decision(decision)
        try:
            try:
                await self._publisher.publish(subject, payload)
            except StreamRefused:
                # Told of an earlier decision or of this one: only a second try tells which.
                self._num_dropped += 1
                await self._publisher.publish(subject, payload)
            self.num_published += 1
        except StreamRefused:
            pass
        except BusUnavailable:
            self._num_dropped += 1

    async def _flush(self) -> None:
        try:
            await self._publisher.flush()
        except (BusUnavailable, StreamRefused):
            self._num_dropped += 1
