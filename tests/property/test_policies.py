"""Laws of every choice, on random fleets."""

from random import Random

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from kvatlas.router.decision.plans import MAX_PULL_STEPS, plan_for
from kvatlas.router.decision.policies import POLICIES, policy_named
from kvatlas.router.decision.pricing import price_all
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.routing import Candidate, Question
from kvatlas.schemas.settings import RouterSettings

PROMPT_BLOCKS = 100
SETTINGS = st.builds(
    RouterSettings,
    load_window_ms=st.floats(0, 2_000),
    balance_weight=st.floats(0, 1),
    pull_weight=st.floats(0, 20),
    min_pull_tokens=st.integers(0, 800),
    degraded_match_share=st.floats(0, 1),
    predicted_match_share=st.floats(0, 1),
    pull_fixed_ms=st.floats(0, 50),
    dram_ms_per_1k_tokens=st.floats(0, 200),
    ssd_ms_per_1k_tokens=st.floats(0, 200),
    remote_ms_per_1k_tokens=st.floats(0, 200),
)
LIVE = [Trust.exact, Trust.exact, Trust.catching_up, Trust.degraded, Trust.stale]


@st.composite
def candidates(draw: st.DrawFn, worker: str) -> Candidate:
    block_tokens = 16
    held = draw(st.tuples(*[st.integers(0, PROMPT_BLOCKS // 5)] * 5))
    return Candidate(
        worker=worker,
        rank=draw(st.integers(0, 1)),
        trust=draw(st.sampled_from(LIVE)),
        group=0,
        block_tokens=block_tokens,
        kv_class=draw(st.integers(0, 2)),
        held=held,
        predicted_blocks=draw(st.sampled_from([0, 0, PROMPT_BLOCKS - sum(held)])),
        in_flight=draw(st.integers(0, 3)),
        queued_ms=draw(st.sampled_from([0.0, 10.0, 5_000.0])),
        work_ms=draw(st.sampled_from([0.0, 1_000.0])),
        compute_ms_per_token=draw(st.floats(0.001, 1)),
        pull_ms_per_token=draw(st.floats(0.0001, 1)),
    )


@st.composite
def questions(draw: st.DrawFn) -> Question:
    fleet = tuple(draw(candidates(f"w{n}")) for n in range(draw(st.integers(1, 5))))
    tokens = 16 * PROMPT_BLOCKS + draw(st.integers(0, 15))
    return Question(tokens, draw(st.integers(0, 9)), draw(st.integers(0, 2**63 - 1)), fleet)


@given(questions(), SETTINGS)
def test_terms_add_up_and_the_chosen_is_the_cheapest(
    question: Question, settings: RouterSettings
) -> None:
    choice = policy_named("predicted_ttft", settings).choose(question)
    for price in choice.prices:
        assert sum(price.terms) == price.cost_ms
        assert all(term >= 0 for term in price.terms[:-1])
    assert choice.prices[choice.chosen].cost_ms == min(p.cost_ms for p in choice.prices)


@given(questions(), SETTINGS, st.sampled_from(sorted(POLICIES)), st.randoms(use_true_random=False))
def test_the_order_of_candidates_changes_nothing(
    question: Question, settings: RouterSettings, name: str, random: Random
) -> None:
    policy = policy_named(name, settings)
    order = random.sample(range(len(question.candidates)), len(question.candidates))
    turned = msgspec.structs.replace(
        question, candidates=tuple(question.candidates[at] for at in order)
    )
    one, other = policy.choose(question), policy.choose(turned)
    assert order[other.chosen] == one.chosen
    assert [other.prices[order.index(at)] for at in range(len(order))] == one.prices
    assert policy.choose(question) == one


@given(questions(), SETTINGS, st.data())
def test_a_longer_match_never_costs_more(
    question: Question, settings: RouterSettings, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(question.candidates) - 1))
    tier = data.draw(st.integers(0, 4))
    longer = data.draw(st.integers(1, 20))
    candidate = question.candidates[at]
    assume(sum(candidate.held) + candidate.predicted_blocks + longer <= PROMPT_BLOCKS)
    held = list(candidate.held)
    held[tier] += longer
    grown = msgspec.structs.replace(candidate, held=tuple(held))
    fleet = (*question.candidates[:at], grown, *question.candidates[at + 1 :])
    before = price_all(question, settings)[at]
    after = price_all(msgspec.structs.replace(question, candidates=fleet), settings)[at]
    assert after.cost_ms <= before.cost_ms + 1e-9 * abs(before.cost_ms) + 1e-9


@given(questions(), SETTINGS)
def test_a_plan_covers_the_prompt_once(question: Question, settings: RouterSettings) -> None:
    for chosen, price in enumerate(price_all(question, settings)):
        plan = plan_for(question, chosen, price, settings)
        at = plan.reuse_blocks
        for step in plan.pulls:
            owner = next(
                c for c in question.candidates if (c.worker, c.rank) == (step.worker, step.rank)
            )
            assert step.first_block == at
            assert step.num_blocks > 0
            at += step.num_blocks
            assert sum(owner.held) >= at
            assert owner.kv_class == question.candidates[chosen].kv_class != 0
            assert owner.instance != question.candidates[chosen].instance
        assert len(plan.pulls) <= MAX_PULL_STEPS
        assert plan.compute_tokens == max(question.prompt_tokens - at * plan.block_tokens, 1)
