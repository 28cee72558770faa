"""Which blocks each instance holds: events about blocks become steps of the index.

Called by IndexState alone, which has settled epoch and sequence before. An instance without a
number is one that the index had no room for: its events pass without effect.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter

import numpy as np

from kvatlas.indexer.index import PrefixIndex, TreeNode
from kvatlas.indexer.instances import Instance, OpenInventory
from kvatlas.indexer.reader import InstanceMatch, TreeRun
from kvatlas.schemas.digest import BLOCK_HASH_BYTES, TierDigest
from kvatlas.schemas.fleet import WorkerInfo
from kvatlas.schemas.hashing import reuse_point
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Inventory

NOTHING = TierDigest()
_name, _trust = attrgetter("id"), attrgetter("trust")


class Residency:
    """The index, and which of its numbers stands for whom."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        #: number in the index -> its instance; each has this number
        self._by_number: dict[int, Instance] = {}
        #: instances whose blocks count for nothing in a match, while they have a place
        self.excluded: set[InstanceId] = set()
        #: instances whose matches end at reuse points, while they have a place
        self._ending_at_points: set[InstanceId] = set()
        self.num_inventories = 0
        #: sets of parts that were interrupted, out of date or too large
        self.num_dropped_inventories = 0

    def admit(self, instance: Instance) -> None:
        """Give the instance an empty place; raises IndexFull."""
        instance.number = self._index.add_instance()
        self._by_number[instance.number] = instance

    def release(self, instance: Instance) -> None:
        """Forget all that the instance holds, at once."""
        self.excluded.discard(instance.id)
        self._ending_at_points.discard(instance.id)
        if instance.number is not None:
            self._index.forget_instance(instance.number)
            del self._by_number[instance.number]
            instance.number = None

    def introduce(self, instance: Instance, info: WorkerInfo) -> None:
        """Learn how the instance describes itself."""
        instance.info = info
        if info.ends_at_reuse_points:
            self._ending_at_points.add(instance.id)
        else:
            self._ending_at_points.discard(instance.id)

    # --- events; all raise IndexFull ----------------------------------------------------------

    def store(self, instance: Instance, event: BlockStored) -> None:
        """Add a run of blocks."""
        self._touch(instance, event.tier)
        if instance.number is not None:
            parent = event.parent or event.root
            self._index.store(instance.number, event.tier, parent, event.hashes)

    def remove(self, instance: Instance, event: BlockRemoved) -> None:
        """Take blocks out of a tier."""
        self._touch(instance, event.tier)
        if instance.number is not None:
            self._index.remove(instance.number, event.tier, event.hashes)

    def clear(self, instance: Instance, event: AllBlocksCleared) -> None:
        """Empty tiers. What is known to be empty is as good as an inventory."""
        for tier in Tier if event.tier is None else (event.tier,):
            self._touch(instance, tier)
            instance.inventoried.add(tier)
            instance.verified.discard(tier)
        if instance.number is not None:
            self._index.clear(instance.number, event.tier)

    def take_inventory(self, instance: Instance, part: Inventory) -> None:
        """Collect the parts of a tier; the last one replaces the tier.

        A set counts only when its parts follow one another, and when nothing of the tier has
        changed, or may have, since the sequence that it stands for.
        """
        tier = part.tier
        inventory = instance.open_inventories.get(tier)
        if part.part == 1:
            self.interrupt(instance, tier)
            if not instance.changed_at[tier] <= part.as_of_seq <= instance.seq:
                self.num_dropped_inventories += 1
                return
            inventory = OpenInventory(part.as_of_seq, part.parts)
            instance.open_inventories[tier] = inventory
        if inventory is None:
            return
        if not inventory.take(part):
            self.interrupt(instance, tier)
        elif inventory.is_complete:
            del instance.open_inventories[tier]
            self._replace(instance, tier, inventory.runs)
            self.num_inventories += 1

    def interrupt(self, instance: Instance, tier: Tier) -> None:
        """Drop the tier's inventory if parts of it are missing yet."""
        if instance.open_inventories.pop(tier, None) is not None:
            self.num_dropped_inventories += 1

    # --- answers ------------------------------------------------------------------------------

    def digest(self, instance: Instance, tier: Tier) -> TierDigest:
        """Return the digest of a tier."""
        return NOTHING if instance.number is None else self._index.digest(instance.number, tier)

    def digests(self, instance: Instance) -> dict[Tier, TierDigest]:
        """Return the digests of the tiers that hold something."""
        digests = {tier: self.digest(instance, tier) for tier in Tier}
        return {tier: digest for tier, digest in digests.items() if digest.count}

    def match(self, chain: bytes) -> list[InstanceMatch]:
        """Return the matches of a chain, but for excluded instances."""
        matches = self._index.match(chain)
        if not matches:
            return []
        numbers, num_blocks, by_tier = zip(*matches, strict=True)
        found = [self._by_number[number] for number in numbers]
        fields = zip(map(_name, found), map(_trust, found), num_blocks, by_tier, strict=True)
        # what InstanceMatch(...) does, without a Python call per match
        named = list(map(tuple.__new__, repeat(InstanceMatch), fields))
        if self._ending_at_points:
            named = self._up_to_reuse_points(chain, numbers, named)
        if self.excluded:
            return [match for match in named if match.instance not in self.excluded]
        return named

    def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
        """Return who holds a block, and where."""
        return [(self._by_number[n].id, tier) for n, tier in self._index.holders(block_hash)]

    def tree(self, depth: int, width: int) -> list[TreeRun]:
        """Return the radix view with instances by name."""
        return [self._run(node) for node in self._index.tree(depth, width)]

    def num_blocks(self) -> int:
        """Return the number of distinct blocks."""
        return self._index.num_blocks()

    def memory_bytes(self) -> int:
        """Return the bytes that the index takes."""
        return self._index.memory_bytes()

    # --- reuse points ----------------------------------------------------------------------------

    def _up_to_reuse_points(
        self, chain: bytes, numbers: Sequence[int], matches: list[InstanceMatch]
    ) -> list[InstanceMatch]:
        """Cut each match of an instance that reuses up to a reuse point only (ADR-0006).

        O(blocks behind the last point) for all of them together, and a match per length left.
        """
        holders: dict[int, set[int]] = {}
        cut: dict[int, dict[int, tuple[int, int, int, int, int]]] = {}
        kept = []
        for number, match in zip(numbers, matches, strict=True):
            if match.instance not in self._ending_at_points:
                kept.append(match)
                continue
            end = match.num_blocks
            while end and number not in self._ending_with(chain, end, holders):
                end -= 1
            if end:
                if end not in cut:
                    shorter = self._index.match(chain[: end * BLOCK_HASH_BYTES])
                    cut[end] = {found.instance: found.by_tier for found in shorter}
                kept.append(match._replace(num_blocks=end, by_tier=cut[end][number]))
        return kept

    def _ending_with(self, chain: bytes, end: int, holders: dict[int, set[int]]) -> set[int]:
        """Return who can end reuse after so many blocks; `holders` remembers."""
        if end not in holders:
            point = reuse_point(chain[(end - 1) * BLOCK_HASH_BYTES : end * BLOCK_HASH_BYTES])
            holders[end] = {number for number, _ in self._index.holders(point)}
        return holders[end]

    # --- below --------------------------------------------------------------------------------

    def _replace(self, instance: Instance, tier: Tier, runs: list[tuple[bytes, bytes]]) -> None:
        if instance.number is None:
            self.admit(instance)
        assert instance.number is not None
        told = digest_of_packed(b"".join(hashes for _, hashes in runs))
        if self._index.digest(instance.number, tier) != told:
            self._index.clear(instance.number, tier)
            for root, hashes in runs:
                self._index.store(instance.number, tier, root, hashes)
        instance.inventoried.add(tier)
        instance.verified.discard(tier)

    def _touch(self, instance: Instance, tier: Tier) -> None:
        """Note that the tier changes at the present sequence."""
        instance.changed_at[tier] = instance.seq
        if instance.open_inventories:
            self.interrupt(instance, tier)

    def _run(self, node: TreeNode) -> TreeRun:
        return TreeRun(
            hash_key=node.hash_key,
            depth=node.depth,
            num_blocks=node.num_blocks,
            holders=tuple(self._by_number[number].id for number in node.holders),
            num_pairs=node.num_pairs,
            num_children=node.num_children,
            children=tuple(self._run(child) for child in node.children),
        )


def digest_of_packed(hashes: bytes) -> TierDigest:
    """Return `digest_of` for distinct packed hashes, without an object per hash."""
    keys = np.frombuffer(hashes, ">u8")[1::2].astype(np.uint64)
    keys[keys == 0] = 1
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return TierDigest(len(keys), int(np.bitwise_xor.reduce(keys)))
