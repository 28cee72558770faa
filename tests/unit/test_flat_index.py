"""What only the flat index promises: bounds, sweeps, and arrays for answers."""

import random
from typing import Any

import numba
import numpy as np
import pytest

from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.index import kernel
from kvatlas.schemas.digest import digest_of, index_key, mix64, split_hashes
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import Tier
from testkit.blocks import a_chain, a_hash

ROOT = b"\xff" * 16


def a_bounded_index() -> FlatRadixIndex:
    """Return an index with room for some thousand blocks."""
    return FlatRadixIndex(
        max_bytes=1 << 17, segment_cells=64, first_segments=2, set_rows=2, set_words=2
    )


def chain_of(num_blocks: int, start: int = 0) -> bytes:
    return a_chain(*range(start, start + num_blocks))


@pytest.mark.parametrize("name", ["segment_cells", "first_segments", "set_rows", "set_words"])
@pytest.mark.parametrize("value", [0, 1, 3, 100])
def test_a_size_is_a_power_of_two(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}, expected a power of two"):
        FlatRadixIndex(**{name: value})  # type: ignore[arg-type]


def test_more_blocks_than_the_limit_are_refused_and_the_rest_stays_exact() -> None:
    index = a_bounded_index()
    instance = index.add_instance()
    chain = chain_of(8000)
    with pytest.raises(IndexFull, match="the limit is 131072"):
        index.store(instance, Tier.hbm, ROOT, chain)
    num_blocks = index.num_blocks()
    assert 1000 < num_blocks < 8000
    assert index.memory_bytes() <= 1 << 17
    assert index.digest(instance, Tier.hbm) == digest_of(split_hashes(chain[: 16 * num_blocks]))
    assert [match.num_blocks for match in index.match(chain)] == [num_blocks]


def test_a_full_index_takes_removals_and_then_blocks_again() -> None:
    index = a_bounded_index()
    one, other = index.add_instance(), index.add_instance()
    with pytest.raises(IndexFull):
        index.store(one, Tier.hbm, ROOT, chain_of(8000))
    num_blocks = index.num_blocks()
    assert index.remove(one, Tier.hbm, chain_of(8000)) == num_blocks
    assert index.store(other, Tier.hbm, ROOT, chain_of(400)) == 400


def test_a_full_index_has_room_again_once_an_instance_is_forgotten() -> None:
    index = a_bounded_index()
    gone, fresh = index.add_instance(), index.add_instance()
    with pytest.raises(IndexFull):
        index.store(gone, Tier.hbm, ROOT, chain_of(8000))
    index.forget_instance(gone)
    assert index.store(fresh, Tier.hbm, ROOT, chain_of(400, start=9000)) == 400
    assert index.num_blocks() == 400


def test_too_many_different_sets_are_refused_and_removals_still_work() -> None:
    index = a_bounded_index()
    instances = [index.add_instance() for _ in range(60)]

    def hold_differently() -> None:
        for number in range(4000):
            for bit, instance in enumerate(instances):
                if (number * 2654435761) >> (bit % 32) & 1:
                    index.store(instance, Tier(bit % 5), ROOT, a_hash(number))

    with pytest.raises(IndexFull):
        hold_differently()
    for instance in instances:
        index.clear(instance, None)
    assert index.num_blocks() == 0
    assert index.store(instances[0], Tier.hbm, ROOT, chain_of(100)) == 100


def test_sets_that_nobody_uses_any_more_do_not_add_up() -> None:
    index = FlatRadixIndex(set_rows=2, set_words=2, max_bytes=1 << 24)
    instances = [index.add_instance() for _ in range(30)]
    chain = chain_of(4)
    sizes = []
    for turn in range(3000):
        for offset in range(4):
            index.store(instances[(turn * 7 + offset * turn) % 30], Tier.hbm, ROOT, chain)
            index.remove(instances[(turn * 5 + offset) % 30], Tier.hbm, chain[16 * offset :])
        sizes.append(index.memory_bytes())
    assert max(sizes[1000:]) == max(sizes[:1000])


def test_churn_of_blocks_leaves_the_memory_as_it_was() -> None:
    index = FlatRadixIndex(segment_cells=64, first_segments=2, max_bytes=1 << 24)
    instance = index.add_instance()
    sizes = []
    for turn in range(20):
        chain = chain_of(1000, start=1000 * turn)
        index.store(instance, Tier.hbm, ROOT, chain)
        index.remove(instance, Tier.hbm, chain)
        sizes.append(index.memory_bytes())
    assert index.num_blocks() == 0
    assert sizes[-1] < 1.5 * sizes[0]


def test_a_block_costs_at_most_30_bytes_before_the_table_grows() -> None:
    index = FlatRadixIndex()
    instance = index.add_instance()
    best = min(
        index.memory_bytes() / index.num_blocks()
        for start in range(0, 100_000, 1000)
        if index.store(instance, Tier.hbm, ROOT, chain_of(1000, start))
    )
    assert best <= 30


def test_churn_of_instances_reuses_their_numbers() -> None:
    index = FlatRadixIndex()
    numbers = set()
    for _ in range(500):
        instance = index.add_instance()
        index.store(instance, Tier.hbm, ROOT, chain_of(3))
        index.forget_instance(instance)
        numbers.add(instance)
    assert len(numbers) <= 17


def an_index_with_long_sweeps() -> FlatRadixIndex:
    """Return one of so many segments that a sweep is not done at once."""
    return FlatRadixIndex(segment_cells=4, first_segments=128, set_rows=1 << 12, set_words=1 << 16)


def test_a_long_sweep_goes_on_with_events_and_answers_stay_right() -> None:
    """Epochs end one after the other."""
    index = an_index_with_long_sweeps()
    plain, twins, numbers = ReferenceIndex(), dict[int, int](), set[int]()
    chosen, num_ended = random.Random(1), 0
    for step in range(300):
        if len(twins) == 40:
            gone = chosen.choice(list(twins))
            index.forget_instance(gone)
            plain.forget_instance(twins.pop(gone))
        number = index.add_instance()
        twins[number] = plain.add_instance()
        numbers.add(number)
        for _ in range(20):
            other, chain = chosen.choice(list(twins)), chain_of(6, start=chosen.randrange(600))
            is_under_way = bool(index._leaving)
            if chosen.random() < 0.7:
                index.store(other, Tier.hbm, ROOT, chain)
                plain.store(twins[other], Tier.hbm, ROOT, chain)
            else:
                index.remove(other, Tier.hbm, chain)
                plain.remove(twins[other], Tier.hbm, chain)
            num_ended += is_under_way and not index._leaving
            asked = chain_of(6, start=chosen.randrange(600))
            found = {twins[match.instance]: match.num_blocks for match in index.match(asked)}
            assert found == {match.instance: match.num_blocks for match in plain.match(asked)}, step
        assert index.num_blocks() == plain.num_blocks(), step
    assert index.audit() == []
    assert num_ended >= 4, "sweeps end while events come"
    assert len(numbers) <= 40 + 2 * 16, "numbers come back"


def test_a_snapshot_amid_a_sweep_is_the_whole_index() -> None:
    index, copy = an_index_with_long_sweeps(), an_index_with_long_sweeps()
    for number in range(20):
        instance = index.add_instance()
        index.store(instance, Tier.hbm, ROOT, chain_of(300, start=20 * number))
    for gone in range(16):
        index.forget_instance(gone)
    kept = index.add_instance()
    index.store(kept, Tier.hbm, ROOT, chain_of(5))
    assert index._leaving
    assert 0 < index._num_swept < index._state[kernel.NUM_SEGMENTS]
    copy.restore(index.export()())
    for each in (index, copy):
        each.store(kept, Tier.dram, ROOT, chain_of(600))
        numbers = {each.add_instance() for _ in range(40)}
        assert numbers.isdisjoint({*range(16, 20), kept})
        for number in numbers:
            each.store(number, Tier.hbm, ROOT, chain_of(9, start=10 * number))
        assert each.audit() == []
    assert index.num_blocks() == copy.num_blocks()
    for start in range(0, 700, 7):
        found = [sorted(each.match(chain_of(9, start=start))) for each in (index, copy)]
        assert found[0] == found[1]


def test_columns_say_the_same_as_matches() -> None:
    index = FlatRadixIndex()
    for position in range(20):
        instance = index.add_instance()
        index.store(instance, Tier(position % 5), ROOT, chain_of(1 + position))
        index.store(instance, Tier.hbm, ROOT, chain_of(position // 2))
    columns = index.match_columns(chain_of(30))
    assert [
        (instance, num_blocks, tuple(by_tier))
        for instance, num_blocks, by_tier in zip(
            columns.instances.tolist(),
            columns.num_blocks.tolist(),
            columns.by_tier.T.tolist(),
            strict=True,
        )
    ] == index.match(chain_of(30))
    assert index.match_columns(b"").instances.size == 0


def test_kernels_read_keys_and_mix_them_like_the_schemas() -> None:
    chain = chain_of(50) + bytes(16) + b"\xff" * 16
    words = np.frombuffer(chain, np.uint64)
    for position, block_hash in enumerate(split_hashes(chain)):
        key = kernel.key_at(words, np.uint64(position))
        assert int(key) == index_key(block_hash)
        assert int(kernel.mix64(np.uint64(key))) == mix64(index_key(block_hash))


@pytest.mark.skipif(not kernel.IS_COMPILED, reason="NUMBA_DISABLE_JIT")
def test_each_kernel_is_compiled_for_its_declared_types_only() -> None:
    index = FlatRadixIndex()
    instance = index.add_instance()
    large = b"\xff" * 16
    index.store(instance, Tier.hbm, large, large)
    index.remove(instance, Tier.hbm, bytes(16))
    index.match(large)
    index.match(b"")
    for name in ("store", "remove", "clear", "strip", "collect", "match", "row_of", "compress"):
        dispatcher: Any = getattr(kernel, name)
        assert len(dispatcher.signatures) == 1, name


def test_warming_again_costs_nothing() -> None:
    kernel.warm()
    assert kernel.warm() < 0.1


def test_without_a_cache_folder_kernels_compile_in_each_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def njit(**options: bool) -> Any:
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", njit)

    @kernel.compiled()
    def one() -> int:
        return 1

    assert one() == 1
    assert [options.get("cache", False) for options in asked] == [True, False]
