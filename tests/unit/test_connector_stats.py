"""What became of loads, for an engine's log and metrics."""

from collections import Counter

from kvatlas.worker_hooks.connector.loads import LoadOutcomes
from kvatlas.worker_hooks.connector.stats import added, in_words, stats_of


def test_no_loads_are_no_stats() -> None:
    assert stats_of(LoadOutcomes()) == {}
    assert in_words({}) == {"kvatlas loads": 0, "mean ms": 0.0, "blocks": 0}


def test_stats_add_up() -> None:
    one = stats_of(LoadOutcomes(1, 0.1, Counter(held=3, own=0, not_held=1)))
    assert one == {"loads": 1, "seconds": 0.1, "blocks": {"held": 3, "not_held": 1}}
    both = added(one, stats_of(LoadOutcomes(3, 0.3, Counter(held=1, no_room=2))))
    assert both == {
        "loads": 4,
        "seconds": 0.4,
        "blocks": {"held": 4, "not_held": 1, "no_room": 2},
    }
    assert added({}, one) == one


def test_a_log_says_what_came_and_why_the_rest_did_not() -> None:
    stats = stats_of(LoadOutcomes(2, 0.05, Counter(held=4, own=1, no_room=2, behind=1)))
    assert in_words(stats) == {
        "kvatlas loads": 2,
        "mean ms": 25.0,
        "blocks": 5,
        "blocks missing (behind)": 1,
        "blocks missing (no_room)": 2,
    }
