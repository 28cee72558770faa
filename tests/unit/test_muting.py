"""A namespace that told too much: what is told of it while it is muted, and when that is over."""

import pytest

from kvatlas.schemas.digest import digest_of
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Digest,
    Inventory,
    KvEvent,
    NamespacesOverBudget,
    SourceDegraded,
    WorkerUp,
)
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawDoubted,
    RawEvent,
    RawGroupSeen,
    RawRestarted,
    RawStored,
    encode_raw,
)
from kvatlas.worker_hooks.reporting.engine_state.namespace_budgets import NamespaceBudgetSettings
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.reporting.outbox import Outbox
from kvatlas.worker_hooks.reporting.reporter import Reporter
from testkit.builders import up
from testkit.engine_words import (
    BLOCK_TOKENS,
    DESCRIPTOR,
    MODEL,
    chain_of,
    removed,
    stored,
    tokens_of,
)

PLAIN, SALTED = (DESCRIPTOR.namespace(MODEL, None, salt).root() for salt in (None, "tenant"))
WHY = "more than 10 blocks/s"


@pytest.fixture
def tracker() -> EngineStateTracker:
    return EngineStateTracker(MODEL, DESCRIPTOR)


#: what is published with an inventory where nothing is degraded
NO_NOTICES = [SourceDegraded(""), NamespacesOverBudget(b"")]


def told(tracker: EngineStateTracker, tier: Tier = Tier.hbm) -> set[bytes]:
    return {block for block, _ in tracker.residency.blocks(tier)}


def tenants(*names: int, parent: int | None = None) -> RawStored:
    """Say that blocks of the salted namespace are held; their engine hashes are 100 and more."""
    engine_hashes = tuple(100 + name for name in names)
    above = None if parent is None else 100 + parent
    return RawStored(engine_hashes, above, tokens_of(*names), cache_salt="tenant")


# --- the edge ------------------------------------------------------------------------------------


def test_what_comes_to_a_muted_namespace_is_withheld_and_others_are_told(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([tenants(1)])
    assert tracker.mark_over_budget([SALTED], WHY) == [NamespacesOverBudget(SALTED, WHY)]
    assert tracker.handle([tenants(2, 3, parent=1)]) == []
    events = tracker.handle([stored(1, 2)])
    assert BlockStored(PLAIN, b"".join(chain_of(1, 2))) in events
    assert told(tracker) == {*chain_of(1, salt="tenant"), *chain_of(1, 2)}
    assert tracker.digests()[Tier.hbm] == Digest(Tier.hbm, *digest_of(told(tracker)))
    assert (tracker.counters.withheld_blocks, tracker.counters.namespace_mutes) == (2, 1)
    assert tracker.num_named(Tier.hbm) == 5


def test_removals_of_what_was_told_are_told_and_of_what_was_withheld_are_not(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([tenants(1)])
    tracker.mark_over_budget([SALTED], WHY)
    tracker.handle([tenants(2, parent=1)])
    assert tracker.handle([removed(102)]) == []
    (one,) = chain_of(1, salt="tenant")
    assert tracker.handle([removed(101)]) == [BlockRemoved(SALTED, one)]
    assert tracker.num_named(Tier.hbm) == 0
    tracker.clear_over_budget([SALTED])
    assert told(tracker) == set()


def test_a_block_that_was_told_and_comes_again_is_withheld(tracker: EngineStateTracker) -> None:
    tracker.handle([tenants(1)])
    tracker.mark_over_budget([SALTED], WHY)
    tracker.handle([removed(101)])
    assert tracker.handle([tenants(1)]) == []
    tracker.clear_over_budget([SALTED])
    assert told(tracker) == set(chain_of(1, salt="tenant"))


def test_a_further_copy_of_what_was_told_is_no_news_and_not_withheld(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([tenants(1)])
    tracker.mark_over_budget([SALTED], WHY)
    tracker.handle([RawStored((777,), None, tokens_of(1), cache_salt="tenant")])
    assert tracker.counters.withheld_blocks == 0
    assert tracker.handle([removed(101)]) == []
    (one,) = chain_of(1, salt="tenant")
    assert tracker.handle([removed(777)]) == [BlockRemoved(SALTED, one)]


def test_further_copies_of_withheld_blocks_are_counted_over_the_end_of_a_mute(
    tracker: EngineStateTracker,
) -> None:
    tracker.mark_over_budget([SALTED], WHY)
    twin = RawStored((777,), None, tokens_of(1), cache_salt="tenant")
    tracker.handle([tenants(1), twin])
    tracker.clear_over_budget([SALTED])
    assert tracker.handle([removed(101)]) == []
    (one,) = chain_of(1, salt="tenant")
    assert tracker.handle([removed(777)]) == [BlockRemoved(SALTED, one)]


def test_one_namespace_speaks_again_while_another_stays_muted(tracker: EngineStateTracker) -> None:
    tracker.mark_over_budget([SALTED, PLAIN], WHY)
    tracker.handle([tenants(1), stored(1)])
    tracker.clear_over_budget([PLAIN])
    assert told(tracker) == set(chain_of(1))
    assert tracker.degradation_notices() == [NamespacesOverBudget(SALTED, WHY)]
    tracker.clear_over_budget([SALTED])
    assert tracker.degradation_notices() == []
    assert tracker.degradation_notices(even_none=True) == NO_NOTICES


def test_that_there_are_no_notices_is_published_even_if_there_never_were(
    tracker: EngineStateTracker,
) -> None:
    """What readers know of notices may be forged."""
    assert tracker.degradation_notices(even_none=True) == NO_NOTICES
    assert tracker.degradation_notices() == []


def test_what_is_cleared_is_withheld_no_longer(tracker: EngineStateTracker) -> None:
    tracker.handle([tenants(1)])
    tracker.mark_over_budget([SALTED], WHY)
    tracker.handle([tenants(2, parent=1)])
    assert tracker.handle([RawCleared(None)]) == [AllBlocksCleared(None)]
    tracker.clear_over_budget([SALTED])
    assert told(tracker) == set()


def test_a_withheld_block_is_not_disowned(tracker: EngineStateTracker) -> None:
    tracker.mark_over_budget([SALTED], WHY)
    tracker.handle([tenants(1)])
    assert tracker.retract(b"".join(chain_of(1, salt="tenant"))) == []
    assert tracker.retract(b"".join(chain_of(9))) != []


def test_blocks_of_the_pool_are_withheld_too() -> None:
    tracker = EngineStateTracker(MODEL, DESCRIPTOR, has_pool=True)
    chain = chain_of(1, 2, salt="tenant")
    tracker.handle([tenants(1, 2)])
    tracker.move_pooled(chain[:1], [])
    tracker.mark_over_budget([SALTED], WHY)
    assert tracker.move_pooled(chain[1:], []) == []
    assert tracker.move_pooled([], chain[:1]) == [BlockRemoved(SALTED, chain[0], Tier.dram)]
    tracker.clear_over_budget([SALTED])
    assert told(tracker, Tier.dram) == {chain[1]}


def test_the_pool_of_a_muted_namespace_is_withheld_after_a_clearing() -> None:
    tracker = EngineStateTracker(MODEL, DESCRIPTOR, has_pool=True)
    chain = chain_of(1, salt="tenant")
    tracker.handle([tenants(1)])
    tracker.move_pooled(chain, [])
    tracker.mark_over_budget([SALTED], WHY)
    assert tracker.handle([RawCleared(None)]) == [AllBlocksCleared(None)]
    tracker.clear_over_budget([SALTED])
    assert told(tracker, Tier.dram) == set(chain)


def test_reuse_points_are_withheld_with_their_blocks() -> None:
    tracker = EngineStateTracker(MODEL, DESCRIPTOR)
    tracker.handle([RawGroupSeen(1, "sliding_window", window_tokens=BLOCK_TOKENS + 1)])
    tracker.mark_over_budget([SALTED], WHY)
    window = RawStored((101,), None, b"", group=1)
    assert tracker.handle([tenants(1), window]) == []
    assert tracker.num_named(Tier.hbm) == 2
    tracker.clear_over_budget([SALTED])
    assert len(told(tracker)) == 2


def test_the_namespace_of_a_withheld_block_is_not_forgotten() -> None:
    tracker = EngineStateTracker(MODEL, DESCRIPTOR, has_pool=True)
    tracker.handle([tenants(1)])
    tracker.mark_over_budget([SALTED], WHY)
    tracker.move_pooled(chain_of(1, salt="tenant"), [])
    tracker.handle([removed(101)])  # held in the pool only, and nobody has been told of that
    tracker._publication.namespaces._prune()
    tracker.clear_over_budget([SALTED])
    assert [event.root for event in tracker.inventory(1) if isinstance(event, Inventory)][
        1
    ] == SALTED


# --- the reporter --------------------------------------------------------------------------------


class Reporting:
    """A reporter with its outbox; a namespace may tell 4 blocks at once, and 1 a second."""

    def __init__(self, *, tells_mutes: bool = True, coalesce_bytes: int = 65_536) -> None:
        self.tracker = EngineStateTracker(MODEL, DESCRIPTOR, tells_mutes=tells_mutes)
        self.outbox = Outbox(InstanceId("w1", 0), up(MODEL), coalesce_bytes=coalesce_bytes)
        budgets = NamespaceBudgetSettings(blocks_per_second=1.0, burst_blocks=4.0)
        self.reporter = Reporter(self.tracker, self.outbox, budgets)
        self.reporter.begin_epoch(1)
        self.said()

    def report(self, *events: RawEvent, now: float = 0.0) -> list[str]:
        self.reporter.report(map(encode_raw, events), False, now)
        return self.reporter.keep_budgets(now)

    def said(self) -> list[KvEvent]:
        self.outbox.seal()
        events: list[KvEvent] = []
        while (batch := self.outbox.next_batch(0.0, 0)) is not None:
            events += batch.events
        return events


def mutes_in(events: list[KvEvent]) -> list[bytes]:
    return [event.roots for event in events if isinstance(event, NamespacesOverBudget)]


def test_who_tells_too_much_is_muted_after_it_and_speaks_again_with_an_inventory() -> None:
    reporting = Reporting()
    assert reporting.report(stored(1, 2, 3), now=1.0) == []
    assert mutes_in(reporting.said()) == []
    assert reporting.report(tenants(1, 2, 3, 4, 5), now=2.0) == [
        f"namespace {SALTED.hex()} is over its budget and muted"
    ]
    *_, stores, mute = reporting.said()
    assert isinstance(stores, BlockStored)
    assert mute == NamespacesOverBudget(SALTED, "more than 1 blocks/s")
    reporting.report(tenants(6, parent=5), now=2.5)
    assert reporting.said() == []
    assert reporting.reporter.counters()["muted_namespaces"] == 1
    assert reporting.reporter.keep_budgets(3.0) == [f"namespace {SALTED.hex()} is muted no longer"]
    again = reporting.said()
    assert isinstance(again[0], WorkerUp)
    at_end = again.index(NamespacesOverBudget(b""))
    assert all(type(event) is Digest for event in again[at_end + 1 :])
    inventories = [event for event in again[:at_end] if isinstance(event, Inventory)]
    six = b"".join(chain_of(1, 2, 3, 4, 5, 6, salt="tenant"))
    assert six in [inventory.hashes for inventory in inventories]
    assert Digest(Tier.hbm, *digest_of(told(reporting.tracker))) in again
    assert reporting.reporter.keep_budgets(4.0) == []


def test_removals_count_as_well() -> None:
    reporting = Reporting()
    reporting.report(tenants(1, 2, 3))
    assert reporting.report(removed(102, 103)) != []


def test_blocks_of_the_pool_count_as_well() -> None:
    reporting = Reporting()
    reporting.tracker = EngineStateTracker(MODEL, DESCRIPTOR, has_pool=True)
    budgets = NamespaceBudgetSettings(blocks_per_second=1.0, burst_blocks=4.0)
    reporting.reporter = Reporter(reporting.tracker, reporting.outbox, budgets)
    assert reporting.report(tenants(1, 2, 3)) == []
    reporting.reporter.move_pooled(chain_of(1, 2, salt="tenant"), [])
    assert reporting.reporter.keep_budgets(0.0) != []


def test_what_is_muted_stands_before_every_round_of_digests() -> None:
    reporting = Reporting()
    reporting.report(tenants(1, 2, 3, 4, 5))
    reporting.said()
    reporting.reporter.put_digests()
    assert mutes_in(reporting.said()[:1]) == [SALTED]
    reporting.reporter.put_inventory()
    events = reporting.said()
    at = events.index(NamespacesOverBudget(SALTED, "more than 1 blocks/s"))
    assert events[at - 1] == SourceDegraded("")
    assert isinstance(events[at - 2], Inventory)
    assert isinstance(events[at + 1], Digest)


def test_what_is_muted_and_the_digests_are_lost_together_or_not_at_all() -> None:
    reporting = Reporting(coalesce_bytes=1)  # each event fills a batch
    reporting.report(tenants(1, 2, 3, 4, 5))
    reporting.said()
    reporting.reporter.put_digests()
    batch = reporting.outbox.next_batch(0.0, 0)
    assert batch is not None
    assert mutes_in(list(batch.events)) == [SALTED]
    assert len(batch.events) == 1 + len(Tier)


def test_a_new_epoch_is_told_of_mutes_that_last() -> None:
    reporting = Reporting()
    reporting.report(tenants(1, 2, 3, 4, 5))
    reporting.reporter.begin_epoch(2)
    reporting.said()
    reporting.reporter.put_inventory()
    assert mutes_in(reporting.said()) == [SALTED]


def test_an_outbox_that_has_lost_all_gets_one_inventory_not_two() -> None:
    reporting = Reporting()
    reporting.report(tenants(1, 2, 3, 4, 5))
    reporting.outbox.lose(1)
    reporting.reporter.keep_budgets(1.0)
    assert not any(isinstance(event, Inventory) for event in reporting.said())
    assert reporting.outbox.is_lost
    reporting.reporter.put_inventory()
    assert mutes_in(reporting.said()) == [b""]


# --- for readers of wire 100 ---------------------------------------------------------------------


def test_who_knows_no_mutes_is_told_by_a_doubt_that_ends_after_the_inventory() -> None:
    reporting = Reporting(tells_mutes=False)
    reporting.report(tenants(1, 2, 3, 4, 5))
    doubt = reporting.said()[-1]
    assert doubt == SourceDegraded(
        f"namespace {SALTED.hex()} over its budget: more than 1 blocks/s"
    )
    reporting.reporter.put_digests()
    assert reporting.said()[0] == doubt  # lest equal digests end a loss of it
    reporting.reporter.keep_budgets(1.0)
    events = reporting.said()
    at_end = events.index(SourceDegraded(""))
    assert isinstance(events[at_end - 1], Inventory)
    assert mutes_in(events) == []


def test_a_doubt_stands_before_every_round_of_digests_until_an_inventory_ends_it() -> None:
    reporting = Reporting()
    reporting.report(RawDoubted("lost 3 to 9"))
    reporting.said()
    reporting.reporter.put_digests()
    assert reporting.said()[0] == SourceDegraded("lost 3 to 9")
    reporting.report(RawDoubted(""))
    reporting.said()
    reporting.reporter.put_digests()
    assert {type(event) for event in reporting.said()} == {Digest}
    reporting.reporter.put_inventory()  # for whoever has missed that it is over
    assert SourceDegraded("") in reporting.said()
    reporting.reporter.begin_epoch(2)
    reporting.reporter.put_inventory()  # and what readers know may be forged
    assert SourceDegraded("") in reporting.said()


def test_a_doubt_for_a_mute_stands_beside_one_for_a_loss() -> None:
    reporting = Reporting(tells_mutes=False)
    reporting.report(RawDoubted("lost 3 to 9"), tenants(1, 2, 3, 4, 5))
    reporting.said()
    reporting.report(RawDoubted(""))
    assert reporting.said() == [
        SourceDegraded(f"namespace {SALTED.hex()} over its budget: more than 1 blocks/s")
    ]
    reporting.report(RawRestarted("health"))
    reporting.reporter.begin_epoch(2)
    reporting.reporter.put_inventory()
    assert any(
        isinstance(e, SourceDegraded) and "over its budget" in e.reason for e in reporting.said()
    )


def test_mutes_end_one_inventory_at_a_time_however_many_there_are() -> None:
    """What waits in the outbox of an inventory is counted by nobody else."""
    reporting = Reporting()
    for tenant in range(20):
        blocks = tuple(100 * tenant + n for n in range(1, 6))
        reporting.report(RawStored(blocks, None, tokens_of(*blocks), cache_salt=f"t{tenant}"))
    for second in range(2, 60):  # nobody takes anything
        reporting.reporter.keep_budgets(float(second))
    inventories = [event for event in reporting.said() if isinstance(event, Inventory)]
    assert len([each for each in inventories if each.tier is Tier.dram]) == 1
    reporting.reporter.keep_budgets(99.0)
    reporting.said()
    assert reporting.reporter.counters()["muted_namespaces"] == 0
