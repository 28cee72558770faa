"""What every policy promises; a new one adds itself to POLICIES and is tested here."""

from collections import Counter

import pytest

from kvatlas.router.decision.policies import POLICIES, Policy, policy_named
from kvatlas.router.decision.pricing import TERMS
from kvatlas.schemas.errors import UnknownPolicy
from kvatlas.schemas.routing import Question
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import a_candidate

SETTINGS = RouterSettings()
FLEET = (
    a_candidate("w1", held=(10, 0, 0, 0, 0), queued_ms=50.0, in_flight=2),
    a_candidate("w2", held=(2, 1, 0, 0, 0), work_ms=900.0),
    a_candidate("w3", rank=0, queued_ms=4_000.0, in_flight=9),
    a_candidate("w3", rank=1),
)


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> Policy:
    return policy_named(request.param, SETTINGS)


def ask(turn: int = 0, seed: int = 0) -> Question:
    return Question(256, turn, seed, FLEET)


def test_a_policy_is_known_by_its_name(policy: Policy) -> None:
    assert POLICIES[policy.name] is type(policy)


def test_equal_questions_get_equal_choices(policy: Policy) -> None:
    again = policy_named(policy.name, SETTINGS)
    for seed in range(50):
        assert policy.choose(ask(seed, seed)) == again.choose(ask(seed, seed))


def test_the_order_of_candidates_does_not_matter(policy: Policy) -> None:
    for seed in range(50):
        question = Question(256, seed, seed, FLEET)
        turned = Question(256, seed, seed, FLEET[::-1])
        chosen = FLEET[policy.choose(question).chosen]
        assert turned.candidates[policy.choose(turned).chosen] == chosen


def test_every_candidate_is_priced(policy: Policy) -> None:
    prices = policy.choose(ask()).prices
    assert len(prices) == len(FLEET)
    for price in prices:
        assert sum(price.terms) == price.cost_ms
        assert len(price.terms) == len(TERMS)


def test_the_only_candidate_is_taken(policy: Policy) -> None:
    lonely = Question(64, 7, 7, (a_candidate(queued_ms=1e9),))
    assert policy.choose(lonely).chosen == 0


def test_equal_candidates_get_equal_shares(policy: Policy) -> None:
    """A thousand requests in one tick must not herd: what looks equal is drawn."""
    fleet = tuple(a_candidate(f"w{n}") for n in range(8))
    shares: Counter[int] = Counter()
    for turn in range(1_000):
        shares[policy.choose(Question(256, turn, turn * 7 + 1, fleet)).chosen] += 1
    sigma = (1_000 * 1 / 8 * 7 / 8) ** 0.5
    assert all(abs(shares[n] - 125) <= 4 * sigma for n in range(8))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownPolicy, match="no policy 'best'; known: predicted_ttft"):
        policy_named("best", SETTINGS)
