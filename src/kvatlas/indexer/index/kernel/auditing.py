"""What rows and slots hold, counted anew over the whole index."""

import numpy as np

from kvatlas.indexer.index.kernel.arithmetic import mix64
from kvatlas.indexer.index.kernel.block_table import first_cell, key_in, layout_of, next_cell
from kvatlas.indexer.index.kernel.compiling import compiled
from kvatlas.indexer.index.kernel.holder_sets import span_of
from kvatlas.indexer.index.kernel.layout import (
    BYTE,
    BYTE_MASK,
    COUNT,
    DIGESTS,
    GROUP_SHIFT,
    GROUP_SIZE,
    NUM_ROWS,
    NUM_SEGMENTS,
    NUM_TIERS,
    ONE,
    ROW,
    SEGMENT_BITS,
    SETS,
    STATE,
    U32,
    U64,
    XOR,
    ZERO,
    Number,
)


@compiled(
    f"uint64(uint32[:, ::1], uint32[::1], {SETS}, uint64[::1], {STATE}, uint64[::1], {DIGESTS})"
)
def audit(
    cells: U32,
    directory: U32,
    rows: U64,
    words: U64,
    live: U64,
    state: U64,
    num_blocks: U64,
    digests: U64,
) -> Number:
    """Count anew, from the cells, what each row and each slot holds; O(index).

    `num_blocks` has a number per row, `digests` is shaped like the index's own; both come as zeros.
    Returns the cells that no search finds, or that name a row which does not exist. Changes
    nothing, so matches may run meanwhile.
    """
    layout = layout_of(state)
    num_wrong: Number = ZERO
    xors = np.zeros(rows.shape[0], np.uint64)
    for cell in range(state[NUM_SEGMENTS] << state[SEGMENT_BITS]):
        row = np.uint64(cells[cell, ROW])
        if row == ZERO:
            continue
        key = key_in(cells, cell)
        is_found = False
        probe = first_cell(directory, layout, key)
        for _ in range(ONE << layout[2]):
            if probe == np.uint64(cell):
                is_found = True
            if is_found or cells[probe, ROW] == 0:
                break
            probe = next_cell(layout, probe)
        if not is_found or row >= state[NUM_ROWS]:
            num_wrong += ONE
            continue
        num_blocks[row] += ONE
        xors[row] ^= mix64(key)
    for used in range(ONE, state[NUM_ROWS]):
        if num_blocks[used] == ZERO:
            continue
        start, end = span_of(rows, words, np.uint64(used))
        for position in range(start, end):
            group = words[position] >> GROUP_SHIFT
            if group >= np.uint64(live.size):
                num_wrong += ONE
                continue
            word = words[position] & live[group]
            for byte in range(GROUP_SIZE):
                tiers = (word >> (np.uint64(byte) * BYTE)) & BYTE_MASK
                for tier in range(NUM_TIERS):
                    if (tiers >> np.uint64(tier)) & ONE != ZERO:
                        instance = group * GROUP_SIZE + np.uint64(byte)
                        digests[instance, tier, COUNT] += num_blocks[used]
                        digests[instance, tier, XOR] ^= xors[used]
    return num_wrong
