"""The digest of packed hashes, without an object per hash."""

import numpy as np

from kvatlas.schemas.digest import TierDigest


def digest_of_packed(hashes: bytes) -> TierDigest:
    """Return `digest_of` for distinct packed hashes."""
    keys = np.frombuffer(hashes, ">u8")[1::2].astype(np.uint64)
    keys[keys == 0] = 1
    keys ^= keys >> np.uint64(30)
    keys *= np.uint64(0xBF58476D1CE4E5B9)
    keys ^= keys >> np.uint64(27)
    keys *= np.uint64(0x94D049BB133111EB)
    keys ^= keys >> np.uint64(31)
    return TierDigest(len(keys), int(np.bitwise_xor.reduce(keys)))
