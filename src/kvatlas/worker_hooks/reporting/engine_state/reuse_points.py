"""Where reuse may end in a model with windowed KV groups (ADR-0006).

    chain        b1   b2   b3   b4   b5   b6     a window of two blocks
    held         x              x    x    x      in the windowed group
    run          2    0    0    1    2    2      cut at the window; from the beginning on it is full
    reuse point  *                   *    *      reuse may end there, the rest is computed

Pure bookkeeping over the engine's own hashes; `UsableBlocks` tells what changed.
"""

from kvatlas.worker_hooks.raw_events import EngineHash


class WindowRuns:
    """Per block of one windowed group: how many blocks in a row end with it, cut at the window.

    A step costs what it changes, at most a window per branch.
    """

    def __init__(self, window_blocks: int) -> None:
        self._window = window_blocks
        self._run: dict[EngineHash, int] = {}
        self._above: dict[EngineHash, EngineHash | None] = {}
        #: held blocks below a block, which itself need not be held
        self._below: dict[EngineHash, set[EngineHash]] = {}

    def add(self, block: EngineHash, above: EngineHash | None) -> list[EngineHash]:
        """Hold a block; return the blocks whose window is whole now and was not before.

        Without a block above it stands at the beginning, where no window reaches further back.
        """
        if block in self._run:
            return []
        self._above[block] = above
        if above is not None:
            self._below.setdefault(above, set()).add(block)
        before = self._window if above is None else self._run.get(above, 0)
        return self._spread(block, min(before + 1, self._window))

    def remove(self, block: EngineHash) -> list[EngineHash]:
        """Hold a block no longer; return the blocks whose window was whole and is not now."""
        if block not in self._run:
            return []
        lost = self._spread(block, 0)
        del self._run[block]
        above = self._above.pop(block)
        if above is not None:
            siblings = self._below[above]
            siblings.discard(block)
            if not siblings:
                del self._below[above]
        return lost

    def is_whole(self, block: EngineHash) -> bool:
        """Say whether the window that ends with the block is held."""
        return self._run.get(block, 0) == self._window

    def _spread(self, block: EngineHash, run: int) -> list[EngineHash]:
        crossed = []
        changed = [(block, run)]
        while changed:
            block, run = changed.pop()
            before, self._run[block] = self._run.get(block, 0), run
            if (before == self._window) != (run == self._window):
                crossed.append(block)
            for child in self._below.get(block, ()):
                child_run = min(run + 1, self._window)
                if self._run[child] != child_run:
                    changed.append((child, child_run))
        return crossed


class ReusePoints:
    """The blocks at which the windows of all windowed groups are whole."""

    def __init__(self, window_blocks: dict[int, int]) -> None:
        self._runs = {group: WindowRuns(blocks) for group, blocks in window_blocks.items()}

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, group: int, block: EngineHash, above: EngineHash | None) -> list[EngineHash]:
        """Hold a block in a group; return the blocks that became reuse points."""
        whole = self._runs[group].add(block, above)
        return [each for each in whole if self._is_whole_elsewhere(group, each)]

    def remove(self, group: int, block: EngineHash) -> list[EngineHash]:
        """Hold a block no longer; return the blocks that were reuse points."""
        lost = self._runs[group].remove(block)
        return [each for each in lost if self._is_whole_elsewhere(group, each)]

    def _is_whole_elsewhere(self, group: int, block: EngineHash) -> bool:
        return all(runs.is_whole(block) for other, runs in self._runs.items() if other != group)
