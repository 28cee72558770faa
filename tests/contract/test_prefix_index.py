"""What every PrefixIndex does; a new adapter adds one line to ADAPTERS."""

from collections.abc import Callable

import pytest

from kvatlas.indexer import FlatRadixIndex, Match, PrefixIndex, ReferenceIndex, TreeNode
from kvatlas.indexer.index.exporting import Exportable, InvalidSnapshot
from kvatlas.indexer.index.tree import Tree
from kvatlas.indexer.reader import TreeRun, finished
from kvatlas.schemas.digest import TierDigest, digest_of, index_key, split_hashes
from kvatlas.schemas.errors import IndexFull, InvalidBlock, UnknownInstance
from kvatlas.schemas.ids import InstanceId, Tier
from testkit.indexes import tiny_index

HBM, DRAM, SSD, REMOTE, OTHER = Tier
ROOT = b"\xff" * 16


ADAPTERS: dict[str, Callable[..., PrefixIndex]] = {
    "reference": ReferenceIndex,
    "flat": FlatRadixIndex,
    "flat-tiny": tiny_index,
}


@pytest.fixture(params=ADAPTERS)
def make_index(request: pytest.FixtureRequest) -> Callable[..., PrefixIndex]:
    return ADAPTERS[request.param]


@pytest.fixture
def index(make_index: Callable[..., PrefixIndex]) -> PrefixIndex:
    return make_index()


def packed(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def run_of(num_blocks: int, start: int = 1) -> bytes:
    return packed(*range(start, start + num_blocks))


def lengths(index: PrefixIndex, chain: bytes) -> dict[int, int]:
    return {match.instance: match.num_blocks for match in index.match(chain)}


def test_an_empty_index_matches_nobody(index: PrefixIndex) -> None:
    index.add_instance()
    assert index.match(run_of(3)) == []
    assert index.match(b"") == []
    assert index.num_blocks() == 0
    assert index.tree(5, 5) == []


def test_a_match_is_the_longest_leading_part_of_each_instance(index: PrefixIndex) -> None:
    whole, first, tail = (index.add_instance() for _ in range(3))
    index.store(whole, HBM, ROOT, run_of(3))
    index.store(first, HBM, ROOT, run_of(1))
    index.store(tail, HBM, packed(1), run_of(2, start=2))
    assert lengths(index, run_of(4)) == {whole: 3, first: 1}


def test_columns_are_the_matches(index: PrefixIndex) -> None:
    one, two = index.add_instance(), index.add_instance()
    index.store(two, Tier.dram, ROOT, run_of(2))
    index.store(two, HBM, packed(1), packed(2))
    index.store(one, Tier.ssd, ROOT, packed(1))
    for chain in (run_of(3), packed(9), b""):
        columns = index.match_columns(chain)
        lines = zip(columns.instances, columns.num_blocks, columns.by_tier.T, strict=True)
        found = [(int(n), int(blocks), tuple(by_tier.tolist())) for n, blocks, by_tier in lines]
        assert found == [tuple(match) for match in index.match(chain)]


def test_matches_come_in_order_of_instances(index: PrefixIndex) -> None:
    instances = [index.add_instance() for _ in range(20)]
    for instance in reversed(instances):
        index.store(instance, HBM, ROOT, run_of(1))
    assert list(lengths(index, run_of(1))) == sorted(instances)


def test_a_hole_ends_the_match(index: PrefixIndex) -> None:
    instance = index.add_instance()
    index.store(instance, HBM, ROOT, run_of(5))
    index.remove(instance, HBM, packed(3))
    assert lengths(index, run_of(5)) == {instance: 2}


def test_a_refill_restores_the_match(index: PrefixIndex) -> None:
    instance = index.add_instance()
    index.store(instance, HBM, ROOT, run_of(5))
    index.remove(instance, HBM, packed(3))
    index.store(instance, HBM, packed(2), packed(3))
    assert lengths(index, run_of(5)) == {instance: 5}


def test_a_block_that_comes_before_its_parent_counts_once_the_parent_is_there(
    index: PrefixIndex,
) -> None:
    instance = index.add_instance()
    index.store(instance, HBM, packed(1), packed(2))
    assert index.match(run_of(2)) == []
    index.store(instance, HBM, ROOT, packed(1))
    assert lengths(index, run_of(2)) == {instance: 2}


def test_storing_twice_is_storing_once(index: PrefixIndex) -> None:
    instance = index.add_instance()
    assert index.store(instance, HBM, ROOT, run_of(3)) == 3
    assert index.store(instance, HBM, ROOT, run_of(4)) == 1
    assert index.digest(instance, HBM) == digest_of(split_hashes(run_of(4)))
    assert index.remove(instance, HBM, packed(2)) == 1
    assert lengths(index, run_of(4)) == {instance: 1}


def test_a_hash_named_twice_in_an_event_counts_once(index: PrefixIndex) -> None:
    instance = index.add_instance()
    assert index.store(instance, HBM, ROOT, packed(1, 1, 2)) == 2
    assert index.remove(instance, HBM, packed(1, 1)) == 1
    assert index.digest(instance, HBM) == digest_of([packed(2)])


def test_a_chain_that_names_a_block_twice_counts_it_twice(index: PrefixIndex) -> None:
    instance = index.add_instance()
    index.store(instance, HBM, ROOT, run_of(2))
    assert lengths(index, packed(1, 2, 1, 1, 9)) == {instance: 4}


def test_runs_are_stored_in_order_each_below_its_parent(index: PrefixIndex) -> None:
    one = index.add_instance()
    runs = [(ROOT, packed(1, 2)), (packed(2), b""), (packed(2), packed(3)), (ROOT, packed(1, 9))]
    assert index.store_runs(one, Tier.hbm, runs) == 4
    assert index.store_runs(one, Tier.hbm, []) == 0
    assert [match.num_blocks for match in index.match(packed(1, 2, 3))] == [3]
    assert [run.num_blocks for run in index.tree(3, 8)] == [1]
    with pytest.raises(InvalidBlock):
        index.store_runs(one, Tier.hbm, [(ROOT, packed(7)), (ROOT, b"short")])
    assert index.num_blocks() == 4


def test_removing_what_is_not_held_is_no_error(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    index.store(one, HBM, ROOT, run_of(3))
    assert index.remove(other, HBM, run_of(3)) == 0
    assert index.remove(one, DRAM, run_of(3)) == 0
    assert index.remove(one, HBM, packed(99, 3, 98, 2)) == 2
    assert lengths(index, run_of(3)) == {one: 1}


def test_a_removal_is_for_one_instance(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    index.store(one, HBM, ROOT, run_of(3))
    index.store(other, HBM, ROOT, run_of(3))
    index.remove(one, HBM, run_of(3))
    assert lengths(index, run_of(3)) == {other: 3}


def test_each_block_counts_at_its_best_tier(index: PrefixIndex) -> None:
    instance = index.add_instance()
    index.store(instance, OTHER, ROOT, run_of(6))
    index.store(instance, SSD, ROOT, packed(1, 2))
    index.store(instance, HBM, packed(1), packed(2, 3))
    index.store(instance, REMOTE, packed(3), packed(4))
    # best tier: ssd hbm hbm remote other other
    assert index.match(run_of(6)) == [Match(instance, 6, (2, 0, 1, 1, 2))]
    assert index.match(run_of(2)) == [Match(instance, 2, (1, 0, 1, 0, 0))]


def test_a_block_in_two_tiers_stays_until_both_lose_it(index: PrefixIndex) -> None:
    instance = index.add_instance()
    index.store(instance, HBM, ROOT, run_of(2))
    index.store(instance, DRAM, ROOT, run_of(2))
    assert index.num_blocks() == 2
    index.remove(instance, HBM, run_of(2))
    assert index.match(run_of(2)) == [Match(instance, 2, (0, 2, 0, 0, 0))]
    index.remove(instance, DRAM, packed(2))
    assert index.match(run_of(2)) == [Match(instance, 1, (0, 1, 0, 0, 0))]


def test_neighbouring_instances_change_tiers_independently(index: PrefixIndex) -> None:
    instances = [index.add_instance() for _ in range(9)]
    for position, instance in enumerate(instances):
        index.store(instance, DRAM, ROOT, run_of(9))
        index.store(instance, HBM, packed(position), run_of(9 - position, start=1 + position))
        index.remove(instance, DRAM, run_of(9 - position, start=1 + position))
    assert index.match(run_of(9)) == [
        Match(instance, 9, (9 - position, position, 0, 0, 0))
        for position, instance in enumerate(instances)
    ]


def test_clear_of_a_tier_leaves_the_others(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    index.store(one, HBM, ROOT, run_of(4))
    index.store(one, DRAM, ROOT, run_of(2))
    index.store(other, HBM, ROOT, run_of(3))
    assert index.clear(one, HBM) == 4
    assert index.match(run_of(4)) == [
        Match(one, 2, (0, 2, 0, 0, 0)),
        Match(other, 3, (3, 0, 0, 0, 0)),
    ]
    assert index.digest(one, HBM) == TierDigest()
    assert index.num_blocks() == 3


def test_clear_of_all_tiers_leaves_other_instances(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    for tier in Tier:
        index.store(one, tier, ROOT, run_of(3))
    index.store(other, SSD, ROOT, run_of(2))
    assert index.clear(one, None) == 15
    assert index.clear(one, None) == 0
    assert lengths(index, run_of(3)) == {other: 2}
    assert index.num_blocks() == 2


def test_an_instance_stores_again_after_a_clear(index: PrefixIndex) -> None:
    instance = index.add_instance()
    index.store(instance, HBM, ROOT, run_of(2))
    index.clear(instance, None)
    assert index.store(instance, HBM, ROOT, run_of(2)) == 2
    assert lengths(index, run_of(2)) == {instance: 2}


def test_a_forgotten_instance_vanishes_from_all_answers(index: PrefixIndex) -> None:
    gone, kept = index.add_instance(), index.add_instance()
    index.store(gone, HBM, ROOT, run_of(5))
    index.store(kept, DRAM, ROOT, run_of(2))
    index.forget_instance(gone)
    assert lengths(index, run_of(5)) == {kept: 2}
    assert index.holders(packed(1)) == [(kept, DRAM)]
    assert index.holders(packed(5)) == []
    assert index.num_blocks() == 2
    (node,) = index.tree(9, 9)
    assert (node.num_blocks, node.num_pairs, node.children) == (2, 2, ())


def test_a_number_that_comes_back_brings_nothing_along(
    make_index: Callable[..., PrefixIndex],
) -> None:
    index = make_index(max_instances=3)
    kept = index.add_instance()
    index.store(kept, HBM, ROOT, run_of(3))
    for generation in range(10):
        fresh = [index.add_instance(), index.add_instance()]
        for instance in fresh:
            assert index.digest(instance, HBM) == TierDigest()
            assert lengths(index, run_of(8)) == {kept: 3}
            index.store(instance, HBM, ROOT, run_of(3 + generation))
            index.forget_instance(instance)
    assert index.num_blocks() == 3


def test_instances_run_out_loudly(make_index: Callable[..., PrefixIndex]) -> None:
    index = make_index(max_instances=2)
    first, _ = index.add_instance(), index.add_instance()
    with pytest.raises(IndexFull, match="2 instances"):
        index.add_instance()
    index.forget_instance(first)
    index.add_instance()


def test_several_hundred_instances_keep_apart(index: PrefixIndex) -> None:
    instances = [index.add_instance() for _ in range(300)]
    for position, instance in enumerate(instances):
        index.store(instance, Tier(position % 5), ROOT, run_of(1 + position % 50))
    assert lengths(index, run_of(50)) == {
        instance: 1 + position % 50 for position, instance in enumerate(instances)
    }
    for instance in instances[::2]:
        index.forget_instance(instance)
    assert lengths(index, run_of(50)) == {
        instance: 1 + position % 50 for position, instance in enumerate(instances) if position % 2
    }


def test_thousands_of_blocks_stay_exact(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    chain = run_of(5000)
    index.store(one, HBM, ROOT, chain)
    index.store(other, HBM, ROOT, chain)
    assert index.remove(one, HBM, chain[16:]) == 4999
    assert lengths(index, chain) == {one: 1, other: 5000}
    assert index.num_blocks() == 5000


def test_the_largest_and_the_smallest_key_are_blocks_like_others(index: PrefixIndex) -> None:
    instance = index.add_instance()
    chain = packed(2**128 - 1, 1 << 64, 1 << 63, (1 << 64) - 2)
    assert index.store(instance, HBM, ROOT, chain) == 4
    assert lengths(index, chain) == {instance: 4}
    assert index.digest(instance, HBM) == digest_of(split_hashes(chain))
    assert index.remove(instance, HBM, chain) == 4
    assert index.num_blocks() == 0


def test_a_digest_is_of_the_blocks_held_whatever_the_order(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    index.store(one, DRAM, ROOT, run_of(8))
    index.remove(one, DRAM, packed(7, 2))
    for number in (8, 6, 5, 4, 3, 1):
        index.store(other, DRAM, packed(number - 1), packed(number))
    assert index.digest(one, DRAM) == index.digest(other, DRAM)
    assert index.digest(one, DRAM) == digest_of(split_hashes(packed(1, 3, 4, 5, 6, 8)))
    assert index.digest(one, HBM) == TierDigest()


def test_holders_are_slots_in_order(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    index.store(other, HBM, ROOT, run_of(1))
    index.store(one, SSD, ROOT, run_of(1))
    index.store(one, DRAM, ROOT, run_of(1))
    assert index.holders(packed(1)) == [(one, DRAM), (one, SSD), (other, HBM)]
    assert index.holders(packed(2)) == []


@pytest.mark.parametrize("length", [1, 15, 17, 24])
def test_input_that_is_no_whole_number_of_hashes_changes_nothing(
    index: PrefixIndex, length: int
) -> None:
    instance = index.add_instance()
    odd = bytes(length)
    with pytest.raises(InvalidBlock, match="multiple of 16"):
        index.store(instance, HBM, ROOT, odd)
    with pytest.raises(InvalidBlock, match=f"a hash of {length} bytes"):
        index.store(instance, HBM, odd, run_of(1))
    with pytest.raises(InvalidBlock):
        index.remove(instance, HBM, odd)
    with pytest.raises(InvalidBlock):
        index.match(odd)
    with pytest.raises(InvalidBlock):
        index.holders(odd)
    assert index.num_blocks() == 0


def test_an_event_without_blocks_is_no_error(index: PrefixIndex) -> None:
    instance = index.add_instance()
    assert index.store(instance, HBM, ROOT, b"") == 0
    assert index.remove(instance, HBM, b"") == 0


def test_a_number_that_was_not_given_is_refused(index: PrefixIndex) -> None:
    gone = index.add_instance()
    index.forget_instance(gone)
    for unknown in (gone, 7, -1):
        with pytest.raises(UnknownInstance, match=f"no instance {unknown}"):
            index.store(unknown, HBM, ROOT, run_of(1))
        with pytest.raises(UnknownInstance):
            index.remove(unknown, HBM, run_of(1))
        with pytest.raises(UnknownInstance):
            index.clear(unknown, None)
        with pytest.raises(UnknownInstance):
            index.digest(unknown, HBM)
        with pytest.raises(UnknownInstance):
            index.forget_instance(unknown)


def test_the_memory_of_held_blocks_is_told(index: PrefixIndex) -> None:
    instance = index.add_instance()
    index.store(instance, HBM, ROOT, run_of(1000))
    assert index.memory_bytes() > 8 * 1000


def key(number: int) -> int:
    return index_key(packed(number))


def test_a_tree_joins_blocks_that_are_held_alike(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    index.store(one, HBM, ROOT, run_of(5))
    index.store(other, HBM, ROOT, run_of(2))
    below = TreeNode(key(3), 2, 3, (one,), num_pairs=3, num_children=0, children=())
    top = TreeNode(key(1), 0, 2, (one, other), num_pairs=7, num_children=1, children=(below,))
    assert index.tree(2, 1) == [top]


def test_a_tree_shows_the_hottest_branches_first(index: PrefixIndex) -> None:
    instances = [index.add_instance() for _ in range(3)]
    for position, instance in enumerate(instances):
        index.store(instance, HBM, ROOT, run_of(2))
        for branch in range(position + 1):
            index.store(instance, HBM, packed(2), packed(10 + branch))
    (top,) = index.tree(2, 2)
    assert [child.hash_key for child in top.children] == [key(10), key(11)]
    assert [child.num_pairs for child in top.children] == [3, 2]
    assert (top.num_pairs, top.num_children) == (12, 3)


def test_a_tree_stops_at_its_depth(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    index.store(one, HBM, ROOT, run_of(4))
    index.store(other, HBM, ROOT, run_of(2))
    (top,) = index.tree(1, 9)
    assert (top.num_children, top.children) == (1, ())
    assert index.tree(0, 9) == []
    assert index.tree(9, 0) == []


def test_a_run_whose_parent_is_gone_stands_at_the_top(index: PrefixIndex) -> None:
    instance = index.add_instance()
    index.store(instance, HBM, ROOT, run_of(6))
    index.remove(instance, HBM, packed(3))
    assert [(node.hash_key, node.num_blocks) for node in index.tree(1, 9)] == [
        (key(4), 3),
        (key(1), 2),
    ]


def test_a_tree_of_a_long_chain_is_one_run(index: PrefixIndex) -> None:
    instance = index.add_instance()
    index.store(instance, HBM, ROOT, run_of(3000))
    (node,) = index.tree(3, 3)
    assert (node.num_blocks, node.num_pairs, node.children) == (3000, 3000, ())


def test_parents_in_a_circle_do_no_harm(index: PrefixIndex) -> None:
    instance = index.add_instance()
    index.store(instance, HBM, packed(2), packed(1, 2, 3))
    index.store(instance, HBM, packed(9), packed(9))
    index.store(instance, HBM, ROOT, packed(20))
    assert [node.hash_key for node in index.tree(3, 3)] == [key(20)]
    assert lengths(index, packed(1, 2)) == {instance: 2}


def the_view(index: PrefixIndex, depth: int, width: int, **bounds: int) -> list[TreeRun]:
    names = {number: InstanceId(f"w{number}", 0) for number in range(4)}
    return finished(Tree(index.copy_runs()(), names, 7).view(depth, width, **bounds))


def test_a_copy_of_the_tree_is_of_its_moment_and_changes_nothing(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    index.store(one, HBM, ROOT, run_of(5))
    index.store(other, HBM, ROOT, run_of(2))
    index.forget_instance(other)
    before = index.num_blocks()
    make = index.copy_runs()
    index.store(one, HBM, packed(5), packed(6))
    names = {one: InstanceId("w1", 0)}
    (run,) = finished(Tree(make(), names, 7).view(3, 3))
    assert (run.num_blocks, run.num_pairs, run.holders) == (5, 5, (names[one],))
    assert index.num_blocks() == before + 1
    assert lengths(index, run_of(6)) == {one: 6}


def test_a_view_is_the_tree(index: PrefixIndex) -> None:
    instances = [index.add_instance() for _ in range(3)]
    for position, instance in enumerate(instances):
        index.store(instance, HBM, ROOT, run_of(2))
        for branch in range(position + 1):
            index.store(instance, HBM, packed(2), packed(10 + branch, 20 + branch))
    for depth, width in ((1, 1), (2, 2), (9, 9), (0, 9), (9, 0)):
        assert the_view(index, depth, width) == [*map(named, index.tree(depth, width))]


def named(node: TreeNode) -> TreeRun:
    """Return a node with its instances by name."""
    holders = tuple(InstanceId(f"w{number}", 0) for number in node.holders)
    below = tuple(map(named, node.children))
    about = node.hash_key, node.depth, node.num_blocks
    return TreeRun(*about, holders, node.num_pairs, node.num_children, below)


def test_a_view_is_bounded_in_runs_and_holders_level_by_level(index: PrefixIndex) -> None:
    one, other = index.add_instance(), index.add_instance()
    for top in range(10, 14):
        index.store(one, HBM, ROOT, packed(top))
        index.store(other, HBM, ROOT, packed(top))
        for branch in range(3):
            index.store(one, HBM, packed(top), packed(100 * top + branch))
    whole = the_view(index, 9, 9)
    assert [len(run.children) for run in whole] == [3] * 4
    few = the_view(index, 9, 9, max_runs=6)
    assert [len(run.children) for run in few] == [2, 0, 0, 0]
    assert [run.num_children for run in few] == [3] * 4
    assert [run.hash_key for run in few] == [run.hash_key for run in whole]
    assert len(the_view(index, 9, 9, max_holders=5)) == 3
    assert the_view(index, 9, 9, max_runs=0) == []


# --- snapshots ----------------------------------------------------------------------------------


def copied(index: PrefixIndex, into: PrefixIndex) -> PrefixIndex:
    assert isinstance(index, Exportable)
    assert isinstance(into, Exportable)
    into.restore(index.export()())
    return into


def a_used_index(make_index: Callable[..., PrefixIndex]) -> tuple[PrefixIndex, list[int]]:
    """Return an index with holes, tiers, a forgotten instance, and the numbers that are left."""
    index = make_index()
    instances = [index.add_instance() for _ in range(20)]
    for position, instance in enumerate(instances):
        index.store(instance, Tier(position % 5), ROOT, run_of(100 + position))
        index.remove(instance, Tier(position % 5), packed(50 + position))
    index.forget_instance(instances.pop(3))
    return index, instances


def test_what_is_restored_answers_alike(make_index: Callable[..., PrefixIndex]) -> None:
    index, instances = a_used_index(make_index)
    restored = copied(index, make_index())
    assert restored.match(run_of(130)) == index.match(run_of(130))
    assert restored.holders(packed(60)) == index.holders(packed(60))
    assert restored.num_blocks() == index.num_blocks()
    assert restored.tree(9, 9) == index.tree(9, 9)
    for instance in instances:
        for tier in Tier:
            assert restored.digest(instance, tier) == index.digest(instance, tier)


def test_what_is_restored_goes_on_alike_and_apart(make_index: Callable[..., PrefixIndex]) -> None:
    index, instances = a_used_index(make_index)
    restored = copied(index, make_index())
    for each in (index, restored):
        each.forget_instance(instances[5])
        fresh = [each.add_instance() for _ in range(20)]
        assert not set(fresh) & set(instances) - {instances[5]}
        assert all(each.digest(number, tier) == TierDigest() for number in fresh for tier in Tier)
        each.store(instances[0], HBM, packed(100), run_of(3000, start=101))
        each.remove(instances[1], DRAM, run_of(30))
        each.clear(instances[2], None)
    assert lengths(restored, run_of(3100)) == lengths(index, run_of(3100))
    assert restored.num_blocks() == index.num_blocks()
    before = restored.match(run_of(3100))
    index.clear(instances[0], None)
    assert restored.match(run_of(3100)) == before


def test_what_was_there_before_is_gone(make_index: Callable[..., PrefixIndex]) -> None:
    full, empty = make_index(), make_index()
    for _ in range(30):
        full.store(full.add_instance(), HBM, ROOT, run_of(2000))
    kept = empty.add_instance()
    empty.store(kept, HBM, ROOT, run_of(2))
    restored = copied(empty, full)
    assert lengths(restored, run_of(2000)) == {kept: 2}
    assert restored.num_blocks() == 2
    assert restored.store(kept, HBM, packed(2), run_of(1998, start=3)) == 1998
    assert lengths(restored, run_of(2000)) == {kept: 2000}


def test_an_empty_index_is_restored_empty(make_index: Callable[..., PrefixIndex]) -> None:
    restored = copied(make_index(), make_index())
    assert restored.num_blocks() == 0
    instance = restored.add_instance()
    restored.store(instance, HBM, ROOT, run_of(3))
    assert lengths(restored, run_of(3)) == {instance: 3}


def test_parts_that_are_not_an_index_change_nothing(
    make_index: Callable[..., PrefixIndex],
) -> None:
    index, _ = a_used_index(make_index)
    assert isinstance(index, Exportable)
    before, parts = index.match(run_of(130)), index.export()()
    for name, part in parts.items():
        for wrong in (None, part[:-1], memoryview(bytes(part) + b"\x01")):
            damaged = {other: each for other, each in parts.items() if other != name}
            if wrong is not None:
                damaged[name] = wrong
            with pytest.raises(InvalidSnapshot, match="part"):
                index.restore(damaged)
    assert index.match(run_of(130)) == before
