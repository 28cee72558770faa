"""What a recording of our own log comes to: the batches that `kvatlas record --nats` writes.

    (worker, rank) -> _Instance               its epoch, its sequence, what it holds by tier

An instance holds what its events say since the recording began; an inventory in it replaces a tier.
Pure; `kvatlas decode` prints the story and the report.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from kvatlas.schemas.digest import TierDigest, split_hashes
from kvatlas.schemas.ids import Name, Rank, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Digest,
    Epoch,
    Inventory,
    KvEvent,
    NamespaceSeen,
    NamespacesOverBudget,
    Resync,
    SourceDegraded,
    WorkerDown,
    WorkerUp,
)
from kvatlas.schemas.kv_events import Sequence as BatchSequence
from kvatlas.worker_hooks.recordings.captures import with_bytes
from kvatlas.worker_hooks.recordings.decoding import listed
from kvatlas.worker_hooks.reporting.residency import HeldByTier
from kvatlas.worker_hooks.sidecar.digest_lines import DigestLines

_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
_TAGS = frozenset(
    [
        *("stored", "removed", "cleared", "up", "down", "namespace", "resync", "doubted"),
        *("inventory", "digest"),
    ]
)


class StreamCounts(Struct):
    """What happened in a recording; blocks where nothing else is said."""

    stored: int = 0
    removed: int = 0
    #: clears
    cleared: int = 0
    #: stored while held
    duplicates: int = 0
    #: batches that came twice, and those of an epoch that is over
    repeated: int = 0
    stale: int = 0
    #: holes in sequences, however wide
    gaps: int = 0
    #: digests of an instance that are not those of what its events say here
    digest_mismatches: int = 0
    rejected: dict[str, int] = field(default_factory=dict)


class StreamDecoding:
    """Reads rows of `stream_rows`. `story` yields lines while it reads; then `report` is true.

    With `folds`, equal digests of an instance with nothing between them are one line of the story.
    """

    def __init__(self, rows: Sequence[dict[str, Any]], *, folds: bool = False) -> None:
        self._rows = rows
        self._digests = DigestLines() if folds else None
        self._instances: dict[tuple[str, int], _Instance] = {}
        self._rejected: Counter[str] = Counter()
        self.counts = StreamCounts()
        #: rows that are batches
        self.num_read = 0

    def story(self) -> Iterator[str]:
        """Yield a line for everything that an event says, and for what says nothing."""
        for row in self._rows:
            try:
                batch = msgspec.convert(row, _Row)
            except _UNREADABLE as error:
                yield self._rejection(_place(row), "malformed_batch", error)
                continue
            self.num_read += 1
            yield from self._batch(batch)
        if self._digests is not None:
            yield from self._digests.end_all()

    def reject(self, kind: str) -> None:
        """Count what the reader of the file could not read."""
        self._rejected[kind] += 1

    def report(self) -> dict[str, Any]:
        """Return the resident sets and the counts, ready for JSON."""
        workers: dict[str, dict[str, Any]] = {}
        for (worker, rank), instance in sorted(self._instances.items()):
            workers.setdefault(worker, {})[str(rank)] = instance.report()
        self.counts.rejected = dict(sorted(self._rejected.items()))
        return {"workers": workers, "counts": msgspec.to_builtins(self.counts)}

    def resident_lines(self) -> Iterator[str]:
        """Yield a line an instance on what it holds at the end."""
        for worker, ranks in self.report()["workers"].items():
            for rank, found in ranks.items():
                tiers = (f"{tier} {held['blocks']}" for tier, held in found["tiers"].items())
                yield f"{worker}/{rank} epoch {found['epoch']}: {', '.join(tiers) or 'nothing'}"

    def _batch(self, batch: "_Row") -> Iterator[str]:
        where = f"{batch.worker}/{batch.rank} epoch {batch.epoch} #{batch.seq}"
        key = (batch.worker, batch.rank)
        instance = self._instances.setdefault(key, _Instance(self.counts))
        if batch.epoch < instance.epoch:
            self.counts.stale += 1
            yield from self._kept_back(key)
            yield f"{where}: of an epoch that is over, left out"
            return
        if batch.epoch == instance.epoch and batch.seq <= instance.seq:
            self.counts.repeated += 1
            yield from self._kept_back(key)
            yield f"{where}: had already, left out"
            return
        for line in instance.arrive(batch.epoch, batch.seq):
            yield from self._kept_back(key)
            yield f"{where}: {line}"
        for position, content in enumerate(batch.events):
            at = f"{where}.{position}"
            try:
                line, is_confirmed = self._event(instance, content)
            except _UNREADABLE as error:
                yield from self._kept_back(key)
                yield self._rejection(at, _kind(content), error)
                continue
            if is_confirmed and self._digests is not None:
                self._digests.put(key, at, line)
                continue
            yield from self._kept_back(key)
            yield f"{at}: {line}"

    def _kept_back(self, instance: tuple[str, int]) -> Iterator[str]:
        return iter(()) if self._digests is None else self._digests.end(instance)

    def _event(self, instance: "_Instance", content: Any) -> tuple[str, bool]:
        """Return an event in words, and whether it is a digest that is as expected."""
        if content == ["up"]:
            return "up, its description redacted", False
        event: KvEvent = msgspec.convert(with_bytes(content), KvEvent)
        num_before = self.counts.digest_mismatches
        line = instance.apply(event)
        return line, isinstance(event, Digest) and self.counts.digest_mismatches == num_before

    def _rejection(self, where: str, kind: str, error: Exception) -> str:
        self._rejected[kind] += 1
        return f"{where}: rejected ({kind}): {error}"


class _Row(Struct, frozen=True):
    """The part of a row that says what an instance holds."""

    worker: Name
    rank: Rank
    epoch: Epoch
    seq: BatchSequence
    events: list[Any]


class _Instance:
    """One rank of one worker, in its newest epoch."""

    def __init__(self, counts: StreamCounts) -> None:
        self._counts = counts
        self.epoch = self.seq = 0
        self._held = HeldByTier()
        #: parts of an inventory so far, all in order
        self._parts: dict[Tier, list[Inventory]] = {}

    def arrive(self, epoch: int, seq: int) -> Iterator[str]:
        """Go on to a batch; yield what is noteworthy of its place."""
        if epoch > self.epoch:
            if self.epoch:
                yield f"epoch {epoch} follows {self.epoch}, all of it forgotten"
            elif seq > 1:
                yield "the recording begins in the middle"
            self._forget()
        elif seq > self.seq + 1:
            self._counts.gaps += 1
            yield f"gap, {seq - self.seq - 1} missing after #{self.seq}"
        self.epoch, self.seq = epoch, seq

    def apply(self, event: KvEvent) -> str:
        """Hold what follows from an event; return it in words."""
        match event:
            case BlockStored():
                return self._stored(event)
            case BlockRemoved():
                return self._removed(event)
            case Inventory():
                return self._inventory(event)
            case Digest():
                return self._digest(event)
            case AllBlocksCleared(tier):
                self._counts.cleared += 1
                self._held.clear(tier)
                return f"cleared {'every tier' if tier is None else tier.name}"
            case WorkerDown(reason):
                self._forget()
                return f"down, holds nothing: {reason}"
            case _:
                return _said(event)

    def report(self) -> dict[str, Any]:
        """Return what it holds, ready for JSON."""
        held = {tier: sorted(hash_.hex() for hash_, _ in self._held.blocks(tier)) for tier in Tier}
        tiers = {
            tier.name: {"blocks": len(hashes), "hashes": hashes}
            for tier, hashes in held.items()
            if hashes
        }
        return {"epoch": self.epoch, "seq": self.seq, "tiers": tiers}

    def _forget(self) -> None:
        self._held.clear()
        self._parts.clear()

    def _stored(self, event: BlockStored) -> str:
        hashes = list(split_hashes(event.hashes))
        num_held = sum(not self._held.add(event.tier, one, event.root) for one in hashes)
        self._counts.stored += len(hashes)
        self._counts.duplicates += num_held
        parent = "a root" if event.parent is None else f"below {event.parent.hex()}"
        told = f"stored {listed(hashes)} in {event.tier.name} ({parent})"
        return f"{told}; {num_held} held already" if num_held else told

    def _removed(self, event: BlockRemoved) -> str:
        hashes = list(split_hashes(event.hashes))
        num_unknown = sum(not self._held.discard(event.tier, one) for one in hashes)
        self._counts.removed += len(hashes)
        told = f"removed {listed(hashes)} from {event.tier.name}"
        return f"{told}; {num_unknown} not held" if num_unknown else told

    def _inventory(self, event: Inventory) -> str:
        parts = [] if event.part == 1 else self._parts.pop(event.tier, [])
        told = f"inventory of {event.tier.name}, part {event.part} of {event.parts}"
        if event.part != len(parts) + 1 or any(p.as_of_seq != event.as_of_seq for p in parts):
            return f"{told}; parts before it are missing, left out"
        parts.append(event)
        if event.part < event.parts:
            self._parts[event.tier] = parts
            return told
        self._held.clear(event.tier)
        for part in parts:
            for one in split_hashes(part.hashes):
                self._held.add(event.tier, one, part.root)
        return f"{told}: holds {self._held.digest(event.tier).count} blocks"

    def _digest(self, event: Digest) -> str:
        found = self._held.digest(event.tier)
        told = f"digest of {event.tier.name}: {event.count} blocks"
        if found == TierDigest(event.count, event.xor):
            return f"{told}, as here"
        self._counts.digest_mismatches += 1
        return f"{told}, but {found.count} here, or others"


def _said(event: KvEvent) -> str:
    match event:
        case WorkerUp(info):
            named = f", adapters {', '.join(info.adapters)}" if info.adapters else ""
            return f"up: serves {', '.join(info.models)} at {info.base_url or 'no address'}{named}"
        case NamespaceSeen():
            extras = f", lora {event.lora}" if event.lora else ""
            extras += ", salted" if event.salted else ""
            what = f"{event.model}, blocks of {event.block_tokens} tokens{extras}"
            return f"namespace {event.root.hex()} is {what}"
        case Resync(lost_from, lost_to):
            return f"lost {lost_from} to {lost_to}, an inventory follows"
        case SourceDegraded(reason):
            return f"doubted: {reason}" if reason else "no longer doubted"
        case NamespacesOverBudget(roots, reason):
            named = ", ".join(root.hex() for root in split_hashes(roots))
            return f"holds more than it says of {named}: {reason}" if named else "nothing is muted"
        case _:
            return type(event).__name__


def _place(row: dict[str, Any]) -> str:
    number = row.get("stream_sequence")
    return f"message {number!r:.20}" if isinstance(number, int) else "a line"


def _kind(content: Any) -> str:
    match content:
        case [str(tag), *_]:
            return "malformed_event" if tag in _TAGS else "unknown_event"
        case _:
            return "malformed_event"
