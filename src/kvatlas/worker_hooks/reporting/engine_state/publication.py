"""What the fleet has been told that an instance holds, and the events that tell it.

A block that is held several times over, under several engine hashes or in the serve pool besides,
is told once and taken back when the last copy goes. What comes to a muted namespace is withheld
(ADR-0012):

    hold --> residency, told             root is muted --> withheld, not told
                ^                                             |
                '--- unmute: an inventory tells all of it ----'
"""

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from kvatlas.schemas.digest import split_hashes
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import AllBlocksCleared, BlockRemoved, Digest, KvEvent
from kvatlas.worker_hooks.reporting.engine_state.coalescing import EventCoalescer
from kvatlas.worker_hooks.reporting.engine_state.namespaces import Namespaces
from kvatlas.worker_hooks.reporting.inventory import inventory_of
from kvatlas.worker_hooks.reporting.residency import HeldByTier


class EngineStateCounters(Struct):
    """What happened so far; all rise only."""

    stored_blocks: int = 0
    removed_blocks: int = 0
    #: stored again while held: copies of one block, or the same news twice
    duplicate_blocks: int = 0
    #: removals of what was not held
    unknown_removals: int = 0
    #: events that contradict themselves, such as tokens for another number of blocks
    rejected_events: int = 0
    #: stores of KV groups that nobody has said the use of
    ignored_events: int = 0
    #: chains that waited for their parent, and those that were given up
    parked_events: int = 0
    orphaned_events: int = 0
    #: events that the ring dropped
    lost_events: int = 0
    #: times that the engine's own count of blocks was another one
    audit_mismatches: int = 0
    #: blocks that came while their namespace was muted, and how often one was
    withheld_blocks: int = 0
    namespace_mutes: int = 0


class Publication:
    """Keeps residency and tells each change of it; `take` gives the events since the last call.

    Residency is what has been told, so index and digests follow it, and nothing else.
    """

    def __init__(
        self,
        model: str,
        descriptor: NamespaceDescriptor,
        fleet_key: bytes,
        used_roots: Callable[[], set[bytes]],
    ) -> None:
        self.residency = HeldByTier()
        #: held, and nobody has been told; of muted namespaces only, and never in residency too
        self.withheld = HeldByTier()
        self.muted: set[bytes] = set()
        self.counters = EngineStateCounters()
        self.namespaces = Namespaces(
            model,
            descriptor,
            fleet_key,
            lambda: used_roots() | _roots(self.residency) | _roots(self.withheld),
        )
        #: (tier, hash) held several times, told or not -> how many beyond the first
        self._copies: dict[tuple[Tier, bytes], int] = {}
        self._out = EventCoalescer()

    def drain(self) -> list[KvEvent]:
        """Return what has not been taken yet, in order."""
        return self._out.drain()

    def add(self, tier: Tier, block_hash: bytes, root: bytes) -> bool:
        """Hold a block once more; return whether that is news, which the caller has to tell."""
        if root in self.muted and not self.residency.holds(tier, block_hash):
            if self.withheld.add(tier, block_hash, root):
                self.counters.withheld_blocks += 1
                return False
        elif self.residency.add(tier, block_hash, root):
            self.counters.stored_blocks += 1
            return True
        self.counters.duplicate_blocks += 1
        self._copies[tier, block_hash] = self._copies.get((tier, block_hash), 0) + 1
        return False

    def publish(
        self, root: bytes, parent: bytes, hashes: bytes, tier: Tier, tokens: bytes | None = None
    ) -> None:
        """Tell that the blocks of a chain are held; the first one's parent is `parent`."""
        if root not in self.namespaces.told:
            self._out.other(self.namespaces.publish(root))
        self._out.stored(root, parent, hashes, tier, tokens)

    def release(self, tier: Tier, block_hash: bytes, root: bytes) -> None:
        """Hold a block once less, and tell it when that was the last, if it was told."""
        copies = self._copies.get((tier, block_hash), 0)
        if copies == 0:
            if self.muted and self.withheld.discard(tier, block_hash):
                return
            self.residency.discard(tier, block_hash)
            self.counters.removed_blocks += 1
            self._out.removed(root, block_hash, tier)
        elif copies == 1:
            del self._copies[tier, block_hash]
        else:
            self._copies[tier, block_hash] = copies - 1

    def clear(self, tier: Tier | None) -> None:
        """Hold nothing in a tier, or in any, and tell it."""
        self.residency.clear(tier)
        self.withheld.clear(tier)
        self._copies = {
            key: copies for key, copies in self._copies.items() if tier not in (None, key[0])
        }
        self._out.other(AllBlocksCleared(tier))

    def mark_over_budget(self, root: bytes) -> None:
        """Tell of a namespace no more than what leaves it."""
        if root not in self.muted:
            self.muted.add(root)
            self.counters.namespace_mutes += 1

    def clear_over_budget(self, roots: Iterable[bytes]) -> None:
        """Hold like any other what was withheld of namespaces; an inventory has to tell it."""
        self.muted.difference_update(ended := set(roots))
        for tier in Tier:
            for block_hash, root in list(self.withheld.blocks(tier)):
                if root in ended:
                    self.withheld.discard(tier, block_hash)
                    self.residency.add(tier, block_hash, root)
                    self.counters.stored_blocks += 1

    def other(self, event: KvEvent) -> None:
        """Tell something that is about no block."""
        self._out.other(event)

    def inventory(self, as_of_seq: int) -> Iterator[KvEvent]:
        """Yield the namespaces of all that is held, then the inventory of every tier."""
        empty_root = self.namespaces.hasher(None, None).root
        # what was told of others may have been lost with what the inventory repairs
        self.namespaces.told.clear()
        for root in sorted(_roots(self.residency)):
            yield self.namespaces.publish(root)
        yield from inventory_of(self.residency, as_of_seq, empty_root)

    def digests(self) -> list[KvEvent]:
        """Return the digest of every tier, true right after the events told so far."""
        return [Digest(tier, *self.residency.digest(tier)) for tier in Tier]

    def retract(self, hashes: bytes) -> list[KvEvent]:
        """Return removals for those of the blocks that are held nowhere, told or not."""
        held = self.residency
        not_held = b"".join(block for block in split_hashes(hashes) if not self._holds(block))
        if not not_held:
            return []
        root = self.namespaces.hasher(None, None).root
        tiers = [tier for tier in Tier if tier is Tier.hbm or held.digest(tier).count]
        return [BlockRemoved(root, not_held, tier) for tier in tiers]

    def _holds(self, block_hash: bytes) -> bool:
        return any(
            self.residency.holds(tier, block_hash) or self.withheld.holds(tier, block_hash)
            for tier in Tier
        )


def _roots(residency: HeldByTier) -> set[bytes]:
    return {root for tier in Tier for _, root in residency.blocks(tier)}
