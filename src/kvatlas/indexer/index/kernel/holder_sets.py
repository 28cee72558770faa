"""The holder sets, one row a distinct set, interned.

A *word* holds the slots (instance, tier) of six neighbouring instances: the group number in the
top 16 bits, then a byte per instance whose bit t says that tier t holds the block. So the tiers of
an instance are folded by shifts inside its byte, and a set costs a word per group that occurs in
it, whatever the size of the fleet.

    63        48 47    40      ...      7      0
    [  group    | inst 5 |  4 | 3 | 2 | 1 | inst 0 ]        instance = 6 * group + byte
"""

import numpy as np

from kvatlas.indexer.index.kernel.arithmetic import mix64, times
from kvatlas.indexer.index.kernel.compiling import compiled
from kvatlas.indexer.index.kernel.layout import (
    AFTER,
    BLOCKS,
    BYTE,
    FREE_ROW,
    FULL,
    GROUP_MASK,
    GROUP_SHIFT,
    GROUP_SIZE,
    HASH,
    HEAD,
    LACKING,
    LENGTH,
    NEXT,
    NUM_ROWS,
    NUM_WORDS,
    ONE,
    SET_ROOM,
    SHIFT_32,
    START,
    STEP,
    TIERS,
    U64,
    ZERO,
    Number,
)

GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)


@compiled()
def seek(rows: U64, words: U64, set_hash: Number, start: Number, length: Number) -> Number:
    """Return the interned row of a set equal to these words; 0 when there is none."""
    row = rows[set_hash & (np.uint64(rows.shape[0]) - ONE), HEAD]
    while row != ZERO:
        if rows[row, HASH] == set_hash and rows[row, LENGTH] == length:
            other, same = rows[row, START], ZERO
            while same < length and words[other + same] == words[start + same]:
                same += ONE
            if same == length:
                break
        row = rows[row, NEXT]
    return row


@compiled()
def intern(rows: U64, row: Number) -> None:
    """Let `seek` find a row."""
    chain = rows[row, HASH] & (np.uint64(rows.shape[0]) - ONE)
    rows[row, NEXT], rows[chain, HEAD] = rows[chain, HEAD], row


@compiled()
def forget_interned(rows: U64) -> None:
    """Let `seek` find nothing, and the memo know nothing."""
    for row in range(rows.shape[0]):
        rows[row, HEAD] = rows[row, STEP] = ZERO


@compiled()
def row_of_built(rows: U64, words: U64, state: U64, set_hash: Number, target: Number) -> Number:
    """Return the row of the set whose words were built behind the used ones, up to `target`.

    0 for the empty set. FULL when there is no room for a new row.
    """
    start = state[NUM_WORDS]
    if target == start:
        return ZERO
    equal = seek(rows, words, set_hash, start, target - start)
    if equal != ZERO:
        return equal
    made = state[FREE_ROW]
    if made != ZERO:
        state[FREE_ROW] = rows[made, START]
    elif state[NUM_ROWS] < np.uint64(rows.shape[0]):
        made = state[NUM_ROWS]
        state[NUM_ROWS] = made + ONE
    else:
        state[LACKING] = SET_ROOM
        return FULL
    rows[made, START], rows[made, LENGTH] = start, target - start
    rows[made, BLOCKS], rows[made, HASH] = ZERO, set_hash
    intern(rows, made)
    state[NUM_WORDS] = target
    return made


@compiled()
def changed(
    rows: U64,
    words: U64,
    state: U64,
    row: Number,
    group: Number,
    keep: Number,
    add: Number,
) -> Number:
    """Return the row of a set whose word of the group became `(word & keep) | add`.

    A new row is built behind the used words and stays there if no equal one exists. FULL when
    there is no room for that.
    """
    target = state[NUM_WORDS]
    source, length = rows[row, START], rows[row, LENGTH]
    if target + length + ONE > np.uint64(words.size):
        state[LACKING] = SET_ROOM
        return FULL
    end = source + length
    set_hash = rows[row, HASH]
    while source < end and (words[source] >> GROUP_SHIFT) < group:
        words[target] = words[source]
        target += ONE
        source += ONE
    old = ZERO
    if source < end and (words[source] >> GROUP_SHIFT) == group:
        old = words[source] & TIERS
        set_hash ^= mix64(words[source])
        source += ONE
    new = (old & keep) | add
    if new == old:
        return row
    if new != ZERO:
        words[target] = (group << GROUP_SHIFT) | new
        set_hash ^= mix64(words[target])
        target += ONE
    while source < end:
        words[target] = words[source]
        target += ONE
        source += ONE
    return row_of_built(rows, words, state, set_hash, target)


@compiled()
def kept(rows: U64, words: U64, state: U64, row: Number, live: U64) -> Number:
    """Return the row of a set without the slots outside the live masks; FULL as in `changed`."""
    source, target = rows[row, START], state[NUM_WORDS]
    end = source + rows[row, LENGTH]
    if target + rows[row, LENGTH] > np.uint64(words.size):
        state[LACKING] = SET_ROOM
        return FULL
    set_hash, differs = ZERO, False
    while source < end:
        group = words[source] >> GROUP_SHIFT
        tiers = words[source] & live[group]
        if tiers != ZERO:
            words[target] = (group << GROUP_SHIFT) | tiers
            set_hash ^= mix64(words[target])
            target += ONE
        differs = differs or tiers != words[source] & ~GROUP_MASK
        source += ONE
    if not differs:
        return row
    return row_of_built(rows, words, state, set_hash, target)


@compiled()
def stepped(
    rows: U64,
    words: U64,
    state: U64,
    row: Number,
    instance: Number,
    tier: Number,
    adds: Number,
) -> Number:
    """Return the row of a set with one slot added (adds = 1) or taken out (0); FULL as above.

    The memo is direct-mapped: a step that was taken lately costs one look, others O(words).
    """
    step = (row << SHIFT_32) | (((instance << np.uint64(3)) | tier) << ONE) | adds
    line = (times(step, GOLDEN) >> SHIFT_32) & (np.uint64(rows.shape[0]) - ONE)
    after = rows[line, AFTER]
    if rows[line, STEP] == step:
        return after
    group = instance // GROUP_SIZE
    bit = ONE << ((instance - group * GROUP_SIZE) * BYTE + tier)
    after = changed(rows, words, state, row, group, ~bit, bit if adds != ZERO else ZERO)
    if after != FULL:
        rows[line, STEP], rows[line, AFTER] = step, after
    return after


@compiled()
def span_of(rows: U64, words: U64, row: Number) -> tuple[Number, Number]:
    """Return where the words of a row begin and end, within the arrays whatever the row says."""
    if row >= np.uint64(rows.shape[0]):
        return ZERO, ZERO
    size = np.uint64(words.size)
    start = min(rows[row, START], size)
    return start, start + min(rows[row, LENGTH], size - start)
