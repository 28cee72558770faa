"""Between slots and tensors: every layout that is taken is copied whole, any other is an error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.worker_hooks.connector.layers import LayerMemory
from kvatlas.worker_hooks.transfer.pool import ServePool

torch = pytest.importorskip("torch", reason="tensors need torch")

NUM_BLOCKS = 5
BLOCK = bytes([1]) * 16


def numbers(*shape: int) -> Any:
    count = torch.tensor(shape).prod().item()
    return torch.arange(count, dtype=torch.float32).to(torch.bfloat16).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "block_of"),
    [
        ((NUM_BLOCKS, 2, 3, 4), lambda layer, block: layer[block]),
        ((2, NUM_BLOCKS, 3, 4), lambda layer, block: layer[:, block]),
    ],
    ids=["blocks first", "keys and values apart"],
)
def test_a_block_goes_through_the_pool_as_it_is(
    tmp_path: Path, shape: tuple[int, ...], block_of: Callable[[Any, int], Any]
) -> None:
    theirs = {name: numbers(*shape) + 100 * n for n, name in enumerate("ab")}
    ours = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in "ab"}
    source, target = LayerMemory(theirs, NUM_BLOCKS), LayerMemory(ours, NUM_BLOCKS)
    assert source.block_bytes == 2 * 2 * 3 * 4 * 2
    with ServePool.create("p", 1, source.block_bytes, folder=tmp_path) as pool:
        pool.commit(0, BLOCK, *source.parts(3))
        target.fill(1, pool, 0)
    for name in "ab":
        assert torch.equal(block_of(ours[name], 1), block_of(theirs[name], 3))
        block_of(ours[name], 1).zero_()
        assert not ours[name].any()  # and nothing else was written


@pytest.mark.parametrize(
    ("layer", "problem"),
    [
        (numbers(3, NUM_BLOCKS, 4), "not clearly"),
        (numbers(2 * NUM_BLOCKS, 4), "not clearly"),
        (numbers(2, NUM_BLOCKS - 1, 4), "not clearly"),
        (numbers(4), "not clearly"),
        (numbers(4, 3, NUM_BLOCKS).permute(2, 1, 0), "in pieces"),
        (numbers(2, 4, 3, NUM_BLOCKS).permute(0, 3, 2, 1), "in pieces"),
    ],
)
def test_any_other_layout_is_an_error_that_names_it(layer: Any, problem: str) -> None:
    with pytest.raises(InvalidSetting, match=problem) as raised:
        LayerMemory({"model.layers.0": layer}, NUM_BLOCKS)
    assert "model.layers.0" in str(raised.value)
    assert str(tuple(layer.shape)) in str(raised.value)


def test_two_blocks_of_two_could_be_either() -> None:
    with pytest.raises(InvalidSetting, match="not clearly"):
        LayerMemory({"layer": numbers(2, 2, 4)}, 2)
