"""Short ways to say what a test is about; everything else gets a default.

A block is a small number here: its hash is that number in 16 bytes, so its index key is the number.
"""

from collections.abc import Iterable

from kvatlas.events.bus import Message
from kvatlas.events.codec import DecodedBatch, encode
from kvatlas.events.subjects import control_subject, events_subject
from kvatlas.indexer.fold.stimuli import BatchArrived, ControlArrived
from kvatlas.schemas.digest import digest_of, split_hashes
from kvatlas.schemas.fleet import NamespaceDescriptor, WorkerInfo
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    WIRE_VERSION,
    BlockRemoved,
    BlockStored,
    ControlRecord,
    Digest,
    EventBatch,
    Inventory,
    KvEvent,
    WorkerUp,
)

ROOT = bytes(range(0xA0, 0xB0))
MODEL = "model"
SECOND = 1_000_000_000


def hashes(*blocks: int) -> bytes:
    return b"".join(block.to_bytes(16, "big") for block in blocks)


def an_info(model: str = MODEL, block_tokens: int = 4, **more: object) -> WorkerInfo:
    return WorkerInfo("http://127.0.0.1:1", (model,), NamespaceDescriptor(block_tokens), **more)  # type: ignore[arg-type]


def up(model: str = MODEL, **more: object) -> WorkerUp:
    return WorkerUp(an_info(model, **more))  # type: ignore[arg-type]


def stored(*blocks: int, tier: Tier = Tier.hbm, parent: int | None = None) -> BlockStored:
    return BlockStored(ROOT, hashes(*blocks), None if parent is None else hashes(parent), tier)


def removed(*blocks: int, tier: Tier = Tier.hbm) -> BlockRemoved:
    return BlockRemoved(ROOT, hashes(*blocks), tier)


def inventory(
    *blocks: int, as_of: int, tier: Tier = Tier.hbm, part: int = 1, parts: int = 1
) -> Inventory:
    return Inventory(as_of, part, parts, tier, ROOT, hashes(*blocks))


def digest(*blocks: int, tier: Tier = Tier.hbm) -> Digest:
    return Digest(tier, *digest_of(split_hashes(hashes(*blocks))))


def digests(*blocks: int) -> list[Digest]:
    """Return what an instance tells of every tier that holds these blocks in the first one only."""
    return [digest(*blocks) if tier is Tier.hbm else digest(tier=tier) for tier in Tier]


def a_batch(
    *events: KvEvent, worker: str = "w1", rank: int = 0, epoch: int = 1, seq: int = 1
) -> EventBatch:
    return EventBatch(WIRE_VERSION, worker, rank, epoch, seq, 0, events or (up(), stored(1, 2)))


def a_control(
    worker: str = "w1",
    rank: int = 0,
    epoch: int = 1,
    kind: str = "expired",
    reason: str = "lease",
    by: str = "replica",
) -> ControlRecord:
    return ControlRecord(WIRE_VERSION, worker, rank, epoch, kind, reason, by, 0)


def arrived(batch: EventBatch | ControlRecord, at: int = 1) -> BatchArrived | ControlArrived:
    """Return the stimulus of a batch or record that stands in the log at `at`."""
    if isinstance(batch, EventBatch):
        return BatchArrived(at, at * SECOND, DecodedBatch(batch))
    return ControlArrived(at, at * SECOND, batch)


def a_message(batch: EventBatch | ControlRecord, at: int = 1) -> Message:
    return Message(at, subject_of(batch), encode(batch), at * SECOND)


def subject_of(batch: EventBatch | ControlRecord) -> str:
    instance = InstanceId(batch.worker, batch.rank)
    if isinstance(batch, EventBatch):
        return events_subject(MODEL, instance)
    return control_subject(instance)


def messages(batches: Iterable[EventBatch | ControlRecord]) -> list[Message]:
    """Return a log: the batches at 1, 2, 3, ..."""
    return [a_message(batch, at) for at, batch in enumerate(batches, 1)]
