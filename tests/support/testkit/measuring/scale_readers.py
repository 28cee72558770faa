"""Matches from several processes in one index in shared memory, while its owner folds events."""

import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.publication import IndexPublication, WriterStatus
from kvatlas.indexer.index.shared.reader import SharedIndexReader
from kvatlas.schemas.kv_events import BlockStored, KvEvent
from testkit.builders import ROOT, a_batch, arrived, up
from testkit.measuring.timing import percentiles

HOLDERS, CHAIN_BLOCKS = 16, 2048
CHAIN = random.Random(7).randbytes(16 * CHAIN_BLOCKS)
EVENTS_PER_SECOND, EVENT_BLOCKS = 1_000, 64


class Read(NamedTuple):
    """What one reader did: matches, how many were asked again, and microseconds at p50 and p99."""

    matches: int
    retries: int
    p50_us: float
    p99_us: float


def read_beside_a_writer(num_readers: int, seconds: float) -> list[Read]:
    """Return what each reader did while the index was written to."""
    with tempfile.TemporaryDirectory(dir=_shared_memory()) as name:
        writer = _Writer(Path(name))
        with multiprocessing.get_context("spawn").Pool(num_readers) as readers:
            reads = readers.starmap_async(_read, [(name, seconds)] * num_readers)
            while not reads.ready():
                writer.write_for(0.1)
            found: list[Read] = reads.get()
        writer.close()
    return found


class _Writer:
    """Folds events at a steady rate, and gives signs of life."""

    def __init__(self, folder: Path) -> None:
        self._arrays = SharedArrays(folder)
        self._state = IndexState(FlatRadixIndex(arrays=self._arrays))
        self._publication = IndexPublication(self._arrays, self._state, self._state)
        self._at, self._random = 0, random.Random(1)
        for worker in range(HOLDERS):
            self._fold(f"w{worker}", 1, [up(), BlockStored(ROOT, CHAIN)])
        self._seq = 1
        self._pulse()

    def write_for(self, seconds: float) -> None:
        """Fold what falls due in a while."""
        for _ in range(int(EVENTS_PER_SECOND * seconds)):
            self._seq += 1
            run = self._random.randbytes(16 * EVENT_BLOCKS)
            self._fold("w0", self._seq, [BlockStored(ROOT, run)])
        self._pulse()
        time.sleep(seconds)

    def close(self) -> None:
        self._publication.end()
        self._arrays.close()

    def _fold(self, worker: str, seq: int, events: list[KvEvent]) -> None:
        self._at += 1
        with self._publication:
            self._state.handle(arrived(a_batch(*events, worker=worker, seq=seq), self._at))

    def _pulse(self) -> None:
        self._publication.publish_status(WriterStatus(True, True, self._at, time.monotonic(), {}))


def _read(folder: str, seconds: float) -> Read:
    reader = SharedIndexReader(Path(folder))
    assert len(reader.match(CHAIN)) == HOLDERS
    samples: list[float] = []
    until = time.perf_counter() + seconds
    started = time.perf_counter()
    while started < until:
        reader.match(CHAIN)
        ended = time.perf_counter()
        samples.append(1e6 * (ended - started))
        started = ended
    took = percentiles(samples)
    return Read(len(samples), reader.num_retries, took["p50"], took["p99"])


def _shared_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
