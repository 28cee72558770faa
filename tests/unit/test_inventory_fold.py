"""An inventory takes the place of what was known, all tiers at once, without a search."""

from collections.abc import Sequence

import pytest

from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import AuditFailed
from kvatlas.indexer.index.port import PrefixIndex
from kvatlas.indexer.reader import InstanceSelection, TreeRun
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    EventBatch,
    Inventory,
    KvEvent,
    NamespacesOverBudget,
    WorkerDown,
)
from testkit.builders import (
    ROOT,
    a_batch,
    a_control,
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

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)


@pytest.fixture(params=[FlatRadixIndex, ReferenceIndex])
def index(request: pytest.FixtureRequest) -> PrefixIndex:
    made: PrefixIndex = request.param()
    return made


@pytest.fixture
def state(index: PrefixIndex) -> IndexState:
    return IndexState(index)


@pytest.fixture
def without_search(index: PrefixIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it fail to clear a slot, which is O(index)."""
    forbid(index, monkeypatch, "clear")


def forbid(index: PrefixIndex, monkeypatch: pytest.MonkeyPatch, *steps: str) -> None:
    """Let these steps of the index fail."""

    def asked(*_: object) -> int:
        pytest.fail(f"the index was asked for one of {steps}")

    for step in steps:
        monkeypatch.setattr(index, step, asked)


def take(state: IndexState, *batches: EventBatch) -> None:
    for batch in batches:
        state.handle(arrived(batch, state.stream_sequence + 1))
        validate(state)


def lose_a_batch(state: IndexState, *events: KvEvent) -> None:
    """Let W1 say this, and be in doubt from sequence 3 on."""
    take(state, a_batch(up(), *events), a_batch(stored(), seq=3))


def told(hbm: tuple[int, ...], dram: tuple[int, ...] = ()) -> list[Inventory]:
    """Return what the reference sidecar sends: parts of all tiers."""
    held = {Tier.hbm: hbm, Tier.dram: dram}
    events = []
    for tier in Tier:
        blocks = held.get(tier, ())
        cuts = range(0, len(blocks) or 1, 2)
        for part, at in enumerate(cuts, 1):
            some = blocks[at : at + 2]
            events.append(inventory(*some, as_of=3, tier=tier, part=part, parts=len(cuts)))
    return events


def tell(state: IndexState, *events: KvEvent, first_seq: int = 4) -> int:
    """Say each in a batch of its own; return the next sequence."""
    return tell_in(state, 1, *events, first_seq=first_seq)


def tell_in(state: IndexState, epoch: int, *events: KvEvent, first_seq: int = 4) -> int:
    for seq, event in enumerate(events, first_seq):
        take(state, a_batch(event, epoch=epoch, seq=seq))
    return first_seq + len(events)


def held_by(state: IndexState, instance: InstanceId) -> dict[int, set[Tier]]:
    """Return the blocks 1 to 9 that an instance is said to hold."""
    found: dict[int, set[Tier]] = {}
    for block in range(1, 10):
        tiers = {tier for name, tier in state.holders(hashes(block)) if name == instance}
        if tiers:
            found[block] = tiers
    return found


def numbers_of(state: IndexState, instance: InstanceId) -> list[int]:
    return [place.number for place in state.places() if place.instance == instance]


def matched(state: IndexState) -> dict[str, int]:
    return {m.instance.worker: m.num_blocks for m in state.match(hashes(1, 2, 3))}


# --- told to the end -----------------------------------------------------------------------------


def test_all_tiers_change_at_once_and_without_a_search(
    state: IndexState, without_search: None
) -> None:
    """Blocks came and went in the batch that was lost, in both tiers, as in a full cache."""
    take(state, a_batch(up(), stored(1, 2, 3), worker="w2"))
    lose_a_batch(state, stored(1, 2, 9), stored(8, 9, tier=Tier.dram))
    before, was = held_by(state, W1), numbers_of(state, W1)
    events = told((1, 2, 3, 5), (3, 8, 4))
    seq = tell(state, *events[:-1])
    assert held_by(state, W1) == before, "nothing of it shows before its end"
    assert matched(state) == {"w1": 2, "w2": 3}
    assert state.held(hashes(1, 2, 3), InstanceSelection([W1, W2])).sum(axis=1).tolist() == [2, 3]
    assert [run.holders for run in state.tree(9, 9)].count((W1, W1)) == 0
    seq = tell(state, events[-1], first_seq=seq)
    both = {Tier.hbm, Tier.dram}
    hbm, dram = {Tier.hbm}, {Tier.dram}
    assert held_by(state, W1) == {1: hbm, 2: hbm, 3: both, 5: hbm, 8: dram, 4: dram}
    assert matched(state) == {"w1": 3, "w2": 3}
    assert len(numbers_of(state, W1)) == 1
    assert numbers_of(state, W1) != was
    held = [digest(1, 2, 3, 5), digest(3, 8, 4, tier=Tier.dram), *digests()[2:]]
    tell(state, *held, first_seq=seq)
    assert [view.trust for view in state.instances()] == [Trust.exact, Trust.exact]


def test_a_part_is_in_the_index_before_the_next_one_comes(
    state: IndexState, index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much an instance holds, no message takes longer than a part."""
    lose_a_batch(state, stored(1, 2))
    stores: list[int] = []
    store = index.store

    def counted(instance: int, tier: Tier, parent: bytes, packed: bytes) -> int:
        stores.append(len(packed) // 16)
        return store(instance, tier, parent, packed)

    monkeypatch.setattr(index, "store", counted)
    forbid(index, monkeypatch, "store_runs")
    tell(state, *told((1, 2, 3, 4, 5), (6, 7)))
    assert stores == [2, 2, 1, 2]
    assert set(held_by(state, W1)) == {1, 2, 3, 4, 5, 6, 7}


def test_what_was_known_keeps_its_number(state: IndexState, without_search: None) -> None:
    lose_a_batch(state, stored(1, 2, 3))
    number = numbers_of(state, W1)
    tell(state, *told((1, 2, 3)), *digests(1, 2, 3))
    assert numbers_of(state, W1) == number
    assert [view.trust for view in state.instances()] == [Trust.exact]


def test_whoever_is_not_in_doubt_is_only_compared(
    state: IndexState, index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(state, a_batch(up(), stored(1, 2)), a_batch(stored(3), seq=2), a_batch(seq=3))

    forbid(index, monkeypatch, "store", "store_runs", "clear")
    version = state.places_version
    tell(state, *told((1, 2, 3)))
    assert (len(numbers_of(state, W1)), state.places_version) == (1, version)
    assert state.stats().inventories == len(Tier)


def test_what_was_withheld_of_a_muted_namespace_comes_bit_by_bit(
    state: IndexState, index: PrefixIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a mute, an instance that is not in doubt tells what the index cannot know."""
    take(state, a_batch(up(), stored(1)), a_batch(NamespacesOverBudget(ROOT, "why"), seq=2))
    take(state, a_batch(seq=3))

    forbid(index, monkeypatch, "store_runs", "clear")
    seq = tell(state, *told((1, 2, 3), (4,)), NamespacesOverBudget(b""))
    tell(state, *digests(1, 2, 3), first_seq=seq)
    assert set(held_by(state, W1)) == {1, 2, 3, 4}


def walk(runs: Sequence[TreeRun]) -> list[TreeRun]:
    return [each for run in runs for each in (run, *walk(run.children))]


def test_the_tree_has_no_run_of_what_is_being_told(state: IndexState) -> None:
    lose_a_batch(state, stored(1, 2))
    tell(state, inventory(7, 8, 9, as_of=3, part=1, parts=2))
    assert {run.holders for run in walk(state.tree(9, 9))} == {(W1,)}


def test_the_tree_keeps_what_hangs_below_a_run_that_is_being_told(state: IndexState) -> None:
    take(state, a_batch(up(), stored(9, parent=8), worker="w2"))
    lose_a_batch(state, stored(1, 2))
    tell(state, inventory(7, 8, as_of=3, part=1, parts=2))
    assert {run.holders for run in walk(state.tree(9, 9))} >= {(W1,), (W2,)}


# --- cut short -----------------------------------------------------------------------------------


def test_what_it_says_next_is_about_what_it_has_told(state: IndexState) -> None:
    """The tier that was told counts; the other one is as it was, for nothing was told of it."""
    lose_a_batch(state, stored(1, 2), stored(3, tier=Tier.dram))
    number = numbers_of(state, W1)
    seq = tell(state, inventory(1, 4, as_of=3))
    tell(state, removed(4), first_seq=seq)
    assert held_by(state, W1) == {1: {Tier.hbm}, 3: {Tier.dram}}
    assert numbers_of(state, W1) == number


@pytest.mark.parametrize("dram", [(3,), ()])
def test_a_tier_that_is_told_halfway_does_not_count(
    state: IndexState, dram: tuple[int, ...]
) -> None:
    lose_a_batch(state, stored(1, 2), stored(*dram, tier=Tier.dram))
    half = inventory(7, as_of=3, tier=Tier.dram, part=1, parts=2)
    seq = tell(state, inventory(1, 4, as_of=3), half)
    tell(state, stored(9, tier=Tier.dram), first_seq=seq)
    hbm = {block: {Tier.hbm} for block in (1, 4)}
    assert held_by(state, W1) == hbm | {block: {Tier.dram} for block in (*dram, 9)}
    assert state.stats().dropped_inventories == 1


def test_a_tier_that_is_told_again_counts_as_told_last(state: IndexState) -> None:
    lose_a_batch(state, stored(1, 2))
    tell(state, inventory(1, 4, as_of=3), *told((5, 6)))
    assert held_by(state, W1) == {5: {Tier.hbm}, 6: {Tier.hbm}}


def test_a_new_loss_voids_what_was_told(state: IndexState) -> None:
    lose_a_batch(state, stored(1, 2))
    seq = tell(state, *told((4, 5))[:-1])
    take(state, a_batch(stored(8), seq=seq + 1))
    assert held_by(state, W1) == {block: {Tier.hbm} for block in (1, 2, 8)}
    assert not any(place.is_staging for place in state.places())


def test_an_epoch_takes_what_it_was_publication_along(state: IndexState) -> None:
    lose_a_batch(state, stored(1, 2))
    seq = tell(state, *told((4, 5))[:-1])
    take(state, a_batch(up(), epoch=2))
    assert (held_by(state, W1), len(numbers_of(state, W1))) == ({}, 1)
    take(state, a_batch(stored(), epoch=2, seq=3))
    seq = tell_in(state, 2, *told((4, 5))[:-1])
    take(state, a_batch(WorkerDown("end"), epoch=2, seq=seq))
    assert (held_by(state, W1), numbers_of(state, W1)) == ({}, [])


def test_memory_that_broke_meanwhile_voids_it() -> None:
    """Whoever gets the number next holds nothing of it, though nothing was left of its counts."""
    index = FlatRadixIndex()
    state = IndexState(index)
    lose_a_batch(state, stored(1, 2))
    tell(state, *told((4, 5))[:-1])
    (hidden,) = [place.number for place in state.places() if place.is_staging]
    index._digests[hidden] = 0
    broken = state.audit()
    assert broken == ((W1, Tier.hbm),)
    state.handle(AuditFailed(broken))
    take(state, a_batch(up(), worker="w2"))
    assert numbers_of(state, W2) == [hidden]
    assert (held_by(state, W1), held_by(state, W2), state.audit()) == ({}, {}, ())


# --- without room --------------------------------------------------------------------------------


def test_an_index_without_a_number_left_replaces_what_it_holds_in_one_go() -> None:
    state = IndexState(FlatRadixIndex(max_instances=1))
    lose_a_batch(state, stored(1, 2))
    tell(state, *told((1, 5)))
    assert held_by(state, W1) == {1: {Tier.hbm}, 5: {Tier.hbm}}


def test_an_index_without_room_for_both_gives_up_the_old_first() -> None:
    index = FlatRadixIndex(max_bytes=1 << 20, segment_cells=64, first_segments=2)
    state = IndexState(index)
    many = range(1000, 200_000)
    take(state, a_batch(up()))
    seq = 2
    for at in range(0, len(many), 512):
        take(state, a_batch(stored(*many[at : at + 512]), seq=seq))
        seq += 1
        if state.stats().index_full:
            break
    assert state.stats().index_full, "it is full of what goes"
    parts = told(tuple(range(1, 9)))
    take(
        state,
        *(
            a_batch(
                Inventory(seq - 1, part.part, part.parts, part.tier, part.root, part.hashes),
                seq=seq + number,
            )
            for number, part in enumerate(parts)
        ),
    )
    assert set(held_by(state, W1)) == set(range(1, 9))
    assert state.holders(hashes(1000)) == []


# --- what else is known of an instance -----------------------------------------------------------


def test_who_is_quarantined_stays_so(state: IndexState) -> None:
    take(state, a_batch(up(), stored(1, 2)))
    quarantined = a_control(kind="quarantined", reason="wrong")
    state.handle(arrived(quarantined, state.stream_sequence + 1))
    take(state, a_batch(stored(5), seq=3))
    tell(state, *told((1, 2, 3, 5)))
    assert matched(state) == {}
    assert state.holders(hashes(3)) == [(W1, Tier.hbm)]


def test_where_matches_end_stays_so(state: IndexState) -> None:
    take(state, a_batch(up(ends_at_reuse_points=True), stored(1, 2)), a_batch(stored(5), seq=3))
    tell(state, *told((1, 2, 3, 5)))
    assert [place.ends_at_reuse_points for place in state.places()] == [True]
    assert matched(state) == {}, "none of these blocks is a point where reuse may end"
