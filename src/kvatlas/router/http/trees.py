"""The radix tree for people: copied and counted in a thread, one at a time, and kept a while."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from kvatlas.indexer.reader import IndexReader, TreeRun, TreeView
from kvatlas.router.http.exposition import in_slices

#: a tree is kept for so long, and for so many times as long as it took to make: however many ask,
#: a large index is copied now and then only
KEPT_SECONDS, KEPT_RATIO = 1.0, 20


class Trees:
    """Answers views of the tree of an index; `still` keeps events from it while it is copied."""

    def __init__(
        self,
        index: IndexReader,
        still: Callable[[], AbstractAsyncContextManager[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index, self._still, self._clock = index, still, clock
        #: what makes the newest one, or has made it; ends by itself, whatever who asked does
        self._making: asyncio.Task[TreeView] | None = None
        self._kept_until = 0.0

    async def view(self, depth: int, width: int) -> tuple[int, list[TreeRun]]:
        """Return the sequence that a tree is of, and its top, see TreeView.view.

        Raises NotAnsweredHere where another process has the index.
        """
        tree = await self._newest()
        return tree.stream_sequence, await in_slices(tree.view(depth, width))

    async def _newest(self) -> TreeView:
        making = self._making
        if making is None or (making.done() and self._clock() >= self._kept_until):
            making = self._making = asyncio.create_task(self._make(), name="tree")
        # all who ask meanwhile wait for the same one, and one that gives up ends it for no other
        await asyncio.wait((making,))
        return making.result()

    async def _make(self) -> TreeView:
        self._kept_until = 0.0
        async with self._still():
            began = self._clock()
            copy = asyncio.ensure_future(asyncio.to_thread(self._index.copy_tree))
            await asyncio.wait((copy,))
            made = [copy.result()]
        del copy
        # the thread has the only reference: to free large arrays takes milliseconds as well
        tree = await asyncio.to_thread(lambda: made.pop()())
        ended = self._clock()
        self._kept_until = ended + max(KEPT_SECONDS, KEPT_RATIO * (ended - began))
        return tree
