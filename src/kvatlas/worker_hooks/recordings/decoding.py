"""What a recording comes to: frames -> adapter -> edge, event by event, as the bridge does it live.

    (worker, rank) -> Edge                    what the engine holds there
    (topic, rank)  -> _Stream                 its last sequence, for gaps and restarts

Pure; `kvatlas decode` prints the story and the report.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec import Struct, field

from kvatlas.schemas.errors import MalformedBatch
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import MAX_BLOCK_TOKENS
from kvatlas.worker_hooks.engines.adapter import Decoded, EngineAdapter
from kvatlas.worker_hooks.engines.registry import adapter_of
from kvatlas.worker_hooks.raw_events import (
    EngineHash,
    RawCleared,
    RawEvent,
    RawGroupSeen,
    RawRemoved,
    RawRestarted,
    RawStored,
)
from kvatlas.worker_hooks.recordings.captures import Frame
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker

#: what reading a batch may end with; adapters look into values as deep as they are nested
_UNREADABLE = (MalformedBatch, RecursionError)
#: where nothing in a recording says how large blocks are, none is named
_ANY_BLOCK_TOKENS = 16


class DecodeOptions(Struct, frozen=True, kw_only=True):
    """How a recording is read; what is None comes from the recording."""

    engine: str
    block_tokens: int | None = None
    model: str | None = None
    worker: str | None = None
    #: for frames that nothing names a worker for
    file_stem: str = "worker"


class Counts(Struct):
    """What happened in a recording; blocks where nothing else is said."""

    stored: int = 0
    removed: int = 0
    #: clears
    cleared: int = 0
    duplicates: int = 0
    #: stores whose parent was not known when they came
    orphans_parked: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    stored_events: int = 0
    removed_events: int = 0
    #: holes in sequences, however wide
    gaps: int = 0


def names_of(topic: str) -> tuple[str, str]:
    """Return (worker, model) of a topic `kv@WORKER@MODEL`; a model may have more @ in it."""
    parts = topic.split("@", 2)
    if len(parts) == 3 and parts[0] == "kv":
        return parts[1], parts[2]
    return topic, ""


class Decoding:
    """Reads a recording once to learn the block sizes, then once for good.

    `story` yields lines while it reads; after its end `report` is true.
    """

    def __init__(self, frames: Sequence[Frame], options: DecodeOptions) -> None:
        self._frames, self._options = frames, options
        self._workers: dict[str, _Worker] = {}
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._rejected: Counter[str] = Counter()
        self.counts = Counts()
        #: batches in which there was anything to read
        self.num_read = 0

    def story(self) -> Iterator[str]:
        """Yield a line for everything that an event became, and for what became nothing."""
        windows = _windows(self._frames, self._options, self._worker_of)
        for frame in self._frames:
            name = self._worker_of(frame)
            worker = self._workers.get(name)
            if worker is None:
                model = self._options.model or names_of(frame.topic)[1] or "unnamed"
                window = windows.get(name) or _Window(
                    self._options.block_tokens or _ANY_BLOCK_TOKENS
                )
                worker = self._workers[name] = _Worker(name, model, window, self._options)
                yield f"{name}: model {model}, blocks of {window.in_words()}"
            yield from self._frame(worker, frame)
        self._sum_up()

    def reject(self, kind: str) -> None:
        """Count what the reader of the file could not read."""
        self._rejected[kind] += 1

    def report(self) -> dict[str, Any]:
        """Return the resident sets and the counts, ready for JSON."""
        workers = {
            name: {
                str(rank): _resident(tracker) for rank, tracker in sorted(worker.trackers.items())
            }
            for name, worker in sorted(self._workers.items())
        }
        self._sum_up()
        counts = {key: getattr(self.counts, key) for key in self.counts.__struct_fields__}
        return {"workers": workers, "counts": counts}

    def resident_lines(self) -> Iterator[str]:
        """Yield a line a group on what is held at the end."""
        for name, ranks in self.report()["workers"].items():
            for rank, groups in ranks.items():
                for group, tiers in groups.items():
                    held = ", ".join(f"{tier} {found['blocks']}" for tier, found in tiers.items())
                    yield f"{name}/{rank} group {group}: {held}"

    def _worker_of(self, frame: Frame) -> str:
        name = names_of(frame.topic)[0]
        return self._options.worker or name or frame.topic or self._options.file_stem

    # --- a frame ----------------------------------------------------------------------------

    def _frame(self, worker: "_Worker", frame: Frame) -> Iterator[str]:
        where = worker.name if frame.sequence is None else f"{worker.name} #{frame.sequence}"
        try:
            decoded = worker.adapter.decode(frame.payload)
        except _UNREADABLE as error:
            self._rejected["malformed_batch"] += 1
            yield from self._sequence(worker, frame, worker.only_rank(), where)
            yield f"{where}: rejected (malformed_batch): {error}"
            return
        self.num_read += bool(decoded.events or not decoded.rejected)
        rank = worker.only_rank() if decoded.rank is None else decoded.rank
        tracker = worker.tracker(rank)
        stream = self._streams.get((frame.topic, rank))
        if stream is not None and stream.is_repeated(frame):
            yield f"{where}: the same batch again, left out"
            return
        yield from self._sequence(worker, frame, rank, where)
        self._count_removed(decoded)
        rejected = list(decoded.rejected)
        positions = decoded.positions or tuple(range(len(decoded.events)))
        for position, event in zip(positions, decoded.events, strict=False):
            while rejected and rejected[0].position < position:
                yield self._rejection(where, rejected.pop(0))
            for line in self._event(worker, tracker, event):
                yield f"{where}.{position}: {line}"
        for one in rejected:
            yield self._rejection(where, one)

    def _sequence(self, worker: "_Worker", frame: Frame, rank: int, where: str) -> Iterator[str]:
        """Compare with the batch before: a hole is noted, a step back is a new engine."""
        if frame.sequence is None:
            return
        stream = self._streams.get((frame.topic, rank))
        if stream is None or stream.incarnation != frame.incarnation:
            if frame.sequence > 1:
                yield f"{where}: the recording begins in the middle"
        elif frame.sequence <= stream.sequence:
            worker.tracker(rank).handle([RawRestarted("its sequence went back")])
            yield f"{where}: engine restarted (after #{stream.sequence}), all of it forgotten"
        elif frame.sequence > stream.sequence + 1:
            self.counts.gaps += 1
            missing = frame.sequence - stream.sequence - 1
            yield f"{where}: gap, {missing} missing after #{stream.sequence}"
        self._streams[frame.topic, rank] = _Stream(frame.sequence, frame.incarnation, frame.payload)

    def _rejection(self, where: str, rejected: Any) -> str:
        self._rejected[rejected.kind] += 1
        return f"{where}.{rejected.position}: rejected ({rejected.kind}): {rejected.reason}"

    def _count_removed(self, decoded: Decoded) -> None:
        """Count removals as told: one that names no tier became one of each."""
        widest: dict[int, Counter[tuple[int, int]]] = {}
        positions = decoded.positions or tuple(range(len(decoded.events)))
        for position, event in zip(positions, decoded.events, strict=False):
            if isinstance(event, RawRemoved):
                by_tier = widest.setdefault(position, Counter())
                by_tier[event.tier, event.group] += len(event.engine_hashes)
        self.counts.removed += sum(max(by_tier.values()) for by_tier in widest.values())
        self.counts.removed_events += len(widest)

    # --- an event ---------------------------------------------------------------------------

    def _event(
        self, worker: "_Worker", tracker: EngineStateTracker, event: RawEvent
    ) -> Iterator[str]:
        if isinstance(event, RawGroupSeen):
            worker.see_group(event)
            yield f"group {event.group} is {event.kind}, window {event.window_tokens}"
            return
        if isinstance(event, RawStored):
            self.counts.stored += len(event.engine_hashes)
            self.counts.stored_events += 1
            if event.tokens and (found := _window_of(event)) != worker.window:
                # held, whatever it is; the edge would take it for a contradiction
                has_size = found.block_tokens == worker.window.block_tokens
                kind = "lookahead" if has_size else "block_size"
                self._rejected[kind] += 1
                yield f"rejected ({kind}): blocks of {found.in_words()}, held without a name"
                event = _without_tokens(event)
        self.counts.cleared += isinstance(event, RawCleared)
        before = _snapshot(tracker)
        tracker.handle([event])
        duplicates, parked, orphaned, contradictions, unknown = (
            now - then for now, then in zip(_snapshot(tracker), before, strict=True)
        )
        if contradictions:
            self._rejected["contradiction"] += contradictions
        if orphaned:
            self._rejected["orphan_given_up"] += orphaned
        notes = [
            (duplicates, f"{duplicates} held already"),
            (parked, "waits for its parent"),
            (contradictions, "rejected (contradiction)"),
            (unknown, f"{unknown} not held"),
        ]
        yield "; ".join([_told(event), *(note for number, note in notes if number > 0)])

    def _sum_up(self) -> None:
        trackers = [
            tracker for worker in self._workers.values() for tracker in worker.trackers.values()
        ]
        self.counts.duplicates = sum(tracker.counters.duplicate_blocks for tracker in trackers)
        self.counts.orphans_parked = sum(tracker.counters.parked_events for tracker in trackers)
        self.counts.rejected = dict(sorted(self._rejected.items()))


class _Stream(Struct, frozen=True):
    """Where the batches of a rank are."""

    sequence: int
    incarnation: int | None
    payload: bytes

    def is_repeated(self, frame: Frame) -> bool:
        return frame.sequence == self.sequence and frame.payload == self.payload


class _Worker:
    """An engine with its ranks; they have their groups in common."""

    def __init__(self, name: str, model: str, window: "_Window", options: DecodeOptions) -> None:
        self.name, self._model, self.window = name, model, window
        self._descriptor = NamespaceDescriptor(
            window.block_tokens, lookahead_tokens=window.lookahead_tokens
        )
        self.adapter: EngineAdapter = adapter_of(options.engine, window.block_tokens)
        self.trackers: dict[int, EngineStateTracker] = {}
        self._groups: dict[int, RawGroupSeen] = {}

    def only_rank(self) -> int:
        """Return the rank of a batch that names none."""
        return next(iter(self.trackers)) if len(self.trackers) == 1 else 0

    def tracker(self, rank: int) -> EngineStateTracker:
        tracker = self.trackers.get(rank)
        if tracker is None:
            tracker = self.trackers[rank] = EngineStateTracker(
                self._model, self._descriptor, counts_copies=True
            )
            tracker.handle(self._groups.values())
        return tracker

    def see_group(self, seen: RawGroupSeen) -> None:
        self._groups[seen.group] = seen
        for tracker in self.trackers.values():
            tracker.handle([seen])


def _without_tokens(event: RawStored) -> RawStored:
    """Return a store that says what is held and nothing of what it is."""
    return RawStored(event.engine_hashes, event.parent, b"", event.tier, group=event.group)


class _Window(NamedTuple):
    """What of a prompt a block's name covers."""

    block_tokens: int
    lookahead_tokens: int = 0

    def in_words(self) -> str:
        ahead = f" and {self.lookahead_tokens} behind them" if self.lookahead_tokens else ""
        return f"{self.block_tokens} tokens{ahead}"


def _window_of(event: RawStored) -> _Window:
    """Return the window of the blocks of a store with tokens."""
    num_blocks = len(event.engine_hashes)
    return _Window(len(event.tokens) // 4 // num_blocks, len(event.lookahead) // 4 // num_blocks)


def _windows(
    frames: Sequence[Frame], options: DecodeOptions, worker_of: Callable[[Frame], str]
) -> dict[str, _Window]:
    """Return each worker's window: that of the most blocks told with their tokens.

    Windowed groups count only where nothing else is told.
    """
    adapters: dict[str, EngineAdapter] = {}
    found: dict[str, Counter[_Window]] = {}
    for frame in frames:
        name = worker_of(frame)
        adapter = adapters.setdefault(name, adapter_of(options.engine))
        try:
            events = adapter.decode(frame.payload).events
        except _UNREADABLE:
            continue
        for event in events:
            if isinstance(event, RawStored) and event.tokens and event.engine_hashes:
                window = _window_of(event)
                if options.block_tokens is not None:
                    window = window._replace(block_tokens=options.block_tokens)
                if 1 <= window.block_tokens <= MAX_BLOCK_TOKENS:
                    found.setdefault(name, Counter())[window] += len(event.engine_hashes)
    return {
        name: max(windows, key=lambda window: (windows[window], window))
        for name, windows in found.items()
    }


def _snapshot(tracker: EngineStateTracker) -> tuple[int, int, int, int, int]:
    now = tracker.counters
    return (
        now.duplicate_blocks,
        now.parked_events,
        now.orphaned_events,
        now.rejected_events,
        now.unknown_removals,
    )


def _resident(tracker: EngineStateTracker) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        str(group): {
            tier.name: {"blocks": len(held), "engine_hashes": sorted(map(hash_text, held))}
            for tier, held in sorted(by_tier.items())
        }
        for group, by_tier in sorted(tracker.resident().items())
    }


def hash_text(engine_hash: EngineHash) -> str:
    """Return a hash as people read it: 16 hex digits for an integer, all of a digest."""
    if isinstance(engine_hash, bytes):
        return engine_hash.hex()
    return f"{engine_hash & 0xFFFF_FFFF_FFFF_FFFF:016x}"


def _told(event: RawEvent) -> str:
    match event:
        case RawStored():
            parent = "a root" if event.parent is None else f"below {hash_text(event.parent)}"
            what = f"named, {parent}" if event.tokens else "by hash"
            extras = f", lora {event.lora}" if event.lora else ""
            extras += ", salted" if event.cache_salt else ""
            where = f"{event.tier.name} group {event.group}"
            return f"stored {listed(event.engine_hashes)} in {where} ({what}{extras})"
        case RawRemoved():
            where = f"{event.tier.name} group {event.group}"
            return f"removed {listed(event.engine_hashes)} from {where}"
        case RawCleared(tier):
            return f"cleared {'every tier' if tier is None else tier.name}"
        case _:
            return type(event).__name__


def listed(hashes: Sequence[EngineHash]) -> str:
    """Return the first hashes of a list as text, and how many there are."""
    head = " ".join(hash_text(one) for one in hashes[:4])
    return head if len(hashes) <= 4 else f"{head} ... ({len(hashes)})"
