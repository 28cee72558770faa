"""What reporting costs: the engine per call, the sidecar per block."""

import random
from array import array
from pathlib import Path
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.worker_hooks.raw_events import (
    RawEvent,
    RawRemoved,
    RawStored,
    decode_raw,
    encode_raw,
)
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingWriter

DESCRIPTOR = NamespaceDescriptor(16)
rng = random.Random(1)


def some_hashes(num: int) -> list[int]:
    return [rng.getrandbits(64) for _ in range(num)]


def some_tokens(num_blocks: int) -> bytes:
    return array("I", [rng.randrange(2**17) for _ in range(16 * num_blocks)]).tobytes()


def test_hook_stored_one_block(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    _bench_hook(benchmark, tmp_path, 1)


def test_hook_stored_64_blocks(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    _bench_hook(benchmark, tmp_path, 64)


def test_hook_stored_64_blocks_with_tokens_as_a_list(
    benchmark: BenchmarkFixture, tmp_path: Path
) -> None:
    _bench_hook(benchmark, tmp_path, 64, list(array("I", some_tokens(64))))


def _bench_hook(
    benchmark: BenchmarkFixture, folder: Path, num_blocks: int, tokens: list[int] | None = None
) -> None:
    """The ring has room for all rounds, so that no append is dropped."""
    hook = WorkerHook(RingWriter.create(folder / "ring", 1 << 25))
    arguments = (some_hashes(num_blocks), 7, tokens or some_tokens(num_blocks))
    pedantic: Any = benchmark.pedantic
    pedantic(hook.stored, arguments, rounds=100, iterations=50)
    assert hook.num_lost == 0
    hook.close()


def test_tracker_64_blocks_a_store_then_their_removal(benchmark: BenchmarkFixture) -> None:
    """One round names, holds, reports, and lets go of 64 x 64 blocks."""
    tracker = EngineStateTracker("m", DESCRIPTOR)
    events: list[RawEvent] = []
    for _ in range(64):
        hashes = tuple(some_hashes(64))
        events += [RawStored(hashes, None, some_tokens(64)), RawRemoved(hashes)]
    records = [encode_raw(event) for event in events]
    benchmark(lambda: tracker.handle(decode_raw(record) for record in records))


def test_tracker_one_block_a_store(benchmark: BenchmarkFixture) -> None:
    """One round of 1,000 chained stores of one block each, then their removal."""
    tracker = EngineStateTracker("m", DESCRIPTOR)
    hashes = some_hashes(1000)
    events: list[RawEvent] = [
        RawStored((h,), hashes[i - 1] if i else None, some_tokens(1)) for i, h in enumerate(hashes)
    ]
    records = [encode_raw(event) for event in [*events, RawRemoved(tuple(hashes))]]
    benchmark(lambda: tracker.handle(decode_raw(record) for record in records))
