"""What the edge makes of an engine's words: names, chains, events of the log."""

import tracemalloc

import pytest

from kvatlas.schemas.digest import digest_of
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, Extra, HashAlgorithm
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import BlockRemoved, BlockStored, Digest, Inventory, NamespaceSeen
from kvatlas.worker_hooks.raw_events import RawCleared, RawStored
from kvatlas.worker_hooks.reporting import inventory
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from testkit.engine_words import DESCRIPTOR, MODEL, by_hash, chain_of, removed, stored, tokens_of
from testkit.trackers import ROOT, doubts, held, without_namespaces


@pytest.fixture
def tracker() -> EngineStateTracker:
    return EngineStateTracker(MODEL, DESCRIPTOR)


def test_blocks_get_the_hashes_that_a_router_computes(tracker: EngineStateTracker) -> None:
    assert tracker.handle([stored(1, 2)]) == [
        NamespaceSeen(ROOT, MODEL, 4, DESCRIPTOR.algorithm),
        BlockStored(ROOT, b"".join(chain_of(1, 2))),
    ]


def test_a_chain_goes_on_below_its_parent(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1, 2)])
    (event,) = tracker.handle([stored(3, parent=2)])
    assert event == BlockStored(ROOT, chain_of(1, 2, 3)[2], chain_of(1, 2)[1])


def test_hashes_without_their_tokens_are_rejected(tracker: EngineStateTracker) -> None:
    assert tracker.handle([RawStored((1, 2, 3), None, tokens_of(1))]) == []
    assert tracker.handle([RawStored((1,), None, tokens_of(1)[:-1])]) == []
    assert tracker.counters.rejected_events == 2


def test_a_block_that_follows_itself_is_refused(tracker: EngineStateTracker) -> None:
    """F19: it changes nothing else."""
    tracker.handle([stored(1)])
    assert tracker.handle([stored(2, parent=2)]) == []
    assert tracker.counters.rejected_events == 1
    assert held(tracker) == set(chain_of(1))


def test_extras_make_other_blocks(tracker: EngineStateTracker) -> None:
    image = Extra(offset=5, kind="image", id="cat", length=2)
    tracker.handle([stored(1, 2, extras=(image,))])
    assert chain_of(1)[0] in held(tracker)
    assert chain_of(1, 2)[1] not in held(tracker)


def test_sha256_fleets_get_their_own_hashes() -> None:
    descriptor = NamespaceDescriptor(4, HashAlgorithm.sha256_128)
    tracker = EngineStateTracker(MODEL, descriptor)
    tracker.handle([stored(1)])
    hasher = BlockHasher(descriptor.namespace(MODEL, None, None))
    assert held(tracker) == {hasher.chain(tokens_of(1))}


# --- a parent that comes later -------------------------------------------------------------------


def test_a_store_below_an_unknown_parent_waits_for_it(tracker: EngineStateTracker) -> None:
    assert tracker.handle([stored(3, parent=2), stored(2, parent=1)]) == []
    events = without_namespaces(tracker.handle([stored(1)]))
    assert events == [BlockStored(ROOT, b"".join(chain_of(1, 2, 3)))]
    assert tracker.counters.parked_events == 2
    assert tracker.counters.orphaned_events == 0


def test_what_was_removed_while_it_waited_does_not_rise_again(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(2, 3, parent=1), removed(3)])
    tracker.handle([stored(1)])
    assert held(tracker) == set(chain_of(1, 2))


def test_a_removal_in_one_tier_leaves_what_waits_for_another(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(2, parent=1, tier=Tier.dram), removed(2), removed(2, tier=Tier.dram)])
    tracker.handle([stored(1)])
    assert held(tracker, Tier.dram) == set()


def test_clearing_drops_what_waits(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(2, parent=1), RawCleared()])
    tracker.handle([by_hash(2), stored(1)])
    assert held(tracker) == set(chain_of(1))


def test_of_a_chain_that_waits_a_block_with_a_name_is_told_at_once(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([stored(1, 2)])
    events = tracker.handle([RawStored((5, 2), 9, tokens_of(5, 2), Tier.dram)])
    one, two = chain_of(1, 2)
    assert events == [BlockStored(ROOT, two, one, Tier.dram)]
    assert tracker.counters.parked_events == 1


def test_orphans_are_bounded_and_the_oldest_leave() -> None:
    tracker = EngineStateTracker(MODEL, DESCRIPTOR, max_parked_bytes=1000)
    tracker.handle([stored(100 + i, parent=i) for i in range(1, 20)])
    assert 0 < tracker.counters.orphaned_events < 19
    tracker.handle([stored(1), stored(19)])
    assert chain_of(19, 119)[1] in held(tracker)
    assert chain_of(1, 101)[1] not in held(tracker)


# --- what becomes an event -----------------------------------------------------------------------


def test_neighbours_of_one_chain_become_one_event(tracker: EngineStateTracker) -> None:
    events = tracker.handle([stored(1), stored(2, parent=1), stored(3, parent=2)])
    assert without_namespaces(events) == [BlockStored(ROOT, b"".join(chain_of(1, 2, 3)))]


def test_branches_stay_apart(tracker: EngineStateTracker) -> None:
    events = tracker.handle([stored(1), stored(2, parent=1), stored(3, parent=1)])
    assert [e.hashes for e in without_namespaces(events) if isinstance(e, BlockStored)] == [
        b"".join(chain_of(1, 2)),
        chain_of(1, 3)[1],
    ]


def test_removals_go_by_the_engines_hash(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1, 2, 3)])
    assert tracker.handle([removed(3), removed(2)]) == [
        BlockRemoved(ROOT, chain_of(1, 2, 3)[2] + chain_of(1, 2)[1])
    ]
    assert held(tracker) == set(chain_of(1))
    assert tracker.num_blocks == 1


def test_nothing_changes_places(tracker: EngineStateTracker) -> None:
    events = tracker.handle([stored(1), removed(1), stored(1)])
    kinds = [type(event) for event in without_namespaces(events)]
    assert kinds == [BlockStored, BlockRemoved, BlockStored]


def test_tokens_travel_only_where_asked_for(tracker: EngineStateTracker) -> None:
    (_, without) = tracker.handle([stored(1)])
    assert isinstance(without, BlockStored)
    assert without.tokens is None
    told = EngineStateTracker(MODEL, DESCRIPTOR, include_tokens=True)
    told.handle([stored(1)])
    (event,) = told.handle([stored(1, 2), stored(3, parent=2)])
    assert isinstance(event, BlockStored)
    # block 1 is no news, but it is in the run that has news
    assert event.hashes == b"".join(chain_of(1, 2, 3))
    assert event.tokens == tokens_of(1, 2, 3)


@pytest.mark.parametrize("include_tokens", [False, True])
def test_events_are_bounded_and_still_one_chain(
    monkeypatch: pytest.MonkeyPatch, include_tokens: bool
) -> None:
    monkeypatch.setattr(
        "kvatlas.worker_hooks.reporting.engine_state.coalescing.MAX_EVENT_BLOCKS", 5
    )
    monkeypatch.setattr(
        "kvatlas.worker_hooks.reporting.engine_state.coalescing.MAX_EVENT_TOKEN_BYTES", 3 * 16
    )
    tracker = EngineStateTracker(MODEL, DESCRIPTOR, include_tokens=include_tokens)
    names = tuple(range(1, 31))
    events = without_namespaces(
        tracker.handle([stored(*names[:7]), *(stored(n, parent=n - 1) for n in names[7:])])
    )
    chain, limit = chain_of(*names), 3 if include_tokens else 5
    at = 0
    for event in events:
        assert isinstance(event, BlockStored)
        blocks = [event.hashes[i : i + 16] for i in range(0, len(event.hashes), 16)]
        assert 0 < len(blocks) <= limit
        assert blocks == chain[at : at + len(blocks)]
        assert event.parent == (chain[at - 1] if at else None)
        if include_tokens:
            assert event.tokens == tokens_of(*names[at : at + len(blocks)])
        at += len(blocks)
    assert at == 30
    assert len(events) == 30 / limit
    removals = tracker.handle([removed(*reversed(names))])
    assert [len(e.hashes) // 16 for e in removals if isinstance(e, BlockRemoved)] == [5] * 6


def test_a_block_with_more_tokens_than_an_event_may_have_goes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "kvatlas.worker_hooks.reporting.engine_state.coalescing.MAX_EVENT_TOKEN_BYTES", 7
    )
    tracker = EngineStateTracker(MODEL, DESCRIPTOR, include_tokens=True)
    events = without_namespaces(tracker.handle([stored(1, 2, 3)]))
    assert [e.tokens for e in events if isinstance(e, BlockStored)] == [
        tokens_of(1),
        tokens_of(2),
        tokens_of(3),
    ]


# --- namespaces ----------------------------------------------------------------------------------


def test_salts_and_adapters_are_namespaces_of_their_own(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1)])
    salted = tracker.handle([RawStored((b"s",), None, tokens_of(1), cache_salt="pepper")])
    seen = salted[0]
    assert isinstance(seen, NamespaceSeen)
    assert seen.salted
    assert seen.lora is None
    assert held(tracker) == {*chain_of(1), *chain_of(1, salt="pepper")}
    adapted = tracker.handle([RawStored((b"l",), None, tokens_of(1), lora="tuned")])
    assert isinstance(adapted[0], NamespaceSeen)
    assert adapted[0].lora == "tuned"
    # a chain stays in its namespace, whatever its later blocks say
    (event,) = tracker.handle([RawStored((b"s2",), b"s", tokens_of(2))])
    assert isinstance(event, BlockStored)
    assert event.root == seen.root


def test_a_namespace_is_told_once_an_epoch(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1)])
    assert not any(isinstance(e, NamespaceSeen) for e in tracker.handle([stored(2)]))
    tracker.begin_epoch()
    assert isinstance(tracker.handle([stored(3)])[0], NamespaceSeen)


def test_namespaces_without_blocks_are_forgotten_and_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvatlas.worker_hooks.reporting.engine_state.namespaces.MAX_NAMESPACES", 4)
    tracker = EngineStateTracker(MODEL, DESCRIPTOR)
    tracker.handle([stored(1, cache_salt="keep")])
    for i in range(50):
        tracker.handle([stored(100 + i, cache_salt=f"s{i}"), removed(100 + i)])
    assert len(tracker._publication.namespaces._seen) <= 9
    events = tracker.handle([stored(2, cache_salt="s3")])
    assert isinstance(events[0], NamespaceSeen)
    (kept,) = tracker.handle([stored(5, parent=1)])
    assert isinstance(kept, BlockStored)
    assert kept.root == DESCRIPTOR.namespace(MODEL, None, "keep").root()


def test_of_a_salt_a_digest_is_kept(tracker: EngineStateTracker) -> None:
    salt = "pepper" * 100_000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for n in range(10):
        tracker.handle([stored(n, cache_salt=f"{salt}{n}")])
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < len(salt)
    assert doubts(tracker.handle([stored(99, cache_salt=f"{salt}3")])) == []
    assert held(tracker) >= set(chain_of(99, salt=f"{salt}3"))


# --- all that is held ----------------------------------------------------------------------------


def test_digests_are_of_what_is_held(tracker: EngineStateTracker) -> None:
    tracker.handle([stored(1, 2), stored(9, tier=Tier.ssd), removed(2)])
    digests = {d.tier: (d.count, d.xor) for d in tracker.digests() if isinstance(d, Digest)}
    assert digests[Tier.hbm] == digest_of(chain_of(1))
    assert digests[Tier.ssd] == digest_of(chain_of(9))
    assert set(digests) == set(Tier)


def test_the_inventory_is_all_that_is_held_in_bounded_parts(
    tracker: EngineStateTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory.inventory_of, "__defaults__", (2,))
    tracker.handle([stored(1, 2, 3), stored(4, cache_salt="pepper"), stored(5, tier=Tier.ssd)])
    events = list(tracker.inventory(as_of_seq=7))
    seen, rest = events[:2], events[2:]
    assert all(isinstance(event, NamespaceSeen) for event in seen)
    parts = [event for event in rest if isinstance(event, Inventory)]
    assert len(parts) == len(rest)
    hbm = [part for part in parts if part.tier is Tier.hbm]
    assert [(p.part, p.parts) for p in hbm] == [(1, 3), (2, 3), (3, 3)]
    assert {p.as_of_seq for p in parts} == {7}
    assert all(len(p.hashes) <= 32 for p in parts)
    assert b"".join(sorted(p.hashes for p in hbm)) == b"".join(
        sorted([b"".join(chain_of(1, 2)), chain_of(1, 2, 3)[2], *chain_of(4, salt="pepper")])
    )
    assert {p.tier: p.hashes for p in parts if not p.hashes} == dict.fromkeys(
        [Tier.dram, Tier.remote, Tier.other], b""
    )


def test_blocks_that_somebody_believed_in_are_disowned_unless_held(
    tracker: EngineStateTracker,
) -> None:
    tracker.handle([stored(1)])
    assert tracker.retract(chain_of(1)[0]) == []
    assert tracker.retract(b"".join(chain_of(1, 2))) == [BlockRemoved(ROOT, chain_of(1, 2)[1])]
