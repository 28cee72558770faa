"""Inventories: parts go in under a number that no answer shows, then take the old one's place.

    part --> hidden number, bit by bit --> all tiers told, or its instance says something else
                                           --> shown, the old number forgotten: O(1)

However much an instance holds, its repair stops readers for no longer than a part does. Until the
exchange answers are those of before, which are in doubt anyway or about what is muted. An inventory
of anybody else is only compared: it almost always says what is known.
"""

from contextlib import suppress

from kvatlas.indexer.fold.instances import Instance, OpenInventory, Staging
from kvatlas.indexer.index.naming import NamedIndex
from kvatlas.indexer.index.port import PrefixIndex
from kvatlas.schemas.digest import TierDigest
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import NUM_TIERS, Tier
from kvatlas.schemas.kv_events import Inventory


class InventoryFold:
    """Replaces what instances are believed to hold by what they tell."""

    def __init__(self, index: PrefixIndex, named: NamedIndex) -> None:
        self._index, self._named = index, named
        self.num_taken = 0
        #: sets of parts that were interrupted, out of date or too large
        self.num_dropped = 0

    def apply(self, instance: Instance, part: Inventory) -> None:
        """Collect the parts of a tier, which are one after the other. Raises IndexFull.

        A set counts only when its parts follow one another, and when nothing of the tier has
        changed, or may have, since the sequence that it stands for.
        """
        tier = part.tier
        if part.part == 1 and not self._begin(instance, part):
            return
        inventory = instance.open_inventories.get(tier)
        if inventory is None:
            return
        if not inventory.add_part(part):
            self.interrupt(instance, tier)
            return
        staging = instance.staging
        if staging is not None and tier in staging.begun:
            self._stage(instance, staging, part)
        if inventory.is_complete:
            del instance.open_inventories[tier]
            self._complete(instance, tier, inventory)

    def interrupt(self, instance: Instance, tier: Tier) -> None:
        """Drop the tier's inventory if parts of it are missing yet. Raises IndexFull."""
        if instance.open_inventories.pop(tier, None) is not None:
            self.num_dropped += 1
            if instance.staging is not None and tier in instance.staging.begun:
                self.settle(instance)

    def settle(self, instance: Instance) -> None:
        """Let the tiers that were told count, before something else of it does. Raises IndexFull.

        Where they are not all that the instance holds it keeps its number, and the index is
        searched for what they replace.
        """
        staging, instance.staging = instance.staging, None
        if staging is None:
            return
        whole = staging.whole
        if staging.begun == whole.keys() and self._held(instance) <= whole.keys():
            self._promote_staging(instance, staging)
        else:
            self._forget(staging)
            for tier, inventory in whole.items():
                self._replace(instance, tier, inventory)
        instance.inventoried |= whole.keys()
        self.num_taken += len(whole)

    def drop(self, instance: Instance) -> None:
        """Let nothing of its inventories count that does not count yet."""
        self.num_dropped += len(instance.open_inventories)
        instance.open_inventories.clear()
        staging, instance.staging = instance.staging, None
        if staging is not None:
            self.num_dropped += len(staging.whole)
            self._forget(staging)

    # --- parts ----------------------------------------------------------------------------------

    def _begin(self, instance: Instance, part: Inventory) -> bool:
        tier, staging = part.tier, instance.staging
        self.interrupt(instance, tier)
        if staging is not None and tier in staging.begun:
            self.settle(instance)  # told once more
        if not instance.changed_at[tier] <= part.as_of_seq <= instance.seq:
            self.num_dropped += 1
            return False
        instance.open_inventories[tier] = OpenInventory(part.as_of_seq, part.parts)
        if instance.damages or instance.muted:
            self._begin_staging(instance, tier)
        return True

    def _begin_staging(self, instance: Instance, tier: Tier) -> None:
        if instance.staging is None:
            with suppress(IndexFull):  # of numbers: then it is replaced in one go
                instance.staging = Staging(self._index.add_instance())
                self._named.add_staging(instance.staging.number, instance)
        if instance.staging is not None:
            instance.staging.begun.add(tier)

    def _stage(self, instance: Instance, staging: Staging, part: Inventory) -> None:
        if not part.hashes:
            return
        try:
            self._index.store(staging.number, part.tier, part.root, part.hashes)
        except IndexFull:
            # there may be room when what it holds now has gone
            self.settle(instance)

    def _complete(self, instance: Instance, tier: Tier, inventory: OpenInventory) -> None:
        staging = instance.staging
        if staging is not None and tier in staging.begun:
            staging.whole[tier] = inventory
            if len(staging.whole) == NUM_TIERS:
                self.settle(instance)
            return
        self._replace(instance, tier, inventory)
        instance.inventoried.add(tier)
        self.num_taken += 1

    # --- what counts ----------------------------------------------------------------------------

    def _held(self, instance: Instance) -> set[Tier]:
        number = instance.number
        if number is None:
            return set()
        return {tier for tier in Tier if self._index.digest(number, tier).count}

    def _promote_staging(self, instance: Instance, staging: Staging) -> None:
        """Let the hidden number stand for its instance, unless it holds what is known already."""
        number, told = instance.number, staging.number
        if number is not None and all(
            self._index.digest(number, tier) == self._index.digest(told, tier) for tier in Tier
        ):
            self._forget(staging)
            return
        self._named.promote_staging(told, number)
        instance.number = told
        if number is not None:
            self._index.forget_instance(number)

    def _forget(self, staging: Staging) -> None:
        self._named.drop_staging(staging.number)
        self._index.forget_instance(staging.number)

    def _replace(self, instance: Instance, tier: Tier, inventory: OpenInventory) -> None:
        """Replace a tier in one go, if it is not known already."""
        if instance.number is None:
            instance.number = self._index.add_instance()
            self._named.admit(instance.number, instance)
        if self._index.digest(instance.number, tier) != TierDigest(*inventory.digest):
            self._empty(instance, instance.number, tier)
            self._index.store_runs(instance.number, tier, inventory.runs)

    def _empty(self, instance: Instance, number: int, tier: Tier) -> None:
        """Empty a tier before it is told anew.

        Where no other tier holds anything, the instance gets another number: that is O(1), while
        to search the index for what it holds would stop every reader.
        """
        if self._held(instance) <= {tier}:
            with suppress(IndexFull):  # of numbers
                instance.number = self._index.add_instance()
                self._named.renumber(number, instance.number)
                self._index.forget_instance(number)
                return
        self._index.clear(number, tier)
