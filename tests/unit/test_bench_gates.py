"""What benchmarks hold sides to: plans know the right answers, and a wrong one stops a run."""

import pytest

from kvatlas.indexer import ReferenceIndex
from kvatlas.schemas.ids import Tier
from testkit.builders import ROOT
from testkit.measuring import Bench, Stopped
from testkit.measuring.index_plans import (
    ASKED,
    HASH_BYTES,
    LAYOUTS,
    UNKNOWN,
    ApplyCell,
    MatchCell,
    Step,
    chain_bytes,
)


def with_workers(workers: int) -> ReferenceIndex:
    index = ReferenceIndex()
    for _ in range(workers):
        index.add_instance()
    return index


def store(index: ReferenceIndex, step: Step) -> int:
    return index.store(step.worker, Tier.hbm, ROOT, blocks_of(step))


def blocks_of(step: Step) -> bytes:
    return chain_bytes(step.chain, step.end)[HASH_BYTES * step.begin :]


@pytest.mark.parametrize("hit_percent", [0, 50, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_match_plan_knows_the_answer(layout: str, hit_percent: int) -> None:
    cell = MatchCell(layout, num_blocks=96, holders=5, workers=8)
    index = with_workers(8)
    for step in cell.steps():
        assert store(index, step) == step.end - step.begin
        assert step.end <= cell.length_of(step.chain)
    cut = HASH_BYTES * cell.num_hits(hit_percent)
    query = chain_bytes(ASKED, 96)[:cut] + chain_bytes(UNKNOWN, 96)[cut:]
    found = {match.instance: match.num_blocks for match in index.match(query)}
    assert found == cell.depths(hit_percent)


@pytest.mark.parametrize("shared_by", [1, 4])
def test_an_apply_plan_ends_as_it_says(shared_by: int) -> None:
    cell = ApplyCell(workers=8, blocks_per_event=4, num_events=24, shared_by=shared_by)
    index = with_workers(8)
    assert sum(store(index, step) for step in cell.steps()) == cell.num_pairs
    assert index.num_blocks() == cell.num_blocks
    for step in cell.steps(tail_first=True):
        assert index.remove(step.worker, Tier.hbm, blocks_of(step)) == 4
    assert index.num_blocks() == 0


def test_parents_come_before_their_children_and_go_after_them() -> None:
    cell = ApplyCell(workers=3, blocks_per_event=2, num_events=9, shared_by=1)
    for worker in range(3):
        begins = [step.begin for step in cell.steps() if step.worker == worker]
        ends = [step.begin for step in cell.steps(tail_first=True) if step.worker == worker]
        assert begins == [0, 2, 4]
        assert ends == [4, 2, 0]


def test_a_gate_that_does_not_hold_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench"])
    bench = Bench("any", None)
    bench.gate("this holds", True)
    with pytest.raises(Stopped, match="any: does not hold: this does not"):
        bench.gate("this does not", False)
    assert bench.gates == ["this holds"]
