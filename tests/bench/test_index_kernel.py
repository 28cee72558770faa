"""What an event and a match cost: 256 instances, the plain index in the same table."""

import random
from collections.abc import Callable
from itertools import cycle

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvatlas.indexer import FlatRadixIndex, PrefixIndex, ReferenceIndex
from kvatlas.schemas.ids import Tier

NUM_INSTANCES = 256
EVENT_BYTES = 64 * 16
ROOT = bytes(16)
MAKERS = [ReferenceIndex, FlatRadixIndex]


def with_instances(make: Callable[[], PrefixIndex]) -> PrefixIndex:
    index = make()
    for _ in range(NUM_INSTANCES):
        index.add_instance()
    return index


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("is_shared", [False, True], ids=["own", "shared"])
def test_store_of_64_blocks(
    benchmark: BenchmarkFixture, make: Callable[[], PrefixIndex], is_shared: bool
) -> None:
    index = with_instances(make)
    randbytes = random.Random(1).randbytes
    chains = cycle([randbytes(EVENT_BYTES)]) if is_shared else None
    numbers = cycle(range(NUM_INSTANCES))

    def an_event() -> tuple[tuple[int, Tier, bytes, bytes], dict[str, object]]:
        hashes = next(chains) if chains else randbytes(EVENT_BYTES)
        return (next(numbers), Tier.hbm, ROOT, hashes), {}

    benchmark.pedantic(index.store, setup=an_event, rounds=2000)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("make", MAKERS)
def test_removal_of_64_blocks(benchmark: BenchmarkFixture, make: Callable[[], PrefixIndex]) -> None:
    index = with_instances(make)
    randbytes = random.Random(1).randbytes

    def an_event() -> tuple[tuple[int, Tier, bytes], dict[str, object]]:
        hashes = randbytes(EVENT_BYTES)
        index.store(0, Tier.hbm, ROOT, hashes)
        return (0, Tier.hbm, hashes), {}

    benchmark.pedantic(index.remove, setup=an_event, rounds=2000)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("num_blocks", [512, 8192])
@pytest.mark.parametrize("layout", ["all_hold", "staircase"])
def test_match(
    benchmark: BenchmarkFixture, make: Callable[[], PrefixIndex], num_blocks: int, layout: str
) -> None:
    index = with_instances(make)
    randbytes = random.Random(1).randbytes
    chain = randbytes(16 * num_blocks)
    for instance in range(NUM_INSTANCES):
        share = (instance + 1) / NUM_INSTANCES if layout == "staircase" else 1
        index.store(instance, Tier.hbm, ROOT, chain[: 16 * int(num_blocks * share)])
        index.store(instance, Tier.hbm, ROOT, randbytes(EVENT_BYTES))
    matches = benchmark(index.match, chain)
    assert matches[-1].num_blocks == num_blocks
    assert len(matches) == NUM_INSTANCES
