"""What instances say about their blocks: the events of the log and the batch that carries them.

Wire: msgpack arrays, tag first. Hashes are packed (n x 16 bytes), so a block costs 16 bytes. New
fields go to the end, which older readers ignore; a new event is a new tag, which they skip.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.fleet import WorkerInfo
from kvatlas.schemas.hashing import HashAlgorithm
from kvatlas.schemas.ids import InstanceId, Name, Rank, Tier

#: major * 100 + minor. Readers refuse a newer major and accept every minor of theirs.
WIRE_VERSION = 102
#: the oldest minor that a publisher can be told to write, for readers that know no newer one
OLDEST_WIRE_VERSION = 100
#: the first with NamespacesMuted; writers of an older one say Doubted instead
MUTED_WIRE_VERSION = 101
#: the first with lookahead and with blocks that are held and not reused; writers of an older one
#: say Doubted about the latter
LOOKAHEAD_WIRE_VERSION = 102

#: ms since 1970 or a little more; nothing far in the future, which no later epoch could pass
Epoch = Annotated[int, Meta(ge=1, le=2**44)]
#: more than any instance can say in an epoch, and numbers about them still fit into 64 bits
Sequence = Annotated[int, Meta(ge=1, le=2**53)]
Hash16 = Annotated[bytes, Meta(min_length=BLOCK_HASH_BYTES, max_length=BLOCK_HASH_BYTES)]
#: namespaces in one NamespacesMuted
MAX_MUTED_ROOTS = 4096


#: the reason of a Doubted begins so while the engine gives no sign of life: routers leave it out
ENGINE_STALLED = "engine_stalled"


def _whole(hashes: bytes) -> None:
    if len(hashes) % BLOCK_HASH_BYTES:
        raise ValueError(f"{len(hashes)} bytes of hashes, expected a multiple of 16")


class BlockStored(Struct, frozen=True, array_like=True, tag="stored", gc=False):
    """Blocks of one chain are held now; `parent` is that of the first, None below the root.

    `tokens` (u32 LE) travel only where an operator asked for them.
    """

    root: Hash16
    hashes: bytes
    parent: Hash16 | None = None
    tier: Tier = Tier.hbm
    tokens: bytes | None = None

    def __post_init__(self) -> None:
        _whole(self.hashes)


class BlockRemoved(Struct, frozen=True, array_like=True, tag="removed", gc=False):
    """Blocks are no longer held in a tier."""

    root: Hash16
    hashes: bytes
    tier: Tier = Tier.hbm

    def __post_init__(self) -> None:
        _whole(self.hashes)


class AllBlocksCleared(Struct, frozen=True, array_like=True, tag="cleared", gc=False):
    """A tier is empty now; every tier if None."""

    tier: Tier | None = None


class WorkerUp(Struct, frozen=True, array_like=True, tag="up", gc=False):
    """The instance serves requests, as described.

    The first event of every epoch, and said again before each inventory for readers that begin
    later.
    """

    info: WorkerInfo


class WorkerDown(Struct, frozen=True, array_like=True, tag="down", gc=False):
    """The instance leaves and holds nothing that anybody may count on."""

    reason: str


class NamespaceSeen(Struct, frozen=True, array_like=True, tag="namespace", gc=False):
    """What a root stands for; never the salt itself.

    Told in each epoch before the root's first block, and again with each inventory.
    """

    root: Hash16
    model: str
    block_tokens: int
    algorithm: HashAlgorithm
    lora: str | None = None
    salted: bool = False
    lookahead_tokens: int = 0


class Resync(Struct, frozen=True, array_like=True, tag="resync", gc=False):
    """Events were lost at the instance; an inventory follows.

    `lost_from` and `lost_to` bound the loss by the instance's own sequence. Batches of these
    numbers are not in the log; both are this one's where the events never got into a batch.
    """

    lost_from: int
    lost_to: int


class SourceDegraded(Struct, frozen=True, array_like=True, tag="doubted", gc=False):
    """Something of the engine was missed for good, or it gives no sign of life (ENGINE_STALLED).

    Until it is taken back with an empty reason, or a new epoch begins, nothing makes it exact.
    """

    reason: str


class NamespacesOverBudget(Struct, frozen=True, array_like=True, tag="muted", gc=False):
    """Of these namespaces the instance holds more than it says; of all others it says everything.

    Replaces what was said of this before in the epoch; no roots: there is none any more. What is
    said of a muted namespace is true, and digests count what has been said. Said when it changes
    and again before digests, so that it is known before a loss is found to be none.
    """

    roots: Annotated[bytes, Meta(max_length=BLOCK_HASH_BYTES * MAX_MUTED_ROOTS)]
    reason: str = ""

    def __post_init__(self) -> None:
        _whole(self.roots)


class Inventory(Struct, frozen=True, array_like=True, tag="inventory", gc=False):
    """One part of all that a tier holds right after sequence `as_of_seq`; all parts replace it.

    The parts of a tier follow one another in the instance's sequence with no other event of that
    tier between them.
    """

    as_of_seq: int
    part: Annotated[int, Meta(ge=1)]
    parts: Annotated[int, Meta(ge=1)]
    tier: Tier
    root: Hash16
    hashes: bytes

    def __post_init__(self) -> None:
        _whole(self.hashes)


class Digest(Struct, frozen=True, array_like=True, tag="digest", gc=False):
    """What the tier holds after exactly the preceding event of the instance."""

    tier: Tier
    count: int
    xor: int


KvEvent = (
    BlockStored
    | BlockRemoved
    | AllBlocksCleared
    | WorkerUp
    | WorkerDown
    | NamespaceSeen
    | Resync
    | SourceDegraded
    | NamespacesOverBudget
    | Inventory
    | Digest
)


class EventBatch(Struct, frozen=True, array_like=True):
    """One bus message: what happened at an instance between two sequences.

    (epoch, seq) is the only authority on duplicates: consecutive from 1 in each epoch.
    `ts_ns` is the worker's wall clock, for people; no decision compares it with another machine's.
    """

    v: int
    worker: Name
    rank: Rank
    epoch: Epoch
    seq: Sequence
    ts_ns: int
    events: tuple[KvEvent, ...]

    @property
    def instance(self) -> InstanceId:
        """The instance that speaks."""
        return InstanceId(self.worker, self.rank)


class ControlRecord(Struct, frozen=True, array_like=True):
    """What others say about an instance; idempotent by (instance, epoch, kind, reason).

    expired      its lease ran out: the epoch has ended
    quarantined  its KV is wrong: it serves, but nothing of it counts as a match
    forgotten    it gives no inventory: what it was believed to hold is dropped
    throttled    it says more than its budget: until `released`, what it says has no effect
    released     what was quarantined counts again, if `lifts_quarantine`; else the end of the
                 throttling whose number is the reason
    """

    v: int
    worker: Name
    rank: Rank
    epoch: Epoch
    kind: Annotated[str, Meta(pattern="^(expired|quarantined|forgotten|throttled|released)$")]
    reason: str
    by: str
    ts_ns: int

    @property
    def instance(self) -> InstanceId:
        """The instance spoken of."""
        return InstanceId(self.worker, self.rank)


_LIFTED = "lifted:"


def quarantine_lifted_because(reason: str) -> str:
    """Return the reason of a `released` record that ends a quarantine.

    Readers before it existed take it for the end of a throttling that there is none of.
    """
    return _LIFTED + reason


def lifts_quarantine(record: ControlRecord) -> bool:
    """Whether a record ends a quarantine, and no throttling."""
    return record.kind == "released" and record.reason.startswith(_LIFTED)


class RejectedEvent(msgspec.Struct, frozen=True):
    """An event that a reader skipped: its place in the batch and the reason."""

    position: int
    kind: str
    reason: str
