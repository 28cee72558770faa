"""The compiled code of the index: the block table, the holder sets, and the walks over both.

    block table, one cell a block                      holder sets, one row a distinct set
    cell     0     1     2     3                       row     0      1         2
    key    [ -  |  k1 |  k9 |  k4 ]                    rows  [ {} | 2 cells | 1 cell ]
    row    [ 0  |  1  |  1  |  2  ]  0: free cell                    |         |
    parent [ -  |  r  |  k1 |  k1 ]  the key before    words [ w0 w1  |  w7  ...  free ]

A *word* holds the slots (instance, tier) of six neighbouring instances: the group number in the
top 16 bits, then a byte per instance whose bit t says that tier t holds the block. So the tiers of
an instance are folded by shifts inside its byte, and a set costs a word per group that occurs in
it, whatever the size of the fleet.

    63        48 47    40      ...      7      0
    [  group    | inst 5 |  4 | 3 | 2 | 1 | inst 0 ]        instance = 6 * group + byte

Blocks that are held alike share a row, so a block costs one cell however many hold it, and a walk
along a chain looks into a set only where the row changes. Rows are interned: equal sets, equal row.

The table is cut into *segments*, each an open-addressing table of its own, and grows by splitting
the one that is full, so no event waits for a copy of the whole:

    directory  [ 0 | 0 | 4 | 8 ]  by the top bits of the spread key; -> first cell of a segment
    segments   [ 1 bit | 2 bits | 2 bits ]  how many of these bits their keys have in common

Invariants, kept by every kernel that returns:
- a cell with a key has a row other than 0; in a segment no free cell lies between the cell where
  the search for a key begins and the key; a quarter of the cells is free;
- rows[r, BLOCKS] counts the cells of row r; a row with no cells is garbage until `collect`;
- the words of a row are sorted by group, and none is without a tier bit;
- `seek` finds every row that is in use under rows[r, HASH], the XOR of its mixed words;
- the memo is only a cache, and names no freed row.

Every integer in here is a uint64: met by an int64, a key above 2**63 turns negative. These kernels
call none outside this file, because numba's cache notices a change of the file it compiled, not of
one that this calls into. numba is imported here and in fence_kernel.py; other kernels use
`compiled`.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.extending import intrinsic
from numpy.typing import NDArray

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
#: a uint64, which the signatures hold kernels to; Python's callers pass an int
Number: TypeAlias = Any
#: multiplier, directory shift, segment bits: see `state`
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

#: blocks that events look ahead
AHEAD = np.uint64(8)

# columns of `digests`
COUNT, XOR = 0, 1

GROUP = 6
NUM_TIERS = 5
ZERO, ONE, TWO = np.uint64(0), np.uint64(1), np.uint64(2)
FULL = np.uint64(2**64 - 1)
GROUP_SIZE, BYTE, BYTE_MASK = np.uint64(GROUP), np.uint64(8), np.uint64(0xFF)
GROUP_SHIFT, GROUP_MASK = np.uint64(48), np.uint64(0xFFFF << 48)
WIDTH = np.uint64(64)
TIERS = np.uint64(0x1F1F_1F1F_1F1F)
EACH_BYTE = np.uint64(0x0101_0101_0101)
ABOVE_TIERS = np.uint64(0x2020_2020_2020)
GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
MIX_1, MIX_2 = np.uint64(0xBF58_476D_1CE4_E5B9), np.uint64(0x94D0_49BB_1331_11EB)
SHIFT_27, SHIFT_30, SHIFT_31, SHIFT_32 = (np.uint64(n) for n in (27, 30, 31, 32))
#: a byte with a single tier bit -> the tier
TIER_OF = np.array([0, 0, 1, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 4], np.uint8)
#: False under NUMBA_DISABLE_JIT, which measures coverage
IS_COMPILED = not vars(config)["DISABLE_JIT"]
IS_LITTLE_ENDIAN = sys.byteorder == "little"
LOW_HALF = np.uint64(0xFFFF_FFFF)
SWAP_8, SWAP_16 = np.uint64(0x00FF_00FF_00FF_00FF), np.uint64(0x0000_FFFF_0000_FFFF)
SHIFT_8, SHIFT_16 = np.uint64(8), np.uint64(16)

Function = TypeVar("Function", bound=Callable[..., Any])
#: kernels that `warm` has to compile
_declared: list[tuple[Any, str]] = []
_warming = threading.Lock()

# The types of the arrays in signatures; what is packed comes as bytes, or as read-only views.
BYTES = "Bytes(uint8, 1, 'C', readonly=True)"
PACKED = "Array(uint64, 1, 'C', readonly=True)"
HANDLE = "uint64[::1]"
TABLE = "uint32[:, ::1], uint32[::1], uint32[:, ::1]"
SETS = "uint64[:, ::1], uint64[::1]"
DIGESTS = "uint64[:, :, ::1]"
STATE = "uint64[::1]"


def compiled(signature: str = "") -> Callable[[Function], Function]:
    """Compile with the options that all kernels share.

    A kernel that Python calls declares its signature and is compiled for nothing else, by `warm`;
    one that only kernels call has none. Where no folder for the on-disk cache is writable, it is
    compiled anew in each process.
    """

    def decorate(function: Function) -> Function:
        try:
            dispatcher: Any = numba.njit(nogil=True, cache=True)(function)
        except RuntimeError:  # numba found no cache folder
            dispatcher = numba.njit(nogil=True)(function)
        if signature:
            _declared.append((dispatcher, signature))
        made: Function = dispatcher
        return made

    return decorate


def warm() -> float:
    """Compile all kernels, or load them from the on-disk cache; return the seconds it took.

    Later calls cost next to nothing. Kernels must not be called before; any thread may warm them.
    """
    started = time.perf_counter()
    with _warming:
        while _declared and IS_COMPILED:
            dispatcher, signature = _declared[-1]
            dispatcher.compile(signature)
            dispatcher.disable_compile()
            _declared.pop()
    return time.perf_counter() - started


# --- handles: all arrays as one, because each array that Python passes costs 0.2 us ----------

#: what a handle names, in this order: an address and the length of the first dimension each
HANDLED = ("cells", "directory", "segments", "rows", "words", "masks", "digests", "state")


def handle_of(*arrays: NDArray[Any]) -> U64:
    """Return the handle of the arrays in HANDLED; whoever has it keeps them alive."""
    places = [number for array in arrays for number in (array.ctypes.data, len(array))]
    return np.array(places, np.uint64)


def _pointer_to(kind: Any) -> Callable[..., Any]:
    pointer: Any = types.CPointer(kind)  # type: ignore[no-untyped-call]

    def pointer_to(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.uint64), emit

    return pointer_to


def _content_of(typing_context: Any, content: Any) -> Any:
    pointer: Any = types.CPointer(types.uint64)  # type: ignore[no-untyped-call]

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, value=arguments[0])
        return builder.bitcast(made.data, context.get_value_type(pointer))

    return pointer(content), emit


def _prefetching(typing_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        declare: Any = cgutils.get_or_insert_function
        fetch = declare(builder.module, kind, "llvm.prefetch.p0")
        reads_to_keep = [ir.Constant(number, each) for each in (0, 3, 1)]
        builder.call(fetch, [builder.inttoptr(arguments[0], byte), *reads_to_keep])
        return context.get_dummy_value()

    return types.void(types.uint64), emit


def _no_prefetch(address: Number) -> None:
    """Plain Python knows no caches."""


#: has the processor fetch what lies at an address, and goes on
prefetch: Any = intrinsic(_prefetching) if IS_COMPILED else _no_prefetch
pointer_32: Any
pointer_64: Any
array_at: Any
if IS_COMPILED:
    pointer_32, pointer_64 = (intrinsic(_pointer_to(kind)) for kind in (types.uint32, types.uint64))
    content_of: Any = intrinsic(_content_of)
    array_at = numba.carray  # type: ignore[attr-defined]

    @compiled()
    def words_in(content: bytes) -> U64:
        """Return packed hashes as words."""
        words: U64 = array_at(content_of(content), len(content) // 8)
        return words
else:

    def _caster(kind: Any) -> Callable[[Number], Any]:
        return lambda address: ctypes.cast(int(address), ctypes.POINTER(kind))

    def _array_at(pointer: Any, shape: Any) -> NDArray[Any]:
        return np.ctypeslib.as_array(pointer, tuple(map(int, np.atleast_1d(shape))))

    pointer_32, pointer_64 = _caster(ctypes.c_uint32), _caster(ctypes.c_uint64)
    array_at = _array_at

    def words_in(content: bytes) -> U64:
        """Return packed hashes as words."""
        return np.frombuffer(content, np.uint64)


@compiled()
def table_of(handle: U64) -> tuple[U32, U32, U32]:
    """Return cells, directory and segments."""
    return (
        array_at(pointer_32(handle[0]), (handle[1], np.uint64(NUM_HALVES))),
        array_at(pointer_32(handle[2]), handle[3]),
        array_at(pointer_32(handle[4]), (handle[5], TWO)),
    )


@compiled()
def sets_of(handle: U64) -> tuple[U64, U64, U64]:
    """Return rows, words and live masks."""
    return (
        array_at(pointer_64(handle[6]), (handle[7], np.uint64(NUM_COLUMNS))),
        array_at(pointer_64(handle[8]), handle[9]),
        array_at(pointer_64(handle[10]), handle[11]),
    )


@compiled()
def digests_of(handle: U64) -> U64:
    """Return the digests."""
    digests: U64 = array_at(pointer_64(handle[12]), (handle[13], np.uint64(NUM_TIERS), TWO))
    return digests


@compiled()
def state_of(handle: U64) -> U64:
    """Return the state."""
    state: U64 = array_at(pointer_64(handle[14]), handle[15])
    return state


# --- arithmetic ---------------------------------------------------------------------------


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
def key_at(packed: U64, position: Number) -> Number:
    """Return the index key of the hash at a position of packed hashes."""
    key = packed[TWO * position + ONE]
    if IS_LITTLE_ENDIAN:
        key = ((key & SWAP_8) << SHIFT_8) | ((key >> SHIFT_8) & SWAP_8)
        key = ((key & SWAP_16) << SHIFT_16) | ((key >> SHIFT_16) & SWAP_16)
        key = (key << SHIFT_32) | (key >> SHIFT_32)
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


# --- block table --------------------------------------------------------------------------


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


# --- holder sets --------------------------------------------------------------------------


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


# --- what events do -----------------------------------------------------------------------


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


# --- what readers ask ---------------------------------------------------------------------


@compiled()
def span_of(rows: U64, words: U64, row: Number) -> tuple[Number, Number]:
    """Return where the words of a row begin and end, within the arrays whatever the row says."""
    if row >= np.uint64(rows.shape[0]):
        return ZERO, ZERO
    size = np.uint64(words.size)
    start = min(rows[row, START], size)
    return start, start + min(rows[row, LENGTH], size - start)


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
        num_alive = narrow(rows, words, row, alive, origin, num_alive, tally, position)
    return gathered(words, first_word, tally)


@compiled()
def narrow(
    rows: U64,
    words: U64,
    row: Number,
    alive: U64,
    origin: U64,
    num_alive: Number,
    tally: U32,
    position: Number,
) -> Number:
    """Keep of the alive words what a set holds, count what changes; return how many are left."""
    source, end = span_of(rows, words, row)
    num_kept = ZERO
    for index in range(num_alive):
        group, best = alive[index] & GROUP_MASK, alive[index] & TIERS
        while source < end and words[source] < group:
            source += ONE
        new = ZERO
        if source < end and words[source] & GROUP_MASK == group:
            new = best_tiers(words[source] & whole_bytes(best))
        if new != best:
            count_until(tally, origin[index], best, new, position)
        if new != ZERO:
            alive[num_kept], origin[num_kept] = group | new, origin[index]
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


@compiled(f"uint64(uint64, uint32[:, ::1], uint32[::1], {STATE})")
def row_of(key: Number, cells: U32, directory: U32, state: U64) -> Number:
    """Return the holder set of a key, 0 when nobody holds it."""
    return np.uint64(cells[find(cells, directory, layout_of(state), key), ROW])


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
