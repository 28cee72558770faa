"""The arrays of the fast index, and the room in them: growth, limits, and what a sweep reclaims."""

import secrets
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index import kernel
from kvatlas.indexer.index.arrays import Arrays, PrivateArrays, ReadArrays, TableLayout
from kvatlas.indexer.index.flat_parts import MAX_GROUPS
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import NUM_TIERS

_MAX_CELLS = 1 << 32
#: fewer forgotten numbers are not worth a sweep
_FEW_NUMBERS = 16
#: a sweep of fewer segments is over in a millisecond, and done at once; a longer one goes on by a
#: segment with each event, and one more for so many blocks of it
_FEW_SEGMENTS, _BLOCKS_A_SEGMENT = 64, 256
#: segments that memory is asked for at a time
_SEGMENTS_AT_ONCE = 16


class FlatStorage:
    """Owns the arrays that the kernels walk, and alone knows how they grow.

    FlatRadixIndex is the index in them, and says what the sizes mean.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 8 << 30,
        max_instances: int = 1 << 16,
        segment_cells: int = 1 << 12,
        first_segments: int = 32,
        set_rows: int = 1 << 9,
        set_words: int = 1 << 11,
        arrays: Arrays | None = None,
    ) -> None:
        kernel.warm()
        self._home: Arrays = arrays or PrivateArrays()
        self._max_bytes = max_bytes
        self._max_instances = min(max_instances, MAX_GROUPS * kernel.GROUP)
        self._segment_cells = _checked("segment_cells", segment_cells, 4)
        self._min_words = _checked("set_words", set_words, 2)
        self._live: set[int] = set()
        #: numbers whose slots may still stand in holder sets; not given out before a sweep
        self._forgotten: set[int] = set()
        #: those of them that the sweep under way takes out, empty while there is none
        self._leaving: set[int] = set()
        #: segments that it has been through
        self._num_swept = 0
        #: numbers that no holder set names
        self._free: list[int] = []
        self._num_numbers = 0
        #: per group, the bits of instances that are not forgotten
        self._masks = self._home.zeros("masks", (1,), np.uint64)
        self._digests = np.zeros((kernel.GROUP, NUM_TIERS, 2), np.uint64)

        num_segments = _checked("first_segments", first_segments, 2)
        directory_bits = num_segments.bit_length() - 1
        max_segments = min(max_bytes // self._segment_bytes(), _MAX_CELLS // segment_cells)
        max_segments = max(max_segments, num_segments)
        self._cells = self._home.reserve("cells", max_segments * segment_cells, kernel.NUM_HALVES)
        #: segments that there is memory for
        self._num_provided = 0
        #: why there was no memory when cells were asked for last, empty if there was
        self._cell_shortage = ""
        if not self._has_cells(num_segments):
            raise IndexFull(f"no memory for the first cells of the index: {self._cell_shortage}")
        self._num_provided = num_segments
        self._segments = PrivateArrays().reserve("segments", max_segments, 2)
        self._segments[:num_segments, kernel.BITS] = directory_bits
        self._directory = self._home.zeros("directory", (num_segments,), np.uint32)
        self._directory[:] = np.arange(num_segments, dtype=np.uint32) * np.uint32(segment_cells)
        self._state = np.zeros(kernel.NUM_STATES, np.uint64)
        self._state[kernel.NUM_ROWS] = 1
        self._state[kernel.NUM_SEGMENTS] = num_segments
        self._state[kernel.DIRECTORY_SHIFT] = 64 - directory_bits
        self._state[kernel.SEGMENT_BITS] = segment_cells.bit_length() - 1
        self._state[kernel.MULTIPLIER] = secrets.randbits(64) | 1
        num_rows = _checked("set_rows", set_rows, 2)
        self._rows = self._home.zeros("rows", (num_rows, kernel.NUM_COLUMNS), np.uint64)
        self._words = np.zeros(0, np.uint64)
        self._replace_sets(num_rows, self._min_words)

    # --- what is taken up -------------------------------------------------------------------

    def num_blocks(self) -> int:
        num_blocks = int(self._state[kernel.NUM_BLOCKS])
        if self._forgotten:
            num_blocks -= int(self._rows[self._num_holders() == 0, kernel.BLOCKS].sum())
        return num_blocks

    def memory_bytes(self) -> int:
        num_segments = int(self._state[kernel.NUM_SEGMENTS])
        return num_segments * self._segment_bytes() + self._other_bytes()

    def _segment_bytes(self) -> int:
        return 4 * (kernel.NUM_HALVES * self._segment_cells + 2)

    def _other_bytes(self) -> int:
        arrays = self._directory, *self._sets, self._digests, self._masks, self._state
        return sum(array.nbytes for array in arrays)

    def _num_holders(self) -> NDArray[np.uint32]:
        num_holders = np.zeros(len(self._rows), np.uint32)
        kernel.count_holders(self._rows, self._words, self._masks, num_holders, self._state)
        return num_holders

    # --- growth -----------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Add room of the kind that the last kernel lacked, or raise IndexFull."""
        lacking = int(self._state[kernel.LACKING])
        if lacking == kernel.SET_ROOM:
            # collecting a last few rows again and again would cost more than it gives
            if not self._has_set_room(*self._collect()) and not self._has_set_room(*self._sweep()):
                self._refuse()
        elif lacking == kernel.SEGMENT_ROOM and self._provide_more():
            pass
        elif self._forgotten:
            self._sweep()
        elif lacking == kernel.DIRECTORY_ROOM:
            self._double_directory()
        else:
            self._refuse()

    def _has_set_room(self, used_rows: int, used_words: int) -> bool:
        return 8 * used_rows <= 7 * len(self._rows) and 8 * used_words <= 7 * len(self._words)

    def _provide_more(self) -> bool:
        """Have memory for more segments; False at the limit, or when the system has none left."""
        num_segments = self._num_provided + _SEGMENTS_AT_ONCE
        num_segments = min(num_segments, len(self._cells) // self._segment_cells)
        if num_segments <= self._num_provided:
            return False
        if not self._has_cells(num_segments):
            return False
        self._num_provided = num_segments
        return self._limit_segments()

    def _has_cells(self, num_segments: int) -> bool:
        """Have memory for so many segments; False, with the reason noted, where there is none."""
        num_cells = num_segments * self._segment_cells
        is_provided = self._home.provide("cells", num_cells)
        num_more = num_cells - self._num_provided * self._segment_cells
        num_bytes = 4 * kernel.NUM_HALVES * num_more
        self._cell_shortage = "" if is_provided else self._home.shortage(num_bytes)
        return is_provided

    def _double_directory(self) -> None:
        if self.memory_bytes() + self._directory.nbytes > self._max_bytes:
            self._refuse()
        directory = self._home.zeros("directory", (2 * len(self._directory),), np.uint32)
        directory[:] = np.repeat(self._directory, 2)
        self._directory = directory
        self._state[kernel.DIRECTORY_SHIFT] -= np.uint64(1)
        self._bind()

    def _refuse(self) -> NoReturn:
        problem = self._cell_shortage or f"the limit is {self._max_bytes}"
        raise IndexFull(f"{self.num_blocks()} blocks in {self.memory_bytes()} bytes, {problem}")

    def _replace_sets(self, num_rows: int, num_words: int) -> None:
        """Move holder sets to arrays of these sizes. Raises IndexFull, and then changes nothing."""
        rows = self._rows
        if num_rows > len(rows):
            rows = self._home.zeros("rows", (num_rows, kernel.NUM_COLUMNS), np.uint64)
            rows[: len(self._rows)] = self._rows
        self._collect_into(rows, self._home.zeros("words", (num_words,), np.uint64))

    def _collect_into(self, rows: NDArray[np.uint64], words: NDArray[np.uint64]) -> None:
        """Have these arrays for the holder sets; `rows` names sets in the present words."""
        kernel.collect(rows, self._words, words, self._state)
        self._rows, self._words = rows, words
        self._bind()

    def _collect_in_place(self) -> None:
        """Close the gaps between holder sets without any other array that readers see."""
        words = np.zeros(len(self._words), np.uint64)
        kernel.collect(self._rows, self._words, words, self._state)
        self._words[:] = words

    def _bind(self) -> None:
        """Gather the arrays as kernels take them; due whenever one is replaced."""
        self._sets = self._rows, self._words
        self._limit_segments()
        table = self._cells, self._directory
        others = self._masks, self._digests, self._state
        self._handle = kernel.handle_of(*table, self._segments, *self._sets, *others)
        self._read_arrays = (*table, *self._sets, self._masks, self._state)
        layout = kernel.MULTIPLIER, kernel.DIRECTORY_SHIFT, kernel.SEGMENT_BITS
        self._home.bind(
            ReadArrays(*table, *self._sets, self._masks),
            TableLayout(*(int(self._state[entry]) for entry in layout)),
        )

    def _limit_segments(self) -> bool:
        """Tell the kernels how many segments there may be; whether that is more than there are."""
        left_bytes = max(0, self._max_bytes - self._other_bytes())
        max_segments = min(left_bytes // self._segment_bytes(), self._num_provided)
        self._state[kernel.MAX_SEGMENTS] = max_segments
        return max_segments > int(self._state[kernel.NUM_SEGMENTS])

    def _fit_instances(self, num_numbers: int) -> None:
        """Have a mask and digests for so many numbers. Raises IndexFull, and changes nothing."""
        if num_numbers > len(self._digests):
            num_groups = 2 * len(self._masks)
            masks = self._home.zeros("masks", (num_groups,), np.uint64)
            masks[: len(self._masks)] = self._masks
            digests = np.zeros((num_groups * kernel.GROUP, NUM_TIERS, 2), np.uint64)
            digests[: len(self._digests)] = self._digests
            self._masks, self._digests = masks, digests
            self._bind()

    # --- sweeps -----------------------------------------------------------------------------

    def _is_sweep_due(self) -> bool:
        if self._has_no_number:
            return len(self._forgotten) > 0
        num_forgotten = len(self._forgotten) - len(self._leaving)
        return num_forgotten >= max(_FEW_NUMBERS, len(self._live) // 4)

    @property
    def _has_no_number(self) -> bool:
        return not self._free and self._num_numbers >= self._max_instances

    def _begin_sweep(self) -> None:
        """Let events take out what forgotten instances held, or do it all where that is late."""
        is_short = int(self._state[kernel.NUM_SEGMENTS]) <= _FEW_SEGMENTS
        if is_short or self._leaving or self._has_no_number:
            self._sweep()
            return
        self._leaving, self._num_swept = set(self._forgotten), 0

    def _sweep_some(self, num_bytes: int) -> None:
        """Go on with the sweep under way, in proportion to the bytes of an event's hashes."""
        first, num_segments = self._num_swept, int(self._state[kernel.NUM_SEGMENTS])
        last = first + 1 + num_bytes // (BLOCK_HASH_BYTES * _BLOCKS_A_SEGMENT)
        last = min(last, num_segments)
        after = np.full(len(self._rows), kernel.FULL)
        table = self._cells, self._segments
        if not kernel.strip_some(first, last, after, *table, *self._sets, self._masks, self._state):
            if not self._has_set_room(*self._collect()):
                self._sweep()
            return
        self._num_swept = last
        if last == num_segments:
            self._free.extend(self._leaving)
            self._forgotten -= self._leaving
            self._leaving.clear()

    def _sweep(self, is_bounded: bool = True) -> tuple[int, int]:
        """Reclaim what forgotten instances and unused sets occupy, as `_collect` does for sets."""
        if self._forgotten:
            forward = np.zeros(len(self._rows), np.uint32)
            table = self._cells, self._segments
            kernel.strip(*table, *self._sets, self._masks, forward, self._state)
            self._free.extend(self._forgotten)
            self._forgotten.clear()
            self._leaving.clear()
        return self._collect(is_bounded)

    def _collect(self, is_bounded: bool = True) -> tuple[int, int]:
        """Reclaim what unused sets occupy; return rows and words in use. O(sets).

        At least half of the room for sets is free afterwards, unless the limit forbids or there is
        no memory, which raises IndexFull where it leaves no room and `is_bounded` is False.
        """
        in_use = self._rows[:, kernel.BLOCKS] > 0
        # row 0, and a set of all groups that is being built
        used_rows = 1 + int(np.count_nonzero(in_use))
        used_words = 1 + len(self._masks) + int(self._rows[in_use, kernel.LENGTH].sum())
        num_rows = max(len(self._rows), power_of_two(2 * used_rows))
        num_words = max(self._min_words, power_of_two(2 * used_words))
        more_bytes = 8 * (num_words - len(self._words))
        more_bytes += 8 * kernel.NUM_COLUMNS * (num_rows - len(self._rows))
        if is_bounded and self.memory_bytes() + more_bytes > self._max_bytes:
            num_rows, num_words = len(self._rows), len(self._words)
        try:
            self._replace_sets(num_rows, num_words)
        except IndexFull:
            self._collect_in_place()
            if not is_bounded and not self._has_set_room(used_rows, used_words):
                raise  # who asks so tries until there is room
        return used_rows, used_words


def _checked(name: str, value: int, least: int) -> int:
    if value < least or value & (value - 1):
        raise ValueError(f"{name} is {value}, expected a power of two, {least} or more")
    return value


def power_of_two(at_least: int) -> int:
    """Return the lowest one that is not below."""
    return 1 << (at_least - 1).bit_length()
