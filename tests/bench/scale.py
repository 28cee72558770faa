"""How the cost of an event and of a match grows with the index, the fleet and the tiers.

    .venv/bin/python tests/bench/scale.py [--quick] [--peer none] [--save]

Blocks: from 10^5 to as many as fit into 12 GiB, or into what this machine has to spare (10^6 with
--quick). Workers: 8 to 4,096, every block at 16 of them. Tiers: 1 to 4, every holder has each block
in all of them. An event is 64 encoded blocks until the index is changed. A match asks for 2,048
blocks that 16 workers hold, another chain each time, so that in a large table most of its blocks
come from memory and not from a cache; `match again` asks for one chain over and over. Figures are
microseconds. Readers: one and two processes match in shared memory for 5 s, beside a writer that
folds 1,000 events/s. An exponent is the slope of a line through log(time) over log(size): 0 says
that cost is constant, 1 that it is linear. There is no peer; every bench takes `--peer`.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

from collections.abc import Sequence
from itertools import cycle
from typing import NamedTuple

import numpy as np

from kvatlas.events.codec import encode
from kvatlas.indexer import FlatRadixIndex
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import WIRE_VERSION, BlockRemoved, BlockStored, EventBatch, KvEvent
from testkit.builders import ROOT
from testkit.measuring import Bench, pin_to_one_cpu
from testkit.measuring.bench import OURS
from testkit.measuring.index_ours import applier, with_workers
from testkit.measuring.index_plans import HASH_BYTES
from testkit.measuring.scale_readers import read_beside_a_writer
from testkit.measuring.timing import mean_us_over

MAX_BYTES = 12 << 30
SPARE_BYTES = 3 << 30
HOLDERS = 16
EVENT_BLOCKS, CHAIN_BLOCKS = 64, 2048
#: chains that are asked for, half of a small table; 512 of them are 64 MiB of cache lines
NUM_CHAINS, MOST_CHAINS = 32, 512
FILL_BLOCKS = 1 << 12
REPETITIONS = 7
CASES = {"cached": "match again", "columns": "match as columns"}
NUM_EVENTS = 400

random = np.random.default_rng(1)


def main() -> None:
    """Measure all three directions of growth."""
    bench = Bench("scale", __doc__)
    with_more_readers(bench)
    pin_to_one_cpu()
    bench.gate("a chain in a full table is found by all of its holders", finds_all_holders())
    with_more_tiers(bench)
    with_more_workers(bench)
    with_more_blocks(bench)
    bench.finish()


class Costs(NamedTuple):
    """Samples of each figure, in microseconds."""

    stored: list[float]
    removed: list[float]
    match: list[float]
    cached: list[float]
    columns: list[float]

    def note(self, bench: Bench, **cell: str | int) -> None:
        """Add a row for each."""
        for name, samples in self._asdict().items():
            bench.row(CASES.get(name, name), "us", {OURS: samples}, **cell)

    @property
    def apply_us(self) -> float:
        """The fastest store and removal together."""
        return min(self.stored) + min(self.removed)


# --- directions -------------------------------------------------------------------------------


def with_more_readers(bench: Bench) -> None:
    """Measure matches of one and of two reader processes beside a writer, on all cores."""
    matches: dict[int, int] = {}
    for num_readers in (1, 2):
        reads = read_beside_a_writer(num_readers, 1.0 if bench.is_quick else 5.0)
        matches[num_readers] = sum(read.matches for read in reads)
        bench.figure(
            "readers",
            readers=num_readers,
            matches=matches[num_readers],
            retries=sum(read.retries for read in reads),
            p50_us=max(read.p50_us for read in reads),
            p99_us=max(read.p99_us for read in reads),
        )
    bench.absolute("matches_of_2_readers_over_1", matches[2] / matches[1])


def with_more_blocks(bench: Bench) -> None:
    """Fill one index further and further."""
    sizes = [10**5, 316_000, 10**6] if bench.is_quick else [10**5, 10**6, 10**7, 10**8, 10**9]
    index = with_workers(64, max_bytes=MAX_BYTES if bench.is_quick else room_bytes())
    chains, found = list[bytes](), dict[int, Costs]()
    for size in sizes:
        wanted = min(MOST_CHAINS, size // (2 * CHAIN_BLOCKS))
        chains += store_chains(index, range(HOLDERS), (Tier.hbm,), wanted - len(chains))
        if is_full := not fill(index, size):
            make_room(index)
        num_blocks = index.num_blocks()
        costs = measure(index, chains, range(64), (Tier.hbm,))
        costs.note(bench, grows="blocks", blocks=num_blocks, workers=64, holders=HOLDERS, tiers=1)
        bench.figure("table", blocks=num_blocks, gib=index.memory_bytes() / 2**30)
        found[num_blocks] = costs
        if is_full:
            break
    bench.absolute("most_blocks", max(found))
    note_exponents(bench, "blocks", found)


def with_more_workers(bench: Bench) -> None:
    """Let ever more workers share a table of equal size, holders per block fixed."""
    fleets = (16, 64, 256) if bench.is_quick else (8, 16, 64, 256, 1024, 4096)
    num_blocks = 2**18
    found: dict[int, Costs] = {}
    for workers in fleets:
        index, holders = with_workers(workers), min(HOLDERS, workers)
        drawn = random.choice(workers, holders, replace=False).tolist()
        chains = store_chains(index, drawn, (Tier.hbm,))
        while index.num_blocks() < num_blocks:
            hashes = random.bytes(HASH_BYTES * CHAIN_BLOCKS)
            for worker in random.choice(workers, holders, replace=False).tolist():
                index.store(worker, Tier.hbm, ROOT, hashes)
        costs = measure(index, chains, range(workers), (Tier.hbm,))
        costs.note(
            bench, grows="workers", blocks=num_blocks, workers=workers, holders=holders, tiers=1
        )
        if holders == HOLDERS:
            found[workers] = costs
    note_exponents(bench, "workers", found)


def with_more_tiers(bench: Bench) -> None:
    """Let each holder have each block in more tiers."""
    for tiers in range(1, 5):
        index, held = with_workers(64), tuple(Tier)[:tiers]
        chains = store_chains(index, range(HOLDERS), held)
        fill(index, 2**18)
        costs = measure(index, chains, range(64), held)
        costs.note(bench, grows="tiers", blocks=2**18, workers=64, holders=HOLDERS, tiers=tiers)


def note_exponents(bench: Bench, what: str, found: dict[int, Costs]) -> None:
    """Fit both costs over the sizes found."""
    sizes = list(found)
    matches = [min(costs.match) for costs in found.values()]
    bench.absolute(f"exponent_match_{what}", exponent(sizes, matches))
    again = [min(costs.cached) for costs in found.values()]
    bench.absolute(f"exponent_match_again_{what}", exponent(sizes, again))
    events = [costs.apply_us for costs in found.values()]
    bench.absolute(f"exponent_apply_{what}", exponent(sizes, events))


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    x, y = np.log(np.array(sizes, float)), np.log(np.array(times))
    x -= x.mean()
    return float((x * y).sum() / (x * x).sum())


# --- filling ----------------------------------------------------------------------------------


def store_chains(
    index: FlatRadixIndex, holders: Sequence[int], tiers: Sequence[Tier], count: int = NUM_CHAINS
) -> list[bytes]:
    """Let every holder store the chains that matches ask for."""
    chains = [random.bytes(HASH_BYTES * CHAIN_BLOCKS) for _ in range(count)]
    for chain in chains:
        for holder in holders:
            for tier in tiers:
                index.store(holder, tier, ROOT, chain)
    return chains


def fill(index: FlatRadixIndex, num_blocks: int) -> bool:
    """Store blocks of single workers until there are so many; return whether they fit."""
    workers = cycle(range(64))
    while (missing := num_blocks - index.num_blocks()) > 0:
        hashes = random.bytes(HASH_BYTES * min(FILL_BLOCKS, missing))
        try:
            index.store(next(workers), Tier.hbm, ROOT, hashes)
        except IndexFull:
            return False
    return True


def make_room(index: FlatRadixIndex) -> None:
    """Give up the blocks of one worker of 64, so that events find room in every segment."""
    index.clear(63, Tier.hbm)


def room_bytes() -> int:
    """Return what the table may take: 12 GiB, or less where the machine has less to spare."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    [available] = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return min(MAX_BYTES, 1024 * int(available) - SPARE_BYTES)


def finds_all_holders() -> bool:
    """Say whether a filled table answers right."""
    index = with_workers(64)
    chains = store_chains(index, range(HOLDERS), (Tier.hbm,))
    fill(index, 2**17)
    right = [(holder, CHAIN_BLOCKS) for holder in range(HOLDERS)]
    return all([match[:2] for match in index.match(chain)] == right for chain in chains)


# --- measuring --------------------------------------------------------------------------------


def measure(
    index: FlatRadixIndex, chains: list[bytes], workers: Sequence[int], tiers: Sequence[Tier]
) -> Costs:
    """Take all figures in turn; the index holds the same before and after."""
    costs = Costs([], [], [], [], [])
    for _ in range(REPETITIONS):
        stored, removed = an_event_log(workers, tiers)
        costs.stored.append(apply_us(index, len(workers), stored))
        costs.removed.append(apply_us(index, len(workers), removed))
        costs.match.append(mean_us_over(index.match, chains))
        costs.columns.append(mean_us_over(index.match_columns, chains))
        costs.cached.append(mean_us_over(index.match, chains[-1:] * NUM_CHAINS))
    return costs


def an_event_log(workers: Sequence[int], tiers: Sequence[Tier]) -> tuple[list[bytes], list[bytes]]:
    """Return encoded stores of fresh chains, and the removals of the same blocks."""
    stores, removals = list[bytes](), list[bytes]()
    for worker in random.choice(workers, NUM_EVENTS // len(tiers)).tolist():
        hashes = random.bytes(HASH_BYTES * EVENT_BLOCKS)
        for tier in tiers:
            stores.append(payload(worker, BlockStored(ROOT, hashes, tier=tier)))
            removals.append(payload(worker, BlockRemoved(ROOT, hashes, tier)))
    return stores, removals


def payload(worker: int, event: KvEvent) -> bytes:
    """Return a batch of one event."""
    return encode(EventBatch(WIRE_VERSION, f"w{worker}", 0, 1, 1, 0, (event,)))


def apply_us(index: FlatRadixIndex, workers: int, payloads: list[bytes]) -> float:
    """Return the mean time of an event."""
    return mean_us_over(applier(index, workers), payloads)


if __name__ == "__main__":
    main()
