"""The radix view of an index: runs of blocks that are held alike, nested, hottest first.

    blocks  a - b - c - d        runs  [a b] 2 holders
                  \\ e                   |- [c d] 1 holder
                                        `- [e]   1 holder

A run ends where the chain branches or the holding slots change. The view walks only what it shows;
what costs O(index) is numbering the runs, which the fast index does in a kernel.
"""

from collections.abc import Callable, Generator, Mapping, Sequence, Set
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index.port import TreeNode, TreeRunRow, TreeSource
from kvatlas.indexer.reader import TreeRun
from kvatlas.schemas.ids import InstanceId

#: of an answer: what makes it long is how many runs and holders it lists
MAX_RUNS, MAX_HOLDERS = 512, 8_192


class Tree(NamedTuple):
    """A copy of the radix tree as of one stream sequence, with what its instances were called."""

    runs: TreeSource
    #: of instances that show in answers, by their number in the index
    names: Mapping[int, InstanceId]
    stream_sequence: int

    def view(
        self, depth: int, width: int, max_runs: int = MAX_RUNS, max_holders: int = MAX_HOLDERS
    ) -> Generator[None, None, list[TreeRun]]:
        """Yield after each run of the view, and return its top.

        `depth` levels of the `width` hottest runs each, level by level as far as the bounds allow;
        runs that no instance shows are left out where they have none below.
        """
        shown: list[TreeRun] = []
        below: list[list[int]] = [[]]
        level: list[tuple[int, int | None]] = [(0, None)]
        for _ in range(depth):
            following: list[tuple[int, int | None]] = []
            for place, run in level:
                for child in self.runs.below(run, width)[0]:
                    if len(shown) >= max_runs or max_holders <= 0:
                        break
                    shown.append(self._described(child))
                    max_holders -= len(shown[-1].holders)
                    below[place].append(len(shown))
                    below.append([])
                    following.append((len(shown), child))
                    yield
            level = following
        # bottom up: a run stands behind the one above it
        made: list[TreeRun | None] = [None] * (len(shown) + 1)
        for place in range(len(shown), 0, -1):
            children = _those(made, below[place])
            if shown[place - 1].holders or children:
                made[place] = msgspec.structs.replace(shown[place - 1], children=children)
        return list(_those(made, below[0]))

    def _described(self, run: int) -> TreeRun:
        about, names = self.runs.describe(run), self.names
        return TreeRun(
            hash_key=about.hash_key,
            depth=about.depth,
            num_blocks=about.num_blocks,
            holders=tuple(names[number] for number in about.holders if number in names),
            num_pairs=about.num_pairs,
            num_children=self.runs.below(run, 0)[1],
            children=(),
        )


def _those(made: Sequence[TreeRun | None], places: Sequence[int]) -> tuple[TreeRun, ...]:
    return tuple(run for place in places if (run := made[place]) is not None)


def radix_view(runs: TreeSource, depth: int, width: int, run: int | None = None) -> list[TreeNode]:
    """Return the runs below one, `depth` levels of at most `width` each."""
    shown, _ = runs.below(run, width) if depth > 0 else ((), 0)
    nodes = []
    for child in shown:
        about = runs.describe(child)
        nodes.append(
            TreeNode(
                hash_key=about.hash_key,
                depth=about.depth,
                num_blocks=about.num_blocks,
                holders=about.holders,
                num_pairs=about.num_pairs,
                num_children=runs.below(child, 0)[1],
                children=tuple(radix_view(runs, depth - 1, width, child)),
            )
        )
    return nodes


class PlainRuns:
    """TreeSource of plain dicts, known by the key of their first block."""

    def __init__(
        self, parents: Mapping[int, int], slots: Mapping[int, Set[tuple[int, int]]]
    ) -> None:
        self._slots = slots
        self._follow: dict[int | None, list[int]] = {}
        for key, parent in parents.items():
            self._follow.setdefault(parent if parent in slots else None, []).append(key)
        #: top down: each block stands behind its parent
        order = list(self._follow.get(None, ()))
        self._depth = dict.fromkeys(order, 0)
        for key in order:
            for child in self._follow.get(key, ()):
                self._depth[child] = self._depth[key] + 1
                order.append(child)
        self._num_pairs = {key: len(self._instances(key)) for key in order}
        for key in reversed(order):
            if parents[key] in self._num_pairs:
                self._num_pairs[parents[key]] += self._num_pairs[key]

    def below(self, run: int | None, width: int) -> tuple[Sequence[int], int]:
        follow = self._follow.get(None if run is None else self._blocks(run)[-1], [])
        return sorted(follow, key=lambda key: (-self._num_pairs[key], key))[:width], len(follow)

    def describe(self, run: int) -> TreeRunRow:
        return TreeRunRow(
            run,
            self._depth[run],
            len(self._blocks(run)),
            self._num_pairs[run],
            tuple(sorted(self._instances(run))),
        )

    def _blocks(self, run: int) -> list[int]:
        blocks = [run]
        follow = self._follow.get(run, [])
        while len(follow) == 1 and self._slots[follow[0]] == self._slots[run]:
            blocks.append(follow[0])
            follow = self._follow.get(follow[0], [])
        return blocks

    def _instances(self, key: int) -> set[int]:
        return {instance for instance, _ in self._slots[key]}


class ArrayRuns:
    """Runs numbered by the kernel, a column each: key, run above, depth, blocks, pairs, row."""

    def __init__(
        self, columns: NDArray[np.uint64], holders_of: Callable[[int], tuple[int, ...]]
    ) -> None:
        self._columns, self._holders_of = columns, holders_of
        keys, above, _, _, num_pairs, _ = columns
        #: runs that follow the same run are neighbours, hottest first
        self._order = np.lexsort((keys, ~num_pairs, above))
        self._above = above[self._order]

    def below(self, run: int | None, width: int) -> tuple[Sequence[int], int]:
        above = np.uint64(2**64 - 1 if run is None else run)
        first = int(np.searchsorted(self._above, above, "left"))
        end = int(np.searchsorted(self._above, above, "right"))
        return self._order[first : min(end, first + width)].tolist(), end - first

    def describe(self, run: int) -> TreeRunRow:
        key, _, depth, num_blocks, num_pairs, row = self._columns[:, run].tolist()
        return TreeRunRow(key, depth, num_blocks, num_pairs, self._holders_of(row))
