"""Taking snapshots: one replica at a time, whoever gets the turn.

    look --> due? --> turn (a key with a time to live) --> cut --> upload --> remove the surplus

A turn lasts as long as the pause between two snapshots. Nobody renews it: a writer that dies costs
one snapshot, and two writers, should that happen, cost one upload.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from kvatlas.events.bus import Bus
from kvatlas.events.objects import Buffer, ObjectEntry
from kvatlas.events.streams import KV_EVENTS
from kvatlas.indexer.index.exporting import Export, Room
from kvatlas.indexer.snapshots.format import SnapshotInfo, framed
from kvatlas.indexer.snapshots.schedule import headroom, is_due, is_near, name_for, surplus
from kvatlas.schemas.errors import KeyExists, StreamRefused, Unavailable

SNAPSHOTS_BUCKET = "KV_SNAPSHOTS"
TURNS_BUCKET = "kv_snapshot_turns"
TURN = "writer"
#: looks at the log and the snapshots in the time of one snapshot
LOOKS = 10
#: between two warnings that the oldest snapshot is about to be lost
QUIET_SECONDS = 300.0

_logger = logging.getLogger(__name__)


class SnapshotSettings(Struct, frozen=True):
    """When snapshots are taken and which are kept; see schemas.settings.IndexerSettings."""

    seconds: float = 300.0
    messages: int = 10_000
    kept: int = 3
    kept_seconds: float = 86_400.0


class SnapshotCut(NamedTuple):
    """A copy of the fold; `pause_seconds` is how long nothing was folded in."""

    about: SnapshotInfo
    export: Export
    pause_seconds: float


class SnapshotStatus(Struct):
    """What this replica knows of the snapshots, for metrics."""

    num_snapshots: int = 0
    #: messages that the log may lose before the oldest is of no use; None without any
    headroom: int | None = None
    #: the first message that the log keeps; None before the first look
    log_first: int | None = None
    num_written: int = 0
    num_failed: int = 0
    #: of the last one that was taken here
    num_bytes: int = 0
    pause_seconds: float = 0.0
    upload_seconds: float = 0.0


class SnapshotWriter:
    """Takes a snapshot whenever one is due and it is this replica's turn."""

    def __init__(
        self,
        bus: Bus,
        settings: SnapshotSettings,
        name: str,
        cut: Callable[[Room], SnapshotCut | None],
        sequence: Callable[[], int],
        memory_bytes: Callable[[], int],
    ) -> None:
        """`cut` gives None, and `sequence` 0, while the fold has not caught up."""
        self._bus, self._settings, self._name = bus, settings, name
        self._cut, self._sequence, self._memory_bytes = cut, sequence, memory_bytes
        self._objects = bus.objects(SNAPSHOTS_BUCKET)
        self._turns = bus.keys(TURNS_BUCKET)
        self._warned_at = -QUIET_SECONDS
        self.status = SnapshotStatus()

    async def run(self) -> None:
        """Take snapshots until cancelled; no outage ends it."""
        while True:
            await asyncio.sleep(self._settings.seconds / LOOKS)
            try:
                await self.poll()
            except (Unavailable, StreamRefused) as error:
                self.status.num_failed += 1
                _logger.warning("no snapshot: %s", error)

    async def poll(self) -> bool:
        """Take a snapshot if it is due and our turn; return whether."""
        entries = await self._objects.entries()
        await self._watch_headroom(entries)
        if not is_due(entries, self._sequence(), self._settings.messages):
            return False
        try:
            await self._turns.create(TURN, self._name.encode(), self._settings.seconds)
        except KeyExists:
            return False
        room = await asyncio.to_thread(_room, self._memory_bytes())
        cut = self._cut(room)
        if cut is None:
            return False
        about, self.status.pause_seconds = cut.about, cut.pause_seconds
        pieces = await asyncio.to_thread(_pieces, cut)
        del cut, room  # the copy is larger than its parts, and the upload takes a while
        await self._upload(about, pieces)
        for entry in surplus(
            await self._objects.entries(), self._settings.kept, self._settings.kept_seconds
        ):
            await self._objects.delete(entry.name)
        return True

    async def _upload(self, about: SnapshotInfo, pieces: Sequence[Buffer]) -> None:
        started = time.perf_counter()
        name, status = name_for(about.stream_sequence), self.status
        await self._objects.put(name, pieces)
        status.num_written += 1
        status.num_bytes = sum(map(len, pieces))
        status.upload_seconds = time.perf_counter() - started
        _logger.info(
            "snapshot %s: %d blocks, %.1f MB, the fold paused %.1f ms, stored in %.2f s",
            name,
            about.num_blocks,
            status.num_bytes / 1e6,
            1e3 * status.pause_seconds,
            status.upload_seconds,
        )

    async def _watch_headroom(self, entries: Sequence[ObjectEntry]) -> None:
        first = await self._bus.first_sequence(KV_EVENTS)
        last = await self._bus.last_sequence(KV_EVENTS)
        status = self.status
        status.num_snapshots = len(entries)
        status.headroom, status.log_first = headroom(entries, first), first
        if status.headroom is None or not is_near(status.headroom, first, last):
            return
        now = time.monotonic()
        if now - self._warned_at >= QUIET_SECONDS:
            self._warned_at = now
            _logger.warning(
                "the oldest snapshot is %d messages from where the log begins, %d: without newer"
                " ones a start reads the whole log",
                status.headroom,
                first,
            )


def _pieces(cut: SnapshotCut) -> list[Buffer]:
    return list(framed(cut.about, cut.export()))


def _room(num_bytes: int) -> Room:
    """Have the system find memory for a copy before the fold pauses for it.

    On a virtual machine finding 80 MB takes up to 180 ms, copying into them 10 ms.
    """
    room = np.empty(num_bytes, np.uint8)
    room.fill(0)
    return room
