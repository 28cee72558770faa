"""From an engine's words to the log's: names blocks, keeps what is held, says what changed.

    engine hash -> _Block(hash, root, holders)   one entry per block that the engine holds
    (tier, hash) in Residency                    every group that counts holds the block there

Pure; the sidecar and the bridge call `handle` with what the engine said and publish the answer.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from kvatlas.schemas.digest import BLOCK_HASH_BYTES, split_hashes
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import NUM_TIERS, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    Digest,
    KvEvent,
    NamespaceSeen,
    Resync,
)
from kvatlas.worker_hooks.inventory import inventory_of
from kvatlas.worker_hooks.merging import EventMerger
from kvatlas.worker_hooks.parking import Parking
from kvatlas.worker_hooks.raw_events import (
    EngineHash,
    RawCleared,
    RawEvent,
    RawListed,
    RawLost,
    RawRemoved,
    RawStored,
)
from kvatlas.worker_hooks.residency import Residency

#: namespaces kept without a block in them; a forgotten one is built, and told, again
MAX_NAMESPACES = 16_384


class EdgeCounters(Struct):
    """What happened so far; all rise only."""

    stored_blocks: int = 0
    removed_blocks: int = 0
    #: stored again while held: copies of one block, or the same news twice
    duplicate_blocks: int = 0
    #: removals of what was not held
    unknown_removals: int = 0
    #: events that contradict themselves, such as hashes without tokens
    rejected_events: int = 0
    #: events of KV groups that do not count for reuse
    ignored_events: int = 0
    #: chains that waited for their parent, and those that were given up
    parked_events: int = 0
    orphaned_events: int = 0
    #: events that the ring dropped
    lost_events: int = 0


class _Block(Struct, gc=False):
    """A block as the engine holds it; `holders` has a bit for each (tier, group)."""

    hash: bytes
    root: bytes
    holders: int


class Edge:
    """Turns raw events of one instance into events of the log.

    A store below an unknown parent waits, within a bound, until the parent comes. The engine's own
    hash resolves parents and removals and goes no further. Two engine hashes of one block are two
    copies: the block is held until both are gone.
    """

    def __init__(
        self,
        model: str,
        descriptor: NamespaceDescriptor,
        groups: tuple[int, ...] = (0,),
        fleet_key: bytes = b"",
        *,
        include_tokens: bool = False,
        max_parked_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self.residency = Residency()
        self.counters = EdgeCounters()
        self._model, self._descriptor, self._fleet_key = model, descriptor, fleet_key
        self._group_bits = {group: 1 << i * NUM_TIERS for i, group in enumerate(groups)}
        #: shifted by a tier: the bits of all groups in that tier
        self._all_groups = sum(self._group_bits.values())
        self._include_tokens = include_tokens
        self._hashers: dict[tuple[str | None, str | None], BlockHasher] = {}
        self._namespaces: dict[bytes, NamespaceSeen] = {}
        self._told: set[bytes] = set()
        self._prune_at = MAX_NAMESPACES
        self._blocks: dict[EngineHash, _Block] = {}
        #: (tier, hash) held under several engine hashes -> how many beyond the first
        self._copies: dict[tuple[Tier, bytes], int] = {}
        self._parking = Parking(max_parked_bytes)
        self._out = EventMerger()

    def begin_epoch(self) -> None:
        """Tell every namespace again, as the first of its blocks comes."""
        self._told.clear()

    def handle(self, raw_events: Iterable[RawEvent]) -> list[KvEvent]:
        """Return what changed, in order; neighbours of one chain become one event.

        A `Resync` in the answer has no bounds yet: the outbox knows the sequences.
        """
        for event in raw_events:
            match event:
                case RawStored():
                    self._handle_stored(event)
                case RawRemoved():
                    self._handle_removed(event)
                case RawCleared(tier):
                    self._handle_cleared(tier)
                case RawLost(num_events, listing_follows):
                    self._handle_lost(num_events, listing_follows)
                case RawListed():
                    pass
        return self._out.take()

    def inventory(self, as_of_seq: int) -> Iterator[KvEvent]:
        """Yield the namespaces of all that is held, then the inventory of every tier.

        The caller holds back other events until all parts are in the outbox.
        """
        empty_root = self._hasher(None, None).root
        # what was told of others may have been lost with what the inventory repairs
        self._told = {root for tier in Tier for _, root in self.residency.blocks(tier)}
        for root in sorted(self._told):
            yield self._namespaces[root]
        yield from inventory_of(self.residency, as_of_seq, empty_root)

    def digests(self) -> list[KvEvent]:
        """Return the digest of every tier, true right after the events returned so far."""
        return [Digest(tier, *self.residency.digest(tier)) for tier in Tier]

    def disown(self, hashes: bytes) -> list[KvEvent]:
        """Return removals for those of the blocks that are held nowhere, though somebody asked.

        Whoever asked believes in them; so may the index, for a loss that nobody has noticed.
        """
        held = self.residency
        not_held = b"".join(
            block for block in split_hashes(hashes) if not any(held.holds(t, block) for t in Tier)
        )
        if not not_held:
            return []
        root = self._hasher(None, None).root
        tiers = [tier for tier in Tier if tier is Tier.hbm or held.digest(tier).count]
        return [BlockRemoved(root, not_held, tier) for tier in tiers]

    @property
    def num_blocks(self) -> int:
        """Blocks known by an engine hash."""
        return len(self._blocks)

    # --- stored ---------------------------------------------------------------------------

    def _handle_stored(self, event: RawStored) -> None:
        if event.group not in self._group_bits:
            self.counters.ignored_events += 1
            return
        # a chain that waited for this one, and one that waited for that, and so on
        waiting: list[RawStored | RawRemoved] = [event]
        while waiting:
            current = waiting.pop()
            if isinstance(current, RawRemoved):
                self._handle_removed(current)
            elif self._store(current) and self._parking:
                waiting += reversed(self._parking.take(current.engine_hashes))

    def _store(self, event: RawStored) -> bool:
        """Hold the blocks of an event; return False if it waits or is wrong."""
        hasher = self._hasher(event.lora, event.cache_salt)
        root = parent = hasher.root
        if event.parent is not None:
            known = self._blocks.get(event.parent)
            if known is None:
                self.counters.parked_events += 1
                self.counters.orphaned_events += self._parking.park(event)
                return False
            root, parent = known.root, known.hash
        if len(event.tokens) != 4 * self._descriptor.block_tokens * len(event.engine_hashes):
            self.counters.rejected_events += 1
            return False
        chain = hasher.chain(event.tokens, event.extras, parent, event.first_token)
        self._hold(event, root, parent, chain)
        return True

    def _hold(self, event: RawStored, root: bytes, parent: bytes, chain: bytes) -> None:
        """Hold each block of the chain; say which runs of usable blocks have news in them."""
        tier, blocks = event.tier, self._blocks
        bit, usable = self._group_bits[event.group] << tier, self._all_groups << tier
        run_start, run_has_news = 0, False
        for position, engine_hash in enumerate(event.engine_hashes):
            at = position * BLOCK_HASH_BYTES
            block_hash = chain[at : at + BLOCK_HASH_BYTES]
            block = blocks.get(engine_hash)
            if block is not None and block.hash != block_hash:
                # the engine took the handle for another block
                self._say_run(event, root, parent, chain, run_start, position, run_has_news)
                run_start, run_has_news = position, False
                self._forget(engine_hash, block)
                block = None
            if block is None:
                block = blocks[engine_hash] = _Block(block_hash, root, 0)
            was_usable = block.holders & usable == usable
            block.holders |= bit
            if block.holders & usable != usable:
                self._say_run(event, root, parent, chain, run_start, position, run_has_news)
                run_start, run_has_news = position + 1, False
            elif not was_usable:
                run_has_news |= self._acquire(tier, block_hash, root)
            else:
                self.counters.duplicate_blocks += 1
        end = len(event.engine_hashes)
        self._say_run(event, root, parent, chain, run_start, end, run_has_news)

    def _acquire(self, tier: Tier, block_hash: bytes, root: bytes) -> bool:
        if self.residency.add(tier, block_hash, root):
            self.counters.stored_blocks += 1
            return True
        self.counters.duplicate_blocks += 1
        self._copies[tier, block_hash] = self._copies.get((tier, block_hash), 0) + 1
        return False

    def _say_run(
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
        if root not in self._told:
            self._tell_namespace(root)
        cut = BLOCK_HASH_BYTES * first
        hashes = chain[cut : BLOCK_HASH_BYTES * end]
        before = chain[cut - BLOCK_HASH_BYTES : cut] if first else parent
        tokens = None
        if self._include_tokens:
            width = 4 * self._descriptor.block_tokens
            tokens = event.tokens[width * first : width * end]
        self._out.stored(root, before, hashes, event.tier, tokens)

    # --- removed, cleared, lost -----------------------------------------------------------

    def _handle_removed(self, event: RawRemoved) -> None:
        if event.group not in self._group_bits:
            self.counters.ignored_events += 1
            return
        bit = self._group_bits[event.group] << event.tier
        usable = self._all_groups << event.tier
        for engine_hash in event.engine_hashes:
            block = self._blocks.get(engine_hash)
            if block is None or not block.holders & bit:
                if not self._parking.remove(engine_hash, event):
                    self.counters.unknown_removals += 1
                continue
            was_usable = block.holders & usable == usable
            block.holders &= ~bit
            if not block.holders:
                del self._blocks[engine_hash]
            if was_usable:
                self._release(event.tier, block)

    def _release(self, tier: Tier, block: _Block) -> None:
        copies = self._copies.get((tier, block.hash), 0)
        if copies == 0:
            self.residency.discard(tier, block.hash)
            self.counters.removed_blocks += 1
            self._out.removed(block.root, block.hash, tier)
        elif copies == 1:
            del self._copies[tier, block.hash]
        else:
            self._copies[tier, block.hash] = copies - 1

    def _forget(self, engine_hash: EngineHash, block: _Block) -> None:
        del self._blocks[engine_hash]
        for tier in Tier:
            usable = self._all_groups << tier
            if block.holders & usable == usable:
                self._release(tier, block)

    def _handle_cleared(self, tier: Tier | None) -> None:
        self._empty(tier)
        self._out.other(AllBlocksCleared(tier))

    def _empty(self, tier: Tier | None) -> None:
        self._parking.clear(tier)
        self.residency.clear(tier)
        if tier is None:
            self._blocks.clear()
            self._copies.clear()
            return
        kept = ~(self._all_groups << tier)
        for engine_hash, block in list(self._blocks.items()):
            block.holders &= kept
            if not block.holders:
                del self._blocks[engine_hash]
        for copied in [key for key in self._copies if key[0] is tier]:
            del self._copies[copied]

    def _handle_lost(self, num_events: int, listing_follows: bool) -> None:
        """Start from nothing where the engine will tell all again.

        Where it cannot, what was held is kept: a few blocks too many cost a refused lease each,
        and forgetting all costs every hit on what the engine never reports again.
        """
        self.counters.lost_events += num_events
        self._out.other(Resync(0, 0))
        if listing_follows:
            self._handle_cleared(None)

    # --- namespaces -----------------------------------------------------------------------

    def _hasher(self, lora: str | None, cache_salt: str | None) -> BlockHasher:
        hasher = self._hashers.get((lora, cache_salt))
        if hasher is None:
            namespace = self._descriptor.namespace(self._model, lora, cache_salt)
            hasher = BlockHasher(namespace, self._fleet_key)
            if len(self._namespaces) >= self._prune_at:
                self._prune_namespaces()
            self._hashers[lora, cache_salt] = hasher
            self._namespaces[hasher.root] = NamespaceSeen(
                hasher.root,
                self._model,
                self._descriptor.block_tokens,
                self._descriptor.algorithm,
                lora,
                cache_salt is not None,
            )
        return hasher

    def _prune_namespaces(self) -> None:
        """Forget the namespaces that no block is in; the next of their blocks tells them again."""
        used = {block.root for block in self._blocks.values()}
        self._namespaces = {root: seen for root, seen in self._namespaces.items() if root in used}
        self._told &= used
        self._hashers.clear()
        self._prune_at = max(MAX_NAMESPACES, 2 * len(self._namespaces))

    def _tell_namespace(self, root: bytes) -> None:
        self._told.add(root)
        self._out.other(self._namespaces[root])
