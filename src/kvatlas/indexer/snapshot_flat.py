"""The parts of a FlatRadixIndex, checked before a kernel walks them.

    cells     [ k1 | - | k9 | k4 | - | - ]      free cells, a half of them all, are left out:
    occupied  [ 1    0   1    1    0   0 ]      a bit a cell
    blocks    [ k1 | k9 | k4 ]                  and those that hold a block, in order

Kernels check no bounds. A part that passed its checksum is what an index wrote; the checks here
keep one that another version or a wrong writer made from leading a kernel out of its arrays.
"""

from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvatlas.indexer import kernel
from kvatlas.indexer.snapshot import InvalidSnapshot, Parts, Room, array_of, bytes_of, part_of
from kvatlas.schemas.ids import NUM_TIERS

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
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
    """Return the parts of an index; raises InvalidSnapshot."""
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
    words = found.words
    num_rows, num_words = len(found.rows), len(words)
    in_use = found.rows[found.rows[:, kernel.BLOCKS] > 0]
    start, length = in_use[:, kernel.START], in_use[:, kernel.LENGTH]
    block_rows = found.blocks[:, kernel.ROW]
    held = np.count_nonzero(found.occupied.reshape(-1, found.segment_cells), axis=1)
    rules = {
        "blocks name rows": _largest(block_rows) < num_rows and bool(block_rows.all()),
        "rows name words": _largest(start) <= num_words
        and _largest(length) <= num_words
        and _largest(start + length) <= num_words,
        "words name groups": _largest(words >> kernel.GROUP_SHIFT) < len(found.masks),
        "the directory names segments": _largest(found.directory) < len(found.occupied)
        and not (found.directory & np.uint32(found.segment_cells - 1)).any(),
        "segments count their blocks": np.array_equal(held, found.segments[:, kernel.HELD])
        and int(held.sum()) == len(found.blocks),
        "a quarter of a segment is free": 4 * _largest(held) <= 3 * found.segment_cells,
        "each number has a mask": found.numbers.num_numbers <= len(found.digests),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise InvalidSnapshot(f"it does not hold that {broken[0]}")


def _numbers(parts: Parts) -> FlatNumbers:
    try:
        numbers = msgspec.msgpack.decode(bytes_of(parts, "flat.numbers"), type=FlatNumbers)
    except msgspec.DecodeError as error:
        raise InvalidSnapshot(f"part flat.numbers: {error}") from error
    every = [*numbers.live, *numbers.forgotten, *numbers.free]
    if sorted(every) != list(range(numbers.num_numbers)):
        raise InvalidSnapshot("part flat.numbers: a number is in no list, or in two")
    return numbers


def _largest(values: NDArray[np.generic]) -> int:
    return int(values.max()) if values.size else 0


def _u32(parts: Parts, name: str, *shape: int) -> U32:
    return array_of(parts, name, np.uint32, *shape).view(np.uint32)


def _u64(parts: Parts, name: str, *shape: int) -> U64:
    return array_of(parts, name, np.uint64, *shape).view(np.uint64)
