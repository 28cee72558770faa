"""Prices over columns are those of pricing.py to the last bit, and so is all that follows."""

from math import fsum

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvatlas.indexer.index import kernel
from kvatlas.router.decision import price_kernel as k
from kvatlas.router.decision.candidate_table import CandidateTable
from kvatlas.router.decision.plans import QuestionPeers, plan_for
from kvatlas.router.decision.policies import POLICIES, picker, policy_named
from kvatlas.router.decision.pricing import TERMS, Price
from kvatlas.router.decision.scores import scores_of
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.routing import Candidate, CandidateScore, Question
from kvatlas.schemas.settings import RouterSettings
from testkit.candidate_tables import a_candidate_table

kernel.warm()

SETTINGS = st.builds(
    RouterSettings,
    load_window_ms=st.floats(0, 2_000),
    balance_weight=st.floats(0, 1),
    pull_weight=st.one_of(st.sampled_from([0.0, 1.0, 3.0]), st.floats(0, 20)),
    min_pull_tokens=st.sampled_from([0, 1, 16, 64, 160, 2**80]),
    degraded_match_share=st.floats(0, 1),
    predicted_match_share=st.floats(0, 1),
    pull_fixed_ms=st.floats(0, 50),
    dram_ms_per_1k_tokens=st.floats(0, 200),
    ssd_ms_per_1k_tokens=st.floats(0, 200),
    remote_ms_per_1k_tokens=st.floats(0, 200),
)
TRUST = [Trust.exact, Trust.exact, Trust.catching_up, Trust.degraded, Trust.stale, Trust.gone]
#: differences of a pull's least tokens are common
few = st.one_of(st.sampled_from([0, 1, 4, 10, 14]), st.integers(0, 40))
#: equal ones are common, as in an idle fleet
milliseconds = st.one_of(st.sampled_from([0.0, 10.0, 20.0]), st.floats(0, 1e9))
compute_rates = st.one_of(st.just(0.1), st.floats(1e-6, 10))
pull_rates = st.one_of(st.just(0.005), st.floats(1e-6, 10))


@st.composite
def questions(draw: st.DrawFn) -> Question:
    fleet = draw(
        st.lists(
            st.builds(
                Candidate,
                worker=st.just("w"),
                rank=st.integers(0, 1),
                trust=st.sampled_from(TRUST),
                group=st.integers(0, 1),
                block_tokens=st.sampled_from([16, 16, 16, 1, 64]),
                kv_class=st.sampled_from([1, 1, 1, 0, 2, 3]),
                held=st.one_of(few.map(lambda n: (n, 0, 0, 0, 0)), st.tuples(*[few] * 5)),
                predicted_blocks=st.sampled_from([0, 0, 3]),
                in_flight=st.integers(0, 2),
                queued_ms=milliseconds,
                work_ms=milliseconds,
                compute_ms_per_token=compute_rates,
                pull_ms_per_token=pull_rates,
            ),
            min_size=1,
            max_size=12,
        )
    )
    named = tuple(
        Candidate(f"w{n}", *(getattr(c, name) for name in c.__struct_fields__[1:]))
        for n, c in enumerate(fleet)
    )
    seed = draw(st.integers(0, 2**63 - 1))
    return Question(draw(st.integers(1, 8_000)), draw(st.integers(0, 9)), seed, named)


@settings(max_examples=300)
@given(questions(), SETTINGS, st.sampled_from(["predicted_ttft"] * 5 + sorted(POLICIES)))
def test_columns_and_objects_get_equal_choices_costs_and_plans(
    question: Question, chosen_settings: RouterSettings, name: str
) -> None:
    policy = policy_named(name, chosen_settings)
    choice, candidate_table = policy.choose(question), a_candidate_table(question)
    assert candidate_table.question == question
    assert picker(policy)(candidate_table) == (choice.chosen, choice.reason)
    assert [candidate_table.price_of(line) for line in range(len(candidate_table))] == choice.prices
    for chosen, price in enumerate(choice.prices):
        plan = plan_for(question, chosen, price, chosen_settings)
        assert plan_for(candidate_table, chosen, price, chosen_settings) == plan
    tokens = [sum(c.held) * c.block_tokens for c in question.candidates]
    assert candidate_table.longest == tokens.index(max(tokens))
    assert candidate_table.match_tokens(candidate_table.longest) == max(tokens)


@given(questions(), st.sampled_from([0, 1, 4]), st.integers(0, 3))
def test_plans_find_the_same_owners_in_either(question: Question, first: int, count: int) -> None:
    candidate_table, peers = priced(question), QuestionPeers(question)
    for chosen in range(len(candidate_table)):
        owners = peers.owners(chosen, first)
        assert candidate_table.owners(chosen, first) == owners
        assert candidate_table.next_best(owners, count) == peers.next_best(owners, count)
        if owners:
            assert candidate_table.lightest(owners) == peers.lightest(owners)


@given(questions(), st.integers(1, 14))
def test_the_cheapest_stand_in_order_and_equal_ones_as_they_came(
    question: Question, count: int
) -> None:
    candidate_table = priced(question)
    costs = candidate_table.columns[:, k.COST].tolist()
    assert (
        candidate_table.cheapest(count)
        == sorted(range(len(candidate_table)), key=costs.__getitem__)[:count]
    )


@pytest.mark.parametrize("count", [1, k.FEW, k.FEW + 1, 2_000])
def test_the_cheapest_of_many(count: int) -> None:
    lines = np.zeros((1_000, k.NUM_COLUMNS))
    lines[:, k.COST] = np.random.default_rng(1).integers(0, 40, 1_000)
    order = np.argsort(lines[:, k.COST], kind="stable")[:count].tolist()
    assert k.cheapest_lines(lines, count) == order


@given(questions(), st.integers(2, 14))
def test_what_is_recorded_is_the_cheapest_and_the_chosen(question: Question, limit: int) -> None:
    candidate_table = priced(question)
    chosen = len(candidate_table) - 1
    late, is_complete = candidate_table.recorded(chosen, limit)
    kept = late()
    assert is_complete == (len(candidate_table) <= limit)
    if is_complete:
        assert kept == question
        return
    lines = sorted({*candidate_table.cheapest(limit - 1), chosen})
    assert kept.candidates == tuple(question.candidates[line] for line in lines)
    assert (kept.prompt_tokens, kept.turn, kept.seed) == (
        question.prompt_tokens,
        question.turn,
        question.seed,
    )


@given(st.lists(st.one_of(st.floats(-1e300, 1e300), st.floats(-1, 1)), min_size=1, max_size=60))
@example([1.0, 2**-53, 2**-106])  # half way, and a little more
@example([-1.0, -(2**-53), -(2**-106)])
def test_the_mean_work_is_that_of_an_exact_sum(work: list[float]) -> None:
    lines = np.zeros((len(work), k.NUM_COLUMNS))
    lines[:, k.WORK] = work
    assert k.exact_mean(lines, k.WORK) == fsum(work) / len(work)


@given(questions(), st.integers(0, 11))
def test_the_lightest_of_equal_costs_is_that_of_objects(question: Question, of: int) -> None:
    candidate_table = priced(question)
    of %= len(candidate_table)
    candidate_table.columns[::2, k.COST] = candidate_table.columns[
        of, k.COST
    ]  # equal ones are rare otherwise
    costs = candidate_table.columns[:, k.COST].tolist()
    alike = [line for line, cost in enumerate(costs) if cost == costs[of]]
    assert candidate_table.least_loaded_of_cheapest(of, len(alike)) == QuestionPeers(
        question
    ).lightest(alike)


@given(questions(), SETTINGS, st.permutations(range(12)))
def test_scores_are_what_objects_say(
    question: Question, chosen_settings: RouterSettings, order: list[int]
) -> None:
    policy, candidate_table = (
        policy_named("predicted_ttft", chosen_settings),
        a_candidate_table(question),
    )
    prices = policy.choose(question).prices
    picker(policy)(candidate_table)
    lines = [line for line in order if line < len(candidate_table)]
    scores = [a_score(question.candidates[line], prices[line]) for line in lines]
    # as JSON, in which the order of names shows
    assert msgspec.json.encode(scores_of(candidate_table, lines)) == msgspec.json.encode(scores)


def a_score(candidate: Candidate, price: Price) -> CandidateScore:
    by_tier = {Tier(tier).name: blocks for tier, blocks in enumerate(candidate.held) if blocks}
    _, tier_load, predicted, trust, _, compute, _ = price.terms
    size = candidate.block_tokens
    return CandidateScore(
        worker=candidate.worker,
        rank=candidate.rank,
        base_url=f"http://{candidate.worker}",
        trust=candidate.trust,
        match_tokens=sum(candidate.held) * size,
        match_tokens_by_tier={name: blocks * size for name, blocks in by_tier.items()},
        cost_ms=price.cost_ms,
        terms=dict(zip(TERMS, price.terms, strict=True)),
        predicted_tokens=candidate.predicted_blocks * size,
        expected_ttft_ms=(
            candidate.queued_ms + tier_load + predicted + trust + price.pull_ms + compute
        ),
    )


def priced(question: Question) -> CandidateTable:
    candidate_table = a_candidate_table(question)
    picker(policy_named("predicted_ttft", RouterSettings()))(candidate_table)
    return candidate_table
