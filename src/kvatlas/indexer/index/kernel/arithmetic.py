"""Arithmetic modulo 2**64, and what it makes of keys and words."""

import sys

import numpy as np

from kvatlas.indexer.index.kernel.compiling import IS_COMPILED, compiled
from kvatlas.indexer.index.kernel.layout import (
    BYTE_MASK,
    ONE,
    SHIFT_32,
    TIERS,
    TWO,
    U64,
    ZERO,
    Number,
)

EACH_BYTE = np.uint64(0x0101_0101_0101)
ABOVE_TIERS = np.uint64(0x2020_2020_2020)
MIX_1, MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
SHIFT_27, SHIFT_30, SHIFT_31 = np.uint64(27), np.uint64(30), np.uint64(31)
SWAP_8, SWAP_16 = np.uint64(0x00FF_00FF_00FF_00FF), np.uint64(0x0000_FFFF_0000_FFFF)
SHIFT_8, SHIFT_16 = np.uint64(8), np.uint64(16)
IS_LITTLE_ENDIAN = sys.byteorder == "little"


if not IS_COMPILED:

    def times(a: Number, b: Number) -> Number:
        """Multiply modulo 2**64, about which numpy's scalars would warn."""
        return np.uint64(int(a) * int(b) & 0xFFFF_FFFF_FFFF_FFFF)
else:

    @compiled()
    def times(a: Number, b: Number) -> Number:
        """Multiply modulo 2**64."""
        return a * b


@compiled()
def mix64(key: Number) -> Number:
    """Equal to schemas.digest.mix64."""
    key ^= key >> SHIFT_30
    key = times(key, MIX_1)
    key ^= key >> SHIFT_27
    key = times(key, MIX_2)
    return key ^ (key >> SHIFT_31)


@compiled()
def swapped(word: Number) -> Number:
    """Return the word with its bytes in reverse."""
    word = ((word & SWAP_8) << SHIFT_8) | ((word >> SHIFT_8) & SWAP_8)
    word = ((word & SWAP_16) << SHIFT_16) | ((word >> SHIFT_16) & SWAP_16)
    return (word << SHIFT_32) | (word >> SHIFT_32)


@compiled()
def key_at(packed: U64, position: Number) -> Number:
    """Return the index key of the hash at a position of packed hashes."""
    key = packed[TWO * position + ONE]
    if IS_LITTLE_ENDIAN:
        key = swapped(key)
    if key == ZERO:
        return ONE
    return key


@compiled()
def best_tiers(word: Number) -> Number:
    """Keep the lowest bit of each byte."""
    tiers = word & TIERS
    return tiers & (ABOVE_TIERS - tiers)


@compiled()
def whole_bytes(word: Number) -> Number:
    """Fill each byte that has a tier bit."""
    word &= TIERS
    word |= word >> np.uint64(4)
    word |= (word >> TWO) | (word >> ONE) | (word >> np.uint64(3))
    return times(word & EACH_BYTE, BYTE_MASK)
