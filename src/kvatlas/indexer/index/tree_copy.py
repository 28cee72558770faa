"""A copy of the fast index's arrays that its radix tree is made of, apart from the index."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index import kernel
from kvatlas.indexer.index.port import TreeSource
from kvatlas.indexer.index.tree import ArrayRuns


class TreeCopy(NamedTuple):
    """The arrays by the names that FlatRoom gives them.

    Whatever is done to them shows nowhere else: a sweep of what forgotten instances held included.
    """

    cells: NDArray[np.uint32]
    segments: NDArray[np.uint32]
    directory: NDArray[np.uint32]
    rows: NDArray[np.uint64]
    words: NDArray[np.uint64]
    masks: NDArray[np.uint64]
    state: NDArray[np.uint64]
    #: no instance is forgotten: equal rows are equal sets
    is_swept: bool

    def runs(self) -> TreeSource:
        """Return the runs of the tree. O(index); kernels run without the interpreter lock."""
        sets = self.rows, self.words
        if not self.is_swept:
            forward = np.zeros(len(self.rows), np.uint32)
            kernel.strip(self.cells, self.segments, *sets, self.masks, forward, self.state)
        num_holders = np.zeros(len(self.rows), np.uint32)
        kernel.count_holders(*sets, self.masks, num_holders, self.state)
        columns = kernel.compress(self.cells, self.directory, num_holders, self.state)
        return ArrayRuns(columns, TreeSets(*sets, self.masks).holders)


class TreeSets(NamedTuple):
    """The holder sets of the copy, which are kept as long as its runs: the cells are not."""

    rows: NDArray[np.uint64]
    words: NDArray[np.uint64]
    masks: NDArray[np.uint64]

    def holders(self, row: int) -> tuple[int, ...]:
        """Return the instances of a row, ascending."""
        start, length = self.rows[row, : kernel.BLOCKS].tolist()
        words = self.words[start : start + length]
        groups = words >> kernel.GROUP_SHIFT
        present = (words & self.masks[groups.astype(np.intp)]).astype("<u8").view(np.uint8)
        at, byte = np.nonzero(present.reshape(-1, 8)[:, : kernel.GROUP])
        numbers = groups[at].astype(np.int64) * kernel.GROUP + byte
        return tuple(sorted(numbers.tolist()))
