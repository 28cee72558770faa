"""Starting from a snapshot: the newest one that is whole and of this log, or none.

    entries, newest first --> header --> parts --> is it this log? --> IndexState.restore

A snapshot that is of no use costs a line in the log and the time to find out, never the start.
"""

import logging
import time
from contextlib import AbstractContextManager, nullcontext

from msgspec import Struct

from kvatlas.events.bus import Bus
from kvatlas.events.objects import ObjectEntry, ObjectStore
from kvatlas.events.streams import KV_EVENTS
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index.exporting import InvalidSnapshot, Parts, refusing
from kvatlas.indexer.snapshots.format import Anchor, SnapshotInfo, SnapshotReader
from kvatlas.indexer.snapshots.schedule import sequence_of
from kvatlas.schemas.errors import IndexFull, NotFound, StreamRefused, Unavailable

_logger = logging.getLogger(__name__)


class LoadedSnapshot(Struct, frozen=True):
    """The snapshot that an index has started from."""

    name: str
    about: SnapshotInfo
    num_bytes: int
    seconds: float


async def load_newest(
    bus: Bus,
    objects: ObjectStore,
    state: IndexState,
    window: AbstractContextManager[object] | None = None,
) -> LoadedSnapshot | None:
    """Restore the newest snapshot that can be used; None, and nothing has changed, if none can.

    `window` is entered while the index changes: others may be reading it. Raises BusUnavailable and
    StreamRefused when the log itself cannot be looked at.
    """
    first, last = await bus.first_sequence(KV_EVENTS), await bus.last_sequence(KV_EVENTS)
    try:
        entries = await objects.entries()
    except (Unavailable, StreamRefused) as error:
        _logger.warning("snapshots cannot be listed, starting without one: %s", error)
        return None
    for entry in entries:
        try:
            started = time.perf_counter()
            about, parts = await _read(bus, objects, entry, first, last)
            with window or nullcontext():
                restore(state, about, parts)
        except (InvalidSnapshot, IndexFull, NotFound, StreamRefused, Unavailable) as error:
            _logger.warning("snapshot %s is of no use: %s", entry.name, error)
        else:
            return LoadedSnapshot(entry.name, about, entry.num_bytes, time.perf_counter() - started)
    return None


async def _read(
    bus: Bus, objects: ObjectStore, entry: ObjectEntry, first: int, last: int
) -> tuple[SnapshotInfo, Parts]:
    """Return a snapshot that is whole and of this log."""

    def accepts(about: SnapshotInfo) -> None:
        check_place(about.stream_sequence, first, last)

    sequence = sequence_of(entry.name)
    if sequence is not None:
        check_place(sequence, first, last)
    reader = SnapshotReader(entry.num_bytes, accepts)
    await objects.get(entry.name, reader.feed)
    about, parts = reader.finish()
    if about.anchor is not None and about.anchor.stream_sequence >= first:
        await _check_anchor(bus, about.anchor)
    return about, parts


def restore(state: IndexState, about: SnapshotInfo, parts: Parts) -> None:
    """Become what the parts say, if that is what the snapshot is about; else stay as it was.

    Raises InvalidSnapshot for whatever is wrong with the parts, and IndexFull.
    """
    before = state.export()
    try:
        with refusing():
            _become(state, about, parts)
    except (InvalidSnapshot, IndexFull):
        state.restore(before())
        raise


def _become(state: IndexState, about: SnapshotInfo, parts: Parts) -> None:
    state.restore(parts)
    if state.stream_sequence != about.stream_sequence:
        raise InvalidSnapshot(f"its parts stand for sequence {state.stream_sequence}")
    if state.state_digest() != about.state_digest:
        raise InvalidSnapshot("its digest is another one")
    if broken := state.audit():
        instance, tier = broken[0]
        raise InvalidSnapshot(
            f"the blocks of {instance} in {tier.name} are not those of its digest"
        )


def check_place(sequence: int, first: int, last: int) -> None:
    """Raise InvalidSnapshot unless the log, `first` to `last`, goes on from a sequence."""
    if not first - 1 <= sequence <= last:
        raise InvalidSnapshot(f"it stands for {sequence}, the log has {first} to {last}")


async def _check_anchor(bus: Bus, anchor: Anchor) -> None:
    """Raise InvalidSnapshot when the log has something else where the anchor was."""
    at = anchor.stream_sequence
    async for message in bus.read_range(KV_EVENTS, at, at):
        if Anchor.of(message) == anchor:
            return
    raise InvalidSnapshot(f"it is of another log: message {at} is not the same")
