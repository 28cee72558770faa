"""What the edge makes of an engine's words."""

import tracemalloc

import pytest

from kvatlas.schemas.digest import digest_of
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import Extra, reuse_point
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Digest,
    Doubted,
    Inventory,
    KvEvent,
    NamespaceSeen,
    Resync,
)
from kvatlas.worker_hooks import inventory
from kvatlas.worker_hooks.edge import Edge
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawDoubted,
    RawForgotten,
    RawGroupSeen,
    RawHeld,
    RawListed,
    RawLost,
    RawRemoved,
    RawRestarted,
    RawStored,
)
from testkit.engine_words import DESCRIPTOR, MODEL, chain_of, removed, stored, tokens_of

ROOT = DESCRIPTOR.namespace(MODEL, None, None).root()


@pytest.fixture
def edge() -> Edge:
    return Edge(MODEL, DESCRIPTOR)


def without_namespaces(events: list[KvEvent]) -> list[KvEvent]:
    return [event for event in events if not isinstance(event, NamespaceSeen)]


def held(edge: Edge, tier: Tier = Tier.hbm) -> set[bytes]:
    return {block for block, _ in edge.residency.blocks(tier)}


def test_blocks_get_the_hashes_that_a_router_computes(edge: Edge) -> None:
    assert edge.handle([stored(1, 2)]) == [
        NamespaceSeen(ROOT, MODEL, 4, DESCRIPTOR.algorithm),
        BlockStored(ROOT, b"".join(chain_of(1, 2))),
    ]


def test_a_chain_goes_on_below_its_parent(edge: Edge) -> None:
    edge.handle([stored(1, 2)])
    (event,) = edge.handle([stored(3, parent=2)])
    assert event == BlockStored(ROOT, chain_of(1, 2, 3)[2], chain_of(1, 2)[1])


def test_neighbours_of_one_chain_become_one_event(edge: Edge) -> None:
    events = edge.handle([stored(1), stored(2, parent=1), stored(3, parent=2)])
    assert without_namespaces(events) == [BlockStored(ROOT, b"".join(chain_of(1, 2, 3)))]


def test_branches_stay_apart(edge: Edge) -> None:
    events = edge.handle([stored(1), stored(2, parent=1), stored(3, parent=1)])
    assert [e.hashes for e in without_namespaces(events) if isinstance(e, BlockStored)] == [
        b"".join(chain_of(1, 2)),
        chain_of(1, 3)[1],
    ]


def test_removals_go_by_the_engines_hash(edge: Edge) -> None:
    edge.handle([stored(1, 2, 3)])
    assert edge.handle([removed(3), removed(2)]) == [
        BlockRemoved(ROOT, chain_of(1, 2, 3)[2] + chain_of(1, 2)[1])
    ]
    assert held(edge) == set(chain_of(1))
    assert edge.num_blocks == 1


def test_nothing_changes_places(edge: Edge) -> None:
    events = edge.handle([stored(1), removed(1), stored(1)])
    kinds = [type(event) for event in without_namespaces(events)]
    assert kinds == [BlockStored, BlockRemoved, BlockStored]


def test_what_is_held_already_is_no_news(edge: Edge) -> None:
    edge.handle([stored(1, 2)])
    assert edge.handle([stored(1, 2)]) == []
    assert edge.counters.duplicate_blocks == 2


def test_removals_of_unknown_blocks_are_counted(edge: Edge) -> None:
    assert edge.handle([removed(7, 8)]) == []
    assert edge.counters.unknown_removals == 2


def test_two_engine_hashes_of_one_block_are_two_copies(edge: Edge) -> None:
    other = RawStored((b"other",), None, tokens_of(1))
    assert len(without_namespaces(edge.handle([stored(1), other]))) == 1
    assert edge.handle([removed(1)]) == []
    assert edge.handle([removed(b"other")]) == [BlockRemoved(ROOT, chain_of(1)[0])]  # type: ignore[arg-type]


def test_an_engine_hash_taken_for_another_block_lets_the_first_go(edge: Edge) -> None:
    edge.handle([stored(1)])
    events = edge.handle([RawStored((1,), None, tokens_of(2))])
    assert events == [
        BlockRemoved(ROOT, chain_of(1)[0]),
        BlockStored(ROOT, chain_of(2)[0]),
    ]


def test_tiers_are_apart(edge: Edge) -> None:
    edge.handle([stored(1), stored(1, tier=Tier.dram)])
    assert edge.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]
    assert held(edge, Tier.dram) == set(chain_of(1))
    # its parent is known as long as any tier holds it
    assert isinstance(edge.handle([stored(2, parent=1)])[0], BlockStored)


def test_a_store_below_an_unknown_parent_waits_for_it(edge: Edge) -> None:
    assert edge.handle([stored(3, parent=2), stored(2, parent=1)]) == []
    events = without_namespaces(edge.handle([stored(1)]))
    assert events == [BlockStored(ROOT, b"".join(chain_of(1, 2, 3)))]
    assert edge.counters.parked_events == 2
    assert edge.counters.orphaned_events == 0


def test_what_was_removed_while_it_waited_does_not_rise_again(edge: Edge) -> None:
    edge.handle([stored(2, 3, parent=1), removed(3)])
    edge.handle([stored(1)])
    assert held(edge) == set(chain_of(1, 2))


def test_a_removal_in_one_tier_leaves_what_waits_for_another(edge: Edge) -> None:
    edge.handle([stored(2, parent=1, tier=Tier.dram), removed(2), removed(2, tier=Tier.dram)])
    edge.handle([stored(1)])
    assert held(edge, Tier.dram) == set()


def test_clearing_drops_what_waits(edge: Edge) -> None:
    edge.handle([stored(2, parent=1), RawCleared()])
    edge.handle([stored(1)])
    assert held(edge) == set(chain_of(1))


def test_orphans_are_bounded_and_the_oldest_leave() -> None:
    edge = Edge(MODEL, DESCRIPTOR, max_parked_bytes=1000)
    edge.handle([stored(100 + i, parent=i) for i in range(1, 20)])
    assert 0 < edge.counters.orphaned_events < 19
    edge.handle([stored(1), stored(19)])
    assert chain_of(19, 119)[1] in held(edge)
    assert chain_of(1, 101)[1] not in held(edge)


def test_a_block_is_usable_when_every_group_that_counts_holds_it() -> None:
    edge = Edge(MODEL, DESCRIPTOR, groups=(0, 2))
    assert edge.handle([stored(1, 2, group=0)]) == []
    assert edge.handle([stored(1, 2, group=1)]) == []  # does not count
    (_, event) = edge.handle([stored(1, group=2)])
    assert event == BlockStored(ROOT, chain_of(1)[0])
    assert edge.handle([removed(1, group=0)]) == [BlockRemoved(ROOT, chain_of(1)[0])]
    assert edge.handle([removed(1, group=2)]) == []
    assert edge.counters.ignored_events == 1


def test_only_usable_runs_with_news_are_said() -> None:
    edge = Edge(MODEL, DESCRIPTOR, groups=(0, 1))
    edge.handle([stored(1, 2, 3, 4, group=0), removed(2, group=0)])
    events = without_namespaces(edge.handle([stored(1, 2, 3, 4, group=1)]))
    chain = chain_of(1, 2, 3, 4)
    assert events == [
        BlockStored(ROOT, chain[0]),
        BlockStored(ROOT, chain[2] + chain[3], chain[1]),
    ]


def test_hashes_without_their_tokens_are_rejected(edge: Edge) -> None:
    assert edge.handle([RawStored((1, 2, 3), None, tokens_of(1))]) == []
    assert edge.handle([RawStored((1,), None, tokens_of(1)[:-1])]) == []
    assert edge.counters.rejected_events == 2


def test_salts_and_adapters_are_namespaces_of_their_own(edge: Edge) -> None:
    edge.handle([stored(1)])
    salted = edge.handle([RawStored((b"s",), None, tokens_of(1), cache_salt="pepper")])
    seen = salted[0]
    assert isinstance(seen, NamespaceSeen)
    assert seen.salted
    assert seen.lora is None
    assert held(edge) == {*chain_of(1), *chain_of(1, salt="pepper")}
    adapted = edge.handle([RawStored((b"l",), None, tokens_of(1), lora="tuned")])
    assert isinstance(adapted[0], NamespaceSeen)
    assert adapted[0].lora == "tuned"
    # a chain stays in its namespace, whatever its later blocks say
    (event,) = edge.handle([RawStored((b"s2",), b"s", tokens_of(2))])
    assert isinstance(event, BlockStored)
    assert event.root == seen.root


def test_extras_make_other_blocks(edge: Edge) -> None:
    image = Extra(offset=5, kind="image", id="cat", length=2)
    edge.handle([stored(1, 2, extras=(image,))])
    assert chain_of(1)[0] in held(edge)
    assert chain_of(1, 2)[1] not in held(edge)


def test_a_namespace_is_told_once_an_epoch(edge: Edge) -> None:
    edge.handle([stored(1)])
    assert not any(isinstance(e, NamespaceSeen) for e in edge.handle([stored(2)]))
    edge.begin_epoch()
    assert isinstance(edge.handle([stored(3)])[0], NamespaceSeen)


def test_namespaces_without_blocks_are_forgotten_and_told_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvatlas.worker_hooks.namespaces.MAX_NAMESPACES", 4)
    edge = Edge(MODEL, DESCRIPTOR)
    edge.handle([stored(1, cache_salt="keep")])
    for i in range(50):
        edge.handle([stored(100 + i, cache_salt=f"s{i}"), removed(100 + i)])
    assert len(edge._telling.namespaces._seen) <= 9
    events = edge.handle([stored(2, cache_salt="s3")])
    assert isinstance(events[0], NamespaceSeen)
    (kept,) = edge.handle([stored(5, parent=1)])
    assert isinstance(kept, BlockStored)
    assert kept.root == DESCRIPTOR.namespace(MODEL, None, "keep").root()


def test_of_a_salt_a_digest_is_kept(edge: Edge) -> None:
    salt = "pepper" * 100_000
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for n in range(10):
        edge.handle([stored(n, cache_salt=f"{salt}{n}")])
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < len(salt)
    assert doubts(edge.handle([stored(99, cache_salt=f"{salt}3")])) == []
    assert held(edge) >= set(chain_of(99, salt=f"{salt}3"))


def test_a_tier_can_be_cleared_alone(edge: Edge) -> None:
    edge.handle([stored(1, 2), stored(1, tier=Tier.dram)])
    assert edge.handle([RawCleared(Tier.hbm)]) == [AllBlocksCleared(Tier.hbm)]
    assert held(edge) == set()
    assert held(edge, Tier.dram) == set(chain_of(1))
    assert edge.handle([removed(2)]) == []
    assert edge.counters.unknown_removals == 1


def test_copies_are_forgotten_with_their_tier(edge: Edge) -> None:
    edge.handle([stored(1), RawStored((b"other",), None, tokens_of(1)), RawCleared(Tier.hbm)])
    edge.handle([stored(1)])
    assert edge.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]


def test_after_a_loss_an_engine_that_lists_is_believed_from_nothing(edge: Edge) -> None:
    edge.handle([stored(1, 2)])
    events = edge.handle([RawLost(5, listing_follows=True), stored(1), RawListed(True)])
    assert events == [Resync(0, 0), AllBlocksCleared(None), BlockStored(ROOT, chain_of(1)[0])]
    assert held(edge) == set(chain_of(1))
    assert edge.counters.lost_events == 5


def test_after_a_loss_an_engine_that_cannot_list_keeps_what_it_had(edge: Edge) -> None:
    edge.handle([stored(1, 2)])
    assert edge.handle([RawLost(5, listing_follows=False)]) == [Resync(0, 0)]
    assert held(edge) == set(chain_of(1, 2))


def test_tokens_travel_only_where_asked_for(edge: Edge) -> None:
    (_, without) = edge.handle([stored(1)])
    assert isinstance(without, BlockStored)
    assert without.tokens is None
    told = Edge(MODEL, DESCRIPTOR, include_tokens=True)
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
    monkeypatch.setattr("kvatlas.worker_hooks.merging.MAX_EVENT_BLOCKS", 5)
    monkeypatch.setattr("kvatlas.worker_hooks.merging.MAX_EVENT_TOKEN_BYTES", 3 * 16)
    edge = Edge(MODEL, DESCRIPTOR, include_tokens=include_tokens)
    names = tuple(range(1, 31))
    events = without_namespaces(
        edge.handle([stored(*names[:7]), *(stored(n, parent=n - 1) for n in names[7:])])
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
    removals = edge.handle([removed(*reversed(names))])
    assert [len(e.hashes) // 16 for e in removals if isinstance(e, BlockRemoved)] == [5] * 6


def test_a_block_with_more_tokens_than_an_event_may_have_goes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvatlas.worker_hooks.merging.MAX_EVENT_TOKEN_BYTES", 7)
    edge = Edge(MODEL, DESCRIPTOR, include_tokens=True)
    events = without_namespaces(edge.handle([stored(1, 2, 3)]))
    assert [e.tokens for e in events if isinstance(e, BlockStored)] == [
        tokens_of(1),
        tokens_of(2),
        tokens_of(3),
    ]


def test_digests_are_of_what_is_held(edge: Edge) -> None:
    edge.handle([stored(1, 2), stored(9, tier=Tier.ssd), removed(2)])
    digests = {d.tier: (d.count, d.xor) for d in edge.digests() if isinstance(d, Digest)}
    assert digests[Tier.hbm] == digest_of(chain_of(1))
    assert digests[Tier.ssd] == digest_of(chain_of(9))
    assert set(digests) == set(Tier)


def test_the_inventory_is_all_that_is_held_in_bounded_parts(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory.inventory_of, "__defaults__", (2,))
    edge.handle([stored(1, 2, 3), stored(4, cache_salt="pepper"), stored(5, tier=Tier.ssd)])
    events = list(edge.inventory(as_of_seq=7))
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


def test_blocks_that_somebody_believed_in_are_disowned_unless_held(edge: Edge) -> None:
    edge.handle([stored(1)])
    assert edge.disown(chain_of(1)[0]) == []
    assert edge.disown(b"".join(chain_of(1, 2))) == [BlockRemoved(ROOT, chain_of(1, 2)[1])]


def test_sha256_fleets_get_their_own_hashes() -> None:
    from kvatlas.schemas.hashing import BlockHasher, HashAlgorithm

    descriptor = NamespaceDescriptor(4, HashAlgorithm.sha256_128)
    edge = Edge(MODEL, descriptor)
    edge.handle([stored(1)])
    hasher = BlockHasher(descriptor.namespace(MODEL, None, None))
    assert held(edge) == {hasher.chain(tokens_of(1))}


# --- blocks that the engine names by their hashes alone ------------------------------------------


def by_hash(*names: int, **rest: object) -> RawStored:
    return RawStored(names, None, b"", **rest)  # type: ignore[arg-type]


def test_a_store_without_tokens_is_held_where_it_says(edge: Edge) -> None:
    """F43: an offload tier tells hashes only."""
    edge.handle([stored(1, 2)])
    events = edge.handle([by_hash(1, 2, tier=Tier.dram)])
    chain = chain_of(1, 2)
    assert events == [BlockStored(ROOT, b"".join(chain), None, Tier.dram)]
    assert held(edge, Tier.dram) == set(chain)


def test_it_may_come_before_anything_has_said_what_the_block_is(edge: Edge) -> None:
    assert edge.handle([by_hash(1, tier=Tier.dram)]) == []
    assert edge.num_unnamed == 1
    edge.handle([stored(1)])
    assert held(edge, Tier.dram) == held(edge) == set(chain_of(1))
    assert edge.num_unnamed == 0


def test_what_is_known_by_hash_alone_is_no_prefix(edge: Edge) -> None:
    assert edge.handle([by_hash(1), stored(2, parent=1)]) == []
    assert edge.resident() == {0: {Tier.hbm: [1, 2]}}
    assert edge.counters.parked_events == 1


def test_a_block_stays_known_while_some_tier_holds_it(edge: Edge) -> None:
    edge.handle([stored(1), by_hash(1, tier=Tier.ssd), removed(1)])
    events = edge.handle([stored(2, parent=1)])
    assert events == [BlockStored(ROOT, chain_of(1, 2)[1], chain_of(1)[0])]
    assert held(edge, Tier.ssd) == set(chain_of(1))


def test_what_follows_a_kept_block_is_known_though_its_parent_is_gone(edge: Edge) -> None:
    edge.handle([stored(1, 2), removed(1)])
    events = edge.handle([stored(2, 3, parent=1)])
    assert events == [BlockStored(ROOT, b"".join(chain_of(1, 2, 3)[1:]), chain_of(1)[0])]


def test_a_block_that_follows_itself_is_refused(edge: Edge) -> None:
    """F19: it changes nothing else."""
    edge.handle([stored(1)])
    assert edge.handle([stored(2, parent=2)]) == []
    assert edge.counters.rejected_events == 1
    assert held(edge) == set(chain_of(1))


# --- copies ----------------------------------------------------------


def test_f20_from_outside_every_copy_counts() -> None:
    bridge = Edge(MODEL, DESCRIPTOR, counts_copies=True)
    bridge.handle([stored(1), stored(1), stored(1)])
    assert bridge.handle([removed(1), removed(1)]) == []
    assert held(bridge) == set(chain_of(1))
    assert bridge.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]


def test_f20_inside_the_engine_a_removal_is_the_last_copys(edge: Edge) -> None:
    edge.handle([stored(1), stored(1)])
    assert edge.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]


def test_announcements_of_a_connector_are_no_copies() -> None:
    bridge = Edge(MODEL, DESCRIPTOR, counts_copies=True)
    bridge.handle([stored(1), *[by_hash(1, tier=Tier.other)] * 3])
    assert bridge.handle([RawRemoved((1,), Tier.other)]) == [
        BlockRemoved(ROOT, chain_of(1)[0], Tier.other)
    ]


def test_clearing_forgets_copies() -> None:
    bridge = Edge(MODEL, DESCRIPTOR, counts_copies=True)
    bridge.handle([stored(1), stored(1), RawCleared(Tier.hbm), stored(1)])
    assert bridge.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]


# --- hybrid models ----------------------------------------------------------

#: four tokens a block, so a hit needs the last two blocks of the window
HYBRID = [
    RawGroupSeen(0, "sliding_window", window_tokens=9, block_tokens=4),
    RawGroupSeen(1, "full_attention", block_tokens=4),
]


def points(edge: Edge, *names: int) -> set[int]:
    """Return after how many blocks of a chain reuse may end."""
    ends = enumerate(chain_of(*names), 1)
    return {end for end, block in ends if edge.residency.holds(Tier.hbm, reuse_point(block))}


def test_f56_a_window_says_where_reuse_may_end_and_holds_no_prefix(edge: Edge) -> None:
    edge.handle([*HYBRID, by_hash(4, 5, group=0), stored(1, 2, 3, 4, 5, group=1)])
    chain = chain_of(1, 2, 3, 4, 5)
    assert held(edge) == {*chain, reuse_point(chain[4])}
    assert edge.ends_at_reuse_points
    assert edge.resident() == {0: {Tier.hbm: [4, 5]}, 1: {Tier.hbm: [4, 5, 1, 2, 3]}}


def test_near_the_beginning_a_window_is_whole_sooner(edge: Edge) -> None:
    edge.handle([*HYBRID, by_hash(1, 2, group=0), stored(1, 2, 3, group=1)])
    assert points(edge, 1, 2, 3) == {1, 2}


def test_a_removal_in_one_group_leaves_what_another_holds(edge: Edge) -> None:
    edge.handle([*HYBRID, by_hash(1, 2, group=0), stored(1, 2, group=1)])
    events = edge.handle([removed(2, group=0)])
    assert events == [BlockRemoved(ROOT, reuse_point(chain_of(1, 2)[1]))]
    assert set(chain_of(1, 2)) <= held(edge)
    edge.handle([removed(1, group=1)])
    assert chain_of(1)[0] not in held(edge)
    assert edge.resident() == {0: {Tier.hbm: [1]}, 1: {Tier.hbm: [2]}}


def test_a_state_space_group_needs_its_last_block_only(edge: Edge) -> None:
    groups = [RawGroupSeen(0, "mamba"), RawGroupSeen(1, "full_attention")]
    edge.handle([*groups, by_hash(3, group=0), stored(1, 2, 3, 4, group=1)])
    assert points(edge, 1, 2, 3, 4) == {3}


def test_a_group_of_unknown_kind_has_to_hold_every_block(edge: Edge) -> None:
    edge.handle([RawGroupSeen(0, "full_attention"), RawGroupSeen(1, "unknown")])
    edge.handle([stored(1, 2, group=0)])
    assert held(edge) == set()
    edge.handle([stored(1, group=1)])
    assert held(edge) == set(chain_of(1))


def test_groups_that_show_late_change_what_was_told(edge: Edge) -> None:
    edge.handle([by_hash(2, group=3), stored(1, 2)])
    assert held(edge) == set(chain_of(1, 2))
    events = edge.handle([RawGroupSeen(3, "full_attention")])
    assert events == [BlockRemoved(ROOT, chain_of(1)[0])]


def test_clearing_takes_the_reuse_points_along(edge: Edge) -> None:
    edge.handle([*HYBRID, by_hash(1, 2, group=0), stored(1, 2, group=1)])
    edge.handle([RawCleared(Tier.hbm)])
    edge.handle([stored(1, 2, group=1)])
    assert points(edge, 1, 2) == set()
    edge.handle([by_hash(2, group=0)])
    assert points(edge, 1, 2) == set()
    edge.handle([by_hash(1, group=0)])
    assert points(edge, 1, 2) == {1, 2}


# --- restarts, doubts ---------------------------------------------------------------------------


def test_f1_an_engine_that_began_anew_holds_nothing(edge: Edge) -> None:
    edge.handle([stored(1), stored(2, tier=Tier.dram)])
    assert edge.handle([RawRestarted("sequence 0 again")]) == [AllBlocksCleared(None)]
    assert edge.num_blocks == 0


def test_doubts_are_told(edge: Edge) -> None:
    assert edge.handle([RawDoubted("lost 3 to 9")]) == [Doubted("lost 3 to 9")]


def test_what_a_doubt_leaves_unconfirmed_can_be_forgotten() -> None:
    bridge = Edge(MODEL, DESCRIPTOR, counts_copies=True)
    bridge.handle([stored(1), stored(1), stored(2, parent=1), RawDoubted("lost 3 to 9")])
    bridge.handle([stored(1), stored(3, parent=1)])
    assert bridge.handle([RawForgotten()]) == [BlockRemoved(ROOT, chain_of(1, 2)[1])]
    # the copies of before the doubt count no more
    assert bridge.handle([removed(1)]) == [BlockRemoved(ROOT, chain_of(1)[0])]
    assert held(bridge) == {chain_of(1, 3)[1]}


def test_a_doubt_that_is_taken_back_forgets_nothing(edge: Edge) -> None:
    edge.handle([stored(1), RawDoubted("lost 3 to 9"), RawDoubted("")])
    assert edge.handle([RawForgotten()]) == []


# --- blocks of another size ---------------------------------------------------------------------

REASON = "the engine's blocks have 8 tokens, told were 4"


def large(*names: int, parent: int | None = None, group: int = 0) -> RawStored:
    """Say that blocks twice as long as told are held."""
    packed = b"".join(tokens_of(name, name) for name in names)
    return RawStored(names, parent, packed, group=group)


def doubts(events: list[KvEvent]) -> list[str]:
    return [event.reason for event in events if isinstance(event, Doubted)]


def test_f51_blocks_of_another_size_are_a_doubt_that_names_both_and_the_flag(edge: Edge) -> None:
    (reason,) = doubts(edge.handle([large(1), large(2, 3)]))
    assert reason.startswith(REASON)
    assert "--block-tokens 8" in reason
    assert edge.doubt == reason
    assert edge.counters.rejected_events == 2


def test_it_is_taken_back_by_a_block_of_the_right_size_while_none_of_another_is_held(
    edge: Edge,
) -> None:
    edge.handle([large(1, 2)])
    assert doubts(edge.handle([stored(5)])) == []
    assert doubts(edge.handle([removed(1)])) == []
    assert doubts(edge.handle([stored(6), removed(2)])) == []
    assert doubts(edge.handle([stored(7)])) == [""]
    assert edge.counters.unknown_removals == 0
    assert edge.doubt == ""


@pytest.mark.parametrize(
    "end", [RawCleared(None), RawCleared(Tier.hbm), RawLost(1, listing_follows=True)]
)
def test_what_ends_with_a_tier_is_missing_no_longer(edge: Edge, end: RawCleared | RawLost) -> None:
    edge.handle([large(1)])
    assert doubts(edge.handle([RawCleared(Tier.dram), stored(5)])) == []
    assert doubts(edge.handle([end, stored(5)])) == [""]


def test_a_doubt_that_others_take_back_leaves_our_own(edge: Edge) -> None:
    edge.handle([RawDoubted("lost 3 to 9")])
    (both,) = doubts(edge.handle([large(1)]))
    assert both.startswith("lost 3 to 9; the engine's blocks")
    (own,) = doubts(edge.handle([RawDoubted("")]))
    assert own.startswith(REASON)
    edge.handle([RawDoubted("lost 9"), RawForgotten()])
    assert doubts(edge.handle([RawDoubted(""), stored(5)]))[-1] == ""
    edge.handle([large(1), RawRestarted("sequence 0 again")])
    assert edge.doubt == ""


def test_a_short_block_alone_is_the_end_of_a_prompt_and_no_doubt(edge: Edge) -> None:
    def short(name: int, parent: int | None) -> RawStored:
        return RawStored((name,), parent, tokens_of(name)[:8])

    assert doubts(edge.handle([stored(1), short(2, 1), short(3, 1)])) == []
    (reason,) = doubts(edge.handle([short(4, 3)]))
    assert "blocks have 2 tokens" in reason
    edge.handle([RawRestarted("sequence 0 again")])
    (reason,) = doubts(edge.handle([RawStored((7, 8), None, tokens_of(7))]))
    assert "blocks have 2 tokens" in reason


def test_blocks_of_groups_that_decide_nothing_are_no_doubt(edge: Edge) -> None:
    edge.handle([RawGroupSeen(1, "sliding_window", 9, 4)])
    assert doubts(edge.handle([large(1, group=1), large(2, group=2)])) == []


def test_blocks_of_another_size_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.worker_hooks.misfits.MAX_MISFITS", 2)
    edge = Edge(MODEL, DESCRIPTOR)
    edge.handle([large(1, 2, 3), removed(1, 2, 3)])
    assert doubts(edge.handle([stored(5)])) == []
    assert doubts(edge.handle([RawCleared(None), stored(5)])) == [""]


# --- audits, the serve pool ---------------------------------------------------------------------


def test_f21_an_audit_shows_what_the_engine_counts_otherwise(edge: Edge) -> None:
    edge.handle([stored(1, 2), RawHeld(2)])
    assert edge.counters.audit_mismatches == 0
    edge.handle([RawHeld(1)])
    assert edge.counters.audit_mismatches == 1


@pytest.fixture
def pooling() -> Edge:
    return Edge(MODEL, DESCRIPTOR, has_pool=True)


def test_blocks_of_the_serve_pool_are_held_as_dram(pooling: Edge) -> None:
    pooling.handle([stored(1, 2), removed(2)])
    one, two = chain_of(1, 2)
    (event,) = pooling.move_pooled([one], [])
    assert event == BlockStored(ROOT, one, None, Tier.dram)
    assert pooling.move_pooled([two], []) == []  # nothing says any more where it belongs
    assert pooling.handle([stored(2, parent=1)])[-1] == BlockStored(ROOT, two, one)
    assert held(pooling, Tier.dram) == {one, two}
    assert pooling.move_pooled([], [one]) == [BlockRemoved(ROOT, one, Tier.dram)]


def test_the_pool_outlives_what_the_engine_forgets(pooling: Edge) -> None:
    pooling.handle([stored(1)])
    pooling.move_pooled(chain_of(1), [])
    events = pooling.handle([RawCleared(None)])
    assert events == [AllBlocksCleared(None), BlockStored(ROOT, chain_of(1)[0], None, Tier.dram)]
    assert pooling.move_pooled([], chain_of(1)) == [BlockRemoved(ROOT, chain_of(1)[0], Tier.dram)]


def test_a_handle_taken_for_another_block_keeps_no_copies_of_the_first() -> None:
    bridge = Edge(MODEL, DESCRIPTOR, counts_copies=True)
    other = RawStored((1,), None, tokens_of(5))
    bridge.handle([stored(1), other])
    bridge.handle([removed(1)])
    assert held(bridge) == set()
