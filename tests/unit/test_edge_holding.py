"""What the edge takes for held: tiers, copies, blocks known by hash alone, the serve pool."""

import pytest

from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Resync
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawHeld,
    RawListed,
    RawLost,
    RawRemoved,
    RawStored,
)
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from testkit.engine_words import DESCRIPTOR, MODEL, by_hash, chain_of, removed, stored, tokens_of
from testkit.trackers import ROOT, held, without_namespaces


@pytest.fixture
def tracker() -> EngineStateTracker:
    return EngineStateTracker(MODEL, DESCRIPTOR)


def test_removals_of_unknown_blocks_are_counted(tracker: EngineStateTracker) -> None:
    assert tracker.handle([removed(7, 8)]) == []
    assert tracker.counters.unknown_removals == 2


def test_two_engine_hashes_of_one_block_are_two_copies(tracker: EngineStateTracker) -> None:
    other = RawStored((b"other",), None, tokens_of(1))
    assert len(without_namespaces(tracker.handle([stored(1), other]))) == 1
    assert tracker.handle([removed(1)]) == []
    assert tracker.handle([removed(b"other")]) == [BlockRemoved(ROOT, chain_of(1)[0])]  # type: ignore[arg-type]


def test_an_engine_hash_taken_for_another_block_lets_the_first_go(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([stored(1)])
    events = tracker.handle([RawStored((1,), None, tokens_of(2))])
    assert events == [
        BlockRemoved(ROOT, chain_of(1)[0]),
        BlockStored(ROOT, chain_of(2)[0]),
    ]


def test_tiers_are_apart(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1), stored(1, tier=Tier.dram)])
    assert tracker.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]
    assert held(tracker, Tier.dram) == set(chain_of(1))
    # its parent is known as long as any tier holds it
    assert isinstance(tracker.handle([stored(2, parent=1)])[0], BlockStored)


def test_a_tier_can_be_cleared_alone(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1, 2), stored(1, tier=Tier.dram)])
    assert tracker.handle([RawCleared(Tier.hbm)]) == [AllBlocksCleared(Tier.hbm)]
    assert held(tracker) == set()
    assert held(tracker, Tier.dram) == set(chain_of(1))
    assert tracker.handle([removed(2)]) == []
    assert tracker.counters.unknown_removals == 1
    assert tracker.handle([stored(1)]) == [BlockStored(ROOT, chain_of(1)[0])]


def test_copies_are_forgotten_with_their_tier(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1), RawStored((b"other",), None, tokens_of(1)), RawCleared(Tier.hbm)])
    tracker.handle([stored(1)])
    assert tracker.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]


def test_after_a_loss_an_engine_that_lists_is_believed_from_nothing(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([stored(1, 2)])
    events = tracker.handle([RawLost(5, listing_follows=True), stored(1), RawListed(True)])
    assert events == [Resync(0, 0), AllBlocksCleared(None), BlockStored(ROOT, chain_of(1)[0])]
    assert held(tracker) == set(chain_of(1))
    assert tracker.counters.lost_events == 5


def test_after_a_loss_an_engine_that_cannot_list_keeps_what_it_had(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([stored(1, 2)])
    assert tracker.handle([RawLost(5, listing_follows=False)]) == [Resync(0, 0)]
    assert held(tracker) == set(chain_of(1, 2))


def test_what_is_held_already_is_no_news(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1, 2)])
    assert tracker.handle([stored(1, 2)]) == []
    assert tracker.counters.duplicate_blocks == 2


# --- blocks that the engine names by their hashes alone ------------------------------------------


def test_a_store_without_tokens_is_held_where_it_says(tracker: EngineStateTracker) -> None:
    """F43: an offload tier tells hashes only."""
    tracker.handle([stored(1, 2)])
    events = tracker.handle([by_hash(1, 2, tier=Tier.dram)])
    chain = chain_of(1, 2)
    assert events == [BlockStored(ROOT, b"".join(chain), None, Tier.dram)]
    assert held(tracker, Tier.dram) == set(chain)


def test_it_may_come_before_anything_has_said_what_the_block_is(
    tracker: EngineStateTracker,
) -> None:
    assert tracker.handle([by_hash(1, tier=Tier.dram)]) == []
    assert tracker.num_unnamed == 1
    tracker.handle([stored(1)])
    assert held(tracker, Tier.dram) == held(tracker) == set(chain_of(1))
    assert tracker.num_unnamed == 0


def test_what_is_known_by_hash_alone_is_no_prefix(tracker: EngineStateTracker) -> None:
    assert tracker.handle([by_hash(1), stored(2, parent=1)]) == []
    assert tracker.resident() == {0: {Tier.hbm: [1, 2]}}
    assert tracker.counters.parked_events == 1


def test_a_block_stays_known_while_some_tier_holds_it(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1), by_hash(1, tier=Tier.ssd), removed(1)])
    events = tracker.handle([stored(2, parent=1)])
    assert events == [BlockStored(ROOT, chain_of(1, 2)[1], chain_of(1)[0])]
    assert held(tracker, Tier.ssd) == set(chain_of(1))


def test_what_follows_a_kept_block_is_known_though_its_parent_is_gone(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([stored(1, 2), removed(1)])
    events = tracker.handle([stored(2, 3, parent=1)])
    assert events == [BlockStored(ROOT, b"".join(chain_of(1, 2, 3)[1:]), chain_of(1)[0])]


# --- copies --------------------------------------------------------------------------------------


def test_f20_from_outside_every_copy_counts() -> None:
    bridge = EngineStateTracker(MODEL, DESCRIPTOR, counts_copies=True)
    bridge.handle([stored(1), stored(1), stored(1)])
    assert bridge.handle([removed(1), removed(1)]) == []
    assert held(bridge) == set(chain_of(1))
    assert bridge.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]


def test_f20_inside_the_engine_a_removal_is_the_last_copys(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1), stored(1)])
    assert tracker.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]


def test_announcements_of_a_connector_are_no_copies() -> None:
    bridge = EngineStateTracker(MODEL, DESCRIPTOR, counts_copies=True)
    bridge.handle([stored(1), *[by_hash(1, tier=Tier.other)] * 3])
    assert bridge.handle([RawRemoved((1,), Tier.other)]) == [
        BlockRemoved(ROOT, chain_of(1)[0], Tier.other)
    ]


def test_clearing_forgets_copies() -> None:
    bridge = EngineStateTracker(MODEL, DESCRIPTOR, counts_copies=True)
    bridge.handle([stored(1), stored(1), RawCleared(Tier.hbm), stored(1)])
    assert bridge.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]


def test_a_handle_taken_for_another_block_keeps_no_copies_of_the_first() -> None:
    bridge = EngineStateTracker(MODEL, DESCRIPTOR, counts_copies=True)
    other = RawStored((1,), None, tokens_of(5))
    bridge.handle([stored(1), other])
    bridge.handle([removed(1)])
    assert held(bridge) == set()


# --- audits, the serve pool ----------------------------------------------------------------------


def test_f21_an_audit_shows_what_the_engine_counts_otherwise(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1, 2), RawHeld(2)])
    assert tracker.counters.audit_mismatches == 0
    tracker.handle([RawHeld(1)])
    assert tracker.counters.audit_mismatches == 1


@pytest.fixture
def pooling() -> EngineStateTracker:
    return EngineStateTracker(MODEL, DESCRIPTOR, has_pool=True)


def test_blocks_of_the_serve_pool_are_held_as_dram(pooling: EngineStateTracker) -> None:
    pooling.handle([stored(1, 2), removed(2)])
    one, two = chain_of(1, 2)
    (event,) = pooling.move_pooled([one], [])
    assert event == BlockStored(ROOT, one, None, Tier.dram)
    assert pooling.move_pooled([two], []) == []  # nothing says any more where it belongs
    assert pooling.handle([stored(2, parent=1)])[-1] == BlockStored(ROOT, two, one)
    assert held(pooling, Tier.dram) == {one, two}
    assert pooling.move_pooled([], [one]) == [BlockRemoved(ROOT, one, Tier.dram)]


def test_the_pool_outlives_what_the_engine_forgets(pooling: EngineStateTracker) -> None:
    pooling.handle([stored(1)])
    pooling.move_pooled(chain_of(1), [])
    events = pooling.handle([RawCleared(None)])
    assert events == [AllBlocksCleared(None), BlockStored(ROOT, chain_of(1)[0], None, Tier.dram)]
    assert pooling.move_pooled([], chain_of(1)) == [BlockRemoved(ROOT, chain_of(1)[0], Tier.dram)]
