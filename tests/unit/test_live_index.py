"""Trust by the clock, laid over the fold's."""

import pytest

from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.reader import IndexReader, finished
from kvatlas.indexer.trust_overlay import TrustOverlay
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import ControlRecord, EventBatch
from testkit.builders import MODEL, a_batch, a_control, arrived, hashes, stored, up

EXACT, DEGRADED, GONE = InstanceId("exact", 0), InstanceId("degraded", 0), InstanceId("gone", 0)


@pytest.fixture
def state() -> IndexState:
    state = IndexState(ReferenceIndex())
    log: list[EventBatch | ControlRecord] = [
        a_batch(up(), stored(1), worker="exact"),
        a_batch(up(), stored(1), worker="degraded", seq=2),
        a_batch(up(), stored(1), worker="gone"),
        a_control(worker="gone"),
    ]
    for at, item in enumerate(log, 1):
        state.handle(arrived(item, at))
    return state


def trusts(index: IndexReader) -> dict[str, Trust]:
    everywhere = {view.instance.worker: view.trust for view in index.instances()}
    living = {name: trust for name, trust in everywhere.items() if trust is not Trust.gone}
    assert {m.instance.worker: m.trust for m in index.match(hashes(1))} == living
    assert {view.instance.worker: view.trust for view in index.serving(MODEL)} == living
    for view in index.instances():
        assert index.instance(view.instance) == view
    return everywhere


def test_until_it_has_caught_up_nobody_is_exact(state: IndexState) -> None:
    index = TrustOverlay(state)
    assert trusts(index) == {"exact": "catching_up", "degraded": "degraded", "gone": "gone"}
    index.update_trust(is_catching_up=False, silent=frozenset())
    assert trusts(index) == {"exact": "exact", "degraded": "degraded", "gone": "gone"}


def test_the_silent_are_stale_and_the_worst_counts(state: IndexState) -> None:
    index = TrustOverlay(state)
    index.update_trust(is_catching_up=True, silent=frozenset({EXACT, GONE}))
    assert trusts(index) == {"exact": "stale", "degraded": "degraded", "gone": "gone"}
    index.update_trust(is_catching_up=False, silent=frozenset({DEGRADED}))
    assert trusts(index) == {"exact": "exact", "degraded": "stale", "gone": "gone"}


def test_reasons_are_added(state: IndexState) -> None:
    index = TrustOverlay(state)
    index.update_trust(is_catching_up=False, silent=frozenset({DEGRADED}))
    view = index.instance(DEGRADED)
    assert view is not None
    assert view.trust_reasons == ("unknown_history: expected 1, got 2", "silent")
    assert index.instance(InstanceId("nobody", 0)) is None


def test_its_version_rises_with_the_fold_and_with_the_clock(state: IndexState) -> None:
    index = TrustOverlay(state)
    versions = [index.fleet_version]
    index.update_trust(is_catching_up=False, silent=frozenset())
    versions.append(index.fleet_version)
    state.handle(arrived(a_control(worker="exact"), 5))
    versions.append(index.fleet_version)
    assert versions == sorted(set(versions))
    index.update_trust(is_catching_up=False, silent=frozenset())
    assert index.fleet_version == versions[-1]


def test_the_serving_list_is_kept_until_something_changes(state: IndexState) -> None:
    index = TrustOverlay(state)
    first = index.serving(MODEL)
    assert index.serving(MODEL) is first
    index.update_trust(is_catching_up=False, silent=frozenset())
    assert index.serving(MODEL) is not first


def test_the_rest_is_the_folds_own(state: IndexState) -> None:
    index = TrustOverlay(state)
    assert index.stream_sequence == state.stream_sequence
    assert index.stats() == state.stats()
    assert finished(index.copy_tree()().view(2, 2)) == state.tree(2, 2)
    assert index.state_digest() == state.state_digest()
    assert (EXACT, Tier.hbm) in index.holders(hashes(1))
