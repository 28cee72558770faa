"""Loads asked for together are those asked for one by one, through whatever happens to workers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.indexer.index import kernel
from kvatlas.router.decision import price_kernel as k
from kvatlas.router.decision.loads import LoadKey, LoadSelection, LoadTracker
from kvatlas.router.decision.requests import Report
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Plan
from kvatlas.schemas.settings import RouterSettings

kernel.warm()

SETTINGS = RouterSettings(work_half_life_seconds=20.0, request_timeout_seconds=60.0)
WORKERS = [InstanceId(f"w{n}", 0) for n in range(4)]
MODELS = ["m", "other"]
steps = st.tuples(
    st.sampled_from(
        ["asked"] * 4
        + ["routed"] * 3
        + ["prefilled", "done", "failed", "restart"]
        + ["model", "grown"]
    ),
    st.integers(0, len(WORKERS) - 1),
    st.integers(1, 4_000),
    st.sampled_from([0.0, 0.0, 0.1, 5.0, 45.0]),
)


class Asking:
    """Loads, and the candidate set that they are asked for; `together` is how."""

    def __init__(self, together: bool) -> None:
        self.loads, self.together = LoadTracker(SETTINGS), together
        self.candidate_set = [LoadKey(instance, 1, "m") for instance in WORKERS[:2]]
        self.selection = LoadSelection(self.candidate_set)

    def take(self, candidate_set: list[LoadKey]) -> None:
        self.candidate_set, self.selection = candidate_set, LoadSelection(candidate_set)

    def ask(self, now: float) -> list[tuple[float, ...]]:
        if self.together:
            lines = np.full((len(self.candidate_set), k.NUM_COLUMNS), np.nan)
            self.loads.fill(self.selection, now, lines)
            assert not lines[:, k.PREDICTED].any()
            return [tuple(line) for line in lines[:, k.IN_FLIGHT : k.NUM_ASKED].tolist()]
        loads = [self.loads.of(*asked, now) for asked in self.candidate_set]
        return [
            (e.in_flight, e.queued_ms, e.work_ms, e.compute_ms_per_token, e.pull_ms_per_token)
            for e in loads
        ]


def happen(one: Asking, kind: str, number: int, tokens: int, at: int, now: float) -> None:
    asked = one.candidate_set[number % len(one.candidate_set)]
    report = Report(computed_tokens=tokens, prefill_ms=tokens / 7, ttft_ms=tokens / 5)
    match kind:
        case "routed":
            one.ask(now)
            one.loads.routed(f"r{at}", asked.instance, Plan(16, 0, (), tokens), 1.0, now)
        case "prefilled":
            one.loads.prefilled(f"r{at - number - 1}", report, now)
        case "done" | "failed":
            ended = Report(failed=True) if kind == "failed" else report
            one.loads.done(f"r{at - number - 1}", ended, now)
        case "restart":
            risen = LoadKey(asked.instance, asked.epoch + 1, asked.model)
            one.take([risen if each is asked else each for each in one.candidate_set])
        case "model":
            other = LoadKey(asked.instance, asked.epoch, MODELS[tokens % 2])
            one.take([other if each is asked else each for each in one.candidate_set])
        case "grown":
            known = [each.instance for each in one.candidate_set]
            new = [each for each in WORKERS if each not in known]
            one.take([*one.candidate_set, *(LoadKey(each, 1, "m") for each in new[:1])][-3:])
        case _:
            pass


@given(st.lists(steps, max_size=40))
def test_together_is_one_by_one(history: list[tuple[str, int, int, float]]) -> None:
    together, apart, now = Asking(True), Asking(False), 0.0
    for at, (kind, number, tokens, seconds) in enumerate(history):
        now += seconds
        for one in (together, apart):
            happen(one, kind, number, tokens, at, now)
        expected = [pytest.approx(line, rel=1e-9, abs=1e-9) for line in apart.ask(now)]
        assert together.ask(now) == expected
        assert len(together.loads) == len(apart.loads)
        assert together.loads.num_workers == apart.loads.num_workers


def test_rows_are_taken_again_and_the_table_grows() -> None:
    loads = LoadTracker(SETTINGS)
    fleet = [LoadKey(InstanceId(f"w{n}", 0), 1, "m") for n in range(300)]
    selections = LoadSelection(fleet), LoadSelection(fleet[:7])
    lines = np.zeros((300, k.NUM_COLUMNS))
    loads.fill(selections[0], 0.0, lines)
    loads.routed("r", fleet[250].instance, Plan(16, 0, (), 100), 0.0, 0.0)
    loads.fill(selections[1], 50.0, lines)
    loads.prefilled("r", Report(), 50.0)
    loads.expire(70.0)
    assert loads.num_workers == 8  # whoever was asked about or has something to do
    loads.done("r", Report(), 71.0)
    loads.expire(131.0)
    assert loads.num_workers == 0
    loads.fill(selections[0], 132.0, lines)
    assert loads.num_workers == 300
    assert not lines[:, k.QUEUED].any()
