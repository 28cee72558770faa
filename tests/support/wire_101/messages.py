"""The messages of wire 101, as they were. Never to be edited: see README.md."""

from enum import IntEnum, StrEnum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

WIRE_VERSION = 101
BLOCK_HASH_BYTES = 16
MAX_MUTED_ROOTS = 4096

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Rank = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Epoch = Annotated[int, Meta(ge=1, le=2**44)]
Sequence = Annotated[int, Meta(ge=1, le=2**53)]
Hash16 = Annotated[bytes, Meta(min_length=BLOCK_HASH_BYTES, max_length=BLOCK_HASH_BYTES)]


class Tier(IntEnum):
    """Where a block lies, best first; the numbers are wire values."""

    hbm = 0
    dram = 1
    ssd = 2
    remote = 3
    other = 4


class InstanceId(NamedTuple):
    """One rank of one worker: the unit that has an epoch, a sequence, a lease and a digest."""

    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"


class HashAlgorithm(StrEnum):
    """How a fleet names its blocks."""

    xxh3_128 = "xxh3_128"
    sha256_128 = "sha256_128"


class NamespaceDescriptor(Struct, frozen=True, array_like=True):
    """How a worker cuts and names blocks. Candidates with equal descriptors share one chain."""

    block_tokens: Annotated[int, Meta(ge=1, le=65_536)]
    algorithm: HashAlgorithm = HashAlgorithm.xxh3_128


class TierCapacity(Struct, frozen=True, array_like=True):
    """How many blocks fit into a tier."""

    tier: Tier
    num_blocks: int


class Role(StrEnum):
    """What a worker does of a request."""

    both = "both"
    prefill = "prefill"
    decode = "decode"


class WorkerInfo(Struct, frozen=True, array_like=True):
    """What WorkerUp says of an instance.

    `models` are the names that requests may use; the first is the model of the namespace.
    `adapters` maps a LoRA adapter's name to its base model. `groups` are the KV groups that
    full-prefix reuse needs. `kv_fingerprint` is 16 bytes: equal hashes mean equal KV only where it
    is equal, and an empty one means that nothing may be pulled. With `ends_at_reuse_points` a match
    counts up to its last reuse point only (ADR-0006). `p2p_address` (host:port) is where the
    engine's own transfer tier listens, which other engines can be told to pull from.
    `leasable_tiers` are those whose blocks peers can have; who does not say lends every tier.
    """

    base_url: str
    models: Annotated[tuple[Name, ...], Meta(min_length=1)]
    descriptor: NamespaceDescriptor
    kv_fingerprint: bytes = b""
    tiers: tuple[TierCapacity, ...] = ()
    adapters: dict[Name, Name] = {}
    groups: tuple[int, ...] = (0,)
    role: Role = Role.both
    sidecar: str = ""
    versions: dict[str, str] = {}
    ends_at_reuse_points: bool = False
    p2p_address: str = ""
    leasable_tiers: tuple[Tier, ...] = tuple(Tier)


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


class Resync(Struct, frozen=True, array_like=True, tag="resync", gc=False):
    """Events were lost at the instance; an inventory follows.

    `lost_from` and `lost_to` bound the loss by the instance's own sequence. Batches of these
    numbers are not in the log; both are this one's where the events never got into a batch.
    """

    lost_from: int
    lost_to: int


class Doubted(Struct, frozen=True, array_like=True, tag="doubted", gc=False):
    """Whoever speaks for the instance has missed something of the engine for good.

    Until it is taken back with an empty reason, or a new epoch begins, nothing makes it exact.
    """

    reason: str


class NamespacesMuted(Struct, frozen=True, array_like=True, tag="muted", gc=False):
    """Of these namespaces the instance holds more than it says; of all others it says everything.

    Replaces what was said of this before in the epoch; no roots: there is none any more.
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
    | Doubted
    | NamespacesMuted
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


class RejectedEvent(msgspec.Struct, frozen=True):
    """An event that a reader skipped: its place in the batch and the reason."""

    position: int
    kind: str
    reason: str
