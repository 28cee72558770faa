"""What scenarios do not show of IndexState: its answers, its bounds, and what it counts."""

import msgspec
import pytest
from msgspec.structs import replace

from kvatlas.events.codec import DecodedBatch
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.fleet import MAX_REJECTED_KINDS
from kvatlas.indexer.fold.instances import (
    MAX_OPEN_INVENTORY_BYTES,
    MAX_REASON,
    PART_BYTES,
    OpenInventory,
)
from kvatlas.indexer.fold.records import MAX_CONTROLS
from kvatlas.indexer.fold.residency import ResidencyTables
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import (
    BatchArrived,
    HoleSeen,
    LeaseExpired,
    PayloadRejected,
    Proposed,
    PublishControl,
    ReportRefused,
    ReportRejected,
    ReportTakeover,
    RequestIntroduction,
    RequestInventory,
    stimulus_of,
)
from kvatlas.indexer.reader import IndexReader, IndexStats, Replaced
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    WIRE_VERSION,
    AllBlocksCleared,
    ControlRecord,
    EventBatch,
    Inventory,
    NamespacesOverBudget,
    RejectedEvent,
    SourceDegraded,
    WorkerDown,
    WorkerUp,
    quarantine_lifted_because,
)
from testkit.builders import (
    MODEL,
    SECOND,
    a_batch,
    a_control,
    a_message,
    an_info,
    arrived,
    digest,
    digests,
    hashes,
    inventory,
    removed,
    stored,
    up,
)
from testkit.histories import validate

W1 = InstanceId("w1", 0)


def a_state(*log: EventBatch | ControlRecord, index: ReferenceIndex | None = None) -> IndexState:
    state = IndexState(index or ReferenceIndex())
    for at, item in enumerate(log, 1):
        state.handle(arrived(item, at))
    validate(state)
    return state


# --- answers ------------------------------------------------------------------------------------


def test_a_match_says_who_how_much_in_which_tier_and_how_sure() -> None:
    state = a_state(
        a_batch(up(), stored(1, 2), stored(3, tier=Tier.ssd, parent=2)),
        a_batch(up(), stored(1), worker="w2", seq=2),
    )
    assert state.match(hashes(1, 2, 3, 4)) == [
        (W1, Trust.exact, 3, (2, 0, 1, 0, 0)),
        (InstanceId("w2", 0), Trust.degraded, 1, (1, 0, 0, 0, 0)),
    ]
    assert state.holders(hashes(3)) == [(W1, Tier.ssd)]


def test_a_view_tells_all_of_an_instance() -> None:
    state = a_state(a_batch(up(), stored(1, 2)), a_batch(stored(1, tier=Tier.dram), seq=2))
    view = state.instance(W1)
    assert view is not None
    assert (view.epoch, view.seq, view.trust, view.trust_reasons) == (1, 2, Trust.exact, ())
    assert view.info == an_info()
    assert view.num_blocks == 3
    assert {tier.name: held.count for tier, held in view.digests.items()} == {"hbm": 2, "dram": 1}
    assert view.last_event_ns == 2 * SECOND
    assert state.instances() == [view]
    assert state.instance(InstanceId("w1", 1)) is None


def test_a_name_that_was_taken_from_a_living_process_is_told_with_both() -> None:
    state = a_state(a_batch(WorkerUp(an_info()), epoch=7))
    elsewhere = WorkerUp(msgspec.structs.replace(an_info(), base_url="http://elsewhere"))
    effects = state.handle(arrived(a_batch(elsewhere, epoch=8), 2))
    was = Replaced(7, "http://127.0.0.1:1", last_event_ns=SECOND)
    assert ReportTakeover(W1, 8, was) in effects
    view = state.instance(W1)
    assert view is not None
    assert (view.epoch, view.replaced) == (8, was)
    state.handle(arrived(a_batch(WorkerDown("end"), epoch=8, seq=2), 3))
    assert not [e for e in state.handle(arrived(a_batch(up(), epoch=9), 4)) if "Takeover" in str(e)]
    view = state.instance(W1)
    assert view is not None
    assert view.replaced is None
    assert state.stats().takeovers == 1


def test_an_engine_that_begins_anew_where_it_was_takes_nobodys_name() -> None:
    state = a_state(a_batch(up(), epoch=7), a_batch(up(), epoch=8))
    view = state.instance(W1)
    assert view is not None
    assert (view.epoch, view.replaced, state.stats().takeovers) == (8, None, 0)


def test_who_missed_a_release_releases_for_itself() -> None:
    """The log has lost the release, and all that whoever published it knows of is over."""
    state = a_state(a_batch(up()), a_control(kind="throttled", reason="1"))
    assert [name for name, *_ in state.fleet.throttled()] == [W1]
    proposed = state.handle(Proposed(W1, 1, "released", now_ns=5, seen_by="two"))
    (record,) = [effect.record for effect in proposed if isinstance(effect, PublishControl)]
    assert RequestInventory(W1, 1) in state.handle(arrived(record, 3))
    assert state.fleet.throttled() == []


def test_of_a_reason_a_line_is_kept() -> None:
    long = "x" * 1_000_000
    state = a_state(a_batch(up(), NamespacesOverBudget(hashes(1, 2), long), SourceDegraded(long)))
    view = state.instance(W1)
    assert view is not None
    assert [len(why) for why in view.muted.values()] == [MAX_REASON] * 2
    assert len(view.trust_reasons[0]) < MAX_REASON + 50


def test_parts_of_an_inventory_without_hashes_are_bounded_too() -> None:
    instance = OpenInventory(as_of_seq=1, parts=10**9)
    numbers = range(1, MAX_OPEN_INVENTORY_BYTES)
    taken = next(
        n
        for n in numbers
        if not instance.add_part(Inventory(1, n, 10**9, Tier.hbm, b"r" * 16, b""))
    )
    assert taken <= MAX_OPEN_INVENTORY_BYTES // PART_BYTES + 1
    assert instance.runs == []


def test_both_sides_of_a_divergence_are_shown_until_they_are_equal() -> None:
    state = a_state(a_batch(up(), stored(1), digest(1, 2, 3)))
    view = state.instance(W1)
    assert view is not None
    assert view.divergent == {Tier.hbm: (3, 1)}
    state.handle(arrived(a_batch(stored(2, 3), digest(1, 2, 3), seq=2), 2))
    view = state.instance(W1)
    assert view is not None
    assert view.divergent == {}


def test_instances_serve_their_models_and_adapters_from_worker_up_until_they_are_gone() -> None:
    info = an_info("base", adapters={"sql": "base"})
    state = a_state(a_batch(stored(1)), a_batch(WorkerUp(info), worker="w2"))
    names = {
        model: [view.instance.worker for view in state.serving(model)]
        for model in (MODEL, "base", "sql", "?")
    }
    assert names == {MODEL: [], "base": ["w2"], "sql": ["w2"], "?": []}
    state.handle(arrived(a_control(worker="w2"), 3))
    assert state.serving("base") == []


def test_the_serving_list_is_kept_until_the_fleet_changes() -> None:
    state = a_state(a_batch(up()))
    before, version = state.serving(MODEL), state.fleet_version
    state.handle(arrived(a_batch(stored(1), seq=2), 2))
    assert state.serving(MODEL) is before
    assert state.fleet_version == version
    state.handle(arrived(a_batch(stored(2), seq=4), 3))
    assert state.fleet_version > version
    assert [view.trust for view in state.serving(MODEL)] == [Trust.degraded]


def test_the_quarantine_of_a_doubtful_instance_changes_the_fleet() -> None:
    """Readers of a shared index learn from the version who counts for nothing."""
    state = a_state(a_batch(up(), stored(1), seq=5))
    view = state.instance(W1)
    assert view is not None
    assert view.trust is Trust.degraded
    version = state.fleet_version
    state.handle(arrived(a_control(kind="quarantined"), 2))
    assert state.match(hashes(1)) == []
    assert state.fleet_version > version


def test_the_tree_names_instances() -> None:
    state = a_state(a_batch(up(), stored(1, 2)), a_batch(up(), stored(1), worker="w2"))
    (top,) = state.tree(depth=2, width=4)
    assert (top.num_blocks, top.holders) == (1, (W1, InstanceId("w2", 0)))
    assert [child.holders for child in top.children] == [(W1,)]


def test_a_state_is_an_index_reader() -> None:
    reader: IndexReader = a_state()
    assert reader.stats().num_blocks == 0


def test_counters_can_be_encoded_and_add_up() -> None:
    state = a_state(
        a_batch(up(), stored(1, 2)),
        a_batch(up()),
        a_batch(digest(1, 2), digest(9), seq=4),
        a_batch(stored(1, 2), seq=1, epoch=9),
        a_control(epoch=3),
        a_control(epoch=9),
    )
    stats = state.stats()
    assert (stats.batches, stats.events, stats.duplicates) == (3, 5, 1)
    assert (stats.gaps, stats.missing_batches) == (1, 2)
    assert (stats.digest_matches, stats.digest_mismatches) == (1, 1)
    assert (stats.controls, stats.ignored_controls) == (1, 1)
    assert (stats.num_instances, stats.num_blocks, stats.stream_sequence) == (0, 0, 6)
    assert msgspec.json.decode(msgspec.json.encode(stats), type=IndexStats) == stats


# --- order of the stream ------------------------------------------------------------------------


def test_what_is_not_newer_in_the_stream_is_ignored() -> None:
    state = a_state(a_batch(up(), stored(1)), a_batch(stored(2), seq=2))
    assert state.handle(arrived(a_batch(stored(3), seq=3), 2)) == []
    assert state.match(hashes(3)) == []
    assert state.stream_sequence == 2


def test_after_a_hole_the_stream_goes_on_behind_it() -> None:
    state = a_state(a_batch(up(), stored(1)))
    state.handle(HoleSeen(2, 10))
    assert state.stream_sequence == 9
    state.handle(arrived(a_batch(stored(2), seq=2), 10))
    assert state.stream_sequence == 10


def test_a_log_that_was_lost_and_begun_anew_is_followed() -> None:
    state = a_state(a_batch(up(), stored(1)), a_batch(stored(2), seq=2))
    state.handle(HoleSeen(3, 1))
    state.handle(arrived(a_batch(stored(3), seq=3), 1))
    assert [match.trust for match in state.match(hashes(3))] == [Trust.exact]


# --- bounds -------------------------------------------------------------------------------------


def test_rejected_kinds_are_counted_apart_up_to_a_bound() -> None:
    state = a_state()
    for at in range(1, MAX_REJECTED_KINDS + 11):
        state.handle(PayloadRejected(at, 0, f"w{at}", "payload", "why"))
    rejected = state.stats().rejected
    assert len(rejected) == MAX_REJECTED_KINDS + 1
    assert state.stats().rejected_total == MAX_REJECTED_KINDS + 10


def test_gone_instances_are_remembered_up_to_a_bound() -> None:
    state = IndexState(ReferenceIndex(), max_gone=2)
    for at in range(1, 6):
        state.handle(arrived(a_batch(up(), WorkerDown("end"), worker=f"w{at}", epoch=5), at))
        validate(state)
    assert [view.instance.worker for view in state.instances()] == ["w4", "w5"]
    state.handle(arrived(a_batch(worker="w4", epoch=5, seq=3), 6))
    assert [view.trust for view in state.instances()] == [Trust.gone, Trust.gone]
    state.handle(arrived(a_batch(stored(1), worker="w1", epoch=5, seq=3), 7))
    assert len(state.instances()) == 2
    state.handle(arrived(a_batch(up(), worker="w1", epoch=5, seq=4), 8))
    assert next(view.trust for view in state.instances()) is Trust.degraded


def test_records_about_an_epoch_are_told_apart_up_to_a_bound_but_an_end_always_counts() -> None:
    state = a_state(a_batch(up()))
    for at in range(2, MAX_CONTROLS + 12):
        state.handle(arrived(a_control(kind="quarantined", reason=f"r{at}"), at))
    assert state.stats().controls == MAX_CONTROLS
    state.handle(arrived(a_control(), MAX_CONTROLS + 12))
    assert [view.trust for view in state.instances()] == [Trust.gone]


def test_a_record_about_no_epoch_is_ignored() -> None:
    state = a_state(a_batch(up()), a_control(epoch=0), a_control(epoch=-4))
    assert [view.trust for view in state.instances()] == [Trust.exact]
    assert state.stats().ignored_controls == 2


def test_an_inventory_over_the_limit_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.indexer.fold.instances.MAX_OPEN_INVENTORY_BYTES", 40)
    state = a_state(a_batch(up(), stored(1)))
    state.handle(arrived(a_batch(inventory(1, 2, as_of=1, part=1, parts=3), seq=2), 2))
    state.handle(arrived(a_batch(inventory(3, as_of=1, part=2, parts=3), seq=3), 3))
    assert state.stats().dropped_inventories == 1
    validate(state)


def test_one_instance_too_many_takes_the_place_of_the_longest_gone_or_is_refused() -> None:
    state = IndexState(ReferenceIndex(), max_instances=2)
    log = [
        a_batch(up(), WorkerDown("end"), worker="w1"),
        a_batch(up(), worker="w2"),
        a_batch(up(), worker="w3"),
        a_batch(up(), worker="w4"),
        a_batch(stored(1), worker="w4", seq=2),
    ]
    effects = [state.handle(arrived(batch, at)) for at, batch in enumerate(log, 1)]
    validate(state)
    assert [view.instance.worker for view in state.instances()] == ["w2", "w3"]
    (refused,) = effects[3]
    assert isinstance(refused, ReportRefused)
    assert (refused.instance.worker, refused.kind) == ("w4", "instances")
    assert effects[4] == [RequestIntroduction(InstanceId("w4", 0))]
    stats = state.stats()
    assert (stats.refused_instances, stats.unknown_batches) == (1, 1)
    state.handle(arrived(a_batch(WorkerDown("end"), worker="w3", seq=2), 6))
    state.handle(arrived(a_batch(up(), worker="w4", seq=3), 7))
    assert [view.instance.worker for view in state.instances()] == ["w2", "w4"]
    later = IndexState(ReferenceIndex(), max_instances=2)
    later.restore(state.export()())
    assert later.stats() == state.stats()
    assert later.handle(arrived(a_batch(up(), worker="w5"), 8)) == state.handle(
        arrived(a_batch(up(), worker="w5"), 8)
    )
    assert later.state_digest() == state.state_digest()


def test_invented_names_leave_nothing_behind() -> None:
    """Snapshots and digests are those of a fold that never met them."""
    state, plain = a_state(a_batch(up(), stored(1))), a_state(a_batch(up(), stored(1)))
    for at in range(2, 3_002):
        name = f"invented-{at}"
        batch = a_batch(stored(at), digest(at), worker=name) if at % 2 else a_control(worker=name)
        state.handle(arrived(batch, at))
    validate(state)
    assert state.state_digest() == plain.state_digest()
    grown = len(state.export()()["tables"]) - len(plain.export()()["tables"])
    assert grown < 100
    assert state.fleet.order.position(InstanceId("invented-3", 0)) == (0, 0)
    assert (state.stats().unknown_batches, state.stats().unknown_controls) == (1_500, 1_500)


def test_an_epoch_far_ahead_changes_nothing_and_is_told() -> None:
    now_ms = 1_800_000_000_000
    state, at = a_state(), 1
    for epoch, is_taken in [(now_ms, True), (2**44, False), (now_ms + 1, True)]:
        batch = DecodedBatch(a_batch(up(), stored(1), epoch=epoch))
        effects = state.handle(BatchArrived(at, now_ms * 1_000_000, batch))
        assert any(isinstance(effect, ReportRefused) for effect in effects) is not is_taken
        at += 1
    view = state.instance(W1)
    assert view is not None
    assert (view.epoch, view.trust, state.stats().refused_epochs) == (now_ms + 1, Trust.exact, 1)


# --- no room ------------------------------------------------------------------------------------


def test_an_instance_without_room_is_degraded_and_comes_in_with_an_inventory() -> None:
    state = a_state(
        a_batch(up(), stored(1)),
        a_batch(up(), stored(1), removed(1), digest(), worker="w2"),
        index=ReferenceIndex(max_instances=1),
    )
    view = state.instance(InstanceId("w2", 0))
    assert view is not None
    assert view.trust is Trust.degraded
    assert "index_full" in view.trust_reasons[0]
    assert [match.instance for match in state.match(hashes(1))] == [W1]
    state.handle(arrived(a_batch(WorkerDown("bye"), seq=2), 3))
    state.handle(arrived(a_batch(inventory(1, as_of=1), *digests(1), worker="w2", seq=2), 4))
    assert [match[:2] for match in state.match(hashes(1))] == [(InstanceId("w2", 0), Trust.exact)]
    assert state.stats().index_full == 2, "no number when it came, none when it stored"
    validate(state)


# --- effects ------------------------------------------------------------------------------------


def test_an_expiry_becomes_a_record_that_says_who_saw_it() -> None:
    state = a_state(a_batch(up(), epoch=7))
    effects = state.handle(LeaseExpired(W1, 7, now_ns=5, seen_by="router-1"))
    record = ControlRecord(WIRE_VERSION, "w1", 0, 7, "expired", "lease", "router-1", 5)
    assert effects == [PublishControl(record)]


@pytest.mark.parametrize(
    ("instance", "epoch"), [(InstanceId("nobody", 0), 7), (W1, 6), (W1, 8)], ids=str
)
def test_an_expiry_of_anything_but_the_present_epoch_is_ignored(
    instance: InstanceId, epoch: int
) -> None:
    state = a_state(a_batch(up(), epoch=7))
    assert state.handle(LeaseExpired(instance, epoch, 0)) == []
    assert state.stats().ignored_expiries == 1


def test_a_reader_that_has_caught_up_can_ask_what_is_still_wanted() -> None:
    state = a_state(a_batch(up()), a_batch(seq=5), a_batch(up(), worker="w2"))
    assert state.fleet.wanted_inventories() == [RequestInventory(W1, 1)]
    assert state.fleet.wants_inventory(W1)
    assert not state.fleet.wants_inventory(InstanceId("w2", 0))
    state.handle(arrived(a_batch(epoch=2), 4))
    assert state.fleet.wanted_inventories() == []


def test_a_skipped_event_is_reported_with_its_reason() -> None:
    state = a_state()
    skipped = RejectedEvent(0, "unknown", "tag 'x'")
    effects = state.handle(BatchArrived(1, 0, DecodedBatch(a_batch(), (skipped,))))
    assert effects[0] == ReportRejected("w1", "unknown", "tag 'x'")


def test_who_is_alive_and_who_is_silent_is_told_by_epoch_and_broker_time() -> None:
    state = a_state(a_batch(epoch=4), a_batch(worker="w2"), a_batch(worker="w3"), a_control("w3"))
    assert state.fleet.alive() == [(W1, 4), (InstanceId("w2", 0), 1)]
    assert state.fleet.silent_since(2 * SECOND) == {W1}
    assert state.fleet.silent_since(99 * SECOND) == {W1, InstanceId("w2", 0)}
    state.handle(arrived(a_batch(AllBlocksCleared(), epoch=4, seq=2), 5))
    assert state.fleet.silent_since(99 * SECOND) == {InstanceId("w2", 0)}
    state.handle(LeaseExpired(W1, 4, 0))
    assert state.fleet.alive() == [(InstanceId("w2", 0), 1)]


# --- from messages to stimuli -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("subject", "kind", "worker"),
    [
        ("kv.events.model.w2.0", "spoofed", "w2"),
        ("kv.events.model.w1.1", "spoofed", "w1"),
        ("kv.events.model.w1", "subject", ""),
        ("kv.control.w1.0", "payload", "w1"),
    ],
)
def test_a_batch_counts_only_on_its_own_subject(subject: str, kind: str, worker: str) -> None:
    message = msgspec.structs.replace(a_message(a_batch()), subject=subject)
    stimulus = stimulus_of(message)
    assert isinstance(stimulus, PayloadRejected)
    assert (stimulus.kind, stimulus.worker, stimulus.stream_sequence) == (kind, worker, 1)


def test_a_record_counts_only_on_the_subject_of_whom_it_is_about() -> None:
    message = msgspec.structs.replace(a_message(a_control()), subject="kv.control.w2.0")
    stimulus = stimulus_of(message)
    assert isinstance(stimulus, PayloadRejected)
    assert stimulus.kind == "spoofed"


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        (b"\xc1", "payload"),
        (msgspec.msgpack.encode([900]), "version"),
        (bytes(9 << 20), "too_large"),
    ],
    ids=["payload", "version", "too_large"],
)
def test_what_cannot_be_read_is_named(payload: bytes, kind: str) -> None:
    message = msgspec.structs.replace(a_message(a_batch()), payload=payload)
    stimulus = stimulus_of(message)
    assert isinstance(stimulus, PayloadRejected)
    assert stimulus.kind == kind


def test_batches_and_records_come_through() -> None:
    assert stimulus_of(a_message(a_batch(), 7)) == arrived(a_batch(), 7)
    assert stimulus_of(a_message(a_control(), 7)) == arrived(a_control(), 7)


# --- digest of everything -----------------------------------------------------------------------


def test_the_state_digest_tells_apart_what_matters_and_nothing_else() -> None:
    base = a_state(a_batch(up(), stored(1, 2)))
    same = a_state(a_batch(up(), stored(2)), a_batch(stored(1), seq=1))
    same_blocks = a_state(a_batch(up(), stored(2), stored(1)))
    assert base.state_digest() == same_blocks.state_digest()
    others = [
        same,
        a_state(a_batch(up(), stored(1))),
        a_state(a_batch(up(), stored(1, 2), epoch=2)),
        a_state(a_batch(up(), stored(1, 2), rank=1)),
        a_state(a_batch(up(), stored(1, 2, tier=Tier.dram))),
        a_state(a_batch(up(), stored(1, 2)), a_control()),
        a_state(),
    ]
    digests = [each.state_digest() for each in others]
    assert len({*digests, base.state_digest()}) == len(others) + 1
    assert all(len(each) == 32 for each in digests)


def test_what_others_say_of_an_instance_is_kept_short() -> None:
    long = "x" * 1_000_000
    state = a_state(
        a_batch(up()),
        *[a_control(kind="quarantined", reason=f"{number}{long}") for number in range(3)],
        a_batch(up(), WorkerDown(long), worker="w2"),
        a_batch(up(), worker="w3"),
        a_control(kind="expired", reason=long, worker="w3"),
    )
    reasons = [why for view in state.instances() for why in view.trust_reasons]
    assert len(reasons) == 3
    assert max(map(len, reasons)) <= MAX_REASON + 20
    tables = state.fleet.tables(1, ResidencyTables(set(), set(), 0, 0))
    assert len(msgspec.msgpack.encode(tables)) < 20_000


def test_two_batches_of_one_sequence_are_a_loss_until_it_says_again_what_it_is() -> None:
    first = a_batch(up(), stored(1))
    own = replace(a_batch(stored(2), seq=2), ts_ns=7)
    other = replace(a_batch(SourceDegraded("forged"), seq=2), ts_ns=8)
    healed = a_batch(*digests(1), seq=3)
    state = a_state(first, own, own, healed)
    assert trust_of(state) is Trust.degraded, "block 2 is there as well"
    state = a_state(first, own, own, a_batch(*digests(1, 2), seq=3))
    assert trust_of(state) is Trust.exact, "published twice"
    state = a_state(first, own, other, a_batch(*digests(1, 2), seq=3))
    assert trust_of(state) is Trust.degraded, "the other may be the true one"
    state = a_state(first, own, other, a_batch(up(), *digests(1, 2), seq=3))
    assert trust_of(state) is Trust.exact


def test_one_that_describes_itself_otherwise_in_an_epoch_has_to_say_it_twice() -> None:
    first, other = a_batch(up()), a_batch(up(sidecar="forged"), seq=2)
    state = a_state(first, other, a_batch(*digests(), seq=3))
    assert trust_of(state) is Trust.degraded
    state = a_state(first, other, a_batch(up(), *digests(), seq=3))
    assert trust_of(state) is Trust.degraded
    state = a_state(first, other, a_batch(up(), seq=3), a_batch(up(), *digests(), seq=4))
    assert trust_of(state) is Trust.exact


def test_lifting_quarantines_again_and_again_does_not_use_up_the_records() -> None:
    records = []
    for number in range(2 * MAX_CONTROLS):
        records.append(a_control(kind="quarantined", reason="same"))
        reason = quarantine_lifted_because(str(number))
        records.append(a_control(kind="released", reason=reason))
    state = a_state(a_batch(up()), *records, a_control(kind="quarantined", reason="same"))
    assert trust_of(state) is Trust.degraded


def trust_of(state: IndexState) -> Trust | None:
    view = state.instance(W1)
    return None if view is None else view.trust
