"""Replay: the fold fed from the past, and questions to what comes out.

    archive or stream --archived_log / stream_log--> fold --> IndexState as it was at a moment

The fold is the live one, so after a replay to the live sequence the digests are equal.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from kvatlas.events.archive.port import Archive, Hole
from kvatlas.events.archive.replay import archived_log, stream_log, stream_sequence_at
from kvatlas.events.bus import Bus, Message
from kvatlas.events.streams import KV_EVENTS
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import HoleSeen, stimulus_of
from kvatlas.indexer.index.flat import FlatRadixIndex
from kvatlas.indexer.index.port import PrefixIndex
from kvatlas.indexer.reader import RejectedCount
from kvatlas.schemas.errors import InvalidBlock, InvalidRequest, UnknownModel
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.hashing import BlockHasher, pack_tokens
from kvatlas.schemas.ids import InstanceId, Tier


class Moment(Struct, frozen=True):
    """How far a replay goes: to a stream sequence, to a time, or, with neither, to the end."""

    sequence: int | None = None
    time_ns: int | None = None


END = Moment()


class Replayed(Struct, frozen=True):
    """The state as it was, and how it came about."""

    state: IndexState
    #: the moment as a sequence of the log
    stream_sequence: int
    #: the newest sequence that could be replayed; a moment beyond it comes to this one
    log_end: int
    #: batches that counted, and the events in them
    num_batches: int
    num_events: int
    #: what was missing on the way; with holes the state may not be what it was live
    holes: tuple[Hole, ...]
    seconds: float
    #: rows of the archive that could not be read as they are, in words
    damaged: tuple[str, ...] = ()

    @property
    def state_digest(self) -> str:
        """See IndexState.state_digest."""
        return self.state.state_digest()


class TokenMatch(Struct, frozen=True):
    """How much of a prompt an instance held."""

    worker: str
    rank: int
    trust: Trust
    match_tokens: int
    num_blocks: int
    block_tokens: int
    blocks_by_tier: dict[str, int]


class WorkerReport(Struct, frozen=True):
    """What an instance held, as people and scripts read it; xor is 16 hex digits."""

    worker: str
    rank: int
    epoch: int
    seq: int
    trust: Trust
    trust_reasons: tuple[str, ...]
    digests: dict[str, dict[str, int | str]]


class ReplayReport(Struct, frozen=True):
    """A replay's outcome for people and scripts."""

    stream_sequence: int
    log_end: int
    batches: int
    events: int
    state_digest: str
    holes: tuple[Hole, ...]
    seconds: float
    workers: tuple[WorkerReport, ...]
    damaged: tuple[str, ...] = ()
    #: events and messages that could not be read, as they were live
    rejected: tuple[RejectedCount, ...] = ()


class Fold:
    """Feeds an IndexState from the past."""

    def __init__(self, index: PrefixIndex) -> None:
        self.state = IndexState(index)
        self.holes: list[Hole] = []

    def take(self, item: Message | Hole) -> None:
        """Fold the next item of the log."""
        if isinstance(item, Hole):
            self.holes.append(item)
            self.state.handle(HoleSeen(item.first, item.last + 1))
        else:
            self.state.handle(stimulus_of(item))


def replay(
    archive: Archive,
    until: Moment = END,
    make_index: Callable[[], PrefixIndex] = FlatRadixIndex,
) -> Replayed:
    """Rebuild the state from an archive. Raises ArchiveUnavailable."""
    started = time.monotonic()
    last = log_end = archive.cursor(KV_EVENTS)
    if until.sequence is not None:
        last = min(last, until.sequence)
    if until.time_ns is not None:
        last = min(last, archive.sequence_at(until.time_ns))
    fold = Fold(make_index())
    for item in archived_log(archive, last):
        fold.take(item)
    found = _outcome(fold, last, log_end, started)
    return msgspec.structs.replace(found, damaged=tuple(archive.damaged.lines()))


async def replay_archive(
    url: str,
    until: Moment = END,
    make_index: Callable[[], PrefixIndex] = FlatRadixIndex,
) -> Replayed:
    """Rebuild the state from the archive at a database URL, in a thread.

    Raises ArchiveUnavailable, ArchiveNewer and InvalidSetting.
    """

    from kvatlas.events.archive.sql import SqlArchive

    def run() -> Replayed:
        with SqlArchive(url, must_exist=True) as archive:
            return replay(archive, until, make_index)

    return await asyncio.to_thread(run)


async def replay_stream(
    bus: Bus,
    until: Moment = END,
    make_index: Callable[[], PrefixIndex] = FlatRadixIndex,
) -> Replayed:
    """Rebuild the state from what the stream keeps. Raises BusUnavailable and StreamRefused."""
    started = time.monotonic()
    last = log_end = await bus.last_sequence(KV_EVENTS)
    if until.sequence is not None:
        last = min(last, until.sequence)
    if until.time_ns is not None:
        last = min(last, await stream_sequence_at(bus, until.time_ns))
    fold = Fold(make_index())
    async for item in stream_log(bus, last):
        fold.take(item)
    return _outcome(fold, last, log_end, started)


def report_of(replayed: Replayed) -> ReplayReport:
    """Return what a replay came to, ready for `msgspec.json.encode`."""
    return ReplayReport(
        stream_sequence=replayed.stream_sequence,
        log_end=replayed.log_end,
        batches=replayed.num_batches,
        events=replayed.num_events,
        state_digest=replayed.state_digest,
        holes=replayed.holes,
        seconds=round(replayed.seconds, 3),
        workers=tuple(
            WorkerReport(
                worker=view.instance.worker,
                rank=view.instance.rank,
                epoch=view.epoch,
                seq=view.seq,
                trust=view.trust,
                trust_reasons=view.trust_reasons,
                digests={
                    tier.name: {"count": digest.count, "xor": f"{digest.xor:016x}"}
                    for tier, digest in view.digests.items()
                },
            )
            for view in replayed.state.instances()
        ),
        damaged=replayed.damaged,
        rejected=replayed.state.stats().rejected,
    )


def read_tokens(file: Path) -> bytes:
    """Return the token ids of a file as u32 LE: a JSON list, or raw u32 LE.

    Raises InvalidRequest for a file that cannot be read, and InvalidBlock.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidRequest("tokens", str(error)) from error
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError):
        found = None
    if not isinstance(found, list):
        return pack_tokens(content)
    for place, token in enumerate(found):
        if type(token) is not int:
            raise InvalidBlock(f"{file}: [{place}]: expected an int")
    return pack_tokens(found)


def match_tokens(
    state: IndexState,
    model: str,
    tokens: bytes,
    *,
    cache_salt: str | None = None,
    fleet_key: bytes = b"",
) -> list[TokenMatch]:
    """Return who held how much of a prompt, the longest first; `model` may be an adapter.

    Raises UnknownModel when nobody served it.
    """
    views = state.serving(model)
    if not views:
        raise UnknownModel(model)
    found = []
    chains: dict[bytes, dict[InstanceId, tuple[int, int, int, int, int]]] = {}
    for view in views:
        assert view.info is not None
        lora = model if model in view.info.adapters else None
        namespace = view.info.descriptor.namespace(view.info.model, lora, cache_salt)
        hasher = BlockHasher(namespace, fleet_key)
        if hasher.root not in chains:
            matches = state.match(hasher.chain(tokens))
            chains[hasher.root] = {match.instance: match.by_tier for match in matches}
        by_tier = chains[hasher.root].get(view.instance, (0, 0, 0, 0, 0))
        found.append(
            TokenMatch(
                worker=view.instance.worker,
                rank=view.instance.rank,
                trust=view.trust,
                match_tokens=sum(by_tier) * namespace.block_tokens,
                num_blocks=sum(by_tier),
                block_tokens=namespace.block_tokens,
                blocks_by_tier={tier.name: by_tier[tier] for tier in Tier if by_tier[tier]},
            )
        )
    return sorted(found, key=lambda match: -match.match_tokens)


def _outcome(fold: Fold, stream_sequence: int, log_end: int, started: float) -> Replayed:
    stats = fold.state.stats()
    return Replayed(
        state=fold.state,
        stream_sequence=stream_sequence,
        log_end=log_end,
        num_batches=stats.batches,
        num_events=stats.events,
        holes=tuple(fold.holes),
        seconds=time.monotonic() - started,
    )
