"""A namespace that told too much: what is told of it while it is muted, and when that is over."""

import pytest

from kvatlas.schemas.digest import digest_of
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Digest,
    Doubted,
    Inventory,
    KvEvent,
    NamespacesMuted,
    WorkerUp,
)
from kvatlas.worker_hooks.edge import Edge
from kvatlas.worker_hooks.namespace_budgets import NamespaceBudgetSettings
from kvatlas.worker_hooks.outbox import Outbox
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawDoubted,
    RawEvent,
    RawGroupSeen,
    RawRestarted,
    RawStored,
    encode_raw,
)
from kvatlas.worker_hooks.reporter import Reporter
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
def edge() -> Edge:
    return Edge(MODEL, DESCRIPTOR)


def told(edge: Edge, tier: Tier = Tier.hbm) -> set[bytes]:
    return {block for block, _ in edge.residency.blocks(tier)}


def tenants(*names: int, parent: int | None = None) -> RawStored:
    """Say that blocks of the salted namespace are held; their engine hashes are 100 and more."""
    engine_hashes = tuple(100 + name for name in names)
    above = None if parent is None else 100 + parent
    return RawStored(engine_hashes, above, tokens_of(*names), cache_salt="tenant")


# --- the edge ------------------------------------------------------------------------------------


def test_what_comes_to_a_muted_namespace_is_withheld_and_others_are_told(edge: Edge) -> None:
    edge.handle([tenants(1)])
    assert edge.mute([SALTED], WHY) == [NamespacesMuted(SALTED, WHY)]
    assert edge.handle([tenants(2, 3, parent=1)]) == []
    events = edge.handle([stored(1, 2)])
    assert BlockStored(PLAIN, b"".join(chain_of(1, 2))) in events
    assert told(edge) == {*chain_of(1, salt="tenant"), *chain_of(1, 2)}
    assert edge.digests()[Tier.hbm] == Digest(Tier.hbm, *digest_of(told(edge)))
    assert (edge.counters.withheld_blocks, edge.counters.namespace_mutes) == (2, 1)
    assert edge.num_named(Tier.hbm) == 5


def test_removals_of_what_was_told_are_told_and_of_what_was_withheld_are_not(edge: Edge) -> None:
    edge.handle([tenants(1)])
    edge.mute([SALTED], WHY)
    edge.handle([tenants(2, parent=1)])
    assert edge.handle([removed(102)]) == []
    (one,) = chain_of(1, salt="tenant")
    assert edge.handle([removed(101)]) == [BlockRemoved(SALTED, one)]
    assert edge.num_named(Tier.hbm) == 0
    edge.unmute([SALTED])
    assert told(edge) == set()


def test_a_block_that_was_told_and_comes_again_is_withheld(edge: Edge) -> None:
    edge.handle([tenants(1)])
    edge.mute([SALTED], WHY)
    edge.handle([removed(101)])
    assert edge.handle([tenants(1)]) == []
    edge.unmute([SALTED])
    assert told(edge) == set(chain_of(1, salt="tenant"))


def test_a_further_copy_of_what_was_told_is_no_news_and_not_withheld(edge: Edge) -> None:
    edge.handle([tenants(1)])
    edge.mute([SALTED], WHY)
    edge.handle([RawStored((777,), None, tokens_of(1), cache_salt="tenant")])
    assert edge.counters.withheld_blocks == 0
    assert edge.handle([removed(101)]) == []
    (one,) = chain_of(1, salt="tenant")
    assert edge.handle([removed(777)]) == [BlockRemoved(SALTED, one)]


def test_further_copies_of_withheld_blocks_are_counted_over_the_end_of_a_mute(edge: Edge) -> None:
    edge.mute([SALTED], WHY)
    twin = RawStored((777,), None, tokens_of(1), cache_salt="tenant")
    edge.handle([tenants(1), twin])
    edge.unmute([SALTED])
    assert edge.handle([removed(101)]) == []
    (one,) = chain_of(1, salt="tenant")
    assert edge.handle([removed(777)]) == [BlockRemoved(SALTED, one)]


def test_one_namespace_speaks_again_while_another_stays_muted(edge: Edge) -> None:
    edge.mute([SALTED, PLAIN], WHY)
    edge.handle([tenants(1), stored(1)])
    edge.unmute([PLAIN])
    assert told(edge) == set(chain_of(1))
    assert edge.caveats() == [NamespacesMuted(SALTED, WHY)]
    edge.unmute([SALTED])
    assert edge.caveats() == []
    assert edge.caveats(even_none=True) == [NamespacesMuted(b"")]


def test_who_was_never_muted_in_an_epoch_says_nothing_of_it(edge: Edge) -> None:
    assert edge.caveats(even_none=True) == []
    edge.mute([SALTED], WHY)
    edge.unmute([SALTED])
    edge.begin_epoch()
    assert edge.caveats(even_none=True) == []


def test_what_is_cleared_is_withheld_no_longer(edge: Edge) -> None:
    edge.handle([tenants(1)])
    edge.mute([SALTED], WHY)
    edge.handle([tenants(2, parent=1)])
    assert edge.handle([RawCleared(None)]) == [AllBlocksCleared(None)]
    edge.unmute([SALTED])
    assert told(edge) == set()


def test_a_withheld_block_is_not_disowned(edge: Edge) -> None:
    edge.mute([SALTED], WHY)
    edge.handle([tenants(1)])
    assert edge.disown(b"".join(chain_of(1, salt="tenant"))) == []
    assert edge.disown(b"".join(chain_of(9))) != []


def test_blocks_of_the_pool_are_withheld_too() -> None:
    edge = Edge(MODEL, DESCRIPTOR, has_pool=True)
    chain = chain_of(1, 2, salt="tenant")
    edge.handle([tenants(1, 2)])
    edge.move_pooled(chain[:1], [])
    edge.mute([SALTED], WHY)
    assert edge.move_pooled(chain[1:], []) == []
    assert edge.move_pooled([], chain[:1]) == [BlockRemoved(SALTED, chain[0], Tier.dram)]
    edge.unmute([SALTED])
    assert told(edge, Tier.dram) == {chain[1]}


def test_the_pool_of_a_muted_namespace_is_withheld_after_a_clearing() -> None:
    edge = Edge(MODEL, DESCRIPTOR, has_pool=True)
    chain = chain_of(1, salt="tenant")
    edge.handle([tenants(1)])
    edge.move_pooled(chain, [])
    edge.mute([SALTED], WHY)
    assert edge.handle([RawCleared(None)]) == [AllBlocksCleared(None)]
    edge.unmute([SALTED])
    assert told(edge, Tier.dram) == set(chain)


def test_reuse_points_are_withheld_with_their_blocks() -> None:
    edge = Edge(MODEL, DESCRIPTOR)
    edge.handle([RawGroupSeen(1, "sliding_window", window_tokens=BLOCK_TOKENS + 1)])
    edge.mute([SALTED], WHY)
    window = RawStored((101,), None, b"", group=1)
    assert edge.handle([tenants(1), window]) == []
    assert edge.num_named(Tier.hbm) == 2
    edge.unmute([SALTED])
    assert len(told(edge)) == 2


def test_the_namespace_of_a_withheld_block_is_not_forgotten() -> None:
    edge = Edge(MODEL, DESCRIPTOR, has_pool=True)
    edge.handle([tenants(1)])
    edge.mute([SALTED], WHY)
    edge.move_pooled(chain_of(1, salt="tenant"), [])
    edge.handle([removed(101)])  # held in the pool only, and nobody has been told of that
    edge._telling.namespaces._prune()
    edge.unmute([SALTED])
    assert [event.root for event in edge.inventory(1) if isinstance(event, Inventory)][1] == SALTED


# --- the reporter --------------------------------------------------------------------------------


class Reporting:
    """A reporter with its outbox; a namespace may tell 4 blocks at once, and 1 a second."""

    def __init__(self, *, tells_mutes: bool = True, coalesce_bytes: int = 65_536) -> None:
        self.edge = Edge(MODEL, DESCRIPTOR, tells_mutes=tells_mutes)
        self.outbox = Outbox(InstanceId("w1", 0), up(MODEL), coalesce_bytes=coalesce_bytes)
        budgets = NamespaceBudgetSettings(blocks_per_second=1.0, burst_blocks=4.0)
        self.reporter = Reporter(self.edge, self.outbox, budgets)
        self.reporter.begin_epoch(1)
        self.said()

    def report(self, *events: RawEvent, now: float = 0.0) -> list[str]:
        self.reporter.report(map(encode_raw, events), False, now)
        return self.reporter.keep_budgets(now)

    def said(self) -> list[KvEvent]:
        self.outbox.seal()
        events: list[KvEvent] = []
        while (batch := self.outbox.take(0.0, 0)) is not None:
            events += batch.events
        return events


def mutes_in(events: list[KvEvent]) -> list[bytes]:
    return [event.roots for event in events if isinstance(event, NamespacesMuted)]


def test_who_tells_too_much_is_muted_after_it_and_speaks_again_with_an_inventory() -> None:
    reporting = Reporting()
    assert reporting.report(stored(1, 2, 3), now=1.0) == []
    assert mutes_in(reporting.said()) == []
    assert reporting.report(tenants(1, 2, 3, 4, 5), now=2.0) == [
        f"namespace {SALTED.hex()} is over its budget and muted"
    ]
    *_, stores, mute = reporting.said()
    assert isinstance(stores, BlockStored)
    assert mute == NamespacesMuted(SALTED, "more than 1 blocks/s")
    reporting.report(tenants(6, parent=5), now=2.5)
    assert reporting.said() == []
    assert reporting.reporter.counters()["muted_namespaces"] == 1
    assert reporting.reporter.keep_budgets(3.0) == [f"namespace {SALTED.hex()} is muted no longer"]
    again = reporting.said()
    assert isinstance(again[0], WorkerUp)
    at_end = again.index(NamespacesMuted(b""))
    assert all(type(event) is Digest for event in again[at_end + 1 :])
    inventories = [event for event in again[:at_end] if isinstance(event, Inventory)]
    six = b"".join(chain_of(1, 2, 3, 4, 5, 6, salt="tenant"))
    assert six in [inventory.hashes for inventory in inventories]
    assert Digest(Tier.hbm, *digest_of(told(reporting.edge))) in again
    assert reporting.reporter.keep_budgets(4.0) == []


def test_removals_count_as_well() -> None:
    reporting = Reporting()
    reporting.report(tenants(1, 2, 3))
    assert reporting.report(removed(102, 103)) != []


def test_blocks_of_the_pool_count_as_well() -> None:
    reporting = Reporting()
    reporting.edge = Edge(MODEL, DESCRIPTOR, has_pool=True)
    budgets = NamespaceBudgetSettings(blocks_per_second=1.0, burst_blocks=4.0)
    reporting.reporter = Reporter(reporting.edge, reporting.outbox, budgets)
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
    at = events.index(NamespacesMuted(SALTED, "more than 1 blocks/s"))
    assert isinstance(events[at - 1], Inventory)
    assert isinstance(events[at + 1], Digest)


def test_what_is_muted_and_the_digests_are_lost_together_or_not_at_all() -> None:
    reporting = Reporting(coalesce_bytes=1)  # each event fills a batch
    reporting.report(tenants(1, 2, 3, 4, 5))
    reporting.said()
    reporting.reporter.put_digests()
    batch = reporting.outbox.take(0.0, 0)
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
    assert doubt == Doubted(f"namespace {SALTED.hex()} over its budget: more than 1 blocks/s")
    reporting.reporter.put_digests()
    assert reporting.said()[0] == doubt  # lest equal digests end a loss of it
    reporting.reporter.keep_budgets(1.0)
    events = reporting.said()
    at_end = events.index(Doubted(""))
    assert isinstance(events[at_end - 1], Inventory)
    assert mutes_in(events) == []


def test_a_doubt_stands_before_every_round_of_digests_until_an_inventory_ends_it() -> None:
    reporting = Reporting()
    reporting.report(RawDoubted("lost 3 to 9"))
    reporting.said()
    reporting.reporter.put_digests()
    assert reporting.said()[0] == Doubted("lost 3 to 9")
    reporting.report(RawDoubted(""))
    reporting.said()
    reporting.reporter.put_digests()
    assert {type(event) for event in reporting.said()} == {Digest}
    reporting.reporter.put_inventory()  # for whoever has missed that it is over
    assert Doubted("") in reporting.said()
    reporting.reporter.begin_epoch(2)
    reporting.reporter.put_inventory()
    assert Doubted("") not in reporting.said()


def test_a_doubt_for_a_mute_stands_beside_one_for_a_loss() -> None:
    reporting = Reporting(tells_mutes=False)
    reporting.report(RawDoubted("lost 3 to 9"), tenants(1, 2, 3, 4, 5))
    reporting.said()
    reporting.report(RawDoubted(""))
    assert reporting.said() == [
        Doubted(f"namespace {SALTED.hex()} over its budget: more than 1 blocks/s")
    ]
    reporting.report(RawRestarted("health"))
    reporting.reporter.begin_epoch(2)
    reporting.reporter.put_inventory()
    assert any(isinstance(e, Doubted) and "over its budget" in e.reason for e in reporting.said())


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
