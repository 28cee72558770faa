"""Order-free digests of block sets, equal wherever they are computed.

A digest is (count, xor) with xor = XOR over the held blocks of mix64(index_key(hash)). Adding and
removing a block is the same O(1) step, and two sides that hold the same blocks agree whatever the
order of their events.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

BLOCK_HASH_BYTES = 16
_MASK = 0xFFFF_FFFF_FFFF_FFFF


class TierDigest(NamedTuple):
    """What one (instance, tier) holds: number of blocks and XOR of their mixed keys (u64)."""

    count: int = 0  # type: ignore[assignment]  # hides tuple.count, which a digest has no use for
    xor: int = 0


def index_key(block_hash: bytes) -> int:
    """Return the low 64 bits of a 16-byte hash; 0, which marks an empty slot, becomes 1."""
    return int.from_bytes(block_hash[8:16], "big") or 1


def mix64(key: int) -> int:
    """Spread a u64 over 64 bits (finaliser of splitmix64, Steele et al. 2014)."""
    key ^= key >> 30
    key = key * 0xBF58476D1CE4E5B9 & _MASK
    key ^= key >> 27
    key = key * 0x94D049BB133111EB & _MASK
    return key ^ key >> 31


def split_hashes(packed: bytes) -> Iterator[bytes]:
    """Yield the 16-byte hashes of a packed chain."""
    return (packed[i : i + 16] for i in range(0, len(packed), BLOCK_HASH_BYTES))


def digest_of(hashes: Iterable[bytes]) -> TierDigest:
    """Return the digest of a set of distinct hashes."""
    count = xor = 0
    for block_hash in hashes:
        count += 1
        xor ^= mix64(index_key(block_hash))
    return TierDigest(count, xor)
