"""Matches that end at reuse points, against the definition."""

from itertools import takewhile

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.events.codec import DecodedBatch
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import BatchArrived
from kvatlas.indexer.index.flat import FlatRadixIndex
from kvatlas.indexer.index.reference import ReferenceIndex
from kvatlas.schemas.hashing import reuse_point
from kvatlas.schemas.kv_events import BlockStored, KvEvent
from testkit.builders import ROOT, a_batch, hashes, stored, up

CHAIN = range(1, 9)
blocks = st.sets(st.sampled_from(CHAIN), min_size=3)
workers = st.lists(st.tuples(st.booleans(), blocks, blocks), max_size=4)


@given(workers)
def test_a_hybrid_workers_match_ends_at_its_last_reuse_point(
    fleet: list[tuple[bool, set[int], set[int]]],
) -> None:
    states = IndexState(FlatRadixIndex()), IndexState(ReferenceIndex())
    expected = {}
    for number, (is_hybrid, held, points) in enumerate(fleet, 1):
        events: list[KvEvent] = [up(ends_at_reuse_points=is_hybrid), *map(stored, sorted(held))]
        events += [BlockStored(ROOT, reuse_point(hashes(block))) for block in sorted(points)]
        batch = msgspec.structs.replace(a_batch(worker=f"w{number}"), events=tuple(events))
        for state in states:
            state.handle(BatchArrived(number, 1, DecodedBatch(batch)))
        run = list(takewhile(held.__contains__, CHAIN))
        ends = [block for block in run if block in points] if is_hybrid else run
        if ends:
            expected[f"w{number}"] = ends[-1]
    for state in states:
        found = state.match(hashes(*CHAIN))
        assert {match.instance.worker: match.num_blocks for match in found} == expected
        assert all(sum(match.by_tier) == match.num_blocks for match in found)
