"""What both sides of the index benchmark do, in numbers alone: chains, events, layouts.

Standard library only, because a peer's process imports it too. A chain is a number; its blocks are
16 random bytes each, the same on both sides: one 16-byte hash here, two 64-bit ones elsewhere.
"""

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

HASH_BYTES = 16
MATCH_EVENT_BLOCKS = 64
NOISE_BLOCKS = 256
FORK_EVERY = 16
LAYOUTS = ("one chain", "forked", "staircase")
#: the chain that is asked for, and the one that nobody holds; other numbers are above these
ASKED, UNKNOWN, FIRST_NOISE, FIRST_BRANCH = 0, 1, 1_000, 1_000_000


class Step(NamedTuple):
    """An event: a worker stores, or lets go of, blocks `begin` to `end` of a chain.

    `above` is the block that the first one follows, as (chain, block); None at the top.
    """

    worker: int
    chain: int
    begin: int
    end: int
    above: tuple[int, int] | None


def chain_bytes(chain: int, num_blocks: int) -> bytes:
    """Return the blocks of a chain, 16 bytes each; a longer chain begins alike."""
    return Random(chain).randbytes(HASH_BYTES * num_blocks)


def block_of(chain: bytes, at: int) -> bytes:
    """Return one block of a packed chain."""
    return blocks_of(chain, at, at + 1)


def blocks_of(chain: bytes, begin: int, end: int) -> bytes:
    """Return the blocks of a packed chain from `begin` up to, not including, `end`."""
    return chain[HASH_BYTES * begin : HASH_BYTES * end]


def chain_steps(worker: int, chain: int, num_blocks: int, event_blocks: int) -> Iterator[Step]:
    """Yield the events by which a worker stores a chain."""
    for begin in range(0, num_blocks, event_blocks):
        above = (chain, begin - 1) if begin else None
        yield Step(worker, chain, begin, min(begin + event_blocks, num_blocks), above)


# --- events ---------------------------------------------------------------------------------


class ApplyCell(NamedTuple):
    """Workers that report in turn, `shared_by` of them the same chain."""

    workers: int
    blocks_per_event: int
    num_events: int
    shared_by: int

    @property
    def events_per_worker(self) -> int:
        """Number of events that each worker sends, at least one."""
        return max(1, self.num_events // self.workers)

    @property
    def chain_blocks(self) -> int:
        """Number of blocks of each chain."""
        return self.events_per_worker * self.blocks_per_event

    @property
    def num_pairs(self) -> int:
        """Number of (block, worker) pairs once all is stored."""
        return self.workers * self.chain_blocks

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks."""
        return self.chain_blocks * -(-self.workers // self.shared_by)

    def chain_of(self, worker: int) -> int:
        """Return the chain that a worker holds."""
        return worker // self.shared_by

    def steps(self, *, tail_first: bool = False) -> list[Step]:
        """Return the events in order of arrival: each worker's in turn, workers mixed anew."""
        random, steps = Random(7), []
        each = range(self.events_per_worker)
        for event in reversed(each) if tail_first else each:
            begin = event * self.blocks_per_event
            for worker in random.sample(range(self.workers), self.workers):
                chain = self.chain_of(worker)
                above = (chain, begin - 1) if begin else None
                steps.append(Step(worker, chain, begin, begin + self.blocks_per_event, above))
        return steps


# --- matches --------------------------------------------------------------------------------


class MatchCell(NamedTuple):
    """Of `workers` that hold something, the first `holders` hold the chain that is asked for.

    `one chain`: all of it. `forked`: besides, a branch of one block leaves it every 16 blocks.
    `staircase`: holders drop out one by one along it.
    """

    layout: str
    num_blocks: int
    holders: int
    workers: int

    def depth_of(self, worker: int) -> int:
        """Return how many leading blocks a holder holds."""
        if self.layout == "staircase":
            return max(1, self.num_blocks * (worker + 1) // self.holders)
        return self.num_blocks

    def steps(self) -> Iterator[Step]:
        """Yield the events that make it so."""
        for worker in range(self.workers):
            noise = FIRST_NOISE + worker
            yield from chain_steps(worker, noise, NOISE_BLOCKS, MATCH_EVENT_BLOCKS)
        for worker in range(self.holders):
            yield from chain_steps(worker, ASKED, self.depth_of(worker), MATCH_EVENT_BLOCKS)
        if self.layout == "forked":
            for begin in range(FORK_EVERY, self.num_blocks, FORK_EVERY):
                yield Step(0, FIRST_BRANCH + begin, 0, 1, (ASKED, begin - 1))

    def length_of(self, chain: int) -> int:
        """Return the number of blocks of a chain of `steps`."""
        if chain == ASKED:
            return self.num_blocks
        return 1 if chain >= FIRST_BRANCH else NOISE_BLOCKS

    def num_hits(self, hit_percent: int) -> int:
        """Return how many leading blocks of a query are of the chain; nobody knows the rest."""
        return self.num_blocks * hit_percent // 100

    def depths(self, hit_percent: int) -> dict[int, int]:
        """Return the right answer: worker -> leading blocks, for whoever holds the first."""
        hits = self.num_hits(hit_percent)
        if not hits:
            return {}
        return {worker: min(hits, self.depth_of(worker)) for worker in range(self.holders)}
