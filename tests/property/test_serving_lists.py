"""Lists that are kept while the fleet changes are those that are made anew."""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.events.bus import Message
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import stimulus_of
from kvatlas.indexer.reader import InstanceView
from kvatlas.schemas.kv_events import WorkerDown
from testkit.builders import a_batch, arrived, stored, up
from testkit.histories import Step, histories, publish


def looks(views: list[InstanceView]) -> list[tuple[object, ...]]:
    """Return all of views that is as of now; the rest is as of their making."""
    return [(v.instance, v.epoch, v.info, v.trust, v.muted) for v in views]


@given(histories, st.sets(st.integers(0, 40)), st.sampled_from([1, 4096]))
def test_what_is_kept_is_what_would_be_made(
    history: list[Step], asked_at: set[int], max_gone: int
) -> None:
    state = IndexState(ReferenceIndex(), max_gone=max_gone)
    models = {"model"}
    for at, (subject, payload) in enumerate(publish(history), 1):
        state.handle(stimulus_of(Message(at, subject, payload, at)))
        for view in state.instances():
            if view.info is not None:
                models |= {*view.info.models, *view.info.adapters}
        if at in asked_at:
            agrees(state, models)
    agrees(state, models)


def serving_views(views: Iterable[InstanceView]) -> dict[str, list[InstanceView]]:
    """Return, for each model and adapter, who serves it: the plain twin."""
    serving: dict[str, list[InstanceView]] = {}
    for view in views:
        if view.info is not None:
            for served in {*view.info.models, *view.info.adapters}:
                serving.setdefault(served, []).append(view)
    return serving


def agrees(state: IndexState, models: set[str]) -> None:
    made = serving_views(state.instances())
    for model in models:
        assert looks(state.serving(model)) == looks(made.get(model, []))


def a_fleet() -> tuple[IndexState, Callable[..., None]]:
    state = IndexState(ReferenceIndex())

    def take(*events: object, worker: str, seq: int = 1) -> None:
        batch = a_batch(*events, worker=worker, seq=seq)  # type: ignore[arg-type]
        state.handle(arrived(batch, state.stream_sequence + 1))

    for worker in ("a", "b", "c"):
        take(up(), worker=worker)
    return state, take


def served(state: IndexState) -> str:
    (view, *_) = state.instances()
    assert view.info is not None
    return view.info.models[0]


def test_only_who_has_changed_is_made_anew() -> None:
    state, take = a_fleet()
    before = state.serving(served(state))
    take(stored(1), worker="b", seq=3)
    after = state.serving(served(state))
    assert [new is old for new, old in zip(after, before, strict=True)] == [True, False, True]
    assert [view.instance.worker for view in before] == ["a", "b", "c"], "whoever has it keeps it"


@pytest.mark.parametrize("same", [stored(1), up()])
def test_nothing_is_made_anew_for_blocks_or_for_who_says_the_same_again(same: object) -> None:
    state, take = a_fleet()
    before, version = state.serving(served(state)), state.fleet_version
    take(same, worker="b", seq=2)
    assert state.serving(served(state)) is before
    assert state.fleet_version == version


def test_who_leaves_is_in_no_list() -> None:
    state, take = a_fleet()
    before = state.serving(served(state))
    take(WorkerDown("end"), worker="b", seq=2)
    assert state.serving(served(state)) == [before[0], before[2]]


def test_what_nobody_serves_is_neither_remembered_nor_searched_for() -> None:
    state, _ = a_fleet()
    assert state.serving(served(state))
    lists = state._serving._lists
    assert lists is not None
    known = dict(lists)
    state._serving._views.clear()  # nobody looks at them again while nothing changes
    for number in range(100):
        assert state.serving(f"nobody's {number}") == []
    assert state._serving._lists is lists
    assert lists == known
