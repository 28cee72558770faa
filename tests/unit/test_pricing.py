import pytest

from kvatlas.router.decision.plans import plan_for
from kvatlas.router.decision.pricing import TERMS, Price, price_all
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Candidate, Plan, PullStep, Question
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import a_candidate

SETTINGS = RouterSettings(
    load_window_ms=100.0,
    balance_weight=0.01,
    pull_weight=2.0,
    min_pull_tokens=64,
    pull_fixed_ms=5.0,
    degraded_match_share=0.5,
    predicted_match_share=0.9,
    dram_ms_per_1k_tokens=10.0,
)


def terms(price: Price) -> dict[str, float]:
    return {name: value for name, value in zip(TERMS, price.terms, strict=True) if value}


def priced(*candidates: Candidate, prompt_tokens: int = 1_000) -> list[Price]:
    return price_all(Question(prompt_tokens, 0, 1, candidates), SETTINGS)


def planned(chosen: int, *candidates: Candidate, prompt_tokens: int = 1_000) -> Plan:
    question = Question(prompt_tokens, 0, 1, candidates)
    return plan_for(question, chosen, price_all(question, SETTINGS)[chosen], SETTINGS)


def test_a_miss_costs_its_computation() -> None:
    assert terms(priced(a_candidate())[0]) == {"compute": pytest.approx(100.0)}


def test_a_match_in_hbm_costs_nothing() -> None:
    [price] = priced(a_candidate(held=(50, 0, 0, 0, 0)))
    assert terms(price) == {"compute": pytest.approx(20.0)}


def test_a_match_in_a_lower_tier_costs_its_load() -> None:
    [price] = priced(a_candidate(held=(0, 50, 0, 0, 0)))
    assert terms(price) == {"tier_load": pytest.approx(8.0), "compute": pytest.approx(20.0)}


def test_a_tier_is_never_dearer_than_computing() -> None:
    [price] = priced(a_candidate(held=(0, 50, 0, 0, 0), compute_ms_per_token=0.001))
    assert price.cost_ms == pytest.approx(1.0)


def test_an_unknown_tier_is_worth_nothing() -> None:
    [price] = priced(a_candidate(held=(0, 0, 0, 0, 50)))
    assert price.cost_ms == pytest.approx(100.0)


def test_a_whole_match_still_computes_a_token() -> None:
    [price] = priced(a_candidate(held=(10, 0, 0, 0, 0)), prompt_tokens=160)
    assert terms(price) == {"compute": pytest.approx(0.1)}


def test_queued_work_counts_beyond_the_window() -> None:
    inside, outside = priced(a_candidate(queued_ms=99.0), a_candidate(queued_ms=150.0))
    assert "wait" not in terms(inside)
    assert terms(outside)["wait"] == pytest.approx(50.0)


def test_surplus_of_work_counts_by_its_weight() -> None:
    less, more = priced(a_candidate("w1", work_ms=1_000.0), a_candidate("w2", work_ms=3_000.0))
    assert (terms(less)["balance"], terms(more)["balance"]) == (-10.0, 10.0)


@pytest.mark.parametrize("trust", [Trust.degraded, Trust.catching_up, Trust.stale])
def test_half_of_a_doubtful_match_is_priced_as_computed(trust: Trust) -> None:
    [price] = priced(a_candidate(held=(50, 0, 0, 0, 0), trust=trust))
    assert terms(price) == {"trust": pytest.approx(40.0), "compute": pytest.approx(20.0)}


def test_predicted_blocks_count_almost_as_a_match() -> None:
    [price] = priced(a_candidate(held=(10, 0, 0, 0, 0), predicted_blocks=40))
    assert terms(price) == {"predicted": pytest.approx(6.4), "compute": pytest.approx(20.0)}
    assert price.reuse_blocks == 50


class TestPulls:
    OWNER = a_candidate("owner", held=(50, 0, 0, 0, 0))

    def test_blocks_of_a_peer_are_pulled_where_that_is_cheaper(self) -> None:
        _, price = priced(self.OWNER, a_candidate("w2", held=(10, 0, 0, 0, 0)))
        assert (price.reuse_blocks, price.pull_end) == (10, 50)
        assert price.pull_ms == pytest.approx(5.0 + 640 * 0.005)
        # weight 2; the first 64 tokens cost at least what computing them would
        assert terms(price)["pull"] == pytest.approx(2 * (5.0 + 640 * 0.005))

    def test_a_short_pull_is_not_worth_it(self) -> None:
        _, price = priced(self.OWNER, a_candidate("w2", held=(47, 0, 0, 0, 0)))
        assert price.pull_end == 0

    def test_a_slow_pull_is_not_worth_it(self) -> None:
        _, price = priced(self.OWNER, a_candidate("w2", pull_ms_per_token=0.1))
        assert price.pull_end == 0

    def test_a_candidate_does_not_pull_from_itself(self) -> None:
        [price] = priced(self.OWNER)
        assert price.pull_end == 0

    @pytest.mark.parametrize("kv_class", [0, 2])
    def test_other_kv_is_not_pulled(self, kv_class: int) -> None:
        _, price = priced(self.OWNER, a_candidate("w2", kv_class=kv_class))
        assert price.pull_end == 0

    @pytest.mark.parametrize("trust", [Trust.degraded, Trust.stale])
    def test_doubtful_owners_are_not_asked(self, trust: Trust) -> None:
        owner = a_candidate("owner", held=(50, 0, 0, 0, 0), trust=trust)
        assert priced(owner, a_candidate("w2"))[1].pull_end == 0

    def test_predicted_blocks_are_not_pulled(self) -> None:
        owner = a_candidate("owner", predicted_blocks=50)
        assert priced(owner, a_candidate("w2"))[1].pull_end == 0

    def test_a_doubtful_match_is_pulled_as_a_whole(self) -> None:
        _, price = priced(
            self.OWNER, a_candidate("w2", held=(40, 0, 0, 0, 0), trust=Trust.degraded)
        )
        assert (price.reuse_blocks, price.pull_end) == (0, 50)


class TestPlans:
    def test_reuse_pull_and_compute_cover_the_prompt(self) -> None:
        owner = a_candidate("owner", held=(50, 0, 0, 0, 0))
        plan = planned(1, owner, a_candidate("w2", held=(10, 0, 0, 0, 0)))
        assert plan == Plan(16, 10, (PullStep("owner", 0, 10, 40),), 1_000 - 50 * 16)

    def test_the_least_loaded_of_the_longest_holders_is_asked(self) -> None:
        busy = a_candidate("busy", held=(50, 0, 0, 0, 0), queued_ms=90.0)
        free = a_candidate("free", held=(50, 0, 0, 0, 0))
        [step] = planned(2, busy, free, a_candidate("w3")).pulls
        assert (step.worker, step.fallbacks) == ("free", (InstanceId("busy", 0),))

    def test_what_a_free_owner_lacks_comes_from_the_longest(self) -> None:
        longest = a_candidate("longest", held=(60, 0, 0, 0, 0), queued_ms=90.0)
        free = a_candidate("free", held=(55, 0, 0, 0, 0))
        plan = planned(2, longest, free, a_candidate("w3"))
        assert [(s.worker, s.first_block, s.num_blocks) for s in plan.pulls] == [
            ("free", 0, 55),
            ("longest", 55, 5),
        ]

    def test_a_rest_below_the_threshold_is_computed(self) -> None:
        longest = a_candidate("longest", held=(60, 0, 0, 0, 0), queued_ms=90.0)
        free = a_candidate("free", held=(58, 0, 0, 0, 0))
        plan = planned(2, longest, free, a_candidate("w3"))
        assert [step.worker for step in plan.pulls] == ["free"]
        assert plan.compute_tokens == 1_000 - 58 * 16

    def test_a_short_holder_is_only_a_fallback(self) -> None:
        longest = a_candidate("longest", held=(60, 0, 0, 0, 0), queued_ms=90.0)
        free = a_candidate("free", held=(20, 0, 0, 0, 0))
        [step] = planned(2, longest, free, a_candidate("w3")).pulls
        assert (step.worker, step.fallbacks) == ("longest", (InstanceId("free", 0),))

    def test_a_plan_without_pulls(self) -> None:
        assert planned(0, a_candidate(held=(10, 0, 0, 0, 0))) == Plan(16, 10, (), 840)
