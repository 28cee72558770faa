"""A process that changes a shared index as fast as it can. Run as `python ... FOLDER SEED`.

Workers `a` and `b` get and lose the same blocks of one chain, always within one window, and noise
makes the index grow, sweep and forget meanwhile. So whoever sees them differ has seen half of a
change. It ends with standard input.
"""

import random
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.publication import IndexPublication, WriterStatus
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from testkit.builders import ROOT, a_batch, arrived, up
from testkit.indexes import tiny_index

NUM_BLOCKS = 256
CHAIN = random.Random(7).randbytes(16 * NUM_BLOCKS)
PULSE_SECONDS = 0.2


class Writer:
    """The index and what happens to it; everything is in order, so nobody is ever doubted."""

    def __init__(self, folder: Path, seed: int) -> None:
        arrays = SharedArrays(folder)
        self._state = IndexState(tiny_index(arrays=arrays))
        self._publication = IndexPublication(arrays, self._state, self._state)
        self._random = random.Random(seed)
        self._at = 0
        self._seqs: dict[tuple[str, int], int] = {}
        self._noise_epoch = 1

    def pulse(self) -> None:
        self._publication.publish_status(WriterStatus(True, True, self._at, time.monotonic(), {}))

    def step(self) -> None:
        """Change both alike, in one window, and make noise in another."""
        events = list(self._a_change())
        with self._publication:
            for worker in ("a", "b"):
                self._fold(worker, 1, events)
        with self._publication:
            self._fold("noise", self._noise_epoch, [self._noise()])
        if self._random.random() < 0.01:
            self._noise_epoch += 1

    def _a_change(self) -> Iterator[KvEvent]:
        first = self._random.randrange(NUM_BLOCKS)
        last = self._random.randrange(first, NUM_BLOCKS) + 1
        tier = self._random.choice([Tier.hbm, Tier.dram])
        parent = CHAIN[16 * first - 16 : 16 * first] if first else None
        run = CHAIN[16 * first : 16 * last]
        match self._random.randrange(8):
            case 0:
                yield BlockRemoved(ROOT, run, tier)
            case 1:
                yield AllBlocksCleared(tier)
                yield BlockStored(ROOT, run, parent, tier)
            case _:
                yield BlockStored(ROOT, run, parent, tier)

    def _noise(self) -> KvEvent:
        run = self._random.randbytes(16 * self._random.randrange(1, 200))
        part = CHAIN[: 16 * self._random.randrange(1, NUM_BLOCKS)]
        return BlockStored(ROOT, self._random.choice([run, part]), None, Tier.hbm)

    def _fold(self, worker: str, epoch: int, events: list[KvEvent]) -> None:
        self._at += 1
        seq = self._seqs[worker, epoch] = self._seqs.get((worker, epoch), 0) + 1
        if seq == 1:
            events = [up(), *events]
        batch = a_batch(*events, worker=worker, epoch=epoch, seq=seq)
        self._state.handle(arrived(batch, self._at))


def main(folder: str, seed: str) -> None:
    writer = Writer(Path(folder), int(seed))
    writer.pulse()
    writer.step()
    writer.pulse()
    print("ready", flush=True)
    due = time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0]:
        writer.step()
        if time.monotonic() > due:
            writer.pulse()
            due = time.monotonic() + PULSE_SECONDS


if __name__ == "__main__":
    main(*sys.argv[1:])
