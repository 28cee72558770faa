"""From an engine's words to the log's: names blocks, keeps what is held, says what changed.

    engine hash -> _Block(holders, hash, root, ...)   one entry per block that the engine holds
    (tier, hash) in Residency                         every group that counts holds the block there

An engine says that it holds blocks before, after or without saying what they are. What it holds is
kept by its own hash; a block counts for the fleet from the moment it also has a name of ours, which
follows from its tokens and its parent.

Pure; the sidecar and the bridge call `handle` with what the engine said and publish the answer.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import reuse_point
from kvatlas.schemas.ids import NUM_TIERS, Tier
from kvatlas.schemas.kv_events import Doubted, KvEvent, NamespacesMuted, Resync
from kvatlas.worker_hooks.kv_groups import GroupUse, KvGroups
from kvatlas.worker_hooks.misfits import Misfits
from kvatlas.worker_hooks.parking import Parking
from kvatlas.worker_hooks.pooled import Place, PooledBlocks
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
from kvatlas.worker_hooks.reuse_points import ReusePoints
from kvatlas.worker_hooks.telling import Telling

#: tiers by the bits that stand for them
_TIERS_OF = [tuple(t for t in Tier if bits & 1 << t) for bits in range(1 << NUM_TIERS)]


class _Block(Struct, gc=False):
    """A block as the engine holds it."""

    #: a bit for each (group, tier)
    holders: int = 0
    #: tiers, as bits, in which the fleet has been told of it, or it is withheld
    told_tiers: int = 0
    #: ours; empty while nobody has told what the block is
    hash: bytes = b""
    root: bytes = b""
    #: hash of the block before it, the root for the first
    parent: bytes = b""
    #: the engine's own hash of the block before it
    above: EngineHash | None = None
    #: whether the fleet has been told that reuse may end with it, or it is withheld
    is_reuse_point: bool = False


class Edge:
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
    ) -> None:
        """Without `tells_mutes`, readers that know no NamespacesMuted are told by a doubt."""
        self._telling = Telling(model, descriptor, fleet_key, self._used_roots)
        self.residency, self.counters = self._telling.residency, self._telling.counters
        #: blocks that the engine holds and nothing has told the content of
        self.num_unnamed = 0
        self.block_tokens = descriptor.block_tokens
        self._block_bytes = 4 * descriptor.block_tokens
        self._groups = KvGroups(groups, descriptor.block_tokens)
        self._points = ReusePoints({})
        self._include_tokens, self._counts_copies = include_tokens, counts_copies
        self._blocks: dict[EngineHash, _Block] = {}
        #: (engine hash, holder bit) -> further stores of it, where copies are counted
        self._further: dict[tuple[EngineHash, int], int] = {}
        #: held since before the last doubt and not stored since
        self._unconfirmed: set[EngineHash] = set()
        #: our hash -> a block of that name; kept only where a serve pool needs it
        self._by_name: dict[bytes, _Block] = {}
        self._pooled = PooledBlocks(self._telling, self._place_of) if has_pool else None
        #: holder bits -> tiers, as bits, in which every group that counts holds the block
        self._usable: dict[int, int] = {}
        self._parking = Parking(max_parked_bytes)
        self._misfits = Misfits(descriptor.block_tokens)
        #: why whoever listens doubts; and what the fleet has been told, with our own reason
        self._said_doubt = self.doubt = ""
        self._tells_mutes = tells_mutes
        #: why namespaces are muted, as long as some are
        self._mute_reason = ""
        #: the fleet has been told in this epoch
        self._has_told_doubt = self._has_told_mutes = False

    def begin_epoch(self) -> None:
        """Tell every namespace again, as the first of its blocks comes."""
        self._telling.namespaces.told.clear()
        self._has_told_doubt = self._has_told_mutes = False

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
                    self._handle_group(event)
                case RawRestarted():
                    self._handle_cleared(None)
                    self._misfits.restart()
                    self._said_doubt = ""
                    self._put_doubt()  # a new epoch is told without the old one's
                case RawDoubted(reason):
                    known = set(self._blocks) | self._misfits.hashes
                    self._unconfirmed = known if reason else set()
                    self._said_doubt = reason
                    self._tell_doubt()
                case RawForgotten():
                    self._handle_forgotten()
                case RawHeld(num_pairs, tier):
                    self.counters.audit_mismatches += num_pairs != self.num_pairs(tier)
                case RawListed() | RawEngineBatch():
                    pass
        return self._telling.take()

    def inventory(self, as_of_seq: int) -> Iterator[KvEvent]:
        """Yield the namespaces of all that is held, then the inventory of every tier.

        The caller holds back other events until all parts are in the outbox.
        """
        return self._telling.inventory(as_of_seq)

    def digests(self) -> list[KvEvent]:
        """Return the digest of every tier, true right after the events returned so far."""
        return self._telling.digests()

    def disown(self, hashes: bytes) -> list[KvEvent]:
        """Return removals for those of the blocks that are held nowhere, though somebody asked.

        Whoever asked believes in them; so may the index, for a loss that nobody has noticed.
        """
        return self._telling.disown(hashes)

    def move_pooled(self, came: Iterable[bytes], left: Iterable[bytes]) -> list[KvEvent]:
        """Return what changed with blocks, named by our hash, that left and came to the serve pool.

        They are held as `dram` besides what the engine says. A block that the engine has not told
        of yet is told when it does.
        """
        assert self._pooled is not None, "the edge was made without a pool"
        self._pooled.drop(left)
        self._pooled.hold(came)
        return self._telling.take()

    # --- muted namespaces -------------------------------------------------------------------

    def mute(self, roots: Iterable[bytes], reason: str) -> list[KvEvent]:
        """Tell of these namespaces only what leaves them, from now on; return how that is said."""
        for root in roots:
            self._telling.mute(root)
        self._mute_reason = reason
        return self.caveats()

    def unmute(self, roots: Iterable[bytes]) -> None:
        """Hold what was withheld. The inventory has to be told next, and caveats after it."""
        self._telling.unmute(roots)

    def caveats(self, *, even_none: bool = False) -> list[KvEvent]:
        """Return what readers have to know before equal digests make us exact: a doubt, mutes.

        With `even_none` their end is said again, where some were said in the epoch.
        """
        self._put_doubt()
        events: list[KvEvent] = []
        if self.doubt or (even_none and self._has_told_doubt):
            events.append(Doubted(self.doubt))
            self._has_told_doubt = True
        muted = self._telling.muted if self._tells_mutes else ()
        if muted or (even_none and self._has_told_mutes):
            reason = self._mute_reason if muted else ""
            events.append(NamespacesMuted(b"".join(sorted(muted)), reason))
            self._has_told_mutes = True
        return events

    # --- what is held, for those who ask ----------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks known by an engine hash."""
        return len(self._blocks)

    @property
    def ends_at_reuse_points(self) -> bool:
        """Whether a prefix is reused up to a reuse point only."""
        return bool(self._points)

    def num_named(self, tier: Tier) -> int:
        """Return the blocks that a tier holds and that have a name of ours, told or withheld."""
        told, withheld = self.residency, self._telling.withheld
        return told.digest(tier).count + withheld.digest(tier).count

    def num_pairs(self, tier: Tier) -> int:
        """Return the (engine hash, group) pairs held in a tier. O(blocks), for audits."""
        mask = self._groups.mask(tier)
        return sum((block.holders & mask).bit_count() for block in self._blocks.values())

    def resident(self) -> dict[int, dict[Tier, list[EngineHash]]]:
        """Return what the engine holds by group and tier, in its own hashes."""
        found: dict[int, dict[Tier, list[EngineHash]]] = {}
        for engine_hash, block in self._blocks.items():
            for tier in Tier:
                for group in self._groups.groups_of(block.holders, tier):
                    found.setdefault(group, {}).setdefault(tier, []).append(engine_hash)
        return found

    # --- stored -----------------------------------------------------------------------------

    def _handle_stored(self, event: RawStored) -> None:
        bit = self._groups.bit(event.group, event.tier)
        use = self._groups.use_of(event.group)
        is_own_parent = event.parent in event.engine_hashes
        fits = not event.tokens or self._fits(event)
        if not bit or is_own_parent or not fits:
            self.counters.rejected_events += 1
            if bit and not fits and use is GroupUse.full:
                self._take_misfit(event, bit)
            return
        if self._misfits.reason and event.tokens:
            self._misfits.fitting(event, bit)
            if not self._misfits.reason:
                self._tell_doubt()
        self.counters.ignored_events += use is GroupUse.other
        if event.tokens and use is GroupUse.full:
            # a chain that waited for this one, and one that waited for that, and so on
            waiting = [event]
            self._hold(event, bit)
            while waiting:
                current = waiting.pop()
                if self._name_chain(current) and self._parking:
                    waiting += reversed(self._parking.take(current.engine_hashes))
        else:
            self._hold(event, bit)
            for engine_hash in event.engine_hashes:
                self._settle(self._blocks[engine_hash])

    def _fits(self, event: RawStored) -> bool:
        return len(event.tokens) == self._block_bytes * len(event.engine_hashes)

    def _take_misfit(self, event: RawStored, bit: int) -> None:
        was_doubted = self._misfits.reason
        self._misfits.take(event, bit)
        self._unconfirmed.difference_update(event.engine_hashes)
        if self._misfits.reason != was_doubted:
            self._tell_doubt()

    def _tell_doubt(self) -> None:
        """Tell why the instance is doubtful: what was said, and what the edge has seen itself."""
        self._put_doubt()
        self._telling.other(Doubted(self.doubt))
        self._has_told_doubt = True

    def _put_doubt(self) -> None:
        muted = "" if self._tells_mutes else self._muted_in_words()
        self.doubt = "; ".join(filter(None, (self._said_doubt, self._misfits.reason, muted)))

    def _muted_in_words(self) -> str:
        """Return which namespaces are muted, for readers that know no NamespacesMuted."""
        muted = sorted(self._telling.muted)
        if not muted:
            return ""
        more = f" and {len(muted) - 1} more" if len(muted) > 1 else ""
        return f"namespace {muted[0].hex()}{more} over its budget: {self._mute_reason}"

    def _hold(self, event: RawStored, bit: int) -> None:
        """Note what the engine holds, whatever it is."""
        counts_copies = self._counts_copies and event.tokens and event.tier is Tier.hbm
        use = self._groups.use_of(event.group)
        for engine_hash in event.engine_hashes:
            block = self._blocks.get(engine_hash)
            if block is None:
                block = self._blocks[engine_hash] = _Block()
                self.num_unnamed += 1
            if not block.holders & bit:
                block.holders |= bit
                self._unconfirmed.discard(engine_hash)
                if self._points:
                    self._note_window(event.group, event.tier, engine_hash, block)
                continue
            if engine_hash in self._unconfirmed:
                # the removal of the copies before may have been missed: this is the first again
                self._unconfirmed.discard(engine_hash)
                self._further.pop((engine_hash, bit), None)
            elif counts_copies:
                further = self._further.get((engine_hash, bit), 0)
                self._further[engine_hash, bit] = further + 1
            if use is GroupUse.full:
                self.counters.duplicate_blocks += 1

    def _name_chain(self, event: RawStored) -> bool:
        """Say what the blocks of an event are; return False if that waits for their parent."""
        hasher = self._telling.namespaces.hasher(event.lora, event.cache_salt)
        root = parent = hasher.root
        if event.parent is not None:
            above = self._blocks.get(event.parent)
            first = self._blocks.get(event.engine_hashes[0]) if event.engine_hashes else None
            if above is not None and above.hash:
                root, parent = above.root, above.hash
            elif first is not None and first.hash:
                # the block above is gone, but the engine has kept this one
                root, parent = first.root, first.parent
            else:
                self._park(event)
                return False
        chain = hasher.chain(event.tokens, event.extras, parent, event.first_token)
        self._name_blocks(event, root, parent, chain)
        return True

    def _park(self, event: RawStored) -> None:
        self.counters.parked_events += 1
        self.counters.orphaned_events += self._parking.park(event)
        for engine_hash in event.engine_hashes:
            if engine_hash in self._blocks:
                self._settle(self._blocks[engine_hash])

    def _name_blocks(self, event: RawStored, root: bytes, parent: bytes, chain: bytes) -> None:
        """Name each block of the chain that is held; say which runs have news in them."""
        tier_bit, above, before = 1 << event.tier, event.parent, parent
        run_start, run_has_news = 0, False
        for position, engine_hash in enumerate(event.engine_hashes):
            at = position * BLOCK_HASH_BYTES
            block_hash = chain[at : at + BLOCK_HASH_BYTES]
            block = self._blocks.get(engine_hash)
            if block is not None:
                if block.hash != block_hash:
                    if block.hash:
                        # the engine took the handle for another block; what waits is said before
                        self._say_run(event, root, parent, chain, run_start, position, run_has_news)
                        run_start, run_has_news = position, False
                        self._withdraw(engine_hash, block)
                        self._drop_copies({engine_hash})
                        block.holders = self._groups.bit(event.group, event.tier)
                    self._name(engine_hash, block, block_hash, root, before, above)
                if block.told_tiers != self._usable.get(block.holders):
                    run_has_news |= self._settle(block, quiet_tier=event.tier)
            if block is None or not block.told_tiers & tier_bit:
                self._say_run(event, root, parent, chain, run_start, position, run_has_news)
                run_start, run_has_news = position + 1, False
            before, above = block_hash, engine_hash
        end = len(event.engine_hashes)
        self._say_run(event, root, parent, chain, run_start, end, run_has_news)

    def _name(
        self,
        engine_hash: EngineHash,
        block: _Block,
        block_hash: bytes,
        root: bytes,
        parent: bytes,
        above: EngineHash | None,
    ) -> None:
        if not block.hash:
            self.num_unnamed -= 1
        elif self._by_name.get(block.hash) is block:
            del self._by_name[block.hash]
        block.hash, block.root, block.parent, block.above = block_hash, root, parent, above
        if self._pooled is not None:
            self._by_name[block_hash] = block
            self._pooled.named(block_hash)
        if self._points:
            for group in self._groups.groups_of(block.holders, Tier.hbm):
                self._note_window(group, Tier.hbm, engine_hash, block)

    # --- from what is held to what is told ----------------------------------------------------

    def _settle(self, block: _Block, quiet_tier: Tier | None = None) -> bool:
        """Tell in which tiers a block came or went; of the quiet one return whether it came."""
        usable = self._usable_tiers(block.holders) if block.hash else 0
        changed = usable ^ block.told_tiers
        block.told_tiers = usable
        is_news = False
        for tier in _TIERS_OF[changed]:
            if not usable & 1 << tier:
                self._telling.release(tier, block.hash, block.root)
            elif self._telling.hold(tier, block.hash, block.root):
                if tier is quiet_tier:
                    is_news = True
                else:
                    self._telling.tell(block.root, block.parent, block.hash, tier)
        return is_news

    def _usable_tiers(self, holders: int) -> int:
        usable = self._usable.get(holders)
        if usable is None:
            full = self._groups.full_bits
            held = [t for t in Tier if full and holders >> t & full == full]
            usable = self._usable[holders] = sum(1 << tier for tier in held)
        return usable

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
        cut = BLOCK_HASH_BYTES * first
        hashes = chain[cut : BLOCK_HASH_BYTES * end]
        before = chain[cut - BLOCK_HASH_BYTES : cut] if first else parent
        tokens = None
        if self._include_tokens:
            tokens = event.tokens[self._block_bytes * first : self._block_bytes * end]
        self._telling.tell(root, before, hashes, event.tier, tokens)

    # --- reuse points -----------------------------------------------------------------------

    def _note_window(self, group: int, tier: Tier, engine_hash: EngineHash, block: _Block) -> None:
        """A named block came into a group: where it is windowed, reuse may end elsewhere now."""
        if tier is Tier.hbm and block.hash and group in self._groups.window_blocks:
            for point in self._points.add(group, engine_hash, block.above):
                self._move_point(self._blocks[point], is_point=True)

    def _move_point(self, block: _Block, *, is_point: bool) -> None:
        """Tell that reuse may end with a block, or no longer; a point is told like a block."""
        if block.is_reuse_point == is_point:
            return
        block.is_reuse_point = is_point
        point = reuse_point(block.hash)
        if not is_point:
            self._telling.release(Tier.hbm, point, block.root)
        elif self._telling.hold(Tier.hbm, point, block.root):
            self._telling.tell(block.root, block.root, point, Tier.hbm)

    def _handle_group(self, seen: RawGroupSeen) -> None:
        """Learn what a group is for, and judge all blocks anew if that changes anything."""
        if not self._groups.see(seen):
            return
        self._usable.clear()
        for block in self._blocks.values():
            self._move_point(block, is_point=False)
        self._points = ReusePoints(self._groups.window_blocks)
        for engine_hash, block in self._blocks.items():
            self._settle(block)
            for group in self._groups.groups_of(block.holders, Tier.hbm):
                self._note_window(group, Tier.hbm, engine_hash, block)

    # --- removed, cleared, lost -------------------------------------------------------------

    def _handle_removed(self, event: RawRemoved) -> None:
        bit = self._groups.bit(event.group, event.tier)
        window_blocks = self._groups.window_blocks
        for engine_hash in event.engine_hashes:
            was_misfit = self._misfits.remove(engine_hash, bit)
            block = self._blocks.get(engine_hash)
            if block is None or not block.holders & bit:
                self.counters.unknown_removals += not was_misfit
                continue
            further = self._further.pop((engine_hash, bit), 0) if self._further else 0
            if further:
                if further > 1:
                    self._further[engine_hash, bit] = further - 1
                continue
            if self._points and event.tier is Tier.hbm and event.group in window_blocks:
                for point in self._points.remove(event.group, engine_hash):
                    self._move_point(self._blocks[point], is_point=False)
            block.holders &= ~bit
            self._settle(block)
            if not block.holders:
                self._forget(engine_hash, block)

    def _forget(self, engine_hash: EngineHash, block: _Block) -> None:
        del self._blocks[engine_hash]
        self.num_unnamed -= not block.hash
        if self._pooled is not None and self._by_name.get(block.hash) is block:
            del self._by_name[block.hash]

    def _withdraw(self, engine_hash: EngineHash, block: _Block) -> None:
        """Tell that a block is held nowhere, whatever holds its engine hash now."""
        for group in self._groups.groups_of(block.holders, Tier.hbm):
            if group in self._groups.window_blocks:
                for point in self._points.remove(group, engine_hash):
                    self._move_point(self._blocks[point], is_point=False)
        block.holders = 0
        self._settle(block)

    def _handle_forgotten(self) -> None:
        for engine_hash in self._unconfirmed:
            block = self._blocks.get(engine_hash)
            if block is not None:
                self._withdraw(engine_hash, block)
                self._forget(engine_hash, block)
        self._drop_copies(self._unconfirmed)
        self._misfits.forget(self._unconfirmed)
        self._unconfirmed = set()

    def _drop_copies(self, of: set[EngineHash]) -> None:
        if self._further:
            kept = {key: more for key, more in self._further.items() if key[0] not in of}
            self._further = kept

    def _handle_cleared(self, tier: Tier | None) -> None:
        self._empty(tier)
        self._telling.clear(tier)
        if self._pooled is not None and tier in (None, Tier.dram):
            self._pooled.tell_again()

    def _empty(self, tier: Tier | None) -> None:
        self._parking.clear(tier)
        self._misfits.empty(None if tier is None else self._groups.mask(tier))
        if tier in (None, Tier.hbm):
            self._points = ReusePoints(self._groups.window_blocks)
            self._further.clear()
        if tier is None:
            self._blocks.clear()
            self._by_name.clear()
            self._unconfirmed.clear()
            self.num_unnamed = 0
            return
        kept = ~self._groups.mask(tier)
        for engine_hash, block in list(self._blocks.items()):
            block.holders &= kept
            block.told_tiers &= ~(1 << tier)
            block.is_reuse_point &= tier is not Tier.hbm
            if not block.holders:
                self._forget(engine_hash, block)

    def _handle_lost(self, num_events: int, listing_follows: bool) -> None:
        """Start from nothing where the engine will tell all again.

        Where it cannot, what was held is kept: a few blocks too many cost a refused lease each,
        and forgetting all costs every hit on what the engine never reports again.
        """
        self.counters.lost_events += num_events
        self._telling.other(Resync(0, 0))
        if listing_follows:
            self._handle_cleared(None)

    def _used_roots(self) -> set[bytes]:
        return {block.root for block in self._blocks.values() if block.root}

    def _place_of(self, block_hash: bytes) -> Place | None:
        block = self._by_name.get(block_hash)
        return None if block is None else (block.root, block.parent)
