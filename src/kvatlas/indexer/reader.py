"""The port that routers, pages and command lines read the index through, and its answers."""

from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvatlas.schemas.digest import TierDigest
from kvatlas.schemas.fleet import Trust, WorkerInfo
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import ENGINE_STALLED


class Lag(NamedTuple):
    """How far the index is behind: messages of the log, and seconds since the broker was heard."""

    stream_sequences: int
    seconds_since_contact: float


class InstanceMatch(NamedTuple):
    """How many leading blocks of a chain an instance holds, each counted at its best tier."""

    instance: InstanceId
    trust: Trust
    num_blocks: int
    by_tier: tuple[int, int, int, int, int]


class Replaced(Struct, frozen=True):
    """An epoch that another one took the name from, though it had not gone.

    Either its process died and was started again sooner than its lease ended, or two processes
    claim one name; `base_url` tells.
    """

    epoch: int
    base_url: str
    #: the broker's time of its newest message
    last_event_ns: int = 0


#: how the reason of a degraded instance begins whose sidecar says that the engine has stalled
_STALLED = f"doubted: {ENGINE_STALLED}"


class InstanceView(Struct, frozen=True):
    """An instance as others see it.

    `info` is None until WorkerUp. `num_blocks` counts a block once in each tier that holds it.
    `last_event_ns` is the broker's time of its newest message. `replaced` is the epoch that this
    one took the name from though it had not gone. `divergent` has, per tier whose newest digest was
    not ours, the blocks that it told and those found here. Of the namespaces whose roots are in
    `muted`, with the reason, it holds more than it says, and `trust` is about all others.
    """

    instance: InstanceId
    epoch: int
    seq: int
    info: WorkerInfo | None
    trust: Trust
    trust_reasons: tuple[str, ...]
    digests: dict[Tier, TierDigest]
    num_blocks: int
    last_event_ns: int
    replaced: Replaced | None = None
    divergent: dict[Tier, tuple[int, int]] = {}
    muted: dict[bytes, str] = {}

    @property
    def stall(self) -> str:
        """Why its engine is taken for stalled; empty while it is not."""
        return next((why for why in self.trust_reasons if why.startswith(_STALLED)), "")


class TreeRun(Struct, frozen=True):
    """A run of blocks without a branch, held by the same instances; see TreeNode."""

    hash_key: int
    depth: int
    num_blocks: int
    holders: tuple[InstanceId, ...]
    num_pairs: int
    num_children: int
    children: tuple["TreeRun", ...]


class TreeView(Protocol):
    """A copy of the radix tree as of one stream sequence."""

    @property
    def stream_sequence(self) -> int:
        """The last message of the log that it knows."""
        ...

    def view(self, depth: int, width: int) -> Generator[None, None, list[TreeRun]]:
        """Yield after each run of the view, and return its top; see `index.tree.Tree`."""
        ...


class RejectedCount(Struct, frozen=True):
    """How often something of one kind from one worker was skipped."""

    worker: str
    kind: str
    count: int


class IndexStats(Struct, frozen=True):
    """What the fold has seen so far; counts only rise."""

    stream_sequence: int
    num_instances: int
    num_blocks: int
    memory_bytes: int
    #: batches that counted, and the events in them that were understood
    batches: int
    events: int
    gaps: int
    #: batches that the gaps stand for
    missing_batches: int
    duplicates: int
    old_epochs: int
    #: epochs that took their name from one that had not gone
    takeovers: int
    ended_epochs: int
    resyncs: int
    digest_matches: int
    digest_mismatches: int
    inventories: int
    #: sets of parts that were interrupted, out of date or too large
    dropped_inventories: int
    controls: int
    ignored_controls: int
    ignored_expiries: int
    stream_holes: int
    #: instances whose blocks were dropped because they gave no inventory
    forgotten: int
    #: times that an instance said more than its budget, and its batches without effect since
    throttles: int
    throttled_batches: int
    #: times that an instance began to hold more of a namespace than it says
    namespace_mutes: int
    #: tiers that broken memory had changed
    audit_failures: int
    index_full: int
    #: batches and records about instances that have not said what they are
    unknown_batches: int
    unknown_controls: int
    #: batches that would have made one instance too many, and those of epochs far ahead
    refused_instances: int
    refused_epochs: int
    rejected: tuple[RejectedCount, ...]

    @property
    def rejected_total(self) -> int:
        """Everything that was skipped."""
        return sum(each.count for each in self.rejected)


class InstanceSelection:
    """Instances that are asked about together, again and again: each has a line in the answers.

    Where an index has them is found once and kept here, as long as its numbers stand for the same.
    """

    def __init__(self, instances: Iterable[InstanceId]) -> None:
        self.instances = tuple(instances)
        self.lines = {instance: line for line, instance in enumerate(self.instances)}
        #: what filled the rest in, and as of which version of it
        self.placed_by: object = None
        self.version = -1
        #: number in the index -> line; the line behind the last one for everybody else
        self.line_of: NDArray[np.intp] = np.zeros(0, np.intp)
        #: whether a match of one of them has to end at a reuse point
        self.has_reuse_points = False

    def __len__(self) -> int:
        return len(self.instances)


T = TypeVar("T")


def finished(steps: Generator[None, None, T]) -> T:
    """Return what a generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value


class IndexReader(Protocol):
    """What the fleet holds, as of one stream sequence.

    Answers are consistent with one another until the next await of the caller. An instance that is
    gone is in `instances` for a while and in nothing else.
    """

    @property
    def stream_sequence(self) -> int:
        """Everything up to here is folded in."""
        ...

    @property
    def fleet_version(self) -> int:
        """Rises whenever an instance, its description or its trust changes."""
        ...

    def match(self, chain: bytes) -> list[InstanceMatch]:
        """Return the instances that hold the first block of a packed chain. O(chain)."""
        ...

    def held(self, chain: bytes, selection: InstanceSelection) -> NDArray[np.uint32]:
        """Return `by_tier` of the match of each instance on the roll, a line each.

        Zeros where there is no match. The same as `match`, without an object per holder.
        """
        ...

    def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
        """Return who holds one block, and where. Raises InvalidBlock."""
        ...

    def names(self) -> list[InstanceId]:
        """Return the names of `instances`, in their order: for who looks at a few at a time."""
        ...

    def instances(self) -> list[InstanceView]:
        """Return every instance, gone ones included, by name."""
        ...

    def instance(self, instance: InstanceId) -> InstanceView | None:
        """Return one instance, None if nothing is known of it."""
        ...

    def serving(self, model: str) -> list[InstanceView]:
        """Return the instances that serve a model or adapter: up and not gone.

        Asked for every request: the list is shared and kept while nobody on it changes, so do not
        change it; seq, digests, counts and reasons on it may be of when an instance changed last.
        """
        ...

    def copy_tree(self) -> Callable[[], TreeView]:
        """Copy what the radix tree is made of; what is returned makes it, in any thread.

        O(index), both: for threads beside this one. Nothing may be folded in during the copy.
        Raises NotAnsweredHere where another process has the index.
        """
        ...

    def stats(self) -> IndexStats:
        """Return the counters. O(instances)."""
        ...

    def state_digest(self) -> str:
        """Return 32 hex digits over instances, epochs, sequences and what each tier holds.

        Two folds of the same messages have equal digests at every stream sequence, trust and
        counters aside. O(instances).
        """
        ...

    def digest_steps(self) -> Generator[None, None, str]:
        """Make `state_digest` bit by bit: yield after each instance, and return it.

        Nothing may be folded in meanwhile.
        """
        ...
