"""What events do: blocks are stored, removed, and taken from a slot all at once."""

import numpy as np

from kvatlas.indexer.index.kernel.arithmetic import key_at, mix64
from kvatlas.indexer.index.kernel.block_table import (
    fill_cell,
    find,
    free_cell,
    layout_of,
    look_ahead,
    split,
)
from kvatlas.indexer.index.kernel.compiling import compiled
from kvatlas.indexer.index.kernel.handles import digests_of, sets_of, state_of, table_of, words_in
from kvatlas.indexer.index.kernel.holder_sets import changed, stepped
from kvatlas.indexer.index.kernel.layout import (
    BLOCKS,
    BYTE,
    BYTES,
    COUNT,
    FULL,
    GROUP_SIZE,
    HANDLE,
    HELD,
    NUM_BLOCKS,
    NUM_SEGMENTS,
    ONE,
    PACKED,
    ROW,
    SEGMENT_BITS,
    SETS,
    STATE,
    TWO,
    U32,
    U64,
    XOR,
    ZERO,
    Layout,
    Number,
)

#: blocks that events look ahead: 16 cost a quarter less than 8 where nothing is in the cache
AHEAD = np.uint64(16)


@compiled()
def look_at_first(
    handle: U64, directory: U32, layout: Layout, packed: U64, position: Number, end: Number
) -> None:
    """Look ahead to the first AHEAD blocks of a run, all at once; the others follow one by one."""
    for soon in range(position, min(position + AHEAD, end)):
        look_ahead(handle, directory, layout, key_at(packed, soon))


@compiled(f"UniTuple(uint64, 2)({BYTES}, {BYTES}, uint64, uint64, uint64, {HANDLE})")
def store(
    parent: bytes, hashes: bytes, position: Number, instance: Number, tier: Number, handle: U64
) -> tuple[Number, Number]:
    """Store a run of hashes from a position on; the hash before each is its parent.

    Returns how many were new to the slot, and where it stopped: at the end, or at the first hash
    for which there was no room, LACKING says of what.
    """
    packed = words_in(hashes)
    before = key_at(packed, position - ONE) if position != ZERO else key_at(words_in(parent), ZERO)
    num_hashes = np.uint64(packed.size // 2)
    return store_span(packed, position, num_hashes, before, instance, tier, handle)


@compiled(f"UniTuple(uint64, 2)({BYTES}, {PACKED}, uint64, uint64, uint64, {HANDLE})")
def store_runs(
    runs: bytes, ends: U64, position: Number, instance: Number, tier: Number, handle: U64
) -> tuple[Number, Number]:
    """Do `store` for several runs, each packed behind its parent; a run ends where `ends` says."""
    packed = words_in(runs)
    num_new, begin = ZERO, ZERO
    for run in range(ends.size):
        end = ends[run]
        position = max(position, begin + ONE)
        begin = end
        before = key_at(packed, position - ONE)
        more, position = store_span(packed, position, end, before, instance, tier, handle)
        num_new += more
        if position < end:
            break
    return num_new, position


@compiled()
def store_span(
    packed: U64,
    position: Number,
    end: Number,
    before: Number,
    instance: Number,
    tier: Number,
    handle: U64,
) -> tuple[Number, Number]:
    """Store the hashes from a position to an end; `before` is the key of the first one's parent."""
    cells, directory, segments = table_of(handle)
    rows, words, _ = sets_of(handle)
    digests, state = digests_of(handle), state_of(handle)
    layout = layout_of(state)
    limit = (ONE << layout[2]) - (ONE << (layout[2] - TWO))
    num_new, xor = ZERO, ZERO
    seen = after = FULL
    look_at_first(handle, directory, layout, packed, position, end)
    while position < end:
        if position + AHEAD < end:
            look_ahead(handle, directory, layout, key_at(packed, position + AHEAD))
        key = key_at(packed, position)
        cell = find(cells, directory, layout, key)
        row = np.uint64(cells[cell, ROW])
        if row == ZERO and np.uint64(segments[cell >> layout[2], HELD]) >= limit:
            if split(cells, directory, segments, state, key):
                continue
            break
        if row != seen:
            after = stepped(rows, words, state, row, instance, tier, ONE)
            if after == FULL:
                break
            seen = row
        if after != row:
            if row == ZERO:
                fill_cell(cells, cell, key, after, before)
                segments[cell >> layout[2], HELD] += np.uint32(1)
                state[NUM_BLOCKS] += ONE
            else:
                rows[row, BLOCKS] -= ONE
                cells[cell, ROW] = np.uint32(after)
            rows[after, BLOCKS] += ONE
            num_new += ONE
            xor ^= mix64(key)
        before = key
        position += ONE
    digests[instance, tier, COUNT] += num_new
    digests[instance, tier, XOR] ^= xor
    return num_new, position


@compiled(f"UniTuple(uint64, 2)({BYTES}, uint64, uint64, uint64, {HANDLE})")
def remove(
    hashes: bytes, position: Number, instance: Number, tier: Number, handle: U64
) -> tuple[Number, Number]:
    """Remove the hashes from a position on; returns how many were held, and where it stopped."""
    cells, directory, segments = table_of(handle)
    rows, words, _ = sets_of(handle)
    digests, state = digests_of(handle), state_of(handle)
    packed = words_in(hashes)
    num_hashes = np.uint64(packed.size // 2)
    layout = layout_of(state)
    num_held, xor = ZERO, ZERO
    seen = after = FULL
    look_at_first(handle, directory, layout, packed, position, num_hashes)
    while position < num_hashes:
        if position + AHEAD < num_hashes:
            look_ahead(handle, directory, layout, key_at(packed, position + AHEAD))
        key = key_at(packed, position)
        cell = find(cells, directory, layout, key)
        row = np.uint64(cells[cell, ROW])
        if row != ZERO:
            if row != seen:
                after = stepped(rows, words, state, row, instance, tier, ZERO)
                if after == FULL:
                    break
                seen = row
            if after != row:
                rows[row, BLOCKS] -= ONE
                if after == ZERO:
                    free_cell(cells, segments, state, cell)
                else:
                    cells[cell, ROW] = np.uint32(after)
                    rows[after, BLOCKS] += ONE
                num_held += ONE
                xor ^= mix64(key)
        position += ONE
    digests[instance, tier, COUNT] -= num_held
    digests[instance, tier, XOR] ^= xor
    return num_held, position


@compiled(f"boolean(uint64, uint64, uint64[::1], uint32[:, ::1], uint32[:, ::1], {SETS}, {STATE})")
def clear(
    instance: Number,
    tiers: Number,
    after: U64,
    cells: U32,
    segments: U32,
    rows: U64,
    words: U64,
    state: U64,
) -> bool:
    """Take the slots (instance, each tier in the bits of `tiers`) out of all sets.

    `after` is scratch, FULL for each row. False: there was no room, call again with more. The
    caller sets the digests. A cell that moved back over the end of the table is seen twice, which
    changes nothing.
    """
    group = instance // GROUP_SIZE
    keep = ~(tiers << ((instance - group * GROUP_SIZE) * BYTE))
    for cell in range(state[NUM_SEGMENTS] << state[SEGMENT_BITS]):
        while cells[cell, ROW] != 0:
            row = np.uint64(cells[cell, ROW])
            if after[row] == FULL:
                after[row] = changed(rows, words, state, row, group, keep, ZERO)
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
