"""What an instance holds, by tier: the truth that its inventory and digests are made of."""

from collections.abc import Iterator

from kvatlas.schemas.digest import TierDigest, index_key, mix64
from kvatlas.schemas.ids import Tier


class HeldByTier:
    """Sets of block hashes, one per tier, with their digests. Every step is O(1) but `clear`."""

    def __init__(self) -> None:
        #: hash -> root of its namespace
        self._held: dict[Tier, dict[bytes, bytes]] = {tier: {} for tier in Tier}
        self._xor = dict.fromkeys(Tier, 0)

    def add(self, tier: Tier, block: bytes, root: bytes) -> bool:
        """Hold a block; return False if it was held already."""
        held = self._held[tier]
        if block in held:
            return False
        held[block] = root
        self._xor[tier] ^= mix64(index_key(block))
        return True

    def discard(self, tier: Tier, block: bytes) -> bool:
        """Hold a block no longer; return False if it was not held."""
        if self._held[tier].pop(block, None) is None:
            return False
        self._xor[tier] ^= mix64(index_key(block))
        return True

    def clear(self, tier: Tier | None = None) -> None:
        """Hold nothing in the tier, or in any."""
        for cleared in Tier if tier is None else (tier,):
            self._held[cleared].clear()
            self._xor[cleared] = 0

    def holds(self, tier: Tier, block: bytes) -> bool:
        """Return whether the tier holds the block."""
        return block in self._held[tier]

    def blocks(self, tier: Tier) -> Iterator[tuple[bytes, bytes]]:
        """Yield (hash, root) of each block of the tier, oldest first."""
        return iter(self._held[tier].items())

    def digest(self, tier: Tier) -> TierDigest:
        """Return the digest of the tier."""
        return TierDigest(len(self._held[tier]), self._xor[tier])
