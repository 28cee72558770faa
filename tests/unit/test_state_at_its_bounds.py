"""What the fold says where numbers run out: of the index, of a sequence, of a counter."""

import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvatlas.events.bus import Message
from kvatlas.events.codec import encode
from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.fold.batches import MAX_COUNT
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import AuditFailed, HoleSeen, RequestInventory, stimulus_of
from kvatlas.indexer.index.port import PrefixIndex
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.publication import IndexPublication, WriterStatus
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import EventBatch
from testkit.builders import a_batch, a_control, arrived, digests, hashes, stored, subject_of, up
from testkit.histories import validate
from testkit.indexes import tiny_index

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)
MAX_SEQUENCE = 2**53


def take(state: IndexState, *batches: EventBatch) -> None:
    for batch in batches:
        at = state.stream_sequence + 1
        state.handle(stimulus_of(Message(at, subject_of(batch), encode(batch), at)))
        validate(state)


def trust_of(state: IndexState, instance: InstanceId) -> Trust:
    view = state.instance(instance)
    assert view is not None
    return view.trust


@pytest.mark.parametrize("make", [FlatRadixIndex, ReferenceIndex])
def test_who_found_no_number_and_held_nothing_gets_one_when_it_stores(
    make: type[FlatRadixIndex] | type[ReferenceIndex],
) -> None:
    """Digests of nothing agree without a number; what it stores then must not pass unseen."""
    state = IndexState(make(max_instances=1))
    take(state, a_batch(up()), a_batch(up(), worker="w2"))
    assert trust_of(state, W2) is Trust.degraded
    take(state, a_batch(*digests(), worker="w2", seq=2))
    assert trust_of(state, W2) is Trust.exact, "it holds nothing, and that is known"
    take(state, a_batch(stored(1, 2), worker="w2", seq=3))
    assert trust_of(state, W2) is Trust.degraded
    take(state, a_batch(up(), worker="w1", epoch=2))
    state.handle(arrived(a_control(kind="expired", epoch=2), state.stream_sequence + 1))
    take(state, a_batch(stored(5), worker="w2", seq=4))
    assert state.holders(hashes(5)) == [(W2, Tier.hbm)]
    take(state, a_batch(*digests(1, 2, 5), worker="w2", seq=5))
    assert trust_of(state, W2) is Trust.degraded, "the first two are missing"


@pytest.mark.parametrize("index", [FlatRadixIndex(), ReferenceIndex()])
def test_who_was_forgotten_within_a_hole_is_not_exact_after_its_next_batch(
    index: PrefixIndex,
) -> None:
    """The batch shows that the hole was about others, not that nothing was dropped."""
    state = IndexState(index)
    take(state, a_batch(up(), stored(1, 2)))
    state.handle(HoleSeen(2, 4))
    state.handle(arrived(a_control(kind="forgotten", reason="1"), 4))
    take(state, a_batch(stored(3), seq=2))
    assert (state.holders(hashes(1)), trust_of(state, W1)) == ([], Trust.degraded)
    take(state, a_batch(*digests(3), seq=3))
    assert trust_of(state, W1) is Trust.exact


def test_memory_that_broke_while_nothing_counted_asks_for_no_inventory() -> None:
    state = IndexState(ReferenceIndex())
    take(state, a_batch(up(), stored(1)))
    state.handle(arrived(a_control(kind="throttled", reason="1"), 2))
    assert state.handle(AuditFailed(((W1, Tier.hbm),))) == []
    validate(state)


class NeverMended(ReferenceIndex):
    """An index that finds no memory to take out what an audit has found wrong."""

    def mend(self, slots: Iterable[tuple[int, Tier]]) -> None:
        raise IndexFull("no memory for words")


def test_memory_that_broke_is_emptied_though_there_is_none_to_mend_it() -> None:
    state = IndexState(NeverMended())
    take(state, a_batch(up(), stored(1), stored(2, tier=Tier.dram)))
    broken = (W1, Tier.hbm), (W1, Tier.dram)
    effects = state.handle(AuditFailed(broken))
    assert RequestInventory(W1, 1) in effects
    assert (state.holders(hashes(1)), trust_of(state, W1)) == ([], Trust.degraded)
    validate(state)


def test_a_sequence_that_no_instance_reaches_is_refused() -> None:
    state = IndexState(ReferenceIndex())
    take(state, a_batch(up()), a_batch(seq=MAX_SEQUENCE + 1))
    assert [(each.worker, each.kind) for each in state.stats().rejected] == [("w1", "payload")]
    assert state.stats().gaps == 0


def test_however_many_are_missing_a_snapshot_and_readers_can_be_told(tmp_path: Path) -> None:
    arrays = SharedArrays(tmp_path)
    state = IndexState(tiny_index(arrays=arrays))
    publication = IndexPublication(arrays, state, state)
    state.fleet.counters.missing_batches = MAX_COUNT - 5
    with publication:
        take(state, a_batch(up()), a_batch(seq=MAX_SEQUENCE), a_batch(up(), epoch=2))
    assert state.stats().missing_batches == MAX_COUNT
    publication.publish_status(WriterStatus(True, True, 0, time.monotonic(), {}))
    state.export()()
    arrays.close()
