"""The columns of the arrays, the constants of the kernels, and the types in their signatures."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
#: a uint64, which the signatures hold kernels to; Python's callers pass an int
Number: TypeAlias = Any
#: multiplier, directory shift, segment bits: see below
Layout = tuple[Number, Number, Number]

# columns of `cells`: key and parent in halves, so that a cell is 20 bytes
LOW, HIGH, ROW, PARENT_LOW, PARENT_HIGH = 0, 1, 2, 3, 4
NUM_HALVES = 5

# columns of `segments`
HELD, BITS = 0, 1

# columns of `rows`
START, LENGTH, BLOCKS, HASH = 0, 1, 2, 3  # of the set; in a free row START is the next free one
HEAD, NEXT = 4, 5  # interning: first row of the chain with this number, next row of the chain
STEP, AFTER = 6, 7  # memo: a step whose line this is, and where it led
NUM_COLUMNS = 8

# entries of `state`
NUM_BLOCKS = 0  # cells with a key
NUM_SEGMENTS = 1  # segments in use
MAX_SEGMENTS = 2  # as many as there is room for
MULTIPLIER = 3  # odd, secret: nobody can choose keys that meet in one segment
DIRECTORY_SHIFT = 4  # 64 - log2(entries of the directory), at most 63
SEGMENT_BITS = 5  # log2(cells of a segment), at least 2
NUM_ROWS = 6  # rows ever used, row 0 and the free ones included
FREE_ROW = 7  # first free row below NUM_ROWS, 0 for none
NUM_WORDS = 8  # words used, garbage included
LACKING = 9  # why the last kernel stopped early
NUM_STATES = 10

# values of LACKING
SET_ROOM, SEGMENT_ROOM, DIRECTORY_ROOM = 1, 2, 3

# columns of `digests`
COUNT, XOR = 0, 1

GROUP = 6
NUM_TIERS = 5
ZERO, ONE, TWO = np.uint64(0), np.uint64(1), np.uint64(2)
FULL = np.uint64(2**64 - 1)
GROUP_SIZE, BYTE, BYTE_MASK = np.uint64(GROUP), np.uint64(8), np.uint64(0xFF)
GROUP_SHIFT, GROUP_MASK = np.uint64(48), np.uint64(0xFFFF << 48)
TIERS = np.uint64(0x1F1F_1F1F_1F1F)
LOW_HALF, SHIFT_32 = np.uint64(0xFFFF_FFFF), np.uint64(32)

# The types of the arrays in signatures; what is packed comes as bytes, or as read-only views.
BYTES = "Bytes(uint8, 1, 'C', readonly=True)"
PACKED = "Array(uint64, 1, 'C', readonly=True)"
HANDLE = "uint64[::1]"
SETS = "uint64[:, ::1], uint64[::1]"
DIGESTS = "uint64[:, :, ::1]"
STATE = "uint64[::1]"
