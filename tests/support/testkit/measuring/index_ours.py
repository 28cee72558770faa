"""Our side of the index benchmark: what a reader of the log does, bytes in and the index changed.

`apply_us` decodes an encoded batch and changes the index by its events, the counterpart of a peer's
`apply_event(worker, bytes)`. Its `fold ...` phases are what the service really runs: the same, with
epoch, sequence, trust and digest of the instance judged and kept. Times are microseconds.
"""

import time
from collections.abc import Callable, Iterable

from kvatlas.events.bus import Message
from kvatlas.events.codec import decode, encode
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import stimulus_of
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import WIRE_VERSION, BlockRemoved, BlockStored, EventBatch, KvEvent
from testkit.builders import ROOT, subject_of, up
from testkit.measuring.index_plans import (
    ASKED,
    HASH_BYTES,
    MATCH_EVENT_BLOCKS,
    UNKNOWN,
    ApplyCell,
    MatchCell,
    Step,
    block_of,
    blocks_of,
    chain_bytes,
    chain_steps,
)
from testkit.measuring.timing import mean_us, mean_us_over, rss_bytes

_FILL_CHAIN = 512


class OurIndex:
    """Answers the calls of the index benchmark with a FlatRadixIndex."""

    def __init__(self) -> None:
        self._cell: ApplyCell | None = None
        self._log: dict[str, list[Message]] = {}
        self._index = FlatRadixIndex()
        self._queries: dict[int, bytes] = {}

    # --- events -----------------------------------------------------------------------------

    def apply_us(
        self, workers: int, blocks_per_event: int, num_events: int, shared_by: int
    ) -> dict[str, float]:
        """Return the mean time of an event in each phase, over a fresh index."""
        cell = ApplyCell(workers, blocks_per_event, num_events, shared_by)
        self._prepare(cell)
        apply = applier(with_workers(workers), workers)
        payloads = {phase: [each.payload for each in log] for phase, log in self._log.items()}
        spent = {phase: mean_us_over(apply, payloads[phase]) for phase in self._log}
        state = IndexState(FlatRadixIndex())
        for phase, log in self._log.items():
            spent[f"fold {phase}"] = mean_us_over(lambda each: state.handle(stimulus_of(each)), log)
        return spent

    def visible_pairs(
        self, workers: int, blocks_per_event: int, num_events: int, shared_by: int
    ) -> list[int]:
        """Return the (block, worker) pairs that matches find after each phase."""
        cell = ApplyCell(workers, blocks_per_event, num_events, shared_by)
        self._prepare(cell)
        index = with_workers(workers)
        apply, found = applier(index, workers), []
        for log in self._log.values():
            for message in log:
                apply(message.payload)
            chains = {cell.chain_of(worker) for worker in range(workers)}
            matches = [index.match(chain_bytes(chain, cell.chain_blocks)) for chain in chains]
            found.append(sum(match.num_blocks for each in matches for match in each))
        return found

    def _prepare(self, cell: ApplyCell) -> None:
        """Encode the log of a cell, unless it is the one at hand."""
        if cell == self._cell:
            return
        chains = {
            chain: chain_bytes(chain, cell.chain_blocks)
            for chain in {cell.chain_of(worker) for worker in range(cell.workers)}
        }
        stores = [(step.worker, _stored(step, chains)) for step in cell.steps()]
        removals = [(s.worker, _removed(s, chains)) for s in cell.steps(tail_first=True)]
        log = _Log()
        self._log = {
            "stored": log.messages(stores),
            "duplicate": log.messages(stores),
            "removed": log.messages(removals),
        }
        self._cell = cell

    # --- matches ----------------------------------------------------------------------------

    def prepare_match(self, layout: str, num_blocks: int, holders: int, workers: int) -> None:
        """Fill an index and prepare queries that hit 0, 50 and 100 percent."""
        cell = MatchCell(layout, num_blocks, holders, workers)
        index, chains = with_workers(workers), dict[int, bytes]()
        for step in cell.steps():
            if step.chain not in chains:
                chains[step.chain] = chain_bytes(step.chain, cell.length_of(step.chain))
            event = _stored(step, chains)
            index.store(step.worker, Tier.hbm, event.parent or ROOT, event.hashes)
        unknown = chain_bytes(UNKNOWN, num_blocks)
        for hit_percent in (0, 50, 100):
            cut = HASH_BYTES * cell.num_hits(hit_percent)
            self._queries[hit_percent] = chains[ASKED][:cut] + unknown[cut:]
        self._index = index

    def depths(self, hit_percent: int) -> list[list[int]]:
        """Return [worker, leading blocks] for each match."""
        matches = self._index.match(self._queries[hit_percent])
        return sorted([match.instance, match.num_blocks] for match in matches)

    def match_us(self, hit_percent: int, calls: int) -> dict[str, float]:
        """Return the mean time of a match: a list of named tuples, a dict, three arrays."""
        index, query = self._index, self._queries[hit_percent]

        def as_a_dict() -> dict[int, int]:
            columns = index.match_columns(query)
            return dict(zip(columns.instances.tolist(), columns.num_blocks.tolist(), strict=True))

        return {
            "match": mean_us(lambda: index.match(query), calls),
            "match as a dict": mean_us(as_a_dict, calls),
            "match as columns": mean_us(lambda: index.match_columns(query), calls),
        }

    # --- memory -----------------------------------------------------------------------------

    def bytes_per_pair(self, shared_by: int, num_blocks: int) -> dict[str, float]:
        """Fill to twice `num_blocks`; return bytes per (block, worker) over that last doubling.

        `rss` by growth of resident memory, `told` by memory_bytes; `least` is the fill before
        growth, `mean` the average over growth.
        """
        FlatRadixIndex()  # kernels are loaded before memory is counted
        before = rss_bytes()
        index, samples = with_workers(shared_by), dict[str, list[float]](rss=[], told=[])
        for chain in range(2 * num_blocks // _FILL_CHAIN):
            for worker in range(shared_by):
                _store_chain(index, worker, chain, _FILL_CHAIN)
            pairs = (chain + 1) * _FILL_CHAIN * shared_by
            if pairs > num_blocks * shared_by:
                samples["rss"].append((rss_bytes() - before) / pairs)
                samples["told"].append(index.memory_bytes() / pairs)
        least = {f"{name}_least": min(each) for name, each in samples.items()}
        return least | {f"{name}_mean": sum(each) / len(each) for name, each in samples.items()}

    def churn(self, num_blocks: int, held_blocks: int) -> dict[str, float]:
        """Store and remove so many blocks, never more held; return resident MiB along the way."""
        index, rss_mib = with_workers(1), dict[str, float]()
        num_chains, num_held = num_blocks // _FILL_CHAIN, held_blocks // _FILL_CHAIN
        for chain in range(num_chains):
            _store_chain(index, 0, chain, _FILL_CHAIN)
            if chain >= num_held:
                _remove_chain(index, 0, chain - num_held)
            if chain == max(num_held, num_chains // 10):
                rss_mib["first"] = rss_bytes() / 2**20
        rss_mib["last"] = rss_bytes() / 2**20
        return rss_mib

    # --- clearing ---------------------------------------------------------------------------

    def clear_us(self, num_blocks: int, others: int) -> dict[str, float]:
        """Return what it takes to clear, and to drop, a worker with so many blocks of its own.

        Beside it `others` hold as many each, so the index is larger by them.
        """
        spent = {}
        for phase in ("clear", "drop"):
            index = with_workers(others + 1)
            for worker in range(others + 1):
                for chain in range(num_blocks // _FILL_CHAIN):
                    _store_chain(index, worker, worker * num_blocks + chain, _FILL_CHAIN)
            began = time.perf_counter_ns()
            if phase == "clear":
                index.clear(0, None)
            else:
                index.forget_instance(0)
            spent[phase] = (time.perf_counter_ns() - began) / 1e3
            if index.match(chain_bytes(0, _FILL_CHAIN)):
                raise RuntimeError(f"{phase}: the worker still holds blocks")
        return spent


class _Log:
    """Numbers batches as a broker and their workers do."""

    def __init__(self) -> None:
        self._stream_sequence = 0
        self._sequences: dict[int, int] = {}

    def messages(self, events: Iterable[tuple[int, KvEvent]]) -> list[Message]:
        """Return a message per (worker, event)."""
        messages = []
        for worker, event in events:
            self._stream_sequence += 1
            sequence = self._sequences[worker] = self._sequences.get(worker, 0) + 1
            said = (event,) if sequence > 1 else (up(), event)
            batch = EventBatch(WIRE_VERSION, f"w{worker}", 0, 1, sequence, 0, said)
            at = self._stream_sequence
            messages.append(Message(at, subject_of(batch), encode(batch), at))
        return messages


def with_workers(workers: int, *, max_bytes: int = 8 << 30) -> FlatRadixIndex:
    """Return an index of empty workers 0, 1, 2, ..."""
    index = FlatRadixIndex(max_bytes=max_bytes)
    for _ in range(workers):
        index.add_instance()
    return index


def applier(index: FlatRadixIndex, workers: int) -> Callable[[bytes], None]:
    """Return what decodes a payload and changes the index; worker wN has number N."""
    numbers = {(f"w{worker}", 0): worker for worker in range(workers)}

    def apply(payload: bytes) -> None:
        batch = decode(payload).batch
        number = numbers[batch.worker, batch.rank]
        for event in batch.events:
            match event:
                case BlockStored():
                    index.store(number, event.tier, event.parent or event.root, event.hashes)
                case BlockRemoved():
                    index.remove(number, event.tier, event.hashes)

    return apply


def _stored(step: Step, chains: dict[int, bytes]) -> BlockStored:
    parent = block_of(chains[step.above[0]], step.above[1]) if step.above else None
    return BlockStored(ROOT, blocks_of(chains[step.chain], step.begin, step.end), parent)


def _removed(step: Step, chains: dict[int, bytes]) -> BlockRemoved:
    """Let go of the last block first, as an engine's LRU does."""
    chain = chains[step.chain]
    hashes = [block_of(chain, at) for at in reversed(range(step.begin, step.end))]
    return BlockRemoved(ROOT, b"".join(hashes))


def _store_chain(index: FlatRadixIndex, worker: int, chain: int, num_blocks: int) -> None:
    packed = chain_bytes(chain, num_blocks)
    for step in chain_steps(worker, chain, num_blocks, MATCH_EVENT_BLOCKS):
        parent = block_of(packed, step.begin - 1) if step.above else ROOT
        index.store(worker, Tier.hbm, parent, blocks_of(packed, step.begin, step.end))


def _remove_chain(index: FlatRadixIndex, worker: int, chain: int) -> None:
    packed = chain_bytes(chain, _FILL_CHAIN)
    for step in chain_steps(worker, chain, _FILL_CHAIN, MATCH_EVENT_BLOCKS):
        index.remove(worker, Tier.hbm, blocks_of(packed, step.begin, step.end))
