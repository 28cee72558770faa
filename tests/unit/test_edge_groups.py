"""Where a block counts that several KV groups hold, and where reuse may end in hybrid models."""

import pytest

from kvatlas.schemas.hashing import reuse_point
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import BlockRemoved, BlockStored
from kvatlas.worker_hooks.raw_events import RawCleared, RawGroupSeen
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from testkit.engine_words import DESCRIPTOR, MODEL, by_hash, chain_of, removed, stored
from testkit.trackers import ROOT, held, without_namespaces


@pytest.fixture
def tracker() -> EngineStateTracker:
    return EngineStateTracker(MODEL, DESCRIPTOR)


def test_a_block_is_usable_when_every_group_that_counts_holds_it() -> None:
    tracker = EngineStateTracker(MODEL, DESCRIPTOR, groups=(0, 2))
    assert tracker.handle([stored(1, 2, group=0)]) == []
    assert tracker.handle([stored(1, 2, group=1)]) == []  # does not count
    (_, event) = tracker.handle([stored(1, group=2)])
    assert event == BlockStored(ROOT, chain_of(1)[0])
    assert tracker.handle([removed(1, group=0)]) == [BlockRemoved(ROOT, chain_of(1)[0])]
    assert tracker.handle([removed(1, group=2)]) == []
    assert tracker.counters.ignored_events == 1


def test_only_usable_runs_with_news_are_said() -> None:
    tracker = EngineStateTracker(MODEL, DESCRIPTOR, groups=(0, 1))
    tracker.handle([stored(1, 2, 3, 4, group=0), removed(2, group=0)])
    events = without_namespaces(tracker.handle([stored(1, 2, 3, 4, group=1)]))
    chain = chain_of(1, 2, 3, 4)
    assert events == [
        BlockStored(ROOT, chain[0]),
        BlockStored(ROOT, chain[2] + chain[3], chain[1]),
    ]


# --- hybrid models -------------------------------------------------------------------------------


#: four tokens a block, so a hit needs the last two blocks of the window
HYBRID = [
    RawGroupSeen(0, "sliding_window", window_tokens=9, block_tokens=4),
    RawGroupSeen(1, "full_attention", block_tokens=4),
]


def points(tracker: EngineStateTracker, *names: int) -> set[int]:
    """Return after how many blocks of a chain reuse may end."""
    ends = enumerate(chain_of(*names), 1)
    return {end for end, block in ends if tracker.residency.holds(Tier.hbm, reuse_point(block))}


def test_f56_a_window_says_where_reuse_may_end_and_holds_no_prefix(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([*HYBRID, by_hash(4, 5, group=0), stored(1, 2, 3, 4, 5, group=1)])
    chain = chain_of(1, 2, 3, 4, 5)
    assert held(tracker) == {*chain, reuse_point(chain[4])}
    assert tracker.ends_at_reuse_points
    assert tracker.resident() == {0: {Tier.hbm: [4, 5]}, 1: {Tier.hbm: [4, 5, 1, 2, 3]}}


def test_near_the_beginning_a_window_is_whole_sooner(tracker: EngineStateTracker) -> None:
    tracker.handle([*HYBRID, by_hash(1, 2, group=0), stored(1, 2, 3, group=1)])
    assert points(tracker, 1, 2, 3) == {1, 2}


def test_a_removal_in_one_group_leaves_what_another_holds(tracker: EngineStateTracker) -> None:
    tracker.handle([*HYBRID, by_hash(1, 2, group=0), stored(1, 2, group=1)])
    events = tracker.handle([removed(2, group=0)])
    assert events == [BlockRemoved(ROOT, reuse_point(chain_of(1, 2)[1]))]
    assert set(chain_of(1, 2)) <= held(tracker)
    tracker.handle([removed(1, group=1)])
    assert chain_of(1)[0] not in held(tracker)
    assert tracker.resident() == {0: {Tier.hbm: [1]}, 1: {Tier.hbm: [2]}}


def test_a_state_space_group_needs_its_last_block_only(tracker: EngineStateTracker) -> None:
    groups = [RawGroupSeen(0, "mamba"), RawGroupSeen(1, "full_attention")]
    tracker.handle([*groups, by_hash(3, group=0), stored(1, 2, 3, 4, group=1)])
    assert points(tracker, 1, 2, 3, 4) == {3}


def test_a_group_of_unknown_kind_has_to_hold_every_block(tracker: EngineStateTracker) -> None:
    tracker.handle([RawGroupSeen(0, "full_attention"), RawGroupSeen(1, "unknown")])
    tracker.handle([stored(1, 2, group=0)])
    assert held(tracker) == set()
    tracker.handle([stored(1, group=1)])
    assert held(tracker) == set(chain_of(1))


def test_groups_that_show_late_change_what_was_told(tracker: EngineStateTracker) -> None:
    tracker.handle([by_hash(2, group=3), stored(1, 2)])
    assert held(tracker) == set(chain_of(1, 2))
    events = tracker.handle([RawGroupSeen(3, "full_attention")])
    assert events == [BlockRemoved(ROOT, chain_of(1)[0])]


def test_clearing_takes_the_reuse_points_along(tracker: EngineStateTracker) -> None:
    tracker.handle([*HYBRID, by_hash(1, 2, group=0), stored(1, 2, group=1)])
    tracker.handle([RawCleared(Tier.hbm)])
    tracker.handle([stored(1, 2, group=1)])
    assert points(tracker, 1, 2) == set()
    tracker.handle([by_hash(2, group=0)])
    assert points(tracker, 1, 2) == set()
    tracker.handle([by_hash(1, group=0)])
    assert points(tracker, 1, 2) == {1, 2}


def test_blocks_that_another_tier_keeps_become_reuse_points_again(
    tracker: EngineStateTracker,
) -> None:
    window, blocks = by_hash(1, 2, group=0), stored(1, 2, group=1)
    tracker.handle([*HYBRID, window, blocks, by_hash(1, 2, group=1, tier=Tier.dram)])
    tracker.handle([RawCleared(Tier.hbm), blocks])
    assert points(tracker, 1, 2) == set()
    tracker.handle([window])
    assert points(tracker, 1, 2) == {1, 2}
