"""The index of the ingest benchmark: follows the log, says what it holds and when it learned it."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from kvatlas.events.bus import Bus
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import BatchArrived, Effect, Stimulus
from kvatlas.indexer.index.flat import FlatRadixIndex
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.schemas.digest import TierDigest
from kvatlas.schemas.ids import InstanceId, Tier
from testkit.measuring.ingest_plans import Held


class WatchedState(IndexState):
    """Notes when each batch has been folded in, while it is watched."""

    folded: list[tuple[str, int, float]] | None = None

    def handle(self, stimulus: Stimulus) -> list[Effect]:
        effects = super().handle(stimulus)
        if self.folded is not None and isinstance(stimulus, BatchArrived):
            batch = stimulus.decoded.batch
            self.folded.append((batch.worker, batch.seq, time.perf_counter()))
        return effects


class Indexer:
    """Answers from an index that follows the log."""

    def __init__(self, state: WatchedState) -> None:
        self._state = state
        #: whose last prompts are not found yet
        self._expected: list[Held] = []

    async def expect(self, held: list[Held]) -> None:
        """Learn what `are_visible` looks for."""
        self._expected = list(held)

    async def are_visible(self) -> bool:
        """Say whether the last prompt of every worker is found, looking one up at a time."""
        while self._expected and self._holds(self._expected[0]):
            del self._expected[0]
        return not self._expected

    async def digests(self, workers: list[str]) -> list[TierDigest]:
        """Return what each worker holds."""
        views = [self._state.instance(InstanceId(worker, 0)) for worker in workers]
        return [view.digests[Tier.hbm] if view else TierDigest() for view in views]

    async def watch(self) -> None:
        """Begin to note when batches are folded in."""
        self._state.folded = []

    async def times(self) -> list[tuple[str, int, float]]:
        """Return (worker, sequence, moment) of each batch since `watch`."""
        return self._state.folded or []

    def _holds(self, held: Held) -> bool:
        return any(
            match.instance.worker == held.worker and 16 * match.num_blocks == len(held.last_chain)
            for match in self._state.match(held.last_chain)
        )


@asynccontextmanager
async def indexer(bus: Bus) -> AsyncGenerator[Indexer, None]:
    """Run an index at the end of the log."""
    state = WatchedState(FlatRadixIndex())
    patient = IndexServiceLimits(lease_missing_seconds=3600.0)  # nobody here holds a lease
    async with IndexService(bus, state, settings=patient) as service:
        await service.wait_ready()
        yield Indexer(state)
