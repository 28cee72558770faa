"""What an index meets at its worst, measured on ours alone.

Holder sets drawn at random, so that nearly every block has a set of its own and interning buys
nothing; a memory limit that is reached; calls that wait while the table grows; a reader beside a
writer in another thread. Times are microseconds unless a name says otherwise.
"""

import os
import threading
import time
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

from kvatlas.events.codec import decode, encode
from kvatlas.indexer import FlatRadixIndex, PrefixIndex, ReferenceIndex
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import WIRE_VERSION, BlockStored, EventBatch
from testkit.builders import ROOT
from testkit.measuring.index_ours import with_workers
from testkit.measuring.index_plans import (
    ASKED,
    FIRST_NOISE,
    HASH_BYTES,
    block_of,
    blocks_of,
    chain_bytes,
)
from testkit.measuring.timing import percentiles

_EVENT_BLOCKS = 64
_NUM_READS = 2_000


def agrees_with_reference(num_steps: int) -> bool:
    """Say whether a random history of six workers ends in equal answers, digests and counts."""
    random, chain = Random(num_steps), chain_bytes(ASKED, 64)
    indexes: tuple[PrefixIndex, PrefixIndex] = FlatRadixIndex(), ReferenceIndex()
    workers = list(range(6))
    for index in indexes:
        assert [index.add_instance() for _ in workers] == workers
    for _ in range(num_steps):
        worker, tier = random.choice(workers), random.choice(list(Tier))
        begin = random.randrange(64)
        end = random.randint(begin + 1, 64)
        parent, hashes = block_of(chain, begin - 1) if begin else ROOT, blocks_of(chain, begin, end)
        choice = random.random()
        for index in indexes:
            if choice < 0.7:
                index.store(worker, tier, parent, hashes)
            elif choice < 0.98:
                index.remove(worker, tier, hashes)
            else:
                index.clear(worker, tier)
        if _answers(indexes[0], workers, chain) != _answers(indexes[1], workers, chain):
            return False
    return True


def _answers(index: PrefixIndex, workers: list[int], chain: bytes) -> list[Any]:
    digests = [index.digest(worker, tier) for worker in workers for tier in Tier]
    return [index.match(chain), index.num_blocks(), *digests]


# --- holder sets drawn at random -------------------------------------------------------------


def random_sets(num_blocks: int, workers: int, holders: int) -> dict[str, float]:
    """Give each block holders drawn at random; return bytes per pair and what a sweep takes."""
    index, store_us = with_workers(workers), list[float]()
    for worker, hashes in random_pairs(num_blocks, workers, holders):
        began = time.perf_counter_ns()
        index.store(worker, Tier.hbm, ROOT, hashes)
        store_us.append((time.perf_counter_ns() - began) / 1e3)
    memory = index.memory_bytes()
    return {
        "pairs": num_blocks * holders,
        "bytes_per_pair": memory / (num_blocks * holders),
        "bytes_per_block": memory / num_blocks,
        "sweep_ms": sweep_ms(index, workers),
        **{f"store_us_{name}": value for name, value in percentiles(store_us).items()},
    }


def random_pairs(num_blocks: int, workers: int, holders: int) -> Iterator[tuple[int, bytes]]:
    """Yield (worker, one block's hash), each block at its holders in an order of its own."""
    random = Random(num_blocks)
    for _ in range(num_blocks):
        block = random.randbytes(HASH_BYTES)
        for worker in random.sample(range(workers), holders):
            yield worker, block


def sweep_ms(index: FlatRadixIndex, workers: int) -> float:
    """Forget a quarter of the workers; return how long the newcomer waits that has to sweep."""
    for worker in range(max(workers // 4, 20)):
        index.forget_instance(worker)
    began = time.perf_counter_ns()
    index.add_instance()
    return (time.perf_counter_ns() - began) / 1e6


def at_the_cap(max_bytes: int, workers: int, holders: int) -> dict[str, Any]:
    """Store random sets until IndexFull; say what the index keeps, and what it still can do."""
    pairs = list[tuple[int, bytes]]()
    index = with_workers(workers, max_bytes=max_bytes)
    is_full = False
    for pair in random_pairs(max_bytes, workers, holders):
        try:
            index.store(pair[0], Tier.hbm, ROOT, pair[1])
        except IndexFull:
            is_full = True
            break
        pairs.append(pair)
    found: dict[str, Any] = {"is_full": is_full, "pairs": len(pairs)}
    found["memory_bytes"] = index.memory_bytes()
    found["removed"] = sum(index.remove(worker, Tier.hbm, block) for worker, block in pairs)
    found["blocks_after_removal"] = index.num_blocks()
    found["stored_again"] = index.store(0, Tier.hbm, ROOT, chain_bytes(FIRST_NOISE, 64))
    return found


# --- growth ----------------------------------------------------------------------------------


def during_growth(first_blocks: int, last_blocks: int, asked_blocks: int) -> dict[str, float]:
    """Match and store in turn while the table grows; return percentiles of both, in us."""
    index, random = with_workers(64), Random(1)
    asked = chain_bytes(ASKED, asked_blocks)
    for worker in range(64):
        index.store(worker, Tier.hbm, ROOT, asked)
    match_us, store_us = list[float](), list[float]()
    for worker in _turns(64):
        hashes = random.randbytes(HASH_BYTES * _EVENT_BLOCKS)
        began = time.perf_counter_ns()
        index.store(worker, Tier.hbm, ROOT, hashes)
        stored = time.perf_counter_ns()
        if index.num_blocks() > first_blocks:
            begun = time.perf_counter_ns()
            index.match(asked)
            match_us.append((time.perf_counter_ns() - begun) / 1e3)
            store_us.append((stored - began) / 1e3)
            if index.num_blocks() > last_blocks:
                break
    spent = {f"match_us_{name}": value for name, value in percentiles(match_us).items()}
    return spent | {f"store_us_{name}": value for name, value in percentiles(store_us).items()}


def _turns(workers: int) -> Iterator[int]:
    return (at % workers for at in count())


# --- two threads -----------------------------------------------------------------------------


def beside_a_writer(asked_blocks: int, holders: int, cpus: list[int]) -> dict[str, float]:
    """Match in one thread, without and with a writer in another; percentiles of a match in us.

    The index is used by one thread at a time: each call holds a lock, which the percentiles
    include. Kernels run without the interpreter lock, the rest of a call needs it.
    """
    os.sched_setaffinity(0, cpus)
    index, lock = with_workers(holders), threading.Lock()
    asked = chain_bytes(ASKED, asked_blocks)
    for worker in range(holders):
        index.store(worker, Tier.hbm, ROOT, asked)

    def read() -> list[float]:
        spent = []
        for _ in range(_NUM_READS):
            began = time.perf_counter_ns()
            with lock:
                index.match(asked)
            spent.append((time.perf_counter_ns() - began) / 1e3)
        return spent

    found = {f"alone_{name}": value for name, value in percentiles(read()).items()}
    writer = _Writer(index, lock, holders)
    writer.start()
    began = time.perf_counter()
    spent = read()
    seconds = time.perf_counter() - began
    num_events = writer.stop()
    found |= {f"beside_{name}": value for name, value in percentiles(spent).items()}
    return found | {"events_per_second": num_events / seconds, "cpus": len(cpus)}


class _Writer(threading.Thread):
    """Applies encoded events of 64 blocks, as fast as it can, until it is told to stop."""

    def __init__(self, index: FlatRadixIndex, lock: threading.Lock, workers: int) -> None:
        super().__init__()
        self._index, self._lock = index, lock
        self._stops, self._num_events = threading.Event(), 0
        self._payloads = [_payload(number, number % workers) for number in range(2_000)]

    def run(self) -> None:
        for at in count():
            batch = decode(self._payloads[at % len(self._payloads)]).batch
            event = batch.events[0]
            assert isinstance(event, BlockStored)
            with self._lock:
                if at // len(self._payloads) % 2:
                    self._index.remove(batch.rank, event.tier, event.hashes)
                else:
                    self._index.store(batch.rank, event.tier, event.root, event.hashes)
            self._num_events += 1
            if self._stops.is_set():
                return

    def stop(self) -> int:
        """End, and return the number of events applied."""
        self._stops.set()
        self.join()
        return self._num_events


def _payload(number: int, worker: int) -> bytes:
    event = BlockStored(ROOT, chain_bytes(FIRST_NOISE + number, _EVENT_BLOCKS))
    return encode(EventBatch(WIRE_VERSION, "w", worker, 1, 1, 0, (event,)))
