"""The real bridge process beside an engine with lookahead hashes; vLLM 0.33 encoded its batches."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.schemas.digest import split_hashes
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher
from testkit.bridging import Bridged, a_fleet
from testkit.waiting import until
from testkit.zmq_engine import ZmqEngine

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm_0_33_batches.json"
CASES = {case["name"]: case for case in json.loads(GOLDEN.read_text())["cases"]}
BOTH = CASES["equal tokens, different successors"]
REMOVAL = CASES["the one of two with equal tokens is removed"]
HASHER = BlockHasher(NamespaceDescriptor(4, lookahead_tokens=1).namespace("m", None, None))


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Bridged]:
    async with a_fleet(tmp_path) as fleet:
        yield fleet


async def tell(engine: ZmqEngine, *payloads: str) -> None:
    for payload in payloads:
        await engine.publish(*msgspec.msgpack.decode(bytes.fromhex(payload))[1])


def named(case: dict[str, Any]) -> set[bytes]:
    return {block for prompt in case["prompts"] for block in split_hashes(HASHER.chain(prompt))}


@pytest.mark.parametrize("flags", [(), ("--block-tokens", "4", "--lookahead-tokens", "1")])
async def test_a_bridge_names_blocks_by_what_lies_behind_them(
    fleet: Bridged, flags: tuple[str, ...]
) -> None:
    """It learns the lookahead with the block size, or is given both."""
    async with ZmqEngine() as engine:
        await tell(engine, *BOTH["payloads"])
        bridging = fleet.bridge(engine.endpoint, engine.replay_endpoint, *flags)
        async with bridging:
            await fleet.agrees(lambda: named(BOTH))
            await tell(engine, REMOVAL["payloads"][-1])
            await fleet.agrees(lambda: named(REMOVAL))
            assert fleet.view is not None
            assert fleet.view.info is not None
            assert fleet.view.info.descriptor.lookahead_tokens == 1


async def test_another_lookahead_than_given_is_a_reason_with_the_flag(fleet: Bridged) -> None:
    async with ZmqEngine() as engine:
        flags = ("--block-tokens", "4", "--unreusable-blocks", "1")
        async with fleet.bridge(engine.endpoint, engine.replay_endpoint, *flags):
            await until(lambda: fleet.view is not None and fleet.view.info is not None)
            await tell(engine, *BOTH["payloads"])
            await until(lambda: fleet.is_doubted)
            assert fleet.view is not None
            assert "--lookahead-tokens 1" in str(fleet.view.trust_reasons)
            assert fleet.view.num_blocks == 0
            assert fleet.view.info is not None
            assert fleet.view.info.num_unreusable_trailing_blocks == 1


async def test_a_field_of_a_later_version_is_a_reason(fleet: Bridged) -> None:
    async with ZmqEngine() as engine, fleet.bridge(engine.endpoint, engine.replay_endpoint):
        event = engine.blocks.store(1, 2) | {"draft_window": [7]}
        await engine.publish(event)
        await until(lambda: fleet.is_doubted)
        assert fleet.view is not None
        assert "BlockStored.draft_window" in str(fleet.view.trust_reasons)
