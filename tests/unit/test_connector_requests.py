"""What a request wants of peers and leaves for them: the connector on the scheduler's side."""

from typing import Any

import msgspec
import pytest

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, pack_tokens
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Plan, PullStep
from kvatlas.worker_hooks.connector.orders import BlockRun, BlockSave
from kvatlas.worker_hooks.connector.requests import RequestBlocks, plan_in

BLOCK_TOKENS = 4
HASHER = BlockHasher(NamespaceDescriptor(BLOCK_TOKENS).namespace("m", None, None))
TOKENS = list(range(26))
A, B, C = (InstanceId(name, 0) for name in "abc")


def chain(tokens: list[int]) -> list[bytes]:
    packed = HASHER.chain(pack_tokens(tokens))
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


def of_plan(*steps: PullStep, block_tokens: int = BLOCK_TOKENS) -> RequestBlocks:
    return RequestBlocks("r", HASHER, Plan(block_tokens, 0, steps, 1))


def test_the_routers_plan_is_read() -> None:
    plan = Plan(BLOCK_TOKENS, 1, (PullStep("a", 0, 1, 2, (B,)),), 3)
    params = {"kvatlas": {"decision_id": "d", "plan": msgspec.to_builtins(plan)}, "other": 1}
    assert plan_in(params) == plan


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"other": 1},
        {"kvatlas": None},
        {"kvatlas": 7},
        {"kvatlas": {}},
        {"kvatlas": {"plan": "x"}},
        {"kvatlas": {"plan": {"pulls": []}}},
        {"kvatlas": {"plan": {"block_tokens": 4, "reuse_blocks": 0, "pulls": [1]}}},
    ],
)
def test_what_is_no_plan_is_none(params: dict[str, Any] | None) -> None:
    assert plan_in(params) is None


def test_a_chain_in_pieces_is_the_hashers() -> None:
    blocks = RequestBlocks("r", HASHER, None)
    for num_tokens in (0, 3, 4, 9, 9, 26, 5):
        assert blocks.chain(TOKENS[:num_tokens]) == chain(TOKENS[:num_tokens])


def test_a_plan_is_asked_for_once() -> None:
    blocks = of_plan(PullStep("a", 0, 0, 5))
    assert blocks.wanted_blocks(2, TOKENS) == 3
    assert blocks.wanted_blocks(2, TOKENS) == 0


def test_nothing_is_wanted_beyond_the_prompt_or_behind_what_is_held() -> None:
    assert of_plan(PullStep("a", 0, 0, 99)).wanted_blocks(0, TOKENS) == 6
    assert of_plan(PullStep("a", 0, 0, 3)).wanted_blocks(5, TOKENS) == 0
    assert of_plan(PullStep("a", 0, 0, 3), block_tokens=8).wanted_blocks(0, TOKENS) == 0
    assert of_plan().wanted_blocks(0, TOKENS) == 0


def test_a_hole_is_asked_of_everybody_in_the_plans_order() -> None:
    blocks = of_plan(PullStep("a", 0, 0, 2, (C,)), PullStep("b", 0, 3, 2))
    assert blocks.wanted_blocks(1, TOKENS) == 4
    blocks.block_ids = [10, 11, 12, 13, 14, 15]
    load = blocks.load(4)
    assert load.block_ids == (11, 12, 13, 14)
    assert list(load.hashes) == chain(TOKENS)[1:5]
    # the hole has the same owners in the same order as the blocks before it: one run
    assert load.runs == (BlockRun(0, 2, (A, C, B)), BlockRun(2, 2, (B, A, C)))


def test_a_load_is_cut_to_the_room() -> None:
    blocks = of_plan(PullStep("a", 0, 0, 5))
    blocks.wanted_blocks(0, TOKENS)
    blocks.block_ids = [7, 8]
    load = blocks.load(2)
    assert (load.block_ids, load.runs) == ((7, 8), (BlockRun(0, 2, (A,)),))


def test_completed_blocks_are_told_once_within_a_budget() -> None:
    blocks = RequestBlocks("r", HASHER, None)
    blocks.block_ids, names = [5, 6, 7], chain(TOKENS)
    assert blocks.completed(TOKENS[:3], 9) == []
    assert blocks.completed(TOKENS, 2) == [BlockSave(5, names[0]), BlockSave(6, names[1])]
    assert blocks.completed(TOKENS, 2) == [BlockSave(7, names[2])]
    assert blocks.completed(TOKENS, 2) == []
