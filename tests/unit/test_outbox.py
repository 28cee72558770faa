"""Batches on their way to the bus."""

import inspect
import itertools

import msgspec
import pytest

from kvatlas.schemas.fleet import NamespaceDescriptor, WorkerInfo
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    BlockStored,
    Digest,
    EventBatch,
    Inventory,
    KvEvent,
    Resync,
    WorkerDown,
    WorkerUp,
)
from kvatlas.schemas.settings import SidecarSettings
from kvatlas.worker_hooks.reporting.inventory import MAX_PART_BLOCKS
from kvatlas.worker_hooks.reporting.outbox import DEFAULT_MAX_SECONDS, Outbox
from kvatlas.worker_hooks.sidecar.options import SidecarOptions

_clock = itertools.count(1000.0)
UP = WorkerUp(WorkerInfo("", ("m",), NamespaceDescriptor(16)))
ROOT = bytes(16)
STORED = BlockStored(ROOT, bytes(32))
DIGEST = Digest(Tier.hbm, 0, 0)
INVENTORY = Inventory(1, 1, 1, Tier.hbm, ROOT, bytes(160))


def an_outbox(max_bytes: int = 10_000, coalesce_bytes: int = 1000) -> Outbox:
    return Outbox(InstanceId("w", 0), UP, max_bytes, coalesce_bytes, coalesce_seconds=0.002)


def take_all(outbox: Outbox, now: float | None = None) -> list[EventBatch]:
    """Take until nothing more comes: at one moment, or as time goes by."""
    moments = _clock if now is None else itertools.repeat(now)
    return list(iter(lambda: outbox.next_batch(next(moments), 0), None))


def shape(batches: list[EventBatch]) -> list[tuple[int, tuple[KvEvent, ...]]]:
    return [(batch.seq, batch.events) for batch in batches]


def test_the_first_event_of_an_epoch_is_worker_up() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    outbox.add([STORED])
    (batch,) = take_all(outbox)
    assert (batch.epoch, batch.seq, batch.events) == (5, 1, (UP, STORED))
    assert (batch.worker, batch.rank) == ("w", 0)


def test_nothing_leaves_before_the_epoch_is_known() -> None:
    outbox = an_outbox()
    outbox.add([STORED])
    assert outbox.next_batch(99.0, 0) is None
    assert outbox.seconds_until_due(99.0) is None
    outbox.begin_epoch(5)
    assert shape(take_all(outbox)) == [(1, (UP, STORED))]


def test_what_follows_close_behind_leaves_together() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    take_all(outbox, 10.0)
    outbox.add([STORED])
    outbox.add([DIGEST])
    assert outbox.seconds_until_due(10.0005) == pytest.approx(0.0015)
    assert outbox.next_batch(10.001, 0) is None
    assert shape(take_all(outbox, 10.002)) == [(2, (STORED, DIGEST))]
    assert outbox.seconds_until_due(10.002) is None


def test_after_a_quiet_moment_an_event_leaves_at_once() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    take_all(outbox, 10.0)
    outbox.add([STORED])
    assert outbox.seconds_until_due(11.0) == 0.0


def test_without_coalescing_each_event_leaves_by_itself() -> None:
    outbox = Outbox(InstanceId("w", 0), UP, coalesce_bytes=1, coalesce_seconds=0.0)
    outbox.begin_epoch(5)
    outbox.add([STORED, STORED])
    outbox.add([DIGEST])
    batches = take_all(outbox, 10.0)
    assert [batch.events[-1] for batch in batches] == [STORED, STORED, DIGEST]


def test_what_settings_say_is_what_an_outbox_does_unasked() -> None:
    parameters = inspect.signature(Outbox).parameters
    options = {field.name: field.default for field in msgspec.structs.fields(SidecarOptions)}
    for name in ("coalesce_bytes", "coalesce_seconds"):
        default = parameters[name].default
        assert getattr(SidecarSettings(), name) == options[name] == default
    for name in ("bytes", "seconds"):
        default = parameters[f"max_{name}"].default
        setting = f"max_outbox_{name}"
        assert getattr(SidecarSettings(), setting) == options[setting] == default


def test_many_events_leave_in_batches_of_bounded_size_with_consecutive_sequences() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    outbox.add([STORED] * 100)
    batches = take_all(outbox)
    assert [batch.seq for batch in batches] == list(range(1, len(batches) + 1))
    assert sum(len(batch.events) for batch in batches) == 101
    assert max(len(batch.events) for batch in batches) < 20
    assert outbox.waiting_bytes == 0


def test_an_overflow_is_a_gap_and_one_resync() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    take_all(outbox)
    outbox.add([STORED] * 150)
    assert outbox.is_lost
    outbox.add([STORED] * 150)  # the inventory will tell
    outbox.add([STORED] * 150)
    (batch,) = take_all(outbox)
    (resync,) = batch.events
    assert isinstance(resync, Resync)
    assert (resync.lost_from, resync.lost_to) == (2, batch.seq - 1)
    assert outbox.num_overflows == 1


def test_the_inventory_ends_a_loss() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    take_all(outbox)
    outbox.add([STORED] * 150)
    take_all(outbox)
    assert outbox.is_lost
    as_of = outbox.seal()
    outbox.add_inventory([INVENTORY])
    outbox.add([STORED])
    assert shape(take_all(outbox)) == [(as_of + 1, (INVENTORY,)), (as_of + 2, (STORED,))]


def test_a_second_overflow_before_the_first_was_told_is_one_resync_of_both() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    take_all(outbox)
    outbox.add([STORED] * 150)
    outbox.seal()
    outbox.add_inventory([INVENTORY])
    outbox.add([STORED] * 150)
    (batch,) = take_all(outbox)
    (resync,) = batch.events
    assert isinstance(resync, Resync)
    assert (resync.lost_from, resync.lost_to) == (2, batch.seq - 1)


def test_an_overflow_before_anything_left_begins_anew() -> None:
    outbox = an_outbox()
    outbox.add([STORED] * 150)
    assert outbox.is_lost
    outbox.begin_epoch(5)
    assert shape(take_all(outbox)) == [(1, (UP, Resync(1, 1)))]
    assert outbox.is_lost  # the inventory has to follow


def test_an_inventory_does_not_overflow_however_large() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    outbox.add_inventory([INVENTORY] * 1000)
    outbox.add([STORED])
    assert not outbox.is_lost
    events = [event for batch in take_all(outbox) for event in batch.events]
    assert events == [UP, *[INVENTORY] * 1000, STORED]
    assert outbox.waiting_bytes == 0


def test_an_inventory_leaves_in_batches_that_a_reader_folds_in_a_moment() -> None:
    outbox = Outbox(InstanceId("w", 0), UP)
    outbox.begin_epoch(5)
    parts = [Inventory(1, n, 9, Tier.hbm, ROOT, bytes(16 * MAX_PART_BLOCKS)) for n in range(1, 10)]
    outbox.add_inventory([UP, *parts, *[INVENTORY] * 100])
    batches = take_all(outbox)
    hashes = [b"".join(e.hashes for e in b.events if isinstance(e, Inventory)) for b in batches]
    assert len(b"".join(hashes)) == 16 * (9 * MAX_PART_BLOCKS + 1000)
    assert max(len(each) for each in hashes) <= 16 * MAX_PART_BLOCKS


def test_a_loss_in_the_ring_is_bounded_by_the_sequence_of_its_batch() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    take_all(outbox)
    outbox.add([STORED, Resync(0, 0), STORED])
    assert shape(take_all(outbox)) == [(2, (STORED, Resync(2, 2), STORED))]


def test_a_second_epoch_begins_with_nothing_of_the_first() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    outbox.add([STORED] * 50)
    outbox.next_batch(2.0, 0)
    outbox.begin_epoch(6)
    (batch,) = take_all(outbox)
    assert (batch.epoch, batch.seq, batch.events) == (6, 1, (UP, Resync(1, 1)))
    assert outbox.is_lost


def test_a_batch_that_was_refused_is_told_as_lost() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    take_all(outbox)
    outbox.add([STORED])
    (refused,) = take_all(outbox)
    outbox.add([STORED])
    outbox.lose(refused.seq)
    assert shape(take_all(outbox)) == [(4, (Resync(2, 3),))]
    assert outbox.is_lost


def test_the_last_word_gets_through_a_loss() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    take_all(outbox)
    outbox.add([STORED] * 150)
    outbox.add([WorkerDown("stopped")])
    (batch,) = take_all(outbox)
    assert isinstance(batch.events[0], Resync)
    assert batch.events[1] == WorkerDown("stopped")


def test_what_has_waited_for_too_long_is_dropped_like_what_is_too_much() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    take_all(outbox)
    outbox.add([STORED])
    outbox.age_out(100.0)
    outbox.add([STORED])
    outbox.age_out(100.0 + DEFAULT_MAX_SECONDS - 0.1)
    assert not outbox.is_lost
    outbox.age_out(100.0 + DEFAULT_MAX_SECONDS)
    assert (outbox.is_lost, outbox.num_overflows) == (True, 1)
    outbox.age_out(100.0 + 9 * DEFAULT_MAX_SECONDS)  # what tells the loss is not lost itself
    assert shape(take_all(outbox)) == [(3, (Resync(2, 2),))]
    assert outbox.num_overflows == 1


def test_what_leaves_in_time_does_not_age() -> None:
    outbox = an_outbox()
    outbox.begin_epoch(5)
    for now in range(0, 3000, 100):
        outbox.add([STORED])
        outbox.age_out(float(now))
        take_all(outbox)
    assert outbox.num_overflows == 0


def test_an_outbox_holds_the_events_of_a_busy_engine_through_an_election() -> None:
    """2,000 blocks a second, one event each, for 10 s and more: a cluster elects in less."""
    outbox = Outbox(InstanceId("w", 0), UP)
    outbox.begin_epoch(5)
    for second in range(60):
        outbox.add([BlockStored(ROOT, bytes(16), bytes(16))] * 2_000)
        outbox.age_out(float(second))
    assert outbox.num_overflows == 0
