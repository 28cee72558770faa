"""What makes an instance doubtful: restarts, losses, blocks of another size."""

import pytest

from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import AllBlocksCleared, BlockRemoved, SourceDegraded
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawDoubted,
    RawForgotten,
    RawGroupSeen,
    RawLost,
    RawRestarted,
    RawStored,
)
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from testkit.engine_words import DESCRIPTOR, MODEL, chain_of, removed, stored, tokens_of
from testkit.trackers import ROOT, doubts, held


@pytest.fixture
def tracker() -> EngineStateTracker:
    return EngineStateTracker(MODEL, DESCRIPTOR)


def test_f1_an_engine_that_began_anew_holds_nothing(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1), stored(2, tier=Tier.dram)])
    assert tracker.handle([RawRestarted("sequence 0 again")]) == [AllBlocksCleared(None)]
    assert tracker.num_blocks == 0


def test_doubts_are_told(tracker: EngineStateTracker) -> None:
    assert tracker.handle([RawDoubted("lost 3 to 9")]) == [SourceDegraded("lost 3 to 9")]


def test_what_a_doubt_leaves_unconfirmed_can_be_forgotten() -> None:
    bridge = EngineStateTracker(MODEL, DESCRIPTOR, counts_copies=True)
    bridge.handle([stored(1), stored(1), stored(2, parent=1), RawDoubted("lost 3 to 9")])
    bridge.handle([stored(1), stored(3, parent=1)])
    assert bridge.handle([RawForgotten()]) == [BlockRemoved(ROOT, chain_of(1, 2)[1])]
    # the copies of before the doubt count no more
    assert bridge.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]
    assert held(bridge) == {chain_of(1, 3)[1]}


def test_what_is_forgotten_leaves_no_copies() -> None:
    bridge = EngineStateTracker(MODEL, DESCRIPTOR, counts_copies=True)
    bridge.handle([stored(1), stored(1), RawDoubted("lost 3 to 9"), RawForgotten(), stored(1)])
    assert bridge.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]


def test_a_doubt_that_is_taken_back_forgets_nothing(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1), RawDoubted("lost 3 to 9"), RawDoubted("")])
    assert tracker.handle([RawForgotten()]) == []


# --- blocks of another size ----------------------------------------------------------------------


REASON = "the engine's blocks have 8 tokens, told were 4"


def large(*names: int, parent: int | None = None, group: int = 0) -> RawStored:
    """Say that blocks twice as long as told are held."""
    packed = b"".join(tokens_of(name, name) for name in names)
    return RawStored(names, parent, packed, group=group)


def test_f51_blocks_of_another_size_are_a_doubt_that_names_both_and_the_flag(
    tracker: EngineStateTracker,
) -> None:
    (reason,) = doubts(tracker.handle([large(1), large(2, 3)]))
    assert reason.startswith(REASON)
    assert "--block-tokens 8" in reason
    assert tracker.degraded_reason == reason
    assert tracker.counters.rejected_events == 2


def test_it_is_taken_back_by_a_block_of_the_right_size_while_none_of_another_is_held(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([large(1, 2)])
    assert doubts(tracker.handle([stored(5)])) == []
    assert doubts(tracker.handle([removed(1)])) == []
    assert doubts(tracker.handle([stored(6), removed(2)])) == []
    assert doubts(tracker.handle([stored(7)])) == [""]
    assert tracker.counters.unknown_removals == 0
    assert tracker.degraded_reason == ""


@pytest.mark.parametrize(
    "end", [RawCleared(None), RawCleared(Tier.hbm), RawLost(1, listing_follows=True)]
)
def test_what_ends_with_a_tier_is_missing_no_longer(
    tracker: EngineStateTracker, end: RawCleared | RawLost
) -> None:
    tracker.handle([large(1)])
    assert doubts(tracker.handle([RawCleared(Tier.dram), stored(5)])) == []
    assert doubts(tracker.handle([end, stored(5)])) == [""]


def test_a_doubt_that_others_take_back_leaves_our_own(tracker: EngineStateTracker) -> None:
    tracker.handle([RawDoubted("lost 3 to 9")])
    (both,) = doubts(tracker.handle([large(1)]))
    assert both.startswith("lost 3 to 9; the engine's blocks")
    (own,) = doubts(tracker.handle([RawDoubted("")]))
    assert own.startswith(REASON)
    tracker.handle([RawDoubted("lost 9"), RawForgotten()])
    assert doubts(tracker.handle([RawDoubted(""), stored(5)]))[-1] == ""
    tracker.handle([large(1), RawRestarted("sequence 0 again")])
    assert tracker.degraded_reason == ""


def test_a_block_of_another_size_that_comes_again_is_not_forgotten(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([large(1), RawDoubted("lost 3 to 9"), large(1), RawForgotten()])
    (reason,) = doubts(tracker.handle([RawDoubted(""), stored(5)]))
    assert reason.startswith(REASON)
    tracker.handle([RawDoubted("lost 3 to 9"), RawForgotten()])
    assert doubts(tracker.handle([RawDoubted(""), stored(6)]))[-1] == ""


def test_a_short_block_alone_is_the_end_of_a_prompt_and_no_doubt(
    tracker: EngineStateTracker,
) -> None:
    def short(name: int, parent: int | None) -> RawStored:
        return RawStored((name,), parent, tokens_of(name)[:8])

    assert doubts(tracker.handle([stored(1), short(2, 1), short(3, 1)])) == []
    (reason,) = doubts(tracker.handle([short(4, 3)]))
    assert "blocks have 2 tokens" in reason
    tracker.handle([RawRestarted("sequence 0 again")])
    (reason,) = doubts(tracker.handle([RawStored((7, 8), None, tokens_of(7))]))
    assert "blocks have 2 tokens" in reason


def test_blocks_of_groups_that_decide_nothing_are_no_doubt(tracker: EngineStateTracker) -> None:
    tracker.handle([RawGroupSeen(1, "sliding_window", 9, 4)])
    assert doubts(tracker.handle([large(1, group=1), large(2, group=2)])) == []


def test_blocks_of_another_size_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kvatlas.worker_hooks.reporting.engine_state.block_size_mismatch.MAX_MISMATCHES", 2
    )
    tracker = EngineStateTracker(MODEL, DESCRIPTOR)
    tracker.handle([large(1, 2, 3), removed(1, 2, 3)])
    assert doubts(tracker.handle([stored(5)])) == []
    assert doubts(tracker.handle([RawCleared(None), stored(5)])) == [""]
