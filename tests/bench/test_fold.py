"""What a batch costs from bytes to index, a match by name, and a replay."""

from collections.abc import Iterator
from itertools import count
from random import Random

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from kvatlas.events.archive.memory import MemoryArchive
from kvatlas.events.archive.port import BatchKey, EventRecord
from kvatlas.events.bus import Message
from kvatlas.events.codec import encode
from kvatlas.hindsight.replay import replay
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import stimulus_of
from kvatlas.schemas.kv_events import BlockRemoved, BlockStored
from testkit.builders import ROOT, a_batch, arrived, subject_of, up

NUM_WORKERS = 64


def random_chain(random: Random, num_blocks: int) -> bytes:
    return random.randbytes(16 * num_blocks)


def a_log(num_blocks: int) -> Iterator[Message]:
    """Yield stores of fresh chains, worker by worker, without end."""
    random = Random(num_blocks)
    for at in count(1):
        event = BlockStored(ROOT, random_chain(random, num_blocks))
        seq = 1 + at // NUM_WORKERS
        events = (event,) if at > NUM_WORKERS else (up(), event)
        batch = a_batch(*events, worker=f"w{at % NUM_WORKERS}", seq=seq)
        yield Message(at, subject_of(batch), encode(batch), at)


@pytest.mark.parametrize("num_blocks", [1, 4, 64])
def test_fold_a_stored_batch(benchmark: BenchmarkFixture, num_blocks: int) -> None:
    state, log = IndexState(FlatRadixIndex()), a_log(num_blocks)

    def fold(message: Message) -> None:
        state.handle(stimulus_of(message))

    benchmark.pedantic(  # type: ignore[no-untyped-call]
        fold, setup=lambda: ((next(log),), {}), rounds=20_000
    )


def test_fold_a_removed_batch(benchmark: BenchmarkFixture) -> None:
    state, random, at = IndexState(FlatRadixIndex()), Random(1), count(1)

    def a_removal() -> tuple[tuple[Message], dict[str, object]]:
        chain = random_chain(random, 64)
        for event in (BlockStored(ROOT, chain), BlockRemoved(ROOT, chain)):
            sequence = next(at)
            batch = a_batch(*([up()] if sequence == 1 else []), event, seq=sequence)
            message = Message(sequence, subject_of(batch), encode(batch), sequence)
            if isinstance(event, BlockStored):
                state.handle(stimulus_of(message))
        return (message,), {}

    benchmark.pedantic(  # type: ignore[no-untyped-call]
        lambda message: state.handle(stimulus_of(message)), setup=a_removal, rounds=10_000
    )


@pytest.mark.parametrize("num_holders", [8, 256])
def test_match_by_name(benchmark: BenchmarkFixture, num_holders: int) -> None:
    state, chain = IndexState(FlatRadixIndex()), random_chain(Random(1), 512)
    for at in range(1, num_holders + 1):
        state.handle(arrived(a_batch(up(), BlockStored(ROOT, chain), worker=f"w{at}"), at))
    assert len(benchmark(state.match, chain)) == num_holders


def test_replay_an_archive(benchmark: BenchmarkFixture) -> None:
    archive, log = MemoryArchive(), a_log(16)
    records = [
        EventRecord(next(log), BatchKey(f"w{at % NUM_WORKERS}", 0, 1, 1 + at // NUM_WORKERS))
        for at in range(1, 20_001)
    ]
    archive.append_events(records, [], len(records))
    replayed = benchmark.pedantic(  # type: ignore[no-untyped-call]
        replay, (archive,), rounds=3
    )
    assert replayed.num_batches == len(records)
