"""A decision as text, and what the text is made of."""

from typing import Any

import msgspec
import pytest

from kvatlas.events.archive.memory import MemoryArchive
from kvatlas.events.archive.port import DecisionRecord
from kvatlas.events.bus import Message
from kvatlas.hindsight.explain import archived_decision, explain, explanation
from kvatlas.schemas.errors import UnknownDecision
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import (
    DECISION_VERSION,
    CandidateScore,
    Decision,
    Plan,
    PullStep,
    Question,
    encode_decision,
)


def a_score(worker: str, cost_ms: float, **more: Any) -> CandidateScore:
    terms = more.pop("terms", {"wait": 0.0, "compute": cost_ms})
    match = more.pop("match", 0)
    tiers = more.pop("tiers", {"hbm": match})
    trust = more.pop("trust", Trust.exact)
    url = f"http://{worker}"
    return CandidateScore(worker, 0, url, trust, match, tiers, cost_ms, terms, **more)


def a_decision(chosen: CandidateScore, *others: CandidateScore, **more: Any) -> Decision:
    facts: dict[str, Any] = {
        "v": DECISION_VERSION,
        "id": "d1",
        "ts_ns": 1_800_000_000_123_000_000,
        "stream_sequence": 4711,
        "policy": "predicted_ttft",
        "model": "llama",
        "prompt_tokens": 8192,
        "chosen": chosen,
        "candidates": (chosen, *others),
        "num_candidates": 1 + len(others),
        "plan": Plan(16, 256, (), 4096),
        "reasons": ("predicted_ttft: the least predicted cost",),
        "settings": {},
        "question": Question(8192, 0, 0, ()),
        "index_age_ms": 3.2,
    }
    return Decision(**{**facts, **more})


DECISION = a_decision(
    a_score(
        "w1",
        230.0,
        match=4096,
        tiers={"hbm": 3072, "dram": 1024},
        predicted_tokens=512,
        terms={"wait": 20.0, "pull": 10.0, "compute": 205.0, "balance": -5.0},
    ),
    a_score("w2", 412.5, terms={"wait": 0.0, "pull": 0.0, "compute": 410.0, "balance": 2.5}),
    a_score("w3", 700.0, trust=Trust.degraded, terms={"wait": 290.0, "compute": 410.0}),
    num_candidates=40,
    plan=Plan(16, 256, (PullStep("w9", 1, 256, 64, (InstanceId("w8", 0),)),), 3072),
)

TEXT = """\
decision d1 at 2027-01-15T08:00:00.123+00:00
asked     8192 prompt tokens for model llama
policy    predicted_ttft
chosen    w1/0 (http://w1)

40 candidates, predicted ms by term
    worker  trust     match                                      cost ms   wait  pull  compute  balance
->  w1/0    exact     4096 (hbm 3072, dram 1024) +512 predicted    230.0   20.0  10.0    205.0     -5.0
    w2/0    exact     0                                            412.5    0.0   0.0    410.0      2.5
    w3/0    degraded  0                                            700.0  290.0   0.0    410.0      0.0
and 37 more, which cost more

because   predicted_ttft: the least predicted cost
          182.5 ms cheaper than w2/0, the next best
            compute    205.0 ms for it
            wait       20.0 ms against it
            pull       10.0 ms against it
            balance    7.5 ms for it

plan      reuse 4096 tokens (256 blocks of 16)
          pull 1024 tokens from w9/1 (blocks 256 to 319), else from w8/0
          compute 3072 tokens

index     at stream sequence 4711, broker last heard 3 ms before
doubt     the index is not exact about w3/0
doubt     512 tokens were counted on that earlier requests were about to bring
"""  # noqa: E501


def test_the_text_says_what_was_asked_who_was_there_why_and_how_sure() -> None:
    assert explain(DECISION) == TEXT


def test_a_lonely_candidate_needs_no_comparison() -> None:
    text = explain(a_decision(a_score("w1", 5.0)))
    assert "1 candidate," in text
    assert "nobody else could take it" in text
    assert "doubt" not in text


def test_a_choice_that_is_not_the_cheapest_says_so() -> None:
    decision = a_decision(a_score("w1", 50.0), a_score("w2", 30.0), policy="round_robin")
    assert not explanation(decision).is_cheapest
    assert "20.0 ms dearer than w2/0: round_robin does not choose by cost alone" in explain(
        decision
    )


def test_a_chosen_one_outside_the_recorded_few_is_in_the_table() -> None:
    chosen = a_score("w9", 90.0)
    text = explain(a_decision(chosen, candidates=(a_score("w1", 1.0),), num_candidates=2))
    assert "->  w9/0" in text
    assert "more, which" not in text


def test_what_is_doubtful_is_told() -> None:
    decision = a_decision(a_score("w1", 5.0, trust=Trust.stale), is_question_complete=False)
    assert explanation(decision).doubts == (
        "the index is stale about w1/0",
        "not all candidates are recorded, so running it again may choose otherwise",
    )


def test_the_terms_of_the_comparison_add_up_to_the_difference() -> None:
    runner_up = explanation(DECISION).runner_up
    assert runner_up is not None
    assert sum(term.ms for term in runner_up.by_term) == pytest.approx(runner_up.cheaper_ms)


def test_a_decision_without_terms_can_be_explained() -> None:
    decision = a_decision(a_score("w1", 0.0, terms={}), a_score("w2", 0.0, terms={}))
    assert "equal to w2/0, the next best" in explain(decision)


@pytest.mark.parametrize("other_ms", [10.04, 10.0, 9.96])
def test_costs_that_read_alike_are_equal_whatever_is_behind_the_point(other_ms: float) -> None:
    chosen = a_score("w1", 10.0, terms={"wait": -0.04, "compute": 10.0})
    plan = Plan(16, 1, (PullStep("w9", 1, 1, 1, ()),), 3072)
    text = explain(a_decision(chosen, a_score("w2", other_ms), plan=plan))
    assert "equal to w2/0, the next best" in text
    assert "-0.0" not in text
    assert "0.0 ms for it" not in text
    assert "0.0 ms against it" not in text
    assert "reuse 16 tokens (1 block of 16)" in text
    assert "pull 16 tokens from w9/1 (block 1)" in text


def test_scripts_get_json() -> None:
    document = msgspec.json.decode(msgspec.json.encode(explanation(DECISION)))
    assert document["runner_up"]["worker"] == "w2"
    assert document["decision"]["id"] == "d1"


def test_a_decision_is_read_from_an_archive() -> None:
    archive = MemoryArchive()
    message = Message(1, "kv.decisions.llama", encode_decision(DECISION), 0)
    archive.append_decisions([DecisionRecord(message, "d1")], [], 1)
    assert archived_decision(archive, "d1") == DECISION
    with pytest.raises(UnknownDecision):
        archived_decision(archive, "d2")
