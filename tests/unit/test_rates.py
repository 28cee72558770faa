"""Estimates of rates under reports that are wrong, false or merely odd."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.decision.rates import MAX_MODEL_RATIO, ModelRate, RateEstimate, is_plausible

REFERENCE = 1.0


def estimate(max_ratio: float = 3.0) -> RateEstimate:
    return RateEstimate(REFERENCE, 15, max_ratio)


class TestPlausible:
    def test_a_prefill_fits_into_the_time_that_has_passed(self) -> None:
        assert is_plausible(100.0, elapsed_ms=120.0)
        assert not is_plausible(1e10, elapsed_ms=120.0)

    def test_a_prefill_ends_before_the_first_token(self) -> None:
        assert is_plausible(100.0, elapsed_ms=5_000.0, ttft_ms=110.0)
        assert not is_plausible(4_900.0, elapsed_ms=5_000.0, ttft_ms=110.0)

    def test_output_tokens_need_time_too(self) -> None:
        assert is_plausible(4_000.0, elapsed_ms=5_000.0, output_tokens=1_000)
        assert not is_plausible(4_990.0, elapsed_ms=5_000.0, output_tokens=1_000)

    def test_one_output_token_comes_with_the_prefill(self) -> None:
        assert is_plausible(100.0, elapsed_ms=100.0, output_tokens=1)


class TestEstimate:
    @given(
        st.lists(st.floats(0.9, 1.1), min_size=8, max_size=8),
        st.lists(st.floats(0, 1e12), max_size=5),
    )
    def test_a_minority_of_false_samples_moves_it_within_the_honest_ones(
        self, honest: list[float], false: list[float]
    ) -> None:
        learnt = estimate(max_ratio=1_000)
        for ms_per_token in [*false, *honest]:
            learnt.learn(100, 100 * ms_per_token, REFERENCE)
        assert 0.9 <= learnt.ms_per_token <= 1.1

    def test_three_alike_replace_the_reference(self) -> None:
        learnt = estimate()
        seen = []
        for _ in range(3):
            learnt.learn(1_000, 2_000.0, REFERENCE)
            seen.append(learnt.ms_per_token)
        assert seen == [1.0, 1.0, 2.0]

    def test_a_long_prompt_does_not_outweigh_all_others(self) -> None:
        learnt = estimate()
        for _ in range(5):
            learnt.learn(1_000, 1_000.0, REFERENCE)
        learnt.learn(1_000_000, 2_900_000.0, REFERENCE)
        assert learnt.ms_per_token == 1.0

    @given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 1e12)), min_size=1, max_size=40))
    def test_it_stays_near_its_reference(self, samples: list[tuple[int, float]]) -> None:
        learnt = estimate()
        for tokens, ms in samples:
            learnt.learn(tokens, ms, REFERENCE)
            assert REFERENCE / 3 <= learnt.ms_per_token <= REFERENCE * 3

    def test_without_its_samples_it_is_the_reference_as_of_then(self) -> None:
        learnt = estimate()
        for _ in range(5):
            learnt.learn(1_000, 2_500.0, REFERENCE)
        assert learnt.ms_per_token == 2.5
        for _ in range(5):
            learnt.drop_oldest(0.5)
        assert (len(learnt), learnt.ms_per_token) == (0, 0.5)

    def test_with_a_single_sample_it_follows_the_reference(self) -> None:
        learnt = estimate()
        learnt.learn(1_000, 2_500.0, REFERENCE)
        learnt.follow(0.25)
        assert learnt.ms_per_token == 0.25


def test_a_model_stays_within_reach_of_the_configured_rate() -> None:
    rate = ModelRate(0.1)
    for _ in range(100):
        rate.learn(1_000, 1e12)
    assert rate.ms_per_token == pytest.approx(0.1 * MAX_MODEL_RATIO)
