"""Faults that others had, by number: each test is what must happen instead.

docs/faults.md says which test holds which; what is about events, formats and identity is tested
where those are (test_engine_*.py, test_edge*.py, test_hashing.py).
"""

import random
import threading
import tracemalloc

import msgspec
import pytest

from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.events.subjects import events_subject, parse_events_subject
from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import HoleSeen, LeaseExpired, stimulus_of
from kvatlas.indexer.index import kernel
from kvatlas.indexer.reader import RejectedCount
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.router.decision.loads import LoadTracker
from kvatlas.router.decision.requests import Report
from kvatlas.router.replicas.signals import MAX_SIGNAL_BYTES, Routed, encode_signal
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import WIRE_VERSION, EventBatch, WorkerDown
from kvatlas.schemas.routing import Plan
from kvatlas.schemas.settings import RouterSettings
from testkit.builders import (
    MODEL,
    ROOT,
    a_batch,
    a_control,
    a_message,
    arrived,
    digests,
    hashes,
    inventory,
    removed,
    stored,
    subject_of,
    up,
)
from testkit.indexes import tiny_index
from testkit.waiting import until

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)
HUNDRED = range(1, 101)


class Fold:
    """A fold and the number of the next message."""

    def __init__(self, index: FlatRadixIndex | ReferenceIndex | None = None) -> None:
        self.state, self.at = IndexState(index or FlatRadixIndex()), 0

    def take(self, *batches: EventBatch) -> None:
        for batch in batches:
            self.at += 1
            self.state.handle(arrived(batch, self.at))

    def lengths(self, *blocks: int) -> dict[str, int]:
        return {m.instance.worker: m.num_blocks for m in self.state.match(hashes(*blocks))}

    def trust(self, instance: InstanceId = W1) -> Trust:
        view = self.state.instance(instance)
        assert view is not None
        return view.trust


@pytest.fixture
def fold() -> Fold:
    return Fold()


# --- order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "trust"), [(1, Trust.exact), (501, Trust.degraded)])
def test_f2_a_restarted_publisher_is_noticed_whatever_it_counts_from(
    fold: Fold, first: int, trust: Trust
) -> None:
    fold.take(a_batch(up(), stored(*HUNDRED)), *(a_batch(seq=seq) for seq in range(2, 501)))
    fold.take(a_batch(up(), stored(1), epoch=2, seq=first))
    assert fold.lengths(*HUNDRED) == {"w1": 1}
    assert fold.trust() is trust
    fold.take(a_batch(stored(2), epoch=1, seq=499))
    assert fold.lengths(1, 2) == {"w1": 1}
    assert fold.state.stats().old_epochs == 1


def test_f3_a_lost_sequence_is_in_every_answer_and_in_a_counter(fold: Fold) -> None:
    kept = [seq for seq in range(1, 11) if seq != 7]
    fold.take(*(a_batch(*([up()] if seq == 1 else []), stored(seq), seq=seq) for seq in kept))
    assert fold.state.stats().gaps == 1
    assert [match.trust for match in fold.state.match(hashes(1))] == [Trust.degraded]


def test_f4_a_gap_is_repaired_to_what_would_be_without_it(fold: Fold) -> None:
    whole = Fold()
    batches = [a_batch(*([up()] if s == 1 else []), stored(s), seq=s) for s in range(1, 9)]
    told = a_batch(inventory(*range(1, 9), as_of=8), *digests(*range(1, 9)), seq=9)
    whole.take(*batches, told)
    fold.take(*batches[:3], *batches[6:], told)
    assert fold.trust() is Trust.exact
    assert fold.state.state_digest() == whole.state.state_digest()


def test_f5_a_reader_that_comes_after_the_history_is_gone_becomes_exact(fold: Fold) -> None:
    fold.at = 49_000
    fold.state.handle(HoleSeen(1, 49_001))
    fold.take(a_batch(up(), stored(7), seq=50_000))
    assert fold.state.fleet.wants_inventory(W1)
    fold.take(a_batch(inventory(1, 2, 7, as_of=50_000), *digests(1, 2, 7), seq=50_001))
    assert fold.trust() is Trust.exact
    assert fold.lengths(1, 2) == {"w1": 2}


def test_f6_what_is_known_goes_on_being_served_while_a_gap_is_repaired(fold: Fold) -> None:
    thousand = range(1, 1001)
    fold.take(a_batch(up(), stored(*thousand)))
    for seq in range(3, 30):
        fold.take(a_batch(stored(2_000 + seq), seq=seq))
        assert fold.lengths(*thousand) == {"w1": 1000}
        assert fold.trust() is Trust.degraded


def test_f7_ranks_and_inventories_make_no_gaps_and_a_late_start_is_one(fold: Fold) -> None:
    for rank in (0, 1):
        fold.take(a_batch(up(), stored(1), rank=rank))
    for seq in range(2, 6):
        for rank in (0, 1):
            fold.take(a_batch(inventory(1, as_of=seq - 1), rank=rank, seq=seq))
    assert fold.state.stats().gaps == 0
    fold.take(a_batch(up(), worker="w9", seq=5))
    assert fold.state.stats().gaps == 1


def test_f8_a_snapshot_stands_for_its_position_and_nothing_else(fold: Fold) -> None:
    batches = [a_batch(*([up()] if s == 1 else []), stored(s), seq=s) for s in range(1, 21)]
    fold.take(*batches[:10])
    late = Fold()
    late.state.restore(fold.state.export()())
    assert late.state.stream_sequence == 10
    late.at = 5
    late.take(*batches[5:15])
    assert late.state.stream_sequence == 15
    assert (late.state.stats().duplicates, late.state.stats().gaps) == (0, 0)
    fold.take(*batches[10:15])
    assert late.state.state_digest() == fold.state.state_digest()


def test_f12_the_last_words_of_a_worker_are_heard(fold: Fold) -> None:
    fold.take(a_batch(up(), stored(1)), a_batch(stored(2), WorkerDown("bye"), seq=2))
    view = fold.state.instance(W1)
    assert view is not None
    assert (view.seq, view.trust, view.trust_reasons) == (2, Trust.gone, ("down: bye",))


def test_f17_a_dead_worker_is_not_brought_back_by_what_it_said_before(fold: Fold) -> None:
    fold.take(a_batch(up(), stored(1)))
    fold.state.handle(LeaseExpired(W1, 1, 0))
    fold.at += 1
    fold.state.handle(arrived(a_control(), fold.at))
    fold.take(a_batch(stored(2), seq=2))
    assert fold.lengths(1) == fold.lengths(2) == {}


def test_f44_a_newer_version_is_named_in_a_counter(fold: Fold) -> None:
    newer = msgspec.structs.replace(a_batch(up()), v=WIRE_VERSION + 100)
    fold.state.handle(stimulus_of(a_message(newer)))
    [rejected] = fold.state.stats().rejected
    assert rejected == RejectedCount("w1", "version", 1)


# --- the bus --------------------------------------------------------------------------------------


async def test_f9_a_reader_that_starts_again_and_again_harms_no_other() -> None:
    broker = MemoryBroker()
    async with broker.connect() as bus, broker.connect() as other:
        await bus.declare_stream(events_stream())
        publisher = bus.publisher(KV_EVENTS)
        async with IndexService(other, IndexState(ReferenceIndex())) as steady:
            for seq in range(1, 21):
                batch = a_batch(*([up()] if seq == 1 else []), stored(seq), seq=seq)
                await publisher.publish(subject_of(batch), encode(batch))
                async with IndexService(bus, IndexState(ReferenceIndex())) as restarting:
                    await restarting.wait_ready()
            await until(lambda: steady.state.stream_sequence == 20)
            async with IndexService(bus, IndexState(ReferenceIndex())) as last:
                await last.wait_ready()
                assert steady.state.state_digest() == last.state.state_digest()
            assert steady.state.stats().stream_holes == 0


async def test_f10_a_log_that_nobody_reads_stays_within_its_limits() -> None:
    async with MemoryBroker().connect() as bus:
        await bus.declare_stream(events_stream(max_bytes=20_000))
        publisher = bus.publisher(KV_EVENTS)
        for seq in range(1, 201):
            batch = a_batch(stored(*range(30)), seq=seq)
            if seq == 1:
                batch = a_batch(up(), stored(*range(30)))
            elif seq == 200:
                batch = a_batch(up(), inventory(7, as_of=199), *digests(7), seq=200)
            await publisher.publish(subject_of(batch), encode(batch))
        assert await bus.first_sequence(KV_EVENTS) > 1
        async with IndexService(bus, IndexState(ReferenceIndex())) as late:
            await late.wait_ready()
            view = late.index.instance(W1)
            assert view is not None
            assert view.trust is Trust.exact


# --- the index ------------------------------------------------------------------------------------


def test_f18_a_removal_is_of_one_worker_and_counts_are_what_is_there(fold: Fold) -> None:
    fold.take(a_batch(up(), stored(1, 2)), a_batch(up(), stored(1, 2), worker="w2"))
    fold.take(a_batch(removed(1, 2, 9), seq=2), a_batch(removed(1, 2), seq=3))
    assert fold.lengths(1, 2) == {"w2": 2}
    assert fold.state.stats().num_blocks == 2


def test_f23_workers_that_come_and_go_leave_nothing_behind() -> None:
    fold = Fold(tiny_index())
    fold.state.fleet._max_gone = 10

    def come_and_go(times: int) -> None:
        for n in range(times):
            name = f"w{n}"
            fold.take(a_batch(up(), stored(*range(1, 20)), worker=name, epoch=fold.at + 1))
            fold.take(a_batch(WorkerDown("end"), worker=name, epoch=fold.at, seq=2))

    tracemalloc.start()
    try:
        come_and_go(6_000)  # the interpreter keeps some thousands of tuples to use again
        before = tracemalloc.get_traced_memory()[0]
        come_and_go(1_000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 20 * 1_000  # bytes a worker: less than the least that could be kept of one
    assert fold.state.stats().num_blocks == 0
    assert len(fold.state.fleet.instances) <= 11


def test_f27_a_hole_that_is_refilled_shows_what_lies_behind_it(fold: Fold) -> None:
    fold.take(a_batch(up(), stored(1, 2, 3, 4)))
    fold.take(a_batch(removed(2), seq=2))
    assert fold.lengths(1, 2, 3, 4) == {"w1": 1}
    fold.take(a_batch(stored(2, parent=1), seq=3))
    assert fold.lengths(1, 2, 3, 4) == {"w1": 4}


def test_f29_readers_beside_a_writer_change_nothing_that_is_folded() -> None:
    quiet, busy = Fold(), Fold()
    chance = random.Random(1)
    batches = [a_batch(up(), stored(1))]
    for seq in range(2, 400):
        blocks = chance.sample(range(1, 300), 20)
        event = stored(*blocks) if chance.random() < 0.6 else removed(*blocks)
        batches.append(a_batch(event, seq=seq))
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            busy.state.match(hashes(*range(1, 50)))

    reader = threading.Thread(target=ask)
    reader.start()
    try:
        for batch in batches:
            busy.take(batch)
            quiet.take(batch)
    finally:
        ended.set()
        reader.join()
    assert busy.state.state_digest() == quiet.state.state_digest()


def test_f30_however_many_hold_a_block_all_of_them_are_found(fold: Fold) -> None:
    for n in range(300):
        fold.take(a_batch(up(), stored(1), worker=f"w{n}"))
    assert len(fold.lengths(1)) == 300


def test_f33_memory_is_a_function_of_what_is_held() -> None:
    index = FlatRadixIndex()
    worker = index.add_instance()
    chance, sizes = random.Random(1), []
    for _ in range(8):
        runs = [chance.randbytes(16 * 64) for _ in range(200)]
        for run in runs:
            index.store(worker, Tier.hbm, ROOT, run)
        for run in runs:
            index.remove(worker, Tier.hbm, run)
        sizes.append(index.memory_bytes())
    assert index.num_blocks() == 0
    assert sizes[-1] == sizes[1]


def test_f34_at_its_ceiling_the_index_answers_with_what_it_has_and_says_so() -> None:
    index = FlatRadixIndex(max_bytes=1 << 20, segment_cells=64, first_segments=2)
    fold = Fold(index)
    chance = random.Random(1)
    chain = [chance.getrandbits(120) for _ in range(100_000)]
    fold.take(a_batch(up()))
    for seq, first in enumerate(range(0, len(chain), 1_000), 2):
        fold.take(a_batch(stored(*chain[first : first + 1_000]), seq=seq))
    assert fold.trust() is Trust.degraded
    assert fold.state.stats().index_full > 0
    [match] = fold.state.match(hashes(*chain))
    assert 0 < match.num_blocks < len(chain)
    assert index.memory_bytes() <= 1 << 20
    with pytest.raises(IndexFull):
        index.store(0, Tier.hbm, ROOT, chance.randbytes(16 * 100_000))


def test_f37_forgetting_a_worker_does_not_walk_what_it_held() -> None:
    """Counts what the forgetting itself writes: a bit, however much was held."""
    index = FlatRadixIndex()
    one, other = index.add_instance(), index.add_instance()
    chain = random.Random(1).randbytes(16 * 50_000)
    for each in (one, other):
        index.store(each, Tier.hbm, ROOT, chain)
    used = index._cells[: int(index._state[kernel.NUM_SEGMENTS]) * 4096]
    before = used.copy()
    index.forget_instance(one)
    assert (used == before).all()
    assert [match.instance for match in index.match(chain)] == [other]


# --- names, loads ---------------------------------------------------------------------------------


def test_f41_names_are_no_grammar() -> None:
    for model in ("org/m@v1.2", "a.b.c", "*", ">", "", "ü", "w 1"):
        subject = events_subject(model, InstanceId(model, 3))
        assert parse_events_subject(subject) == (model, InstanceId(model, 3))


def test_f68_what_routers_tell_one_another_does_not_grow_with_the_prompt() -> None:
    plan = Plan(16, 0, (), 1_000_000)
    chain = bytes(16 * 62_500)
    signal = Routed("d" * 28, MODEL, "w1", 0, 1, plan, 1.0, chain[: 16 * 1024])
    assert len(encode_signal("router", signal)) < MAX_SIGNAL_BYTES


def test_f69_a_long_request_counts_as_long_as_it_gives_signs_of_life() -> None:
    loads = LoadTracker(RouterSettings(request_timeout_seconds=60.0))
    loads.of(W1, 1, MODEL, 0.0)
    loads.routed("long", W1, Plan(16, 0, (), 100), 0.0, 0.0)
    for minute in range(30):
        assert loads.prefilled("long", Report(), 50.0 * minute)
        loads.expire(50.0 * minute)
    assert loads.of(W1, 1, MODEL, 1_500.0).in_flight == 1
    loads.expire(1_600.0)
    assert loads.of(W1, 1, MODEL, 1_600.0).in_flight == 0


def test_f77_what_the_index_holds_can_be_looked_at(fold: Fold) -> None:
    fold.take(a_batch(up(), stored(1, 2, 3)), a_batch(up(), stored(1), worker="w2"))
    [top] = fold.state.tree(depth=3, width=8)
    assert {each.worker for each in top.holders} == {"w1", "w2"}
    assert fold.state.holders(hashes(1)) == [(W1, Tier.hbm), (W2, Tier.hbm)]
