"""What an engine holds, by its own hashes, whether or not anything has said what the blocks are.

engine hash -> HeldBlock(holders, hash, root, ...)   one entry per block that the engine holds
(engine hash, holder bit) -> further stores          where copies are counted
"""

from collections.abc import Set as AbstractSet

from msgspec import Struct

from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.raw_events import EngineHash, RawStored
from kvatlas.worker_hooks.reporting.engine_state.pooled import Position
from kvatlas.worker_hooks.reporting.kv_groups import KvGroups


class HeldBlock(Struct, gc=False):
    """A block as the engine holds it."""

    #: a bit for each (group, tier)
    holders: int = 0
    #: tiers, as bits, in which the fleet has been told of it, or it is withheld
    published_tiers: int = 0
    #: ours; empty while nobody has told what the block is
    hash: bytes = b""
    root: bytes = b""
    #: hash of the block before it, the root for the first
    parent: bytes = b""
    #: the engine's own hash of the block before it
    above: EngineHash | None = None
    #: whether the fleet has been told that reuse may end with it, or it is withheld
    is_reuse_point: bool = False


class HeldBlocks:
    """The blocks of one instance.

    Two engine hashes of one block are two entries. With `counts_copies` two stores of one engine
    hash are two copies, as engines tell them to whoever listens from outside. With `finds_names`
    a block is found by our hash too.
    """

    def __init__(self, groups: KvGroups, *, counts_copies: bool, finds_names: bool) -> None:
        self._groups = groups
        self._counts_copies, self._finds_names = counts_copies, finds_names
        #: entries come and go here only
        self.by_engine_hash: dict[EngineHash, HeldBlock] = {}
        #: those that nothing has told the content of
        self.num_unnamed = 0
        #: held since before the last doubt and not stored since, blocks of another size included
        self.unconfirmed: set[EngineHash] = set()
        #: (engine hash, holder bit) -> further stores of it, where copies are counted
        self._further: dict[tuple[EngineHash, int], int] = {}
        #: our hash -> a block of that name
        self._by_name: dict[bytes, HeldBlock] = {}

    def add(self, event: RawStored, bit: int) -> list[EngineHash]:
        """Note a store, whatever its blocks are; return those that the bit did not hold before."""
        blocks, unconfirmed, came = self.by_engine_hash, self.unconfirmed, []
        counts_copies = self._counts_copies and event.tokens and event.tier is Tier.hbm
        for engine_hash in event.engine_hashes:
            block = blocks.get(engine_hash)
            if block is None:
                block = blocks[engine_hash] = HeldBlock()
                self.num_unnamed += 1
            if not block.holders & bit:
                block.holders |= bit
                unconfirmed.discard(engine_hash)
                came.append(engine_hash)
            elif engine_hash in unconfirmed:
                # the removal of the copies before may have been missed: this is the first again
                unconfirmed.discard(engine_hash)
                self._further.pop((engine_hash, bit), None)
            elif counts_copies:
                further = self._further.get((engine_hash, bit), 0)
                self._further[engine_hash, bit] = further + 1
        return came

    def add_again(self, engine_hash: EngineHash, block: HeldBlock, event: RawStored) -> None:
        """Hold a block as this store says and no more: its engine hash was another block's."""
        self.drop_copies({engine_hash})
        block.holders = self._groups.bit(event.group, event.tier)

    def drop_copy(self, engine_hash: EngineHash, bit: int) -> bool:
        """Hold a block once less; return False if it is held once only, which changes nothing."""
        further = self._further.pop((engine_hash, bit), 0) if self._further else 0
        if further > 1:
            self._further[engine_hash, bit] = further - 1
        return further > 0

    def drop_copies(self, of: AbstractSet[EngineHash]) -> None:
        """Hold each of these once at most."""
        if self._further:
            kept = {key: more for key, more in self._further.items() if key[0] not in of}
            self._further = kept

    def name(
        self,
        block: HeldBlock,
        block_hash: bytes,
        root: bytes,
        parent: bytes,
        above: EngineHash | None,
    ) -> None:
        """Note what a block is."""
        if not block.hash:
            self.num_unnamed -= 1
        elif self._by_name.get(block.hash) is block:
            del self._by_name[block.hash]
        block.hash, block.root, block.parent, block.above = block_hash, root, parent, above
        if self._finds_names:
            self._by_name[block_hash] = block

    def forget(self, engine_hash: EngineHash, block: HeldBlock) -> None:
        """Drop the entry of a block that is held nowhere."""
        del self.by_engine_hash[engine_hash]
        self.num_unnamed -= not block.hash
        if self._finds_names and self._by_name.get(block.hash) is block:
            del self._by_name[block.hash]

    def empty(self, tier: Tier | None) -> None:
        """Hold nothing in a tier, or at all; telling that is the caller's."""
        if tier in (None, Tier.hbm):
            self._further.clear()
        if tier is None:
            self.by_engine_hash.clear()
            self._by_name.clear()
            self.unconfirmed.clear()
            self.num_unnamed = 0
            return
        kept = ~self._groups.mask(tier)
        for engine_hash, block in list(self.by_engine_hash.items()):
            block.holders &= kept
            block.published_tiers &= ~(1 << tier)
            block.is_reuse_point &= tier is not Tier.hbm
            if not block.holders:
                self.forget(engine_hash, block)

    # --- for those who ask ------------------------------------------------------------------

    def num_pairs(self, tier: Tier) -> int:
        """Return the (engine hash, group) pairs held in a tier. O(blocks)."""
        mask = self._groups.mask(tier)
        return sum((block.holders & mask).bit_count() for block in self.by_engine_hash.values())

    def resident(self) -> dict[int, dict[Tier, list[EngineHash]]]:
        """Return what is held by group and tier."""
        found: dict[int, dict[Tier, list[EngineHash]]] = {}
        for engine_hash, block in self.by_engine_hash.items():
            for tier in Tier:
                for group in self._groups.groups_of(block.holders, tier):
                    found.setdefault(group, {}).setdefault(tier, []).append(engine_hash)
        return found

    def used_roots(self) -> set[bytes]:
        """Return the namespaces of all blocks that have a name. O(blocks)."""
        return {block.root for block in self.by_engine_hash.values() if block.root}

    def position_of(self, block_hash: bytes) -> Position | None:
        """Return root and parent of a block by our hash; needs `finds_names`."""
        block = self._by_name.get(block_hash)
        return None if block is None else (block.root, block.parent)
