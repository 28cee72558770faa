"""How much may be told of a namespace, and how long it is muted beyond that."""

import msgspec
import pytest

from kvatlas.schemas.settings import SidecarSettings
from kvatlas.worker_hooks.reporting.engine_state import namespace_budgets
from kvatlas.worker_hooks.reporting.engine_state.namespace_budgets import (
    NamespaceBudgets,
    NamespaceBudgetSettings,
)
from kvatlas.worker_hooks.sidecar.options import SidecarOptions

#: a setting, and its name in NamespaceBudgetSettings
SETTING_NAMES = {
    "namespace_blocks_per_second": "blocks_per_second",
    "namespace_burst_blocks": "burst_blocks",
}
A, B, C = (bytes([number]) * 16 for number in range(3))
SETTINGS = NamespaceBudgetSettings(
    blocks_per_second=10.0, burst_blocks=100.0, mute_seconds=1.0, max_mute_seconds=8.0
)


def test_a_burst_is_within_the_budget_and_what_is_beyond_it_mutes() -> None:
    budgets = NamespaceBudgets(SETTINGS)
    assert budgets.spend(A, 60, 0.0)
    assert budgets.spend(A, 40, 0.0)
    assert not budgets.spend(A, 1, 0.0)
    assert budgets.num_over_budget == 1


def test_one_namespace_costs_no_other_anything() -> None:
    budgets = NamespaceBudgets(SETTINGS)
    assert not budgets.spend(A, 1_000, 0.0)
    assert budgets.spend(B, 100, 0.0)


def test_the_bucket_fills_with_time_up_to_a_burst() -> None:
    budgets = NamespaceBudgets(SETTINGS)
    assert budgets.spend(A, 100, 0.0)
    assert budgets.spend(A, 10, 1.0)
    assert budgets.spend(A, 100, 1_000.0)
    assert not budgets.spend(A, 11, 1_001.0)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    budgets = NamespaceBudgets(SETTINGS)
    assert budgets.spend(A, 100, 9.0)
    assert budgets.spend(A, 0, 2.0)
    assert budgets.spend(A, 10, 10.0)
    assert not budgets.spend(A, 1, 10.0)


def test_no_rate_limits_nobody() -> None:
    budgets = NamespaceBudgets(NamespaceBudgetSettings(blocks_per_second=0))
    assert budgets.spend(A, 10**12, 0.0)


def test_what_is_told_of_a_muted_one_costs_it_nothing() -> None:
    budgets = NamespaceBudgets(SETTINGS)
    assert not budgets.spend(A, 101, 0.0)
    assert budgets.spend(A, 10**9, 0.5)
    assert budgets.due(1.0) == [A]
    assert budgets.spend(A, 10, 1.0)


def test_each_mute_lasts_twice_as_long_up_to_a_bound_and_ends_once() -> None:
    budgets, now = NamespaceBudgets(SETTINGS), 0.0
    for seconds in (1, 2, 4, 8, 8):
        assert not budgets.spend(A, 1_000, now)
        assert budgets.due(now + seconds - 0.01) == []
        now += seconds
        assert budgets.due(now) == [A]
        assert budgets.due(now) == []


def test_after_a_quiet_time_it_begins_anew() -> None:
    budgets = NamespaceBudgets(SETTINGS)
    budgets.spend(A, 1_000, 0.0)
    budgets.due(1.0)
    budgets.spend(A, 1_000, 2.0)
    assert budgets.due(3.9) == []
    assert budgets.due(4.0) == [A]
    budgets.spend(A, 1_000, 4.0 + SETTINGS.max_mute_seconds)
    assert budgets.due(5.0 + SETTINGS.max_mute_seconds) == [A]


def test_the_least_recently_used_is_left_out_and_never_a_muted_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespace_budgets, "MAX_BUCKETS", 2)
    budgets = NamespaceBudgets(SETTINGS)
    assert not budgets.spend(A, 101, 0.0)
    assert budgets.spend(B, 100, 0.0)
    assert budgets.spend(C, 1, 0.0)
    assert budgets.spend(B, 100, 0.0)  # left out, hence a full one again
    assert budgets.due(1.0) == [A]


def test_a_bucket_that_is_used_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_budgets, "MAX_BUCKETS", 2)
    budgets = NamespaceBudgets(SETTINGS)
    for root in (A, B, A, C):
        assert budgets.spend(root, 40, 0.0)
    assert not budgets.spend(A, 40, 0.0)


def test_more_than_so_many_are_not_muted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_budgets, "MAX_MUTED", 1)
    budgets = NamespaceBudgets(SETTINGS)
    assert not budgets.spend(A, 101, 0.0)
    assert budgets.spend(B, 101, 0.0)
    budgets.due(1.0)
    assert not budgets.spend(B, 1_000, 1.0)


def test_what_settings_say_is_what_is_done_unasked() -> None:
    options = {field.name: field.default for field in msgspec.structs.fields(SidecarOptions)}
    assert options["namespace_mute_seconds"] == NamespaceBudgetSettings().mute_seconds
    for setting, name in SETTING_NAMES.items():
        default = getattr(NamespaceBudgetSettings(), name)
        assert getattr(SidecarSettings(), setting) == options[setting] == default
