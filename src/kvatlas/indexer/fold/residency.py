"""Which blocks each instance holds: events about blocks become steps of the index.

Called by IndexState alone, which has settled epoch and sequence before. An instance without a
number is one that the index had no room for: it gets one when it stores something, or is in doubt.
"""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvatlas.indexer.fold.instances import Count, Instance, numbers_of
from kvatlas.indexer.fold.inventories import InventoryFold
from kvatlas.indexer.index.exporting import Export, Exportable, Parts, Room
from kvatlas.indexer.index.naming import InstanceOrdinal, NamedIndex
from kvatlas.indexer.index.port import PrefixIndex, TreeNode
from kvatlas.indexer.index.tree import Tree
from kvatlas.indexer.reader import InstanceMatch, InstanceSelection, TreeRun
from kvatlas.schemas.digest import TierDigest
from kvatlas.schemas.fleet import WorkerInfo
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

NOTHING = TierDigest()

#: to go over an enumeration costs more than what is asked about each
TIERS = tuple(Tier)


class ResidencyTables(Struct):
    """What is kept of a Residency beside the index; see its fields."""

    excluded: set[InstanceId]
    ending_at_points: set[InstanceId]
    num_inventories: Count
    num_dropped_inventories: Count


class Residency:
    """The index, and which of its numbers stands for whom."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._named = NamedIndex(index)
        self.inventories = InventoryFold(index, self._named)

    def admit(self, instance: Instance) -> int:
        """Give the instance an empty place and return its number; raises IndexFull."""
        number = instance.number = self._index.add_instance()
        self._named.admit(number, instance)
        return number

    def release(self, instance: Instance) -> None:
        """Forget all that the instance holds and was telling, at once."""
        self.inventories.drop(instance)
        self._named.release(instance.number, instance.id)
        if instance.number is not None:
            self._index.forget_instance(instance.number)
            instance.number = None

    def exclude(self, instance: Instance) -> None:
        """Let the instance's blocks count for nothing in a match, while it has a place."""
        self._named.exclude(instance.id)

    def include(self, instance: Instance) -> None:
        """Let the instance's blocks count in a match again."""
        self._named.include(instance.id)

    @property
    def places_version(self) -> int:
        """Rises whenever `places` changes."""
        return self._named.version

    def places(self) -> list[InstanceOrdinal]:
        """Return whose numbers are given out."""
        return self._named.ordinals()

    def introduce(self, instance: Instance, info: WorkerInfo) -> None:
        """Learn how the instance describes itself."""
        instance.info = info
        self._named.end_at_points(instance.id, info.ends_at_reuse_points)

    # --- events; all raise IndexFull ----------------------------------------------------------

    def store(self, instance: Instance, *events: BlockStored) -> None:
        """Add runs of blocks to one tier."""
        tier = events[0].tier
        self._touch(instance, tier)
        number = self.admit(instance) if instance.number is None else instance.number
        if len(events) == 1:
            (event,) = events
            parent = event.parent or event.root
            self._index.store(number, tier, parent, event.hashes)
        else:
            runs = [(event.parent or event.root, event.hashes) for event in events]
            self._index.store_runs(number, tier, runs)

    def remove(self, instance: Instance, *events: BlockRemoved) -> None:
        """Take blocks out of one tier."""
        tier = events[0].tier
        self._touch(instance, tier)
        if instance.number is not None:
            hashes = b"".join([event.hashes for event in events])
            self._index.remove(instance.number, tier, hashes)

    def clear(self, instance: Instance, event: AllBlocksCleared) -> None:
        """Empty tiers. What is known to be empty is as good as an inventory."""
        for tier in Tier if event.tier is None else (event.tier,):
            self._touch(instance, tier)
            instance.inventoried.add(tier)
        if instance.number is not None:
            self._index.clear(instance.number, event.tier)

    def audit(self) -> list[tuple[InstanceId, Tier]]:
        """Return tiers whose blocks are not those that were folded in; see PrefixIndex.audit."""
        named = self._named.by_number
        return [(named[number].id, tier) for number, tier in self._index.audit()]

    def mend(self, slots: Sequence[tuple[Instance, Tier]]) -> None:
        """Empty tiers that an audit has returned."""
        found = [(each.number, tier) for each, tier in slots if each.number is not None]
        found += [(each.staging.number, tier) for each, tier in slots if each.staging is not None]
        self._index.mend(found)
        for each, _ in slots:
            self.inventories.drop(each)

    # --- answers ------------------------------------------------------------------------------

    def digest(self, instance: Instance, tier: Tier) -> TierDigest:
        """Return the digest of a tier."""
        return NOTHING if instance.number is None else self._index.digest(instance.number, tier)

    def digests(self, instance: Instance) -> dict[Tier, TierDigest]:
        """Return the digests of the tiers that hold something."""
        if (number := instance.number) is None:
            return {}
        digest_of = self._index.digest
        return {tier: found for tier in TIERS if (found := digest_of(number, tier)).count}

    def match(self, chain: bytes) -> list[InstanceMatch]:
        """Return the matches of a chain, but for excluded instances."""
        return self._named.match(chain)

    def held(self, chain: bytes, selection: InstanceSelection) -> NDArray[np.uint32]:
        """Return the matches of a chain, a line for each instance on the roll."""
        return self._named.held(chain, selection)

    def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
        """Return who holds a block, and where."""
        return self._named.holders(block_hash)

    def tree(self, depth: int, width: int) -> list[TreeRun]:
        """Return the radix view with instances by name, but for runs that show in no answer yet."""
        runs = map(self._run, self._index.tree(depth, width))
        return [run for run in runs if run.holders or run.children]

    def copy_tree(self, stream_sequence: int) -> Callable[[], Tree]:
        """Copy what the tree is made of; see PrefixIndex.copy_runs."""
        runs, hidden = self._index.copy_runs(), self._named.hidden
        known = self._named.by_number.items()
        names = {number: each.id for number, each in known if number not in hidden}
        return lambda: Tree(runs(), names, stream_sequence)

    def num_blocks(self) -> int:
        """Return the number of distinct blocks, also of those that show in no answer yet."""
        return self._index.num_blocks()

    def memory_bytes(self) -> int:
        """Return the bytes that the index takes."""
        return self._index.memory_bytes()

    # --- snapshots ----------------------------------------------------------------------------

    def export(self, room: Room | None) -> tuple[ResidencyTables, Export]:
        """Return what `restore` needs beside the instances. O(index)."""
        tables = ResidencyTables(
            excluded=set(self._named.excluded),
            ending_at_points=set(self._named.ending_at_points),
            num_inventories=self.inventories.num_taken,
            num_dropped_inventories=self.inventories.num_dropped,
        )
        return tables, self._exportable().export(room)

    def restore(self, tables: ResidencyTables, parts: Parts, instances: Sequence[Instance]) -> None:
        """Hold what was exported, for instances as they were. Raises InvalidSnapshot, IndexFull."""
        self._exportable().restore(parts, set(numbers_of(instances)))
        by_number = {each.number: each for each in instances if each.number is not None}
        hidden = {each.staging.number: each for each in instances if each.staging is not None}
        self._named.replace(by_number | hidden, tables.excluded, tables.ending_at_points, hidden)
        self.inventories.num_taken = tables.num_inventories
        self.inventories.num_dropped = tables.num_dropped_inventories

    def _exportable(self) -> Exportable:
        assert isinstance(self._index, Exportable)
        return self._index

    # --- below --------------------------------------------------------------------------------

    def _touch(self, instance: Instance, tier: Tier) -> None:
        """Note that the tier changes at the present sequence."""
        instance.changed_at[tier] = instance.seq
        if instance.open_inventories:
            self.inventories.interrupt(instance, tier)
        if instance.staging is not None:
            self.inventories.settle(instance)

    def _run(self, node: TreeNode) -> TreeRun:
        return TreeRun(
            hash_key=node.hash_key,
            depth=node.depth,
            num_blocks=node.num_blocks,
            holders=self._named.visible_slots(node.holders),
            num_pairs=node.num_pairs,
            num_children=node.num_children,
            children=tuple(
                run for run in map(self._run, node.children) if run.holders or run.children
            ),
        )
