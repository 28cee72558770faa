"""What reclaims: unused sets are collected, forgotten instances stripped, broken cells freed."""

import numpy as np

from kvatlas.indexer.index.kernel.arithmetic import mix64
from kvatlas.indexer.index.kernel.block_table import free_cell
from kvatlas.indexer.index.kernel.compiling import compiled
from kvatlas.indexer.index.kernel.holder_sets import forget_interned, intern, kept, seek
from kvatlas.indexer.index.kernel.layout import (
    BLOCKS,
    FREE_ROW,
    FULL,
    GROUP_SHIFT,
    HASH,
    LENGTH,
    NUM_ROWS,
    NUM_SEGMENTS,
    NUM_WORDS,
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


@compiled(f"void({SETS}, uint64[::1], {STATE})")
def collect(rows: U64, words: U64, new_words: U64, state: U64) -> None:
    """Free rows without blocks and move the words of the others into `new_words`.

    Rows keep their numbers, so the block table is not looked at.
    """
    forget_interned(rows)
    target = free = ZERO
    for row in range(ONE, state[NUM_ROWS]):
        if rows[row, BLOCKS] == ZERO:
            rows[row, START], rows[row, LENGTH] = free, ZERO
            free = np.uint64(row)
            continue
        start = rows[row, START]
        rows[row, START] = target
        for source in range(start, start + rows[row, LENGTH]):
            new_words[target] = words[source]
            target += ONE
        intern(rows, row)
    state[FREE_ROW] = free
    state[NUM_WORDS] = target


@compiled(f"void(uint32[:, ::1], uint32[:, ::1], uint64[:, ::1], {STATE})")
def free_void(cells: U32, segments: U32, rows: U64, state: U64) -> None:
    """Free cells that name a row which does not exist or stands for nobody: memory has broken."""
    for cell in range(state[NUM_SEGMENTS] << state[SEGMENT_BITS]):
        while cells[cell, ROW] != 0:
            row = np.uint64(cells[cell, ROW])
            if row < state[NUM_ROWS] and rows[row, LENGTH] != ZERO:
                break
            free_cell(cells, segments, state, cell)


@compiled(f"void(uint32[:, ::1], uint32[:, ::1], {SETS}, uint64[::1], uint32[::1], {STATE})")
def strip(
    cells: U32,
    segments: U32,
    rows: U64,
    words: U64,
    live: U64,
    forward: U32,
    state: U64,
) -> None:
    """Take the slots outside the live masks out of all sets, in place.

    Rows that become equal are merged, blocks that nobody is left to hold are deleted. `forward` is
    scratch, a number per row. `collect` is to follow.
    """
    forget_interned(rows)
    for row in range(ONE, state[NUM_ROWS]):
        forward[row] = row
        if rows[row, BLOCKS] == ZERO:
            continue
        start, set_hash = rows[row, START], ZERO
        target = start
        for source in range(start, start + rows[row, LENGTH]):
            group = words[source] >> GROUP_SHIFT
            tiers = words[source] & live[group]
            if tiers != ZERO:
                words[target] = (group << GROUP_SHIFT) | tiers
                set_hash ^= mix64(words[target])
                target += ONE
        rows[row, LENGTH], rows[row, HASH] = target - start, set_hash
        if target == start:
            forward[row] = 0
            rows[row, BLOCKS] = ZERO
            continue
        equal = seek(rows, words, set_hash, start, target - start)
        if equal == ZERO:
            intern(rows, row)
        else:
            forward[row] = equal
            rows[equal, BLOCKS] += rows[row, BLOCKS]
            rows[row, BLOCKS] = ZERO
    for cell in range(state[NUM_SEGMENTS] << state[SEGMENT_BITS]):
        while cells[cell, ROW] != 0:
            cells[cell, ROW] = forward[cells[cell, ROW]]
            if cells[cell, ROW] != 0:
                break
            free_cell(cells, segments, state, cell)


@compiled(
    f"boolean(uint64, uint64, uint64[::1], uint32[:, ::1], uint32[:, ::1], {SETS}, uint64[::1], "
    f"{STATE})"
)
def strip_some(
    first: Number,
    last: Number,
    after: U64,
    cells: U32,
    segments: U32,
    rows: U64,
    words: U64,
    live: U64,
    state: U64,
) -> bool:
    """Do what `strip` does in the segments from `first` to before `last`, by other rows.

    `after` is scratch, FULL for each row. False: there was no room. Nothing moves from one segment
    into another that is not behind all, so one segment after the other is the whole table.
    """
    for cell in range(first << state[SEGMENT_BITS], last << state[SEGMENT_BITS]):
        while cells[cell, ROW] != 0:
            row = np.uint64(cells[cell, ROW])
            if after[row] == FULL:
                after[row] = kept(rows, words, state, row, live)
                if after[row] == FULL:
                    return False
            new = after[row]
            if new == row:
                break
            rows[row, BLOCKS] -= ONE
            if new != ZERO:
                cells[cell, ROW] = np.uint32(new)
                rows[new, BLOCKS] += ONE
                break
            free_cell(cells, segments, state, cell)
    return True
