"""The walk along a chain: who holds how much of it."""

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index.kernel.arithmetic import best_tiers, key_at, whole_bytes
from kvatlas.indexer.index.kernel.block_table import find, layout_of
from kvatlas.indexer.index.kernel.compiling import compiled
from kvatlas.indexer.index.kernel.handles import sets_of, state_of, table_of, words_in
from kvatlas.indexer.index.kernel.holder_sets import span_of
from kvatlas.indexer.index.kernel.layout import (
    BYTE,
    BYTE_MASK,
    BYTES,
    GROUP_MASK,
    GROUP_SHIFT,
    GROUP_SIZE,
    HANDLE,
    NUM_TIERS,
    ONE,
    ROW,
    TIERS,
    U32,
    U64,
    ZERO,
    Number,
)

#: a byte with a single tier bit -> the tier
TIER_OF = np.array([0, 0, 1, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4], np.uint8)


@compiled(f"uint32[:, ::1]({BYTES}, {HANDLE})")
def match(chain: bytes, handle: U64) -> U32:
    """Return a column per instance that holds the first block, in order of instances.

    Line 0 is the instance, 1 its leading blocks, 2 to 6 these by best tier. An alive word keeps
    the best tier of its instances, its tally the position up to which they are counted; both are
    touched only where a set differs from the one before.

    Over arrays that another process writes to meanwhile (indexer/shared) the answer may be void,
    which the caller finds out; nothing is read from outside the arrays, because a row and the words
    and groups that it names are held to their arrays' bounds.
    """
    cells, directory, _ = table_of(handle)
    rows, words, live = sets_of(handle)
    packed = words_in(chain)
    num_hashes, layout = np.uint64(packed.size // 2), layout_of(state_of(handle))
    row = ZERO
    if num_hashes != ZERO:
        row = np.uint64(cells[find(cells, directory, layout, key_at(packed, ZERO)), ROW])
    first_word, end_word = span_of(rows, words, row)
    num_words = end_word - first_word
    alive, origin = np.empty(num_words, np.uint64), np.empty(num_words, np.uint64)
    seen = np.empty(num_words, np.uint64)
    #: per byte of the first set: counted up to, then blocks by tier
    tally = np.zeros((num_words * GROUP_SIZE, np.uint64(1 + NUM_TIERS)), np.uint32)
    num_alive = ZERO
    for offset in range(num_words):
        word = words[first_word + offset]
        if (word >> GROUP_SHIFT) >= np.uint64(live.size):
            continue
        best = best_tiers(word & live[word >> GROUP_SHIFT])
        if best != ZERO:
            alive[num_alive] = (word & GROUP_MASK) | best
            origin[num_alive] = np.uint64(offset) * GROUP_SIZE
            seen[num_alive] = word
            num_alive += ONE
    position = ZERO
    while num_alive != ZERO:
        next_row = row
        while next_row == row:
            position += ONE
            if position == num_hashes:
                break
            next_row = np.uint64(
                cells[find(cells, directory, layout, key_at(packed, position)), ROW]
            )
        # behind the end, all fall out
        row = next_row if position < num_hashes else ZERO
        num_alive = narrow(rows, words, row, alive, origin, seen, num_alive, tally, position)
    return gathered(words, first_word, tally)


@compiled()
def narrow(
    rows: U64,
    words: U64,
    row: Number,
    alive: U64,
    origin: U64,
    seen: U64,
    num_alive: Number,
    tally: U32,
    position: Number,
) -> Number:
    """Keep of the alive words what a set holds, count what changes; return how many are left.

    `seen` has the words of the set before: most sets differ from it in a word or two only.
    """
    source, end = span_of(rows, words, row)
    num_kept = ZERO
    for index in range(num_alive):
        now_alive = alive[index]
        group = now_alive & GROUP_MASK
        while source < end and words[source] < group:
            source += ONE
        word = words[source] if source < end else ZERO
        if word != seen[index]:
            new, best = ZERO, now_alive & TIERS
            if word & GROUP_MASK == group:
                new = best_tiers(word & whole_bytes(best))
            if new != best:
                count_until(tally, origin[index], best, new, position)
            if new == ZERO:
                continue
            now_alive = group | new
        alive[num_kept], origin[num_kept], seen[num_kept] = now_alive, origin[index], word
        num_kept += ONE
    return num_kept


@compiled()
def count_until(tally: U32, origin: Number, best: Number, new: Number, position: Number) -> None:
    """Count the blocks before a position for the instances whose best tier changes there."""
    for byte in range(GROUP_SIZE):
        shift = np.uint64(byte) * BYTE
        old = (best >> shift) & BYTE_MASK
        if old != (new >> shift) & BYTE_MASK:
            line = origin + np.uint64(byte)
            tally[line, 1 + TIER_OF[old]] += np.uint32(position - np.uint64(tally[line, 0]))
            tally[line, 0] = np.uint32(position)


@compiled()
def gathered(words: U64, first_word: Number, tally: U32) -> U32:
    """Return the columns of the instances that were counted."""
    num_found = ZERO
    for line in range(tally.shape[0]):
        if tally[line, 0] != 0:
            num_found += ONE
    matches = np.empty((np.uint64(2 + NUM_TIERS), num_found), np.uint32)
    column = ZERO
    for line in range(np.uint64(tally.shape[0])):
        if tally[line, 0] != 0:
            offset = line // GROUP_SIZE
            group = words[first_word + offset] >> GROUP_SHIFT
            matches[0, column] = np.uint32(group * GROUP_SIZE + (line - offset * GROUP_SIZE))
            matches[1, column] = tally[line, 0]
            for tier in range(NUM_TIERS):
                matches[2 + tier, column] = tally[line, 1 + tier]
            column += ONE
    return matches


@compiled("boolean(uint32[::1], uint32[:, ::1], int64[::1], uint32[:, ::1])")
def put_in_lines(instances: U32, by_tier: U32, line_of: NDArray[np.intp], held: U32) -> bool:
    """Put a match's columns into the lines of who is asked about, which are zeros before.

    `line_of` has a line for each number, one behind the last for who is not asked about. False if
    a number is not in it, and then `held` means nothing.
    """
    for column in range(np.uint64(instances.size)):
        instance = np.uint64(instances[column])
        if instance >= np.uint64(line_of.size):
            return False
        line = np.uint64(line_of[instance])
        if line < np.uint64(held.shape[0]):
            for tier in range(NUM_TIERS):
                held[line, tier] = by_tier[tier, column]
    return True
