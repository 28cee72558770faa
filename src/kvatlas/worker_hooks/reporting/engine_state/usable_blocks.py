"""From what is held to what is told: a block counts where every group that needs it holds it.

holders of a block    --settle--> tiers in which the fleet knows it
windows that are whole  --------> reuse points, told like blocks (ADR-0006)
"""

from collections.abc import Iterable

from kvatlas.schemas.hashing import reuse_point
from kvatlas.schemas.ids import NUM_TIERS, Tier
from kvatlas.worker_hooks.raw_events import EngineHash, RawGroupSeen
from kvatlas.worker_hooks.reporting.engine_state.held_blocks import HeldBlock, HeldBlocks
from kvatlas.worker_hooks.reporting.engine_state.publication import Publication
from kvatlas.worker_hooks.reporting.engine_state.reuse_points import ReusePoints
from kvatlas.worker_hooks.reporting.kv_groups import KvGroups

#: tiers by the bits that stand for them
_TIERS_OF = [tuple(t for t in Tier if bits & 1 << t) for bits in range(1 << NUM_TIERS)]


class UsableBlocks:
    """Tells where blocks came into use and went out of it, once they have a name of ours."""

    def __init__(self, held: HeldBlocks, groups: KvGroups, publication: Publication) -> None:
        self._held, self._groups, self._publication = held, groups, publication
        #: holder bits -> tiers, as bits, in which they make a block usable; filled by `settle`
        self.tiers_of_holders: dict[int, int] = {}
        #: over the windowed groups; empty, hence false, where there is none
        self.points = ReusePoints({})

    def settle(self, block: HeldBlock, quiet_tier: Tier | None = None) -> bool:
        """Tell in which tiers a block came or went; of the quiet one return whether it came."""
        usable = self._usable_tiers(block.holders) if block.hash else 0
        changed = usable ^ block.published_tiers
        block.published_tiers = usable
        is_news = False
        for tier in _TIERS_OF[changed]:
            if not usable & 1 << tier:
                self._publication.release(tier, block.hash, block.root)
            elif self._publication.add(tier, block.hash, block.root):
                if tier is quiet_tier:
                    is_news = True
                else:
                    self._publication.publish(block.root, block.parent, block.hash, tier)
        return is_news

    def _usable_tiers(self, holders: int) -> int:
        usable = self.tiers_of_holders.get(holders)
        if usable is None:
            full = self._groups.full_bits
            held = [t for t in Tier if full and holders >> t & full == full]
            usable = self.tiers_of_holders[holders] = sum(1 << tier for tier in held)
        return usable

    def withdraw(self, engine_hash: EngineHash, block: HeldBlock) -> None:
        """Tell that a block is held nowhere, whatever holds its engine hash now."""
        for group in self._groups.groups_of(block.holders, Tier.hbm):
            self.leave_window(group, Tier.hbm, engine_hash)
        block.holders = 0
        self.settle(block)

    def see(self, seen: RawGroupSeen) -> None:
        """Learn what a group is for, and judge all blocks anew if that changes anything."""
        if not self._groups.see(seen):
            return
        blocks = self._held.by_engine_hash
        self.tiers_of_holders.clear()
        for block in blocks.values():
            self._move_point(block, is_point=False)
        self.empty_windows()
        for engine_hash, block in blocks.items():
            self.settle(block)
            self.named(engine_hash, block)

    # --- reuse points -----------------------------------------------------------------------

    def enter_window(self, group: int, tier: Tier, engine_hashes: Iterable[EngineHash]) -> None:
        """Note blocks that came into a group: where it is windowed, reuse may end elsewhere now."""
        if tier is not Tier.hbm or group not in self._groups.window_blocks:
            return
        blocks = self._held.by_engine_hash
        for engine_hash in engine_hashes:
            block = blocks[engine_hash]
            if block.hash:
                for point in self.points.add(group, engine_hash, block.above):
                    self._move_point(blocks[point], is_point=True)

    def named(self, engine_hash: EngineHash, block: HeldBlock) -> None:
        """Note that a block has a name, without which it is in no window."""
        for group in self._groups.groups_of(block.holders, Tier.hbm):
            self.enter_window(group, Tier.hbm, (engine_hash,))

    def leave_window(self, group: int, tier: Tier, engine_hash: EngineHash) -> None:
        """Note a block that leaves a group, while it is still among those that are held."""
        if tier is Tier.hbm and group in self._groups.window_blocks:
            for point in self.points.remove(group, engine_hash):
                self._move_point(self._held.by_engine_hash[point], is_point=False)

    def empty_windows(self) -> None:
        """Begin with windows in which nothing is held; tells nothing."""
        self.points = ReusePoints(self._groups.window_blocks)

    def _move_point(self, block: HeldBlock, *, is_point: bool) -> None:
        """Tell that reuse may end with a block, or no longer; a point is told like a block."""
        if block.is_reuse_point == is_point:
            return
        block.is_reuse_point = is_point
        point = reuse_point(block.hash)
        if not is_point:
            self._publication.release(Tier.hbm, point, block.root)
        elif self._publication.add(Tier.hbm, point, block.root):
            self._publication.publish(block.root, block.root, point, Tier.hbm)
