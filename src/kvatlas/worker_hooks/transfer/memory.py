"""A transport within one process, for tests and demonstrations.

A `MemoryFabric` is the network: sources join it, transports read through it, and it can freeze or
lose a source. As with the real thing, a frozen source never errors and what it owes arrives late.
"""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.transport import (
    BouncePlaces,
    ReadOutcome,
    ReadStatus,
    Row,
    SourceRef,
    metadata_version,
)


class MemoryFabric:
    """The sources that memory transports can reach."""

    def __init__(self) -> None:
        self._sources: dict[str, MemorySource] = {}

    def join(self, source: "MemorySource") -> None:
        self._sources[source.reference.agent] = source

    def lose(self, agent: str) -> None:
        """Let reads from this agent fail at once, as if its process had died."""
        self._sources.pop(agent, None)

    def freeze(self, agent: str) -> None:
        """Let reads from this agent wait, as if its process were stopped."""
        self._sources[agent].running.clear()

    def thaw(self, agent: str) -> None:
        self._sources[agent].running.set()

    def find(self, source: SourceRef) -> "MemorySource | None":
        """Return the source, unless it is gone or another incarnation is meant."""
        found = self._sources.get(source.agent)
        is_same = found is not None and found.reference.metadata_version == source.metadata_version
        return found if is_same else None


class MemorySource:
    """The blocks of a pool, by their offset in it."""

    def __init__(self, fabric: MemoryFabric, agent: str, pool: ServePool) -> None:
        metadata = f"memory:{agent}".encode()
        self._reference = SourceRef("memory", agent, metadata, metadata_version(metadata))
        self.pool = pool
        self.running = asyncio.Event()
        self.running.set()
        fabric.join(self)

    @property
    def reference(self) -> SourceRef:
        return self._reference

    def rows(self, places: Sequence[int]) -> list[Row]:
        size = self.pool.block_bytes
        return [Row(place * size, size, 0) for place in places]

    def expect_reads(self, seconds: float) -> None:
        pass


class MemoryTransport:
    """Copies from the pools of a fabric."""

    name = "memory"

    def __init__(self, fabric: MemoryFabric, pool: ServePool, bounce: BouncePlaces) -> None:
        self._fabric, self._pool, self._bounce = fabric, pool, bounce
        #: reads in quarantine
        self._late: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        late = list(self._late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    @property
    def num_quarantined(self) -> int:
        """Reads whose transfer is not over."""
        return len(self._late)

    async def connect(self, source: SourceRef, deadline_seconds: float) -> ReadStatus:
        return ReadStatus.done if self._fabric.find(source) else ReadStatus.disconnected

    async def read(
        self, source: SourceRef, rows: Sequence[Row], deadline_seconds: float
    ) -> ReadOutcome:
        started = time.monotonic()
        found = self._fabric.find(source)
        if found is None:
            return ReadOutcome(ReadStatus.disconnected, detail=f"{source.agent} is gone")
        end = len(found.pool.blocks)
        for row in rows:
            if row.length != self._pool.block_bytes or row.address + row.length > end:
                return ReadOutcome(ReadStatus.refused, detail=f"{row} is no block of the pool")
        places = self._bounce.acquire(len(rows))
        if not places:
            return ReadOutcome(ReadStatus.no_room)
        copying = asyncio.create_task(self._copy(found, rows, places))
        try:
            done, _ = await asyncio.wait({copying}, timeout=deadline_seconds)
        except asyncio.CancelledError:
            self._quarantine(copying, places)
            raise
        if not done:
            self._quarantine(copying, places)
            return ReadOutcome(
                ReadStatus.timed_out, detail=f"{len(places)} places are in quarantine"
            )
        seconds = time.monotonic() - started
        return ReadOutcome(ReadStatus.done, places=places, seconds=seconds)

    async def _copy(self, found: MemorySource, rows: Sequence[Row], places: list[int]) -> None:
        await found.running.wait()
        for place, row in zip(places, rows, strict=True):
            came = found.pool.blocks[row.address : row.address + row.length]
            self._pool.bytes_at(place)[:] = came

    def _quarantine(self, copying: asyncio.Task[None], places: list[int]) -> None:
        self._late.add(copying)

        def end(task: asyncio.Task[None]) -> None:
            self._late.remove(task)
            self._bounce.release(places)

        copying.add_done_callback(end)
