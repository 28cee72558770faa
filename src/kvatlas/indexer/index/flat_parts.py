"""The parts of a FlatRadixIndex, checked before a kernel walks them.

    cells     [ k1 | - | k9 | k4 | - | - ]      free cells, a half of them all, are left out:
    occupied  [ 1    0   1    1    0   0 ]      a bit a cell
    blocks    [ k1 | k9 | k4 ]                  and those that hold a block, in order

Kernels check no bounds, and checksums only show damage: everything that a kernel relies on is
checked here, in memory of the size of the parts. What the cells hold is left to an audit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvatlas.indexer.index import kernel
from kvatlas.indexer.index.exporting import (
    InvalidSnapshot,
    Parts,
    Room,
    array_of,
    bytes_of,
    part_of,
)
from kvatlas.schemas.ids import NUM_TIERS

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
#: what has to hold, in words, and whether it does
Rules = Iterator[tuple[str, bool]]
#: a word has 16 bits for its group
MAX_GROUPS = 1 << 16
#: start, length, blocks and hash of a set; how sets are found is made anew
NUM_SET_COLUMNS = kernel.HEAD


class FlatNumbers(Struct, frozen=True):
    """The instance numbers of the index: each is in exactly one of the lists."""

    num_numbers: int
    live: list[int]
    forgotten: list[int]
    #: the last one is given out next
    free: list[int]


class FlatCopy(NamedTuple):
    """A copy of the arrays, up to where they are used."""

    numbers: FlatNumbers
    state: U64
    masks: U64
    digests: U64
    directory: U32
    segments: U32
    rows: U64
    words: U64
    cells: U32

    def parts(self) -> dict[str, memoryview]:
        """Return the parts; any thread may ask."""
        occupied = self.cells[:, kernel.ROW] != 0
        arrays: dict[str, U8 | U32 | U64] = {
            "flat.state": self.state,
            "flat.masks": self.masks,
            "flat.digests": self.digests,
            "flat.directory": self.directory,
            "flat.segments": self.segments,
            "flat.rows": self.rows,
            "flat.words": self.words,
            "flat.occupied": np.packbits(occupied),
            "flat.blocks": self.cells.take(np.flatnonzero(occupied), axis=0),
        }
        parts = {name: part_of(array) for name, array in arrays.items()}
        return {"flat.numbers": memoryview(msgspec.msgpack.encode(self.numbers)), **parts}


class FlatParts(NamedTuple):
    """The arrays as read-only views of the parts."""

    numbers: FlatNumbers
    state: U64
    masks: U64
    digests: U64
    directory: U32
    segments: U32
    rows: U64
    words: U64
    #: per cell
    occupied: NDArray[np.bool_]
    blocks: U32

    @property
    def segment_cells(self) -> int:
        """Cells of a segment."""
        return 1 << int(self.state[kernel.SEGMENT_BITS])


def read_flat(parts: Parts) -> FlatParts:
    """Return the parts of an index; raises InvalidSnapshot. O(parts)."""
    numbers = _numbers(parts)
    state = _u64(parts, "flat.state", kernel.NUM_STATES)
    bits, shift = int(state[kernel.SEGMENT_BITS]), int(state[kernel.DIRECTORY_SHIFT])
    if not (2 <= bits <= 32 and 32 <= shift <= 63):
        raise InvalidSnapshot(f"segments of 2**{bits} cells, directory of 2**{64 - shift}")
    masks = _u64(parts, "flat.masks", -1)
    num_segments, num_blocks = int(state[kernel.NUM_SEGMENTS]), int(state[kernel.NUM_BLOCKS])
    num_cells = num_segments << bits
    bitmap = array_of(parts, "flat.occupied", np.uint8, -(-num_cells // 8)).view(np.uint8)
    found = FlatParts(
        numbers=numbers,
        state=state,
        masks=masks,
        digests=_u64(parts, "flat.digests", len(masks) * kernel.GROUP, NUM_TIERS, 2),
        directory=_u32(parts, "flat.directory", 1 << (64 - shift)),
        segments=_u32(parts, "flat.segments", num_segments, 2),
        rows=_u64(parts, "flat.rows", int(state[kernel.NUM_ROWS]), NUM_SET_COLUMNS),
        words=_u64(parts, "flat.words", int(state[kernel.NUM_WORDS])),
        occupied=np.unpackbits(bitmap, count=num_cells).view(np.bool_),
        blocks=_u32(parts, "flat.blocks", num_blocks, kernel.NUM_HALVES),
    )
    _check(found)
    return found


def copied(cells: U32, room: Room | None) -> U32:
    """Return a copy, in the room if it is large enough."""
    if room is None or room.nbytes < cells.nbytes:
        return cells.copy()
    copy = room[: cells.nbytes].view(np.uint32).reshape(cells.shape)
    copy[:] = cells
    return copy


def fill_cells(cells: U32, found: FlatParts) -> None:
    """Put the blocks into cells that are all free."""
    whole = np.dtype((np.void, 4 * kernel.NUM_HALVES))
    cells.view(whole).reshape(-1)[found.occupied] = found.blocks.view(whole).reshape(-1)


def _check(found: FlatParts) -> None:
    # each group of rules relies on the ones before it
    for rules in (_sizes(found), _table(found), _sets(found)):
        for rule, holds in rules:
            if not holds:
                raise InvalidSnapshot(f"it does not hold that {rule}")


def _sizes(found: FlatParts) -> Rules:
    """Nothing names what lies outside the arrays."""
    num_rows, num_words, num_groups = len(found.rows), len(found.words), len(found.masks)
    start, length = found.rows[:, kernel.START], found.rows[:, kernel.LENGTH]
    in_use = found.rows[:, kernel.BLOCKS] > 0
    numbers = found.numbers
    yield "the multiplier is odd", int(found.state[kernel.MULTIPLIER]) % 2 == 1
    yield "there is a first group", 1 <= num_groups <= MAX_GROUPS
    yield "each number has a mask", numbers.num_numbers <= len(found.digests)
    block_rows = found.blocks[:, kernel.ROW]
    yield "blocks name rows", _largest(block_rows) < num_rows and bool(block_rows.all())
    yield (
        "rows name words",
        _largest(start[in_use]) <= num_words
        and _largest(length[in_use]) <= num_words
        and _largest(start[in_use] + length[in_use]) <= num_words,
    )
    yield "row 0 is the empty set", num_rows > 0 and not found.rows[0].any()
    yield "words name groups", _largest(found.words >> kernel.GROUP_SHIFT) < num_groups
    yield (
        "the directory names segments",
        _largest(found.directory) < len(found.occupied)
        and not (found.directory & np.uint32(found.segment_cells - 1)).any(),
    )


def _table(found: FlatParts) -> Rules:
    """Each search comes to an end, and each segment can be split."""
    held = np.count_nonzero(found.occupied.reshape(-1, found.segment_cells), axis=1)
    bits, directory_bits = found.segments[:, kernel.BITS], len(found.directory).bit_length() - 1
    yield "a segment has a part of the directory", _largest(bits) <= directory_bits
    num_entries = np.left_shift(1, directory_bits - bits.astype(np.int64))
    segment_of = found.directory >> np.uint32(found.segment_cells.bit_length() - 1)
    entries = np.arange(len(found.directory))
    first_entry = entries - entries % num_entries[segment_of]
    yield (
        "the entries of a segment are neighbours",
        np.array_equal(found.directory[first_entry], found.directory)
        and np.array_equal(np.bincount(segment_of, minlength=len(bits)), num_entries),
    )
    yield (
        "segments count their blocks",
        np.array_equal(held, found.segments[:, kernel.HELD])
        and int(held.sum()) == len(found.blocks),
    )
    yield "a quarter of a segment is free", 4 * _largest(held) <= 3 * found.segment_cells


def _sets(found: FlatParts) -> Rules:
    """Each holder set is one that the kernels would build, of numbers that are known."""
    rows, words, numbers = found.rows, found.words, found.numbers
    num_blocks = np.bincount(found.blocks[:, kernel.ROW], minlength=len(rows))
    yield "rows count their blocks", np.array_equal(num_blocks, rows[:, kernel.BLOCKS])
    in_use = rows[rows[:, kernel.BLOCKS] > 0]
    lengths = in_use[:, kernel.LENGTH].astype(np.int64)
    yield (
        "a set in use has words, and no two share them",
        (not len(lengths) or int(lengths.min()) > 0) and int(lengths.sum()) <= len(words),
    )
    ends = np.cumsum(lengths)
    begins = ends - lengths
    at = np.arange(int(lengths.sum())) + np.repeat(
        in_use[:, kernel.START].astype(np.int64) - begins, lengths
    )
    used = words[at]
    groups = (used >> kernel.GROUP_SHIFT).astype(np.int64)
    rises = np.diff(groups, prepend=-1) > 0
    rises[begins] = True
    yield "words are in order", bool(rises.all())
    live = _masks_of(numbers.live, len(found.masks))
    yield "masks are those of the live numbers", np.array_equal(found.masks, live)
    known = live | _masks_of(numbers.forgotten, len(found.masks))
    slots = used & ~kernel.GROUP_MASK
    yield "words name numbers", bool(slots.all()) and not (slots & ~known[groups]).any()
    hashes = np.bitwise_xor.reduceat(_mixed(used), begins) if len(begins) else used
    yield "rows have the hash of their words", np.array_equal(hashes, in_use[:, kernel.HASH])
    is_live = np.zeros(len(found.digests), np.bool_)
    is_live[numbers.live] = True
    yield "only live numbers have digests", not found.digests[~is_live].any()


def _masks_of(numbers: list[int], num_groups: int) -> U64:
    """Return, per group, the slots of these numbers."""
    masks = np.zeros(num_groups * kernel.GROUP, np.uint64)
    masks[numbers] = (1 << NUM_TIERS) - 1
    shifts = np.uint64(8) * np.arange(kernel.GROUP, dtype=np.uint64)
    slots: U64 = (masks.reshape(num_groups, kernel.GROUP) << shifts).sum(axis=1, dtype=np.uint64)
    return slots


def _mixed(keys: U64) -> U64:
    """Return `mix64` of each."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return keys ^ (keys >> np.uint64(31))


def _numbers(parts: Parts) -> FlatNumbers:
    try:
        numbers = msgspec.msgpack.decode(bytes_of(parts, "flat.numbers"), type=FlatNumbers)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidSnapshot(f"part flat.numbers: {error}") from error
    every = [*numbers.live, *numbers.forgotten, *numbers.free]
    # as many as are there: what the part says of itself may be any number
    if len(every) != numbers.num_numbers or sorted(every) != list(range(len(every))):
        raise InvalidSnapshot("part flat.numbers: a number is in no list, or in two")
    return numbers


def _largest(values: NDArray[np.generic]) -> int:
    return int(values.max()) if values.size else 0


def _u32(parts: Parts, name: str, *shape: int) -> U32:
    return array_of(parts, name, np.uint32, *shape).view(np.uint32)


def _u64(parts: Parts, name: str, *shape: int) -> U64:
    return array_of(parts, name, np.uint64, *shape).view(np.uint64)
