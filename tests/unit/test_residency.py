"""An inventory that differs replaces a tier without a search, and nothing else of the instance."""

import pytest

from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.index import PrefixIndex
from kvatlas.indexer.state import IndexState
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import EventBatch
from testkit.builders import a_batch, a_control, arrived, digests, hashes, inventory, stored, up

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)


class Searched(Exception):
    """The index was asked to clear a slot, which is O(index)."""


@pytest.fixture(params=[FlatRadixIndex, ReferenceIndex])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    made: PrefixIndex = request.param()
    return made


@pytest.fixture
def state(index: PrefixIndex) -> IndexState:
    return IndexState(index)


def take(state: IndexState, *batches: EventBatch) -> None:
    for batch in batches:
        state.handle(arrived(batch, state.stream_sequence + 1))


def number_of(state: IndexState, instance: InstanceId) -> int:
    (number,) = [place.number for place in state.places() if place.instance == instance]
    return number


def matched(state: IndexState) -> dict[str, int]:
    return {m.instance.worker: m.num_blocks for m in state.match(hashes(1, 2, 3))}


def test_a_tier_is_told_anew_without_a_search(
    state: IndexState, index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks came and went in the batch that is lost, as in an engine whose cache is full."""

    def search(*_: object) -> int:
        raise Searched

    monkeypatch.setattr(index, "clear", search)
    take(state, a_batch(up(), stored(1, 2, 9)), a_batch(up(), stored(1, 2, 3), worker="w2"))
    take(state, a_batch(stored(5), seq=3))
    version = state.fleet_version
    take(state, a_batch(inventory(1, 2, 3, 5, as_of=3), seq=4))
    assert state.fleet_version > version, "readers of the memory learn the number"
    take(state, a_batch(*digests(1, 2, 3, 5), seq=5))
    assert matched(state) == {"w1": 3, "w2": 3}
    assert state.holders(hashes(9)) == [], "what went is gone"
    assert {view.trust for view in state.instances()} == {Trust.exact}
    assert sorted(place.instance for place in state.places()) == [W1, W2]


def test_what_an_inventory_confirms_keeps_its_number(state: IndexState) -> None:
    take(state, a_batch(up(), stored(1, 2)))
    number, version = number_of(state, W1), state.fleet_version
    take(state, a_batch(inventory(1, 2, as_of=1), seq=2))
    assert (number_of(state, W1), state.fleet_version) == (number, version)


def test_other_tiers_stay(state: IndexState) -> None:
    """Then the tier alone is searched for and emptied."""
    take(state, a_batch(up(), stored(1, 2), stored(3, tier=Tier.dram)))
    take(state, a_batch(stored(5), seq=3))
    number = number_of(state, W1)
    take(state, a_batch(inventory(1, as_of=3), seq=4))
    assert number_of(state, W1) == number
    assert state.holders(hashes(1)) == [(W1, Tier.hbm)]
    assert state.holders(hashes(2)) == []
    assert state.holders(hashes(3)) == [(W1, Tier.dram)]


def test_an_index_without_a_number_left_searches() -> None:
    state = IndexState(FlatRadixIndex(max_instances=1))
    take(state, a_batch(up(), stored(1, 2)), a_batch(stored(5), seq=3))
    take(state, a_batch(inventory(1, 5, as_of=3), seq=4))
    assert state.holders(hashes(2)) == []
    assert state.holders(hashes(1)) == [(W1, Tier.hbm)]


def test_who_is_quarantined_stays_so(state: IndexState) -> None:
    take(state, a_batch(up(), stored(1, 2)))
    quarantined = a_control(kind="quarantined", reason="wrong")
    state.handle(arrived(quarantined, state.stream_sequence + 1))
    take(state, a_batch(stored(5), seq=3), a_batch(inventory(1, 2, 3, 5, as_of=3), seq=4))
    assert matched(state) == {}
    assert state.holders(hashes(3)) == [(W1, Tier.hbm)]


def test_where_matches_end_stays_so(state: IndexState) -> None:
    take(state, a_batch(up(ends_at_reuse_points=True), stored(1, 2)))
    take(state, a_batch(stored(5), seq=3), a_batch(inventory(1, 2, 3, 5, as_of=3), seq=4))
    assert [place.ends_at_reuse_points for place in state.places()] == [True]
    assert matched(state) == {}, "none of these blocks is a point where reuse may end"
