"""Faults that others had, by number: what the fold and the index make of what engines say."""

import logging
import random
import tracemalloc

import pytest

from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.budgets import BudgetSettings
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.indexer.snapshots.writing import SnapshotSettings
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import AllBlocksCleared, BlockStored, EventBatch, KvEvent
from kvatlas.worker_hooks.raw_events import RawEvent, RawRemoved, RawStored
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from testkit import engine_words
from testkit.builders import (
    ROOT,
    a_batch,
    arrived,
    digest,
    digests,
    hashes,
    inventory,
    stored,
    subject_of,
    up,
)
from testkit.engine_words import DESCRIPTOR, chain_of, tokens_of
from testkit.waiting import until

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)
HUNDRED = range(1, 101)
#: no snapshot comes by itself
BY_HAND = SnapshotSettings(seconds=3_600.0, messages=1)


def folded(*batches: EventBatch) -> IndexState:
    state = IndexState(FlatRadixIndex())
    for at, batch in enumerate(batches, 1):
        state.handle(arrived(batch, at))
    return state


def lengths(state: IndexState, chain: bytes) -> dict[InstanceId, int]:
    found = state.match(chain)
    assert len({match.instance for match in found}) == len(found)
    return {match.instance: match.num_blocks for match in found}


# --- life and death -------------------------------------------------------------------------------


def test_f1_a_restart_in_place_leaves_nothing_of_what_was_held_before() -> None:
    """What others hold stays, and so does what they hold in a tier that is shared."""
    state = folded(
        a_batch(up(), stored(*HUNDRED), stored(*HUNDRED, tier=Tier.dram)),
        a_batch(up(), stored(*HUNDRED, tier=Tier.remote), worker="w2"),
        a_batch(up(), stored(1), epoch=2),
    )
    assert lengths(state, hashes(*HUNDRED)) == {W1: 1, W2: 100}
    view = state.instance(W1)
    assert view is not None
    assert (view.trust, view.num_blocks) == (Trust.exact, 1)


def test_f16_a_clear_empties_one_tier_of_one_rank() -> None:
    state = folded(
        *(a_batch(up(), stored(1), stored(2, tier=Tier.dram), rank=rank, seq=1) for rank in (0, 1)),
        a_batch(AllBlocksCleared(Tier.hbm), seq=2),
    )
    views = {view.instance.rank: set(view.digests) for view in state.instances()}
    assert views == {0: {Tier.dram}, 1: {Tier.hbm, Tier.dram}}


def test_f60_a_block_that_moved_without_a_word_is_missed_in_its_tier() -> None:
    """The engine wrote it back to memory and told only that; its digests tell the rest."""
    state = folded(
        a_batch(up(), stored(1, 2)),
        a_batch(stored(2, tier=Tier.dram), seq=2),
        a_batch(digest(1), digest(2, tier=Tier.dram), seq=3),
    )
    view = state.instance(W1)
    assert view is not None
    assert view.trust is Trust.degraded
    assert any("hbm holds 1 blocks, the index 2" in reason for reason in view.trust_reasons)
    assert state.stats().digest_mismatches == 1


def test_f21_a_wrong_count_lives_until_the_next_digest_and_an_inventory_ends_it() -> None:
    """Counted as copies, it went without a removal: only the index still has it."""
    state = folded(a_batch(up(), stored(1)), a_batch(*digests(), seq=2))
    assert [match.trust for match in state.match(hashes(1))] == [Trust.degraded]
    state.handle(arrived(a_batch(inventory(as_of=2), *digests(), seq=3), 3))
    assert state.match(hashes(1)) == []
    view = state.instance(W1)
    assert view is not None
    assert view.trust is Trust.exact


# --- what matches ---------------------------------------------------------------------------------


def heard(tracker: EngineStateTracker, *events: RawEvent) -> list[KvEvent]:
    return tracker.handle(list(events))


def test_f28_blocks_can_be_removed_whatever_an_engine_calls_them() -> None:
    trackers = {
        worker: EngineStateTracker(engine_words.MODEL, DESCRIPTOR) for worker in ("w1", "w2")
    }
    prompt = tokens_of(1, 2, 3, 4)
    calls: dict[str, tuple[int | bytes, ...]] = {
        "w1": (11, 12, 13, 14),
        "w2": (b"a", b"b", b"c", b"d"),
    }
    batches = [
        a_batch(up(), *heard(trackers[w], RawStored(calls[w], None, prompt)), worker=w)
        for w in calls
    ]
    gone = heard(trackers["w2"], RawRemoved((b"c", b"d")))
    state = folded(*batches, a_batch(*gone, worker="w2", seq=2))
    chain = b"".join(chain_of(1, 2, 3, 4))
    assert {i.worker: n for i, n in lengths(state, chain).items()} == {"w1": 4, "w2": 2}


def test_f32_each_worker_has_its_own_longest_match() -> None:
    state = folded(
        a_batch(up(), stored(1, 2)),
        a_batch(up(), stored(1, 2, 3, 4, 5), worker="w2"),
        a_batch(up(), stored(3, 4, 5), worker="w3"),
    )
    assert lengths(state, hashes(1, 2, 3, 4, 5)) == {W1: 2, W2: 5}


@pytest.mark.parametrize("level", [logging.WARNING, logging.DEBUG])
def test_f35_a_match_costs_objects_for_holders_and_none_for_their_blocks(
    level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """3,750 blocks, of which 96 workers hold different parts."""
    caplog.set_level(level)
    chance = random.Random(1)
    chain = chance.randbytes(16 * 3_750)
    state = IndexState(FlatRadixIndex())
    for n in range(96):
        held = BlockStored(ROOT, chain[: 16 * chance.randrange(3_000, 3_751)])
        state.handle(arrived(a_batch(up(), held, worker=f"w{n}"), n + 1))
    state.match(chain)
    tracemalloc.start()
    try:
        found = state.match(chain)
        at_most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == 96
    assert at_most < 96 * 1_000 + 3_750 * 8  # bytes; a reference a holder and block is 2.9 MB
    assert caplog.records == []


# --- replicas, snapshots, floods -----------------------------------------------------------------


async def publish(bus: MemoryBus, *batches: EventBatch) -> None:
    publisher = bus.publisher(KV_EVENTS)
    for batch in batches:
        await publisher.publish(subject_of(batch), encode(batch))
    await publisher.flush()


async def test_f11_an_index_that_is_lost_under_load_is_replaced_by_an_equal_one() -> None:
    """Ready at the end that the log had when it started, and `catching_up` before that."""
    async with MemoryBroker().connect() as bus:
        await bus.declare_stream(events_stream())
        batches = [a_batch(*([up()] if s == 1 else []), stored(s), seq=s) for s in range(1, 301)]
        steady = IndexService(bus, IndexState(FlatRadixIndex()))
        lost = IndexService(bus, IndexState(FlatRadixIndex()), snapshots=BY_HAND)
        async with steady:
            async with lost:
                await publish(bus, *batches[:100])
                await until(lambda: lost.state.stream_sequence == 100)
                assert lost._writer is not None
                assert await lost._writer.poll()
                await publish(bus, *batches[100:150])
            again = IndexService(bus, IndexState(FlatRadixIndex()), snapshots=BY_HAND)
            await publish(bus, *batches[150:200])
            async with again:
                assert again.loaded is not None
                assert again.loaded.about.stream_sequence == 100
                assert not again.is_ready
                assert [view.trust for view in again.index.instances()] == [Trust.catching_up]
                await publish(bus, *batches[200:])
                await again.wait_ready()
                for service in (steady, again):
                    await until(lambda s=service: s.state.stream_sequence == 300)  # type: ignore[misc]
                assert again.state.state_digest() == steady.state.state_digest()
                assert again.index.instances() == steady.index.instances()


async def test_f80_who_floods_or_forges_harms_itself_only() -> None:
    budget = BudgetSettings(bytes_per_second=1_000.0, burst_bytes=20_000.0, throttle_seconds=60.0)
    settings = IndexServiceLimits(poll_seconds=0.01, budget=budget)
    async with MemoryBroker().connect() as bus:
        await bus.declare_stream(events_stream())
        state = IndexState(FlatRadixIndex())
        async with IndexService(bus, state, settings=settings) as service:
            await publish(bus, a_batch(up(), stored(1)), a_batch(up(), stored(1), worker="w2"))
            publisher = bus.publisher(KV_EVENTS)
            forged = encode(a_batch(up(), epoch=2))
            await publisher.publish(subject_of(a_batch(worker="w2")), forged)
            await publish(
                bus, *(a_batch(stored(*range(100)), worker="w2", seq=seq) for seq in range(2, 30))
            )
            await until(lambda: state.stats().throttles == 1)
            assert [(r.worker, r.kind, r.count) for r in state.stats().rejected] == [
                ("w2", "spoofed", 1)
            ]
            await publish(bus, a_batch(stored(2), seq=2))
            await until(lambda: lengths(state, hashes(1, 2)) == {W1: 2})
            view = service.index.instance(W1)
            assert view is not None
            assert (view.trust, view.epoch) == (Trust.exact, 1)
