"""From the records of a ring to the outbox."""

import itertools

import msgspec
import pytest

from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    BlockStored,
    Inventory,
    KvEvent,
    NamespacesOverBudget,
    SourceDegraded,
    WorkerUp,
)
from kvatlas.worker_hooks.raw_events import (
    RawDoubted,
    RawEngineBatch,
    RawEvent,
    RawGroupSeen,
    RawHeld,
    RawListed,
    RawRestarted,
    RawStored,
    encode_raw,
)
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.reporting.outbox import Outbox
from kvatlas.worker_hooks.reporting.reporter import MAX_AUDIT_SECONDS, ReportEffects, Reporter
from kvatlas.worker_hooks.reporting.ring import Lost
from testkit.builders import up
from testkit.engine_words import DESCRIPTOR, MODEL, stored, tokens_of


class Reporting:
    """A reporter with its outbox; `said` gives what left since the last call."""

    def __init__(self) -> None:
        tracker = EngineStateTracker(MODEL, DESCRIPTOR)
        self.outbox = Outbox(InstanceId("w1", 0), up(MODEL))
        self.reporter = Reporter(tracker, self.outbox)
        self.reporter.begin_epoch(1)
        self._now = 0.0

    def report(
        self, *events: RawEvent, writer_lists: bool = False, now: float = 0.0
    ) -> ReportEffects:
        return self.reporter.report(map(encode_raw, events), writer_lists, now)

    def said(self) -> list[KvEvent]:
        self._now += 1.0
        events: list[KvEvent] = []
        while (batch := self.outbox.next_batch(self._now, 0)) is not None:
            events += batch.events
        return events

    def kinds(self) -> list[type]:
        return [type(event) for event in self.said()]


@pytest.fixture
def reporting() -> Reporting:
    reporting = Reporting()
    reporting.said()
    return reporting


def engine_batch(*events: object, engine: str = "vllm") -> RawEngineBatch:
    return RawEngineBatch(engine, msgspec.msgpack.encode([0.0, events, 0]))


def engine_stored(engine_hash: int) -> list[object]:
    return ["BlockStored", [engine_hash], None, [1, 2, 3, 4], 4, None, "GPU"]


def test_an_engines_own_batch_is_read_by_its_adapter(reporting: Reporting) -> None:
    reporting.report(engine_batch(engine_stored(7), ["Teleported"]))
    (stored_event,) = [event for event in reporting.said() if isinstance(event, BlockStored)]
    assert stored_event.tier is Tier.hbm
    assert reporting.reporter.counters()["rejected_unknown_event"] == 1


@pytest.mark.parametrize(
    "batch", [RawEngineBatch("vllm", b"\xc1"), engine_batch(engine="abacus")], ids=["bytes", "name"]
)
def test_a_batch_that_nobody_can_read_is_counted_and_costs_no_other(
    reporting: Reporting, batch: RawEngineBatch
) -> None:
    reporting.report(batch, stored(1))
    assert BlockStored in reporting.kinds()
    assert reporting.reporter.counters()["malformed_events"] == 1


def test_a_restart_clears_and_asks_for_a_new_epoch(reporting: Reporting) -> None:
    reporting.report(stored(1))
    reporting.said()
    assert reporting.report(RawRestarted("sequence 0 again"), stored(2)).is_restarted
    assert reporting.said()[0] == AllBlocksCleared(None)


def test_doubts_are_said_and_said_again_with_each_inventory(reporting: Reporting) -> None:
    reporting.report(RawDoubted("lost 3 to 9"))
    assert reporting.said() == [SourceDegraded("lost 3 to 9")]
    reporting.reporter.put_inventory()
    assert isinstance(reporting.said()[0], WorkerUp)
    assert reporting.said()[0] == SourceDegraded("lost 3 to 9")  # right before the digests
    reporting.report(RawDoubted(""))
    reporting.said()
    reporting.reporter.put_inventory()
    reporting.said()
    assert reporting.said()[0] == SourceDegraded("")  # again, for whoever has missed it


def test_a_restart_ends_the_doubts(reporting: Reporting) -> None:
    reporting.report(RawDoubted("lost 3 to 9"), RawRestarted("health"))
    reporting.reporter.begin_epoch(2)
    reporting.said()
    reporting.reporter.put_inventory()
    doubts = [e for e in (*reporting.said(), *reporting.said()) if isinstance(e, SourceDegraded)]
    assert doubts == [SourceDegraded("")]


def test_an_inventory_takes_back_what_others_have_said(reporting: Reporting) -> None:
    """A forged doubt has no other end: the instance itself has never said one."""
    reporting.reporter.put_inventory()
    reporting.said()
    assert reporting.said()[:2] == [SourceDegraded(""), NamespacesOverBudget(b"")]


def test_it_is_said_before_the_blocks_that_matches_end_at_reuse_points(
    reporting: Reporting,
) -> None:
    windowed = RawGroupSeen(0, "sliding_window", window_tokens=9)
    reporting.report(windowed, RawGroupSeen(1, "full_attention"), stored(1, group=1))
    said = reporting.said()
    assert isinstance(said[0], WorkerUp)
    assert said[0].info.ends_at_reuse_points
    assert isinstance(said[-1], BlockStored)


def test_f45_adapters_are_learnt_from_what_they_store(reporting: Reporting) -> None:
    reporting.report(stored(1, lora="sql"), stored(2, lora="sql"))
    introduced = [event for event in reporting.said() if isinstance(event, WorkerUp)]
    assert [event.info.adapters for event in introduced] == [{"sql": MODEL}]


@pytest.mark.parametrize(("counted", "asks"), [(1, False), (2, True)])
def test_an_audit_that_differs_asks_for_a_listing(
    reporting: Reporting, counted: int, asks: bool
) -> None:
    reported = reporting.report(stored(1), RawHeld(counted), writer_lists=True)
    assert reported.wants_listing is asks


def test_an_engine_that_goes_on_to_count_otherwise_is_asked_less_and_less_often(
    reporting: Reporting,
) -> None:
    asked = [
        second
        for second in range(900)
        if reporting.report(
            RawHeld(5), RawListed(True), writer_lists=True, now=second
        ).wants_listing
    ]
    waits = [after - before for before, after in itertools.pairwise(asked)]
    assert waits[:10] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert max(waits) == MAX_AUDIT_SECONDS


def test_patience_comes_back_with_time_and_with_another_incarnation(reporting: Reporting) -> None:
    def asks(now: float, *events: RawEvent) -> bool:
        return reporting.report(*events, RawHeld(5), writer_lists=True, now=now).wants_listing

    assert [asks(now) for now in (0.0, 0.5, 1.0, 2.5, 3.0)] == [True, False, True, False, True]
    assert asks(3.1, RawRestarted("sequence 0 again"))
    assert [asks(now) for now in (1000.0, 1001.0, 1002.0)] == [True, True, False]


def test_a_loss_is_listed_at_once_however_often_the_engine_was_asked(reporting: Reporting) -> None:
    for second in range(5):
        reporting.report(RawHeld(5), writer_lists=True, now=second)
    assert reporting.reporter.report([Lost(3)], writer_lists=True, now=5.0).wants_listing


def test_values_as_deep_as_the_stack_are_counted(reporting: Reporting) -> None:
    for depth in range(800, 1000):
        entry = '{"key": ' * depth + "1" + "}" * depth
        fields = f'"event_type": "store", "tier": "l1", "entries": [{entry}]'
        reporting.report(RawEngineBatch("lmcache", f"{{{fields}}}".encode()))
    assert reporting.reporter.counters()["malformed_events"] > 0


def test_the_trackers_own_doubt_is_said_again_with_each_inventory(reporting: Reporting) -> None:
    reporting.report(RawStored((1,), None, tokens_of(1, 2)))
    (doubt,) = reporting.said()
    reporting.report(RawDoubted(""))
    reporting.said()
    reporting.reporter.put_inventory()
    reporting.said()
    assert isinstance(doubt, SourceDegraded)
    assert reporting.said()[0] == doubt


def test_where_nothing_can_be_listed_an_audit_asks_for_nothing(reporting: Reporting) -> None:
    assert not reporting.report(RawHeld(5), writer_lists=False).wants_listing


def test_after_a_loss_what_is_known_becomes_the_inventory(reporting: Reporting) -> None:
    reporting.report(stored(1))
    reporting.said()
    reporting.reporter.report([Lost(3)], writer_lists=False, now=0.0)
    assert Inventory in reporting.kinds()


def test_losses_while_an_inventory_waits_owe_one_more_together() -> None:
    reporting = Reporting()
    for _ in range(5):
        reporting.reporter.report([Lost(3)], writer_lists=False, now=0.0)
    assert reporting.kinds().count(Inventory) == len(Tier)
    reporting.reporter.put_digests()
    assert reporting.kinds().count(Inventory) == len(Tier)
    reporting.reporter.put_digests()
    assert Inventory not in reporting.kinds()
