"""From an engine's words to the log's: names blocks, keeps what is held, says what changed.

    RawEvent -> HeldBlocks     what the engine holds, by its own hashes
             -> BlockNames     what the blocks are, in our hashes
             -> UsableBlocks   in which tiers every group that counts holds them
             -> Telling        what the fleet has been told of that, and the events that tell it

An engine says that it holds blocks before, after or without saying what they are. What it holds is
kept by its own hash; a block counts for the fleet from the moment it also has a name of ours, which
follows from its tokens and its parent.

Pure; the sidecar and the bridge call `handle` with what the engine said and publish the answer.
"""

from collections.abc import Iterable, Iterator

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import KvEvent, Resync
from kvatlas.worker_hooks.raw_events import (
    EngineHash,
    RawCleared,
    RawDoubted,
    RawEngineBatch,
    RawEvent,
    RawForgotten,
    RawGroupSeen,
    RawHeld,
    RawListed,
    RawLost,
    RawRemoved,
    RawRestarted,
    RawStored,
)
from kvatlas.worker_hooks.reporting.engine_state.block_hashing import BlockHashing
from kvatlas.worker_hooks.reporting.engine_state.block_size_mismatch import BlockSizeMismatches
from kvatlas.worker_hooks.reporting.engine_state.degradation import DegradationNotices
from kvatlas.worker_hooks.reporting.engine_state.held_blocks import HeldBlocks
from kvatlas.worker_hooks.reporting.engine_state.pooled import PooledBlocks
from kvatlas.worker_hooks.reporting.engine_state.publication import Publication
from kvatlas.worker_hooks.reporting.engine_state.usable_blocks import UsableBlocks
from kvatlas.worker_hooks.reporting.kv_groups import GroupUse, KvGroups


class EngineStateTracker:
    """Turns raw events of one instance into events of the log.

    A store below an unknown parent waits, within a bound, until the parent comes. The engine's own
    hash resolves parents and removals and goes no further. Two engine hashes of one block are two
    copies: the block is held until both are gone. With `counts_copies` so are two stores of one
    engine hash, as engines tell them to whoever listens from outside.
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
        counts_copies: bool = False,
        has_pool: bool = False,
        tells_mutes: bool = True,
        standing_doubt: str = "",
    ) -> None:
        """Without `tells_mutes`, readers that know no NamespacesMuted are told by a doubt.

        `standing_doubt` is why the instance is never exact, whatever happens.
        """
        self.block_tokens = descriptor.block_tokens
        self._groups = KvGroups(groups, self.block_tokens)
        self._held = HeldBlocks(self._groups, counts_copies=counts_copies, finds_names=has_pool)
        self._publication = Publication(model, descriptor, fleet_key, self._held.used_roots)
        self.residency, self.counters = self._publication.residency, self._publication.counters
        self._usable = UsableBlocks(self._held, self._groups, self._publication)
        self._pooled = PooledBlocks(self._publication, self._held.position_of) if has_pool else None
        self._names = BlockHashing(
            self._held,
            self._usable,
            self._publication,
            self._pooled,
            descriptor=descriptor,
            include_tokens=include_tokens,
            max_parked_bytes=max_parked_bytes,
        )
        self._mismatches = BlockSizeMismatches(descriptor)
        self._notices = DegradationNotices(
            self._publication,
            self._mismatches,
            tells_mutes=tells_mutes,
            standing_doubt=standing_doubt,
        )

    def begin_epoch(self) -> None:
        """Tell every namespace again, as the first of its blocks comes."""
        self._publication.namespaces.told.clear()

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
                case RawGroupSeen():
                    self._usable.see(event)
                case RawRestarted():
                    self._handle_cleared(None)
                    self._mismatches.restart()
                    self._notices.restart()
                case RawDoubted(reason):
                    self._handle_doubted(reason)
                case RawForgotten():
                    self._handle_forgotten()
                case RawHeld(num_pairs, tier):
                    self.counters.audit_mismatches += num_pairs != self.num_pairs(tier)
                case RawListed() | RawEngineBatch():
                    pass
        return self._publication.drain()

    def inventory(self, as_of_seq: int) -> Iterator[KvEvent]:
        """Yield the namespaces of all that is held, then the inventory of every tier.

        The caller holds back other events until all parts are in the outbox.
        """
        return self._publication.inventory(as_of_seq)

    def digests(self) -> list[KvEvent]:
        """Return the digest of every tier, true right after the events returned so far."""
        return self._publication.digests()

    def retract(self, hashes: bytes) -> list[KvEvent]:
        """Return removals for those of the blocks that are held nowhere, though somebody asked.

        Whoever asked believes in them; so may the index, for a loss that nobody has noticed.
        """
        return self._publication.retract(hashes)

    def move_pooled(self, came: Iterable[bytes], left: Iterable[bytes]) -> list[KvEvent]:
        """Return what changed with blocks, named by our hash, that left and came to the serve pool.

        They are held as `dram` besides what the engine says. A block that the engine has not told
        of yet is told when it does.
        """
        assert self._pooled is not None, "the edge was made without a pool"
        self._pooled.drop(left)
        self._pooled.add(came)
        return self._publication.drain()

    # --- what is not exact ------------------------------------------------------------------

    def doubt_fields(self, names: Iterable[str]) -> None:
        """Be doubtful until the engine restarts: its events have fields that nobody here reads."""
        self._notices.doubt_fields(names)

    @property
    def degraded_reason(self) -> str:
        """Why the instance is doubtful; empty where it is not."""
        return self._notices.doubt

    def stall(self, reason: str) -> list[KvEvent]:
        """Note that the engine gives no sign of life, or does again; return how that is said."""
        self._notices.stall(reason)
        return self._publication.drain()

    def mark_over_budget(self, roots: Iterable[bytes], reason: str) -> list[KvEvent]:
        """Tell of these namespaces only what leaves them, from now on; return how that is said."""
        self._notices.mark_over_budget(roots, reason)
        return self.degradation_notices()

    def clear_over_budget(self, roots: Iterable[bytes]) -> None:
        """Hold what was withheld. Publish the inventory next, then the degradation notices."""
        self._publication.clear_over_budget(roots)

    def degradation_notices(self, *, even_none: bool = False) -> list[KvEvent]:
        """Return what readers have to know before equal digests make us exact: a doubt, mutes.

        With `even_none` it is also said that there are none.
        """
        return self._notices.events(even_none=even_none)

    # --- what is held, for those who ask ----------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks known by an engine hash."""
        return len(self._held.by_engine_hash)

    @property
    def num_unnamed(self) -> int:
        """Blocks that the engine holds and nothing has told the content of."""
        return self._held.num_unnamed

    @property
    def ends_at_reuse_points(self) -> bool:
        """Whether a prefix is reused up to a reuse point only."""
        return bool(self._usable.points)

    def num_named(self, tier: Tier) -> int:
        """Return the blocks that a tier holds and that have a name of ours, told or withheld."""
        told, withheld = self.residency, self._publication.withheld
        return told.digest(tier).count + withheld.digest(tier).count

    def num_pairs(self, tier: Tier) -> int:
        """Return the (engine hash, group) pairs held in a tier. O(blocks), for audits."""
        return self._held.num_pairs(tier)

    def resident(self) -> dict[int, dict[Tier, list[EngineHash]]]:
        """Return what the engine holds by group and tier, in its own hashes."""
        return self._held.resident()

    # --- stored, removed --------------------------------------------------------------------

    def _handle_stored(self, event: RawStored) -> None:
        bit = self._groups.bit(event.group, event.tier)
        use = self._groups.use_of(event.group)
        is_own_parent = event.parent in event.engine_hashes
        fits = not event.tokens or self._names.fits(event)
        if not bit or is_own_parent or not fits:
            self.counters.rejected_events += 1
            if bit and not fits and use is GroupUse.full:
                self._handle_block_size_mismatch(event, bit)
            return
        if self._mismatches.reason and event.tokens:
            self._mismatches.fitting(event, bit)
            if not self._mismatches.reason:
                self._notices.publish_reason()
        came = self._held.add(event, bit)
        if self._usable.points:
            self._usable.enter_window(event.group, event.tier, came)
        if use is GroupUse.full:
            self.counters.duplicate_blocks += len(event.engine_hashes) - len(came)
        elif use is GroupUse.other:
            self.counters.ignored_events += 1
        if event.tokens and use is GroupUse.full:
            self._names.name(event)
        else:
            for engine_hash in event.engine_hashes:
                self._usable.settle(self._held.by_engine_hash[engine_hash])

    def _handle_block_size_mismatch(self, event: RawStored, bit: int) -> None:
        was_doubted = self._mismatches.reason
        self._mismatches.note(event, bit)
        self._held.unconfirmed.difference_update(event.engine_hashes)
        if self._mismatches.reason != was_doubted:
            self._notices.publish_reason()

    def _handle_removed(self, event: RawRemoved) -> None:
        bit = self._groups.bit(event.group, event.tier)
        held, usable, mismatches = self._held, self._usable, self._mismatches
        blocks = held.by_engine_hash
        for engine_hash in event.engine_hashes:
            was_mismatch = mismatches.remove(engine_hash, bit)
            block = blocks.get(engine_hash)
            if block is None or not block.holders & bit:
                self.counters.unknown_removals += not was_mismatch
                continue
            if held.drop_copy(engine_hash, bit):
                continue
            if usable.points:
                usable.leave_window(event.group, event.tier, engine_hash)
            block.holders &= ~bit
            usable.settle(block)
            if not block.holders:
                held.forget(engine_hash, block)

    # --- cleared, lost, doubted -------------------------------------------------------------

    def _handle_cleared(self, tier: Tier | None) -> None:
        self._names.forget_orphans(tier)
        self._mismatches.empty(None if tier is None else self._groups.mask(tier))
        if tier in (None, Tier.hbm):
            self._usable.empty_windows()
        self._held.empty(tier)
        self._publication.clear(tier)
        if self._pooled is not None and tier in (None, Tier.dram):
            self._pooled.publish_again()

    def _handle_lost(self, num_events: int, listing_follows: bool) -> None:
        """Start from nothing where the engine will tell all again.

        Where it cannot, what was held is kept: a few blocks too many cost a refused lease each,
        and forgetting all costs every hit on what the engine never reports again.
        """
        self.counters.lost_events += num_events
        self._publication.other(Resync(0, 0))
        if listing_follows:
            self._handle_cleared(None)

    def _handle_doubted(self, reason: str) -> None:
        known = set(self._held.by_engine_hash) | self._mismatches.hashes
        self._held.unconfirmed = known if reason else set()
        self._notices.set_reason(reason)

    def _handle_forgotten(self) -> None:
        unconfirmed = self._held.unconfirmed
        for engine_hash in unconfirmed:
            block = self._held.by_engine_hash.get(engine_hash)
            if block is not None:
                self._usable.withdraw(engine_hash, block)
                self._held.forget(engine_hash, block)
        self._held.drop_copies(unconfirmed)
        self._mismatches.forget(unconfirmed)
        self._held.unconfirmed = set()
