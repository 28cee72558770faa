"""The port: what an index of held blocks promises, and what it answers with."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.schemas.digest import BLOCK_HASH_BYTES, TierDigest
from kvatlas.schemas.errors import InvalidBlock
from kvatlas.schemas.ids import Tier


class Match(NamedTuple):
    """How much of a chain an instance holds.

    Each leading block is counted once, at the best tier that holds it: `by_tier` sums to
    `num_blocks`.
    """

    instance: int
    num_blocks: int
    by_tier: tuple[int, int, int, int, int]


class MatchColumns(NamedTuple):
    """The matches of a chain as arrays, one entry an instance, by number: no object per holder."""

    instances: NDArray[np.uint32]
    num_blocks: NDArray[np.uint32]
    #: a row per tier
    by_tier: NDArray[np.uint32]


class TreeNode(msgspec.Struct, frozen=True):
    """A run of blocks without a branch that the same (instance, tier) slots hold."""

    #: index key of the first block of the run
    hash_key: int
    #: blocks above the run, as far as they are known
    depth: int
    num_blocks: int
    #: instance numbers, ascending
    holders: tuple[int, ...]
    #: (block, instance) pairs of the run and of all below it, shown or not
    num_pairs: int
    #: runs that follow, shown or not
    num_children: int
    children: tuple["TreeNode", ...]


class TreeRunRow(NamedTuple):
    """What a view shows of a run, but for its place."""

    hash_key: int
    depth: int
    num_blocks: int
    num_pairs: int
    holders: tuple[int, ...]


class TreeSource(Protocol):
    """The runs of an index, each known by a number of the adapter's choice."""

    def below(self, run: int | None, width: int) -> tuple[Sequence[int], int]:
        """Return the hottest runs that follow one (None: those at the top), and how many follow."""
        ...

    def describe(self, run: int) -> TreeRunRow:
        """Return what a run is."""
        ...


class PrefixIndex(Protocol):
    """Which instance holds how much of a chain, exactly, whatever the order of events.

    Hashes travel packed, 16 bytes each; a block is known by its index key (schemas.digest), so two
    hashes with equal low 64 bits are one block. An instance is a number given by `add_instance`;
    a slot is an (instance, tier). Input that is not a whole number of hashes raises InvalidBlock, a
    number that was not given or is forgotten UnknownInstance; both change nothing.

    An index is used from one thread at a time: nothing in it is locked.
    """

    def add_instance(self) -> int:
        """Return the number of a fresh, empty instance; IndexFull when there is none left.

        Numbers of forgotten instances come back, at any time after `forget_instance`.
        """
        ...

    def forget_instance(self, instance: int) -> None:
        """Drop an instance and all it holds. O(1), what it leaves behind is swept later."""
        ...

    def store(self, instance: int, tier: Tier, parent: bytes, hashes: bytes) -> int:
        """Add a run of blocks to a slot; return how many it did not hold before. O(blocks).

        Each block follows the one before it, the first follows `parent` (a block or a namespace
        root, which need not be held). Storing again changes nothing. A block that comes back after
        its removal is as good as one that never went. IndexFull may leave the run half stored;
        the digest tells the truth then as well.
        """
        ...

    def store_runs(self, instance: int, tier: Tier, runs: Sequence[tuple[bytes, bytes]]) -> int:
        """Do `store` for each (parent, hashes), in order, at the cost of one call."""
        ...

    def remove(self, instance: int, tier: Tier, hashes: bytes) -> int:
        """Take blocks out of a slot; return how many it held. O(blocks).

        Blocks that the slot does not hold are no error. Blocks that follow stay held: the hole ends
        a match until it is refilled. Raises IndexFull where the system has no memory left; the
        digest tells then what has been taken out.
        """
        ...

    def clear(self, instance: int, tier: Tier | None) -> int:
        """Empty one slot, or all of the instance; return how many blocks they held. O(index).

        Raises IndexFull as `remove` does, with the digest as it was.
        """
        ...

    def match(self, chain: bytes) -> list[Match]:
        """Return, for each instance that holds the first block, its leading blocks, by number.

        O(chain), and stops where nobody is left. Unknown hashes are no error.
        """
        ...

    def match_columns(self, chain: bytes) -> MatchColumns:
        """Return what `match` returns, as arrays."""
        ...

    def holders(self, block_hash: bytes) -> list[tuple[int, Tier]]:
        """Return the slots that hold a block, in order. O(holders)."""
        ...

    def digest(self, instance: int, tier: Tier) -> TierDigest:
        """Return the digest of what a slot holds. O(1)."""
        ...

    def audit(self) -> list[tuple[int, Tier]]:
        """Return the slots whose digest is not that of the blocks that they hold: memory is broken.

        O(index). Changes nothing, and questions may be asked meanwhile by other threads; events
        may not come in.
        """
        ...

    def mend(self, slots: Iterable[tuple[int, Tier]]) -> None:
        """Empty slots that an audit has returned, and count anew what counts are kept. O(index)."""
        ...

    def num_blocks(self) -> int:
        """Return the number of distinct blocks that somebody holds."""
        ...

    def memory_bytes(self) -> int:
        """Return the bytes that the index occupies, free room included."""
        ...

    def tree(self, depth: int, width: int) -> list[TreeNode]:
        """Return the top of the radix tree: runs of `depth` levels, the `width` hottest of each.

        Hottest is most (block, instance) pairs at or below. A run whose parent block nobody holds
        stands at the top. O(index), and may reclaim what forgotten instances held.
        """
        ...

    def copy_runs(self) -> Callable[[], TreeSource]:
        """Copy what the tree is made of, and change nothing. O(index): for a thread of its own.

        What is returned makes the runs of the copy, in any thread, while the index goes on.
        Questions may be asked during the copy; events may not come in.
        """
        ...


def check_packed(hashes: bytes) -> None:
    """Raise InvalidBlock unless this is a whole number of hashes."""
    if len(hashes) % BLOCK_HASH_BYTES:
        raise InvalidBlock(
            f"{len(hashes)} bytes of packed hashes, expected a multiple of {BLOCK_HASH_BYTES}"
        )


def check_hash(block_hash: bytes) -> None:
    """Raise InvalidBlock unless this is one hash."""
    if len(block_hash) != BLOCK_HASH_BYTES:
        raise InvalidBlock(f"a hash of {len(block_hash)} bytes, expected {BLOCK_HASH_BYTES}")
