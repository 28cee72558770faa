"""What the blocks of an engine are: our hashes of them, from their tokens and their parents.

store with tokens --parent known--> names --> the runs of it that are news are told
                  --else----------> waits for its parent (orphans.py)
"""

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.raw_events import RawStored
from kvatlas.worker_hooks.reporting.engine_state.held_blocks import HeldBlocks
from kvatlas.worker_hooks.reporting.engine_state.orphans import OrphanBuffer
from kvatlas.worker_hooks.reporting.engine_state.pooled import PooledBlocks
from kvatlas.worker_hooks.reporting.engine_state.publication import Publication
from kvatlas.worker_hooks.reporting.engine_state.usable_blocks import UsableBlocks


class BlockHashing:
    """Names blocks that are held, and tells what is news by that.

    The engine's own hash resolves parents and goes no further. A block that is held no longer when
    its parent comes gets no name.
    """

    def __init__(
        self,
        held: HeldBlocks,
        usable: UsableBlocks,
        publication: Publication,
        pooled: PooledBlocks | None,
        *,
        descriptor: NamespaceDescriptor,
        include_tokens: bool,
        max_parked_bytes: int,
    ) -> None:
        self._held, self._usable = held, usable
        self._publication, self._pooled = publication, pooled
        self._block_bytes, self._include_tokens = 4 * descriptor.block_tokens, include_tokens
        self._lookahead_bytes = 4 * descriptor.lookahead_tokens
        self._parking = OrphanBuffer(max_parked_bytes)

    def fits(self, event: RawStored) -> bool:
        """Return whether a store has the windows of as many blocks as it has engine hashes."""
        num_blocks = len(event.engine_hashes)
        return (
            len(event.tokens) == self._block_bytes * num_blocks
            and len(event.lookahead) == self._lookahead_bytes * num_blocks
        )

    def name(self, event: RawStored) -> None:
        """Name the blocks of a store that fits, and those of all that waited for them."""
        # a chain that waited for this one, and one that waited for that, and so on
        waiting = [event]
        while waiting:
            current = waiting.pop()
            if self._name_chain(current) and self._parking:
                waiting += reversed(self._parking.pop_children_of(current.engine_hashes))

    def forget_orphans(self, tier: Tier | None) -> None:
        """Drop what waits for its parent in a tier, or in any."""
        self._parking.clear(tier)

    def _name_chain(self, event: RawStored) -> bool:
        """Say what the blocks of an event are; return False if that waits for their parent."""
        hasher = self._publication.namespaces.hasher(event.lora, event.cache_salt)
        root = parent = hasher.root
        if event.parent is not None:
            blocks = self._held.by_engine_hash
            above = blocks.get(event.parent)
            first = blocks.get(event.engine_hashes[0]) if event.engine_hashes else None
            if above is not None and above.hash:
                root, parent = above.root, above.hash
            elif first is not None and first.hash:
                # the block above is gone, but the engine has kept this one
                root, parent = first.root, first.parent
            else:
                self._hold_back_orphan(event)
                return False
        chain = hasher.chain_reported(
            event.tokens, event.lookahead, event.extras, parent, event.first_token
        )
        self._name_blocks(event, root, parent, chain)
        return True

    def _hold_back_orphan(self, event: RawStored) -> None:
        counters, blocks = self._publication.counters, self._held.by_engine_hash
        counters.parked_events += 1
        counters.orphaned_events += self._parking.add(event)
        for engine_hash in event.engine_hashes:
            if engine_hash in blocks:
                self._usable.settle(blocks[engine_hash])

    def _name_blocks(self, event: RawStored, root: bytes, parent: bytes, chain: bytes) -> None:
        """Name each block of the chain that is held; say which runs have news in them."""
        held, usable = self._held, self._usable
        blocks, tiers_of_holders = held.by_engine_hash, usable.tiers_of_holders
        tier_bit, above, before = 1 << event.tier, event.parent, parent
        run_start, run_has_news = 0, False
        for position, engine_hash in enumerate(event.engine_hashes):
            at = position * BLOCK_HASH_BYTES
            block_hash = chain[at : at + BLOCK_HASH_BYTES]
            block = blocks.get(engine_hash)
            if block is not None:
                if block.hash != block_hash:
                    if block.hash:
                        # the engine took the handle for another block; what waits is said before
                        self._publish_run(
                            event, root, parent, chain, run_start, position, run_has_news
                        )
                        run_start, run_has_news = position, False
                        usable.withdraw(engine_hash, block)
                        held.add_again(engine_hash, block, event)
                    held.name(block, block_hash, root, before, above)
                    if self._pooled is not None:
                        self._pooled.named(block_hash)
                    if usable.points:
                        usable.named(engine_hash, block)
                if block.published_tiers != tiers_of_holders.get(block.holders):
                    run_has_news |= usable.settle(block, quiet_tier=event.tier)
            if block is None or not block.published_tiers & tier_bit:
                self._publish_run(event, root, parent, chain, run_start, position, run_has_news)
                run_start, run_has_news = position + 1, False
            before, above = block_hash, engine_hash
        end = len(event.engine_hashes)
        self._publish_run(event, root, parent, chain, run_start, end, run_has_news)

    def _publish_run(
        self,
        event: RawStored,
        root: bytes,
        parent: bytes,
        chain: bytes,
        first: int,
        end: int,
        has_news: bool,
    ) -> None:
        """Say that the blocks first..end-1 of the chain are held, if that is news."""
        if not has_news:
            return
        cut = BLOCK_HASH_BYTES * first
        hashes = chain[cut : BLOCK_HASH_BYTES * end]
        before = chain[cut - BLOCK_HASH_BYTES : cut] if first else parent
        tokens = None
        if self._include_tokens:
            tokens = event.tokens[self._block_bytes * first : self._block_bytes * end]
        self._publication.publish(root, before, hashes, event.tier, tokens)
