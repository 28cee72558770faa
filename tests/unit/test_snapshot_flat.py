"""Parts that would lead a kernel out of its arrays are refused before one sees them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.index import kernel
from kvatlas.indexer.index.exporting import InvalidSnapshot, part_of
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import Tier
from testkit.builders import ROOT, hashes
from testkit.indexes import tiny_index

CHAIN = hashes(*range(1, 3_000))


def small_index() -> FlatRadixIndex:
    return FlatRadixIndex(max_bytes=64 << 20)


def a_used_index() -> FlatRadixIndex:
    index = small_index()
    for position in range(20):
        instance = index.add_instance()
        index.store(instance, Tier(position % 5), ROOT, CHAIN[: 16 * (100 + 100 * position)])
    return index


def set_state(entry: int, value: int) -> Callable[[NDArray[np.uint64]], None]:
    def change(state: NDArray[np.uint64]) -> None:
        state[entry] = value

    return change


def set_all(column: int, value: int) -> Callable[[NDArray[np.uint64]], None]:
    def change(array: NDArray[np.uint64]) -> None:
        array.reshape(-1, array.shape[-1])[:, column] = value

    return change


def set_first(value: int) -> Callable[[NDArray[np.uint64]], None]:
    def change(array: NDArray[np.uint64]) -> None:
        array[0] = value

    return change


@pytest.mark.parametrize(
    ("part", "dtype", "columns", "change", "says"),
    [
        ("flat.blocks", np.uint32, 5, set_all(kernel.ROW, 1 << 20), "blocks name rows"),
        ("flat.blocks", np.uint32, 5, set_all(kernel.ROW, 0), "blocks name rows"),
        ("flat.rows", np.uint64, 4, set_all(kernel.START, 1 << 40), "rows name words"),
        ("flat.rows", np.uint64, 4, set_all(kernel.LENGTH, 2**64 - 1), "rows name words"),
        ("flat.words", np.uint64, 1, set_all(0, 2**64 - 1), "words name groups"),
        ("flat.directory", np.uint32, 1, set_all(0, 1 << 30), "directory names segments"),
        ("flat.directory", np.uint32, 1, set_all(0, 1), "directory names segments"),
        ("flat.segments", np.uint32, 2, set_all(kernel.HELD, 7), "segments count"),
        ("flat.occupied", np.uint8, 1, set_first(255), "segments count"),
        ("flat.state", np.uint64, 1, set_state(kernel.SEGMENT_BITS, 60), "segments of 2"),
        ("flat.state", np.uint64, 1, set_state(kernel.DIRECTORY_SHIFT, 1), "directory of 2"),
        ("flat.state", np.uint64, 1, set_state(kernel.NUM_BLOCKS, 5), "part flat.blocks"),
        ("flat.state", np.uint64, 1, set_state(kernel.NUM_ROWS, 5), "part flat.rows"),
        ("flat.state", np.uint64, 1, set_state(kernel.NUM_WORDS, 1 << 50), "part flat.words"),
        ("flat.state", np.uint64, 1, set_state(kernel.NUM_SEGMENTS, 1 << 40), "part flat"),
    ],
)
def test_a_part_that_points_nowhere_changes_nothing(
    part: str,
    dtype: type[np.uint64],
    columns: int,
    change: Callable[[NDArray[np.uint64]], None],
    says: str,
) -> None:
    index = a_used_index()
    before, parts = index.match(CHAIN), index.export()()
    wrong = np.frombuffer(bytes(parts[part]), dtype).copy()
    change(wrong.reshape(-1, columns) if columns > 1 or "state" not in part else wrong)
    with pytest.raises(InvalidSnapshot, match=says):
        index.restore({**parts, part: part_of(wrong)})
    assert index.match(CHAIN) == before


def test_an_index_with_other_segments_is_refused() -> None:
    tiny = tiny_index()
    tiny.store(tiny.add_instance(), Tier.hbm, ROOT, CHAIN)
    with pytest.raises(InvalidSnapshot, match="segments of 4 cells"):
        small_index().restore(tiny.export()())


def test_an_index_without_room_is_refused() -> None:
    index = FlatRadixIndex(max_bytes=4 << 20)
    parts = a_used_index().export()()
    roomy = small_index()
    instance = roomy.add_instance()
    for first in range(0, 400_000, 1_000):
        roomy.store(instance, Tier.hbm, ROOT, hashes(*range(first, first + 1_000)))
    with pytest.raises((InvalidSnapshot, IndexFull), match="room for"):
        index.restore(roomy.export()())
    index.restore(parts)
    assert len(index.match(CHAIN)) == 20


def test_it_is_restored_into_shared_memory(tmp_path: Path) -> None:
    index = a_used_index()
    shared = FlatRadixIndex(max_bytes=64 << 20, arrays=SharedArrays(tmp_path / "index"))
    shared.restore(index.export()())
    assert shared.match(CHAIN) == index.match(CHAIN)
    for each in (index, shared):
        instance = each.add_instance()
        each.store(instance, Tier.hbm, ROOT, CHAIN)
    assert shared.match(CHAIN) == index.match(CHAIN)
