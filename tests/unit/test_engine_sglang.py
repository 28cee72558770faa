"""SGLang's events: arrays up to 0.5.18, maps from 0.5.20."""

from typing import Any

import msgspec
import pytest

from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.adapter import Decoded
from kvatlas.worker_hooks.engines.sglang import FIELDS_OF, SglangAdapter
from kvatlas.worker_hooks.raw_events import RawCleared, RawRemoved, RawStored

TOKENS = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 4))


def a_store(**fields: Any) -> dict[str, Any]:
    told = {
        "block_hashes": [-3, 5],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
    }
    return {"type": "BlockStored", **told, **fields}


def as_array(event: dict[str, Any], num_fields: int) -> list[Any]:
    names = FIELDS_OF[event["type"]][:num_fields]
    return [event["type"], *[event.get(name) for name in names]]


def decode(*events: Any, block_tokens: int | None = None) -> Decoded:
    payload = msgspec.msgpack.encode([1.5, events, 1])
    return SglangAdapter(block_tokens).decode(payload)


def stored(decoded: Decoded) -> RawStored:
    (event,) = [event for event in decoded.events if isinstance(event, RawStored)]
    return event


@pytest.mark.parametrize(
    "event", [a_store(), as_array(a_store(), 5), as_array(a_store(), 6)], ids=["map", "5", "6"]
)
def test_f38_all_forms_say_the_same_with_hashes_as_unsigned(event: Any) -> None:
    decoded = decode(event, {"type": "BlockRemoved", "block_hashes": [-3], "medium": "GPU"})
    assert stored(decoded) == RawStored((2**64 - 3, 5), None, TOKENS)
    assert decoded.events[1] == RawRemoved((2**64 - 3,))
    assert decoded.rank == 1
    assert decoded.rejected == []


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("GPU", Tier.hbm),
        ("CPU_PINNED", Tier.dram),
        ("DISK", Tier.ssd),
        ("EXTERNAL", Tier.remote),
        ("SOMEWHERE", Tier.other),
    ],
)
def test_media(medium: str, tier: Tier) -> None:
    assert stored(decode(a_store(medium=medium))).tier is tier


def test_salt_and_adapter_separate() -> None:
    event = stored(decode(a_store(cache_salt="tenant", lora_name="sql", session_id="s1")))
    assert (event.cache_salt, event.lora) == ("tenant", "sql")


def test_f42_a_map_where_vllm_has_the_adapters_name_holds_the_salt() -> None:
    event = [*as_array(a_store(), 6), {"cache_salt": "tenant"}]
    assert (stored(decode(event)).cache_salt, stored(decode(event)).lora) == ("tenant", None)


def test_what_stands_there_else_makes_the_blocks_nameless() -> None:
    decoded = decode([*as_array(a_store(), 6), 7])
    assert stored(decoded).tokens == b""
    assert [each.kind for each in decoded.rejected] == ["unknown_extra"]


def test_f22_a_short_last_page_is_not_held() -> None:
    short = a_store(block_hashes=[9], token_ids=[7], block_size=1, parent_block_hash=5)
    for decoded in (decode(a_store(), short), decode(short, block_tokens=2)):
        assert [each.kind for each in decoded.rejected] == ["partial_block"]
        assert all(9 not in event.engine_hashes for event in decoded.events)  # type: ignore[union-attr]


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_f51_pages_of_any_size_are_blocks(page_tokens: int) -> None:
    tokens = list(range(2 * page_tokens))
    decoded = decode(a_store(token_ids=tokens, block_size=page_tokens), block_tokens=page_tokens)
    assert len(stored(decoded).tokens) == 4 * len(tokens)


def test_bigram_pages_are_held_without_a_name() -> None:
    decoded = decode(a_store(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]))
    assert stored(decoded).tokens == b""
    assert [each.kind for each in decoded.rejected] == ["token_pairs"]


def test_f16_a_clear_is_of_the_engines_own_memory() -> None:
    assert decode(["AllBlocksCleared"]).events == [RawCleared(Tier.hbm)]
