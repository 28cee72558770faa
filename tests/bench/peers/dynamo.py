"""NVIDIA Dynamo's side of the index and hashing benchmarks: `RadixTree` of ai-dynamo-runtime.

The tree takes each event as JSON and keeps, of a block, the engine's own hash and the hash of its
tokens (64 bits each). Its Python binding hands every call to a thread of the tree and waits for it.
On one CPU that costs a switch, 6-7 us here; across CPUs it costs the waking of another one, up to
50 us. Whoever starts this has pinned itself to one CPU, and children stay there: the best case.

Payloads are encoded, and queries made, before the clock starts. Times are microseconds.
"""

import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from serving import serve  # type: ignore[import-not-found]

# plans and clock need no package; and this file is not the package `dynamo`
sys.path[0] = str(Path(__file__).parents[2] / "support")

from testkit.measuring.index_plans import (
    ASKED,
    MATCH_EVENT_BLOCKS,
    UNKNOWN,
    ApplyCell,
    MatchCell,
    Step,
    chain_bytes,
    chain_steps,
)
from testkit.measuring.timing import mean_us, rss_bytes, without_gc

os.environ["DYN_LOG"] = "error"  # else the tree writes a line per block that it does not know

from dynamo._core import RadixTree, compute_block_hash_for_seq  # type: ignore[import-not-found]

PACKAGE = "ai-dynamo-runtime"
FILL_CHAIN = 512
CLEARED = b'{"event_id":0,"data":"cleared"}'


class Hashes(NamedTuple):
    """A chain: of each block what the engine calls it, and what its tokens hash to."""

    blocks: tuple[int, ...]
    tokens: tuple[int, ...]


class Dynamo:
    """Answers the calls of the benchmarks; see testkit/measuring/index_ours.py for each."""

    def __init__(self) -> None:
        self._cell: ApplyCell | None = None
        self._log: dict[str, list[tuple[int, bytes]]] = {}
        self._tree: Any = None
        self._queries: dict[int, list[int]] = {}
        self._tokens: list[int] = []

    def version(self) -> dict[str, str]:
        """Return the package and its version."""
        return {PACKAGE: version(PACKAGE)}

    # --- events -----------------------------------------------------------------------------

    def apply_us(self, **cell: int) -> dict[str, float]:
        """Return the mean time of an event in each phase, over a fresh tree."""
        self._prepare(ApplyCell(**cell))
        apply = RadixTree().apply_event
        return {phase: _mean_us(apply, events) for phase, events in self._log.items()}

    def visible_pairs(self, **of_cell: int) -> list[int]:
        """Return the (block, worker) pairs that matches find after each phase."""
        cell = ApplyCell(**of_cell)
        self._prepare(cell)
        tree, found = RadixTree(), []
        for events in self._log.values():
            for event in events:
                tree.apply_event(*event)
            chains = {cell.chain_of(worker) for worker in range(cell.workers)}
            queries = [list(_hashes(chain, cell.chain_blocks).tokens) for chain in chains]
            found.append(sum(sum(tree.find_matches(q).scores.values()) for q in queries))
        return found

    def _prepare(self, cell: ApplyCell) -> None:
        if cell == self._cell:
            return
        chains = {
            chain: _hashes(chain, cell.chain_blocks)
            for chain in {cell.chain_of(worker) for worker in range(cell.workers)}
        }
        stores = list(_encoded(cell.steps(), chains, _stored))
        removals = list(_encoded(cell.steps(tail_first=True), chains, _removed))
        self._log = {"stored": stores, "duplicate": stores, "removed": removals}
        self._cell = cell

    # --- matches ----------------------------------------------------------------------------

    def prepare_match(self, layout: str, num_blocks: int, holders: int, workers: int) -> None:
        """Fill a tree and prepare queries that hit 0, 50 and 100 percent."""
        cell = MatchCell(layout, num_blocks, holders, workers)
        chains: dict[int, Hashes] = {}
        self._tree = RadixTree()
        for worker, event in _encoded(_known(cell, chains), chains, _stored):
            self._tree.apply_event(worker, event)
        asked, unknown = chains[ASKED].tokens, _hashes(UNKNOWN, num_blocks).tokens
        for hit_percent in (0, 50, 100):
            hits = cell.num_hits(hit_percent)
            self._queries[hit_percent] = list(asked[:hits] + unknown[hits:])

    def depths(self, hit_percent: int) -> list[list[int]]:
        """Return [worker, leading blocks] for each match."""
        scores = self._tree.find_matches(self._queries[hit_percent]).scores
        return sorted([worker, depth] for (worker, _), depth in scores.items())

    def match_us(self, hit_percent: int, calls: int) -> dict[str, float]:
        """Return the mean time of a match, its answer a dict."""
        find, query = self._tree.find_matches, self._queries[hit_percent]
        return {"match": mean_us(lambda: find(query).scores, calls)}

    # --- memory -----------------------------------------------------------------------------

    def bytes_per_pair(self, shared_by: int, num_blocks: int) -> dict[str, float]:
        """Return resident bytes per (block, worker) while the tree grows to twice `num_blocks`."""
        RadixTree().find_matches([])
        before = rss_bytes()
        tree, samples = RadixTree(), []
        for chain in range(2 * num_blocks // FILL_CHAIN):
            for event in _fill_events(chain, _stored):
                for worker in range(shared_by):
                    tree.apply_event(worker, event)
            pairs = (chain + 1) * FILL_CHAIN * shared_by
            if pairs > num_blocks * shared_by:
                samples.append((rss_bytes() - before) / pairs)
        return {"rss_least": min(samples), "rss_mean": sum(samples) / len(samples)}

    def churn(self, num_blocks: int, held_blocks: int) -> dict[str, float]:
        """Store and remove so many blocks; return resident MiB along the way."""
        tree, rss_mib = RadixTree(), {}
        num_chains, num_held = num_blocks // FILL_CHAIN, held_blocks // FILL_CHAIN
        for chain in range(num_chains):
            for event in _fill_events(chain, _stored):
                tree.apply_event(0, event)
            if chain >= num_held:
                for event in reversed(list(_fill_events(chain - num_held, _removed))):
                    tree.apply_event(0, event)
            if chain == max(num_held, num_chains // 10):
                rss_mib["first"] = rss_bytes() / 2**20
        rss_mib["last"] = rss_bytes() / 2**20
        return rss_mib

    # --- clearing ---------------------------------------------------------------------------

    def clear_us(self, num_blocks: int, others: int) -> dict[str, float]:
        """Return what it takes to clear, and to drop, a worker with so many blocks of its own."""
        spent = {}
        for phase in ("clear", "drop"):
            tree = RadixTree()
            for worker in range(others + 1):
                for chain in range(num_blocks // FILL_CHAIN):
                    for event in _fill_events(worker * num_blocks + chain, _stored):
                        tree.apply_event(worker, event)
            began = time.perf_counter_ns()
            if phase == "clear":
                tree.apply_event(0, CLEARED)
            else:
                tree.remove_worker(0)
            spent[phase] = (time.perf_counter_ns() - began) / 1e3
            if tree.find_matches(list(_hashes(0, FILL_CHAIN).tokens)).scores:
                raise RuntimeError(f"{phase}: the worker still holds blocks")
        return spent

    # --- hashing ----------------------------------------------------------------------------

    def prepare_tokens(self, num_tokens: int) -> None:
        """Make a prompt of random token ids."""
        random = Random(num_tokens)
        self._tokens = [random.randrange(2**17) for _ in range(num_tokens)]

    def num_hashes(self, block_tokens: int) -> int:
        """Return how many blocks of the prompt get a hash."""
        return len(compute_block_hash_for_seq(self._tokens, block_tokens))

    def hash_us(self, block_tokens: int, calls: int) -> dict[str, float]:
        """Return the mean time of hashing the prompt."""
        tokens = self._tokens
        spent = mean_us(lambda: compute_block_hash_for_seq(tokens, block_tokens), calls)
        return {"binding, from list": spent}


Encode = Callable[[Step, dict[int, Hashes]], bytes]


def _hashes(chain: int, num_blocks: int) -> Hashes:
    words = struct.unpack(f"<{2 * num_blocks}Q", chain_bytes(chain, num_blocks))
    return Hashes(words[0::2], words[1::2])


def _known(cell: MatchCell, chains: dict[int, Hashes]) -> Iterator[Step]:
    """Yield the steps of a cell, each with its chain in `chains`."""
    for step in cell.steps():
        if step.chain not in chains:
            chains[step.chain] = _hashes(step.chain, cell.length_of(step.chain))
        yield step


def _encoded(
    steps: Iterable[Step], chains: dict[int, Hashes], encode: Encode
) -> Iterator[tuple[int, bytes]]:
    """Yield (worker, payload); workers that hold the same share the payload."""
    payloads: dict[tuple[int, int, int], bytes] = {}
    for step in steps:
        key = step[1:4]
        if key not in payloads:
            payloads[key] = encode(step, chains)
        yield step.worker, payloads[key]


def _fill_events(chain: int, encode: Encode) -> Iterator[bytes]:
    chains = {chain: _hashes(chain, FILL_CHAIN)}
    for step in chain_steps(0, chain, FILL_CHAIN, MATCH_EVENT_BLOCKS):
        yield encode(step, chains)


def _stored(step: Step, chains: dict[int, Hashes]) -> bytes:
    chain = chains[step.chain]
    parent = chains[step.above[0]].blocks[step.above[1]] if step.above else None
    blocks = [
        {"block_hash": chain.blocks[at], "tokens_hash": chain.tokens[at]}
        for at in range(step.begin, step.end)
    ]
    return _event({"stored": {"parent_hash": parent, "blocks": blocks}})


def _removed(step: Step, chains: dict[int, Hashes]) -> bytes:
    """Let go of the last block first, as an engine's LRU does."""
    blocks = chains[step.chain].blocks[step.begin : step.end]
    return _event({"removed": {"block_hashes": blocks[::-1]}})


def _event(change: dict[str, Any]) -> bytes:
    return json.dumps({"event_id": 0, "data": change}, separators=(",", ":")).encode()


def _mean_us(apply: Callable[[int, bytes], object], events: list[tuple[int, bytes]]) -> float:
    with without_gc():
        began = time.perf_counter_ns()
        for worker, payload in events:
            apply(worker, payload)
        spent = time.perf_counter_ns() - began
    return spent / len(events) / 1e3


if __name__ == "__main__":
    dynamo = Dynamo()
    calls = [name for name in vars(Dynamo) if not name.startswith("_")]
    serve({name: getattr(dynamo, name) for name in calls})
