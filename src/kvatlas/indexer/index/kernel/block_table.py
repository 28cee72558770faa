"""The block table, one cell a block.

It is cut into *segments*, each an open-addressing table of its own, and grows by splitting the one
that is full, so no event waits for a copy of the whole:

    directory  [ 0 | 0 | 4 | 8 ]  by the top bits of the spread key; -> first cell of a segment
    segments   [ 1 bit | 2 bits | 2 bits ]  how many of these bits their keys have in common
"""

import numpy as np

from kvatlas.indexer.index.kernel.arithmetic import times
from kvatlas.indexer.index.kernel.compiling import compiled
from kvatlas.indexer.index.kernel.handles import prefetch
from kvatlas.indexer.index.kernel.layout import (
    BITS,
    DIRECTORY_ROOM,
    DIRECTORY_SHIFT,
    HELD,
    HIGH,
    LACKING,
    LOW,
    LOW_HALF,
    MAX_SEGMENTS,
    MULTIPLIER,
    NUM_BLOCKS,
    NUM_HALVES,
    NUM_SEGMENTS,
    ONE,
    PARENT_HIGH,
    PARENT_LOW,
    ROW,
    SEGMENT_BITS,
    SEGMENT_ROOM,
    SHIFT_32,
    STATE,
    U32,
    U64,
    ZERO,
    Layout,
    Number,
)

WIDTH = np.uint64(64)


@compiled()
def layout_of(state: U64) -> Layout:
    """Return what a search has to know, loaded once a kernel."""
    return state[MULTIPLIER], state[DIRECTORY_SHIFT], state[SEGMENT_BITS]


@compiled()
def first_cell(directory: U32, layout: Layout, key: Number) -> Number:
    """Return the cell where the search for a key begins."""
    multiplier, shift, bits = layout
    spread = times(key, multiplier)
    return np.uint64(directory[spread >> shift]) | ((spread >> SHIFT_32) & ((ONE << bits) - ONE))


@compiled()
def look_ahead(handle: U64, directory: U32, layout: Layout, key: Number) -> None:
    """Have the cell where a search is to begin soon in the cache by then.

    Events wait for memory at each block, since what they write decides what they read next. A match
    only reads, and the processor overlaps its reads by itself: there it would cost and gain little.
    """
    prefetch(handle[0] + np.uint64(4 * NUM_HALVES) * first_cell(directory, layout, key))


@compiled()
def next_cell(layout: Layout, cell: Number) -> Number:
    """Return the cell behind one, of the same segment."""
    mask = (ONE << layout[2]) - ONE
    return (cell & ~mask) | ((cell + ONE) & mask)


@compiled()
def steps_past(layout: Layout, key: Number, cell: Number) -> Number:
    """Return how far a cell lies behind the one where the search for the key begins."""
    multiplier, _, bits = layout
    mask = (ONE << bits) - ONE
    begin = (times(key, multiplier) >> SHIFT_32) & mask
    return ((cell & mask) + (mask - begin) + ONE) & mask


@compiled()
def key_in(cells: U32, cell: Number) -> Number:
    """Return the key in a cell."""
    return (np.uint64(cells[cell, HIGH]) << SHIFT_32) | np.uint64(cells[cell, LOW])


@compiled()
def parent_in(cells: U32, cell: Number) -> Number:
    """Return the parent's key in a cell."""
    return (np.uint64(cells[cell, PARENT_HIGH]) << SHIFT_32) | np.uint64(cells[cell, PARENT_LOW])


@compiled()
def fill_cell(cells: U32, cell: Number, key: Number, row: Number, parent: Number) -> None:
    """Write a cell; key, row and parent are 0 to free it."""
    cells[cell, LOW], cells[cell, HIGH] = np.uint32(key & LOW_HALF), np.uint32(key >> SHIFT_32)
    cells[cell, ROW] = np.uint32(row)
    cells[cell, PARENT_LOW] = np.uint32(parent & LOW_HALF)
    cells[cell, PARENT_HIGH] = np.uint32(parent >> SHIFT_32)


@compiled()
def find(cells: U32, directory: U32, layout: Layout, key: Number) -> Number:
    """Return the cell of a key, or the free cell where it belongs."""
    cell = first_cell(directory, layout, key)
    while cells[cell, ROW] != 0 and key_in(cells, cell) != key:
        cell = next_cell(layout, cell)
    return cell


@compiled()
def free_cell(cells: U32, segments: U32, state: U64, cell: Number) -> None:
    """Free a cell and move later ones back, so that no search ends at the hole."""
    layout = layout_of(state)
    segments[cell >> layout[2], HELD] -= np.uint32(1)
    state[NUM_BLOCKS] -= ONE
    later, gap = next_cell(layout, cell), ONE
    while cells[later, ROW] != 0:
        key = key_in(cells, later)
        if steps_past(layout, key, later) >= gap:
            fill_cell(cells, cell, key, np.uint64(cells[later, ROW]), parent_in(cells, later))
            cell, gap = later, ZERO
        later = next_cell(layout, later)
        gap += ONE
    fill_cell(cells, cell, ZERO, ZERO, ZERO)


@compiled()
def split(cells: U32, directory: U32, segments: U32, state: U64, key: Number) -> bool:
    """Move about half of the segment where a key belongs into a new one; False without room."""
    layout = layout_of(state)
    multiplier, shift, segment_bits = layout
    entry = times(key, multiplier) >> shift
    cell = np.uint64(directory[entry])
    segment, new = cell >> segment_bits, state[NUM_SEGMENTS]
    bits = np.uint64(segments[segment, BITS])
    if new >= state[MAX_SEGMENTS]:
        state[LACKING] = SEGMENT_ROOM
        return False
    if bits == WIDTH - shift:
        state[LACKING] = DIRECTORY_ROOM
        return False
    # the entries of the segment are neighbours; their upper half goes to the new one
    half = ONE << (WIDTH - shift - bits - ONE)
    upper = (entry & ~(half + half - ONE)) + half
    for moved in range(upper, upper + half):
        directory[moved] = np.uint32(new << segment_bits)
    segments[segment, BITS] = segments[new, BITS] = np.uint32(bits + ONE)
    state[NUM_SEGMENTS] = new + ONE
    # going round from a free cell, each block finds its new place at or before its old one
    while cells[cell, ROW] != 0:
        cell += ONE
    num_left = segments[segment, HELD]
    while num_left != 0:
        cell = next_cell(layout, cell)
        if cells[cell, ROW] != 0:
            num_left -= np.uint32(1)
            moving, row, parent = (
                key_in(cells, cell),
                np.uint64(cells[cell, ROW]),
                parent_in(cells, cell),
            )
            fill_cell(cells, cell, ZERO, ZERO, ZERO)
            target = find(cells, directory, layout, moving)
            fill_cell(cells, target, moving, row, parent)
            if target >> segment_bits == new:
                segments[new, HELD] += np.uint32(1)
    segments[segment, HELD] -= segments[new, HELD]
    return True


@compiled(f"uint64(uint64, uint32[:, ::1], uint32[::1], {STATE})")
def row_of(key: Number, cells: U32, directory: U32, state: U64) -> Number:
    """Return the holder set of a key, 0 when nobody holds it."""
    return np.uint64(cells[find(cells, directory, layout_of(state), key), ROW])
