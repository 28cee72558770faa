"""The radix tree that people ask for: one copy at a time, kept, and nothing waits for it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index.tree import Tree
from kvatlas.router.http.trees import KEPT_SECONDS, Trees
from testkit.builders import a_batch, arrived, stored, up
from testkit.waiting import WAIT_SECONDS, until


class Watched(IndexState):
    """A fold whose copies wait for a word."""

    def __init__(self) -> None:
        super().__init__(FlatRadixIndex())
        self.handle(arrived(a_batch(up(), stored(1, 2)), 1))
        self.begun, self.may_end, self.num_copies = threading.Event(), threading.Event(), 0

    def copy_tree(self) -> Callable[[], Tree]:
        self.begun.set()
        assert self.may_end.wait(WAIT_SECONDS)
        self.num_copies += 1
        return super().copy_tree()


class Still:
    """Says whether events may come in."""

    is_entered = False

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[None, None]:
        self.is_entered = True
        yield
        self.is_entered = False


async def test_all_who_ask_at_once_get_one_copy_and_nothing_comes_in_meanwhile() -> None:
    state, still = Watched(), Still()
    trees = Trees(state, still)
    asking = [asyncio.create_task(trees.view(3, width)) for width in (1, 2, 3)]
    gives_up = asyncio.create_task(trees.view(3, 3))
    await until(state.begun.is_set)
    assert still.is_entered
    gives_up.cancel()
    await asyncio.wait((gives_up,))
    assert still.is_entered
    state.may_end.set()
    for stream_sequence, [run] in await asyncio.gather(*asking):
        assert (stream_sequence, run.num_blocks) == (1, 2)
    assert (state.num_copies, still.is_entered) == (1, False)


async def test_a_copy_is_kept_for_a_while() -> None:
    state, now = Watched(), 0.0
    state.may_end.set()
    trees = Trees(state, Still(), lambda: now)
    await trees.view(3, 3)
    state.handle(arrived(a_batch(stored(3, parent=2), seq=2), 2))
    assert (await trees.view(3, 3))[0] == 1
    now = KEPT_SECONDS
    stream_sequence, [run] = await trees.view(3, 3)
    assert (stream_sequence, run.num_blocks, state.num_copies) == (2, 3, 2)
