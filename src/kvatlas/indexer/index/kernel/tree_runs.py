"""The radix tree, numbered in runs of blocks that follow one another and are held alike."""

import numpy as np

from kvatlas.indexer.index.kernel.arithmetic import whole_bytes
from kvatlas.indexer.index.kernel.block_table import find, key_in, layout_of, parent_in
from kvatlas.indexer.index.kernel.compiling import compiled
from kvatlas.indexer.index.kernel.layout import (
    BYTE,
    FULL,
    GROUP_SHIFT,
    LENGTH,
    NUM_BLOCKS,
    NUM_ROWS,
    NUM_SEGMENTS,
    ONE,
    ROW,
    SEGMENT_BITS,
    SETS,
    START,
    STATE,
    U32,
    U64,
    ZERO,
    Number,
)


@compiled(f"void({SETS}, uint64[::1], uint32[::1], {STATE})")
def count_holders(rows: U64, words: U64, live: U64, num_holders: U32, state: U64) -> None:
    """Add up the live instances of each row."""
    for row in range(ONE, state[NUM_ROWS]):
        for position in range(rows[row, START], rows[row, START] + rows[row, LENGTH]):
            present = whole_bytes(words[position] & live[words[position] >> GROUP_SHIFT])
            while present != ZERO:
                num_holders[row] += np.uint32(present & ONE)
                present >>= BYTE


@compiled(f"uint64[:, ::1](uint32[:, ::1], uint32[::1], uint32[::1], {STATE})")
def compress(cells: U32, directory: U32, num_holders: U32, state: U64) -> U64:
    """Number the runs of the radix tree; a column each: key, run above, depth, blocks, pairs, row.

    FULL stands for no run above. Blocks in or below a circle of parents get no run.
    """
    layout, num_cells = layout_of(state), state[NUM_SEGMENTS] << state[SEGMENT_BITS]
    above, num_below = np.full(num_cells, FULL, np.uint64), np.zeros(num_cells, np.uint32)
    for cell in range(num_cells):
        if cells[cell, ROW] != 0:
            found = find(cells, directory, layout, parent_in(cells, cell))
            if cells[found, ROW] != 0:
                above[cell] = found
                num_below[found] += np.uint32(1)
    # bottom up: a block comes after all that follow it, so that pairs can be summed
    order, waiting = np.empty(state[NUM_BLOCKS], np.uint64), num_below.copy()
    num_pairs = np.zeros(num_cells, np.uint64)
    num_ordered = ZERO
    for cell in range(num_cells):
        if cells[cell, ROW] != 0 and num_below[cell] == 0:
            order[num_ordered] = cell
            num_ordered += ONE
    done = ZERO
    while done < num_ordered:
        cell = order[done]
        done += ONE
        num_pairs[cell] += np.uint64(num_holders[cells[cell, ROW]])
        found = above[cell]
        if found != FULL:
            num_pairs[found] += num_pairs[cell]
            waiting[found] -= np.uint32(1)
            if waiting[found] == 0:
                order[num_ordered] = found
                num_ordered += ONE
    # top down: a block continues the run above it or begins one
    run_of = np.full(num_cells, FULL, np.uint64)
    runs = np.empty((np.uint64(6), num_ordered), np.uint64)
    num_runs = ZERO
    while done > ZERO:
        done -= ONE
        cell = order[done]
        found = above[cell]
        run: Number = FULL
        if found != FULL:
            run = run_of[found]
            if run == FULL:
                continue
        if found == FULL or num_below[found] != 1 or cells[found, ROW] != cells[cell, ROW]:
            runs[0, num_runs] = key_in(cells, cell)
            runs[1, num_runs] = run
            runs[2, num_runs] = ZERO if run == FULL else runs[2, run] + runs[3, run]
            runs[3, num_runs] = ZERO
            runs[4, num_runs] = num_pairs[cell]
            runs[5, num_runs] = np.uint64(cells[cell, ROW])
            run = num_runs
            num_runs += ONE
        run_of[cell] = run
        runs[3, run] += ONE
    return runs[:, :num_runs].copy()
