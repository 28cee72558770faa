"""The short way to a price gives what the long way gives, to the last bit."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.decision import pricing
from kvatlas.router.decision.pricing import price_all
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.routing import Candidate, Question
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import a_candidate

blocks = st.integers(0, 40)
candidates = st.builds(
    lambda n, trust, kv_class, held, predicted, queued, work: a_candidate(
        f"w{n}",
        trust=trust,
        kv_class=kv_class,
        held=held,
        predicted_blocks=predicted,
        queued_ms=queued,
        work_ms=work,
    ),
    st.integers(1, 9),
    st.sampled_from([Trust.exact, Trust.exact, Trust.degraded, Trust.stale]),
    st.integers(0, 2),
    st.one_of(
        blocks.map(lambda n: (n, 0, 0, 0, 0)), st.tuples(blocks, blocks, blocks, blocks, blocks)
    ),
    st.sampled_from([0, 0, 3]),
    st.floats(0, 5_000),
    st.floats(0, 5_000),
)


@given(
    st.lists(candidates, min_size=1, max_size=6),
    st.integers(1, 4_000),
    st.sampled_from([0, 1, 64, 256]),
)
def test_short_and_long_way_agree(
    found: list[Candidate], prompt_tokens: int, min_pull_tokens: int
) -> None:
    settings = RouterSettings(min_pull_tokens=min_pull_tokens, load_window_ms=100.0)
    question = Question(prompt_tokens, 0, 1, tuple(found))
    owners = pricing._longest_owners(question.candidates)
    for position, price in enumerate(price_all(question, settings)):
        c = found[position]
        best = owners.get(c.kv_class)
        owned = 0
        if best is not None:
            owned = best.next_blocks if best.position == position else best.blocks
        wait, *_, balance = price.terms
        tiers = pricing._tier_prices(settings)
        assert price == pricing._price(c, prompt_tokens, owned, wait, balance, tiers, settings)
