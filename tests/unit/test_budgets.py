"""Who may say how much, and when silence is lifted."""

import pytest

from kvatlas.indexer.fold import budgets as budgets_module
from kvatlas.indexer.fold.budgets import BudgetSettings, EventBudgets
from kvatlas.schemas.ids import InstanceId

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)
SECOND = 1_000_000_000
SETTINGS = BudgetSettings(
    bytes_per_second=10.0, burst_bytes=100.0, throttle_seconds=1.0, max_throttle_seconds=8.0
)


def test_a_burst_is_within_the_budget_and_what_is_beyond_it_is_not() -> None:
    budgets = EventBudgets(SETTINGS)
    assert budgets.spend(W1, 60, SECOND)
    assert budgets.spend(W1, 40, SECOND)
    assert not budgets.spend(W1, 1, SECOND)
    assert budgets.spend(W2, 100, SECOND)


def test_the_bucket_fills_by_the_brokers_time_up_to_a_burst() -> None:
    budgets = EventBudgets(SETTINGS)
    assert budgets.spend(W1, 100, SECOND)
    assert not budgets.spend(W1, 11, 2 * SECOND)
    assert budgets.spend(W1, 10, 3 * SECOND)
    assert not budgets.spend(W1, 101, 100 * SECOND)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    budgets = EventBudgets(SETTINGS)
    assert budgets.spend(W1, 100, 9 * SECOND)
    assert not budgets.spend(W1, 1, 2 * SECOND)
    assert not budgets.spend(W1, 1, 9 * SECOND)
    assert budgets.spend(W1, 10, 10 * SECOND)


def test_buckets_are_bounded_and_the_oldest_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets_module, "MAX_BUCKETS", 1)
    budgets = EventBudgets(SETTINGS)
    assert budgets.spend(W1, 100, SECOND)
    assert budgets.spend(W2, 60, SECOND)
    assert budgets.spend(W1, 100, SECOND), "left out, hence a full one again"
    assert len(budgets._buckets) == 1


def test_no_rate_limits_nobody() -> None:
    budgets = EventBudgets(BudgetSettings(bytes_per_second=0))
    assert budgets.spend(W1, 10**12, SECOND)


def test_silence_is_lifted_later_each_time_up_to_a_bound() -> None:
    budgets = EventBudgets(SETTINGS)
    for times, seconds in ((1, 1), (2, 2), (3, 4), (4, 8), (50, 8)):
        throttled = [(W1, 7, SECOND, times)]
        assert not [*budgets.due(throttled, (1 + seconds) * SECOND - 1)]
        assert [*budgets.due(throttled, (1 + seconds) * SECOND)] == [(W1, 7)]
