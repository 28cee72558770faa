"""The index as a reader of its memory asks it: matches and holders, of whatever is there now."""

from collections.abc import Iterator
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index import kernel
from kvatlas.indexer.index.arrays import ReadArrays
from kvatlas.indexer.index.port import Match, MatchColumns, check_hash, check_packed
from kvatlas.indexer.index.shared import header as h
from kvatlas.schemas.digest import index_key
from kvatlas.schemas.ids import NUM_TIERS, Tier


class AttachedIndex:
    """Answers from arrays that somebody else writes to; whoever asks validates the answer."""

    def __init__(self) -> None:
        kernel.warm()
        self._state = np.zeros(kernel.NUM_STATES, np.uint64)
        self._arrays: ReadArrays | None = None
        self._handle = np.zeros(0, np.uint64)

    def bind_arrays(
        self, header: np.ndarray[tuple[int], np.dtype[np.uint64]], arrays: ReadArrays
    ) -> None:
        """Ask these arrays from now on. Raises ValueError for a layout that is not theirs."""
        check_layout(header, arrays)
        self._arrays = arrays
        self._state[kernel.MULTIPLIER] = header[h.MULTIPLIER]
        self._state[kernel.DIRECTORY_SHIFT] = header[h.DIRECTORY_SHIFT]
        self._state[kernel.SEGMENT_BITS] = header[h.SEGMENT_BITS]
        cells, directory, rows, words, masks = arrays
        nothing = np.zeros((0, 2), np.uint32), np.zeros((0, 5, 2), np.uint64)
        self._handle = kernel.handle_of(
            cells, directory, nothing[0], rows, words, masks, nothing[1], self._state
        )

    def match(self, chain: bytes) -> list[Match]:
        """See PrefixIndex."""
        check_packed(chain)
        if self._arrays is None:
            return []
        columns = kernel.match(chain, self._handle)
        instances, num_blocks, *by_tier = columns.tolist()
        fields = zip(instances, num_blocks, zip(*by_tier, strict=True), strict=True)
        return list(map(tuple.__new__, repeat(Match), fields))

    def match_columns(self, chain: bytes) -> MatchColumns:
        """See PrefixIndex."""
        check_packed(chain)
        if self._arrays is None:
            columns = np.zeros((2 + NUM_TIERS, 0), np.uint32)
        else:
            columns = kernel.match(chain, self._handle)
        return MatchColumns(columns[0], columns[1], columns[2:])

    def holders(self, block_hash: bytes) -> list[tuple[int, Tier]]:
        """See PrefixIndex."""
        check_hash(block_hash)
        return list(self._slots(block_hash))

    def _slots(self, block_hash: bytes) -> Iterator[tuple[int, Tier]]:
        if self._arrays is None:
            return
        cells, directory, rows, words, masks = self._arrays
        row = int(kernel.row_of(index_key(block_hash), cells, directory, self._state))
        if row >= len(rows):
            return
        start, length = rows[row, : kernel.BLOCKS].tolist()
        for word in words[start : start + length].tolist():
            group = word >> int(kernel.GROUP_SHIFT)
            live = word & int(masks[group]) if group < len(masks) else 0
            for byte in range(kernel.GROUP):
                for tier in Tier:
                    if live >> (8 * byte + tier) & 1:
                        yield group * kernel.GROUP + byte, tier


def check_layout(header: NDArray[np.uint64], arrays: ReadArrays) -> None:
    """Raise ValueError unless a search by the header's layout stays within the arrays."""
    shift, bits = int(header[h.DIRECTORY_SHIFT]), int(header[h.SEGMENT_BITS])
    if not (2 <= bits <= 32 and 32 <= shift <= 63):
        raise ValueError(f"segments of 2**{bits} cells, a directory of 2**{64 - shift}")
    if len(arrays.directory) != 1 << (64 - shift) or len(arrays.cells) % (1 << bits):
        raise ValueError(
            f"{len(arrays.directory)} entries and {len(arrays.cells)} cells, expected"
            f" {1 << (64 - shift)} and segments of {1 << bits}"
        )
