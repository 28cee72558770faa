"""The adapters of object formats: TensorRT-LLM, Mooncake, LMCache."""

from typing import Any

import msgspec
import pytest

from kvatlas.schemas.errors import InvalidSetting, MalformedBatch
from kvatlas.schemas.hashing import pack_tokens
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.adapter import Decoded
from kvatlas.worker_hooks.engines.registry import adapter_of
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawGroupSeen,
    RawRemoved,
    RawStored,
)


def decode(engine: str, value: Any, block_tokens: int | None = None) -> Decoded:
    return adapter_of(engine, block_tokens).decode(msgspec.json.encode(value))


def kinds(decoded: Decoded) -> list[str]:
    return [rejected.kind for rejected in decoded.rejected]


def block(block_hash: Any, *tokens: Any, level: int = 0, **more: Any) -> dict[str, Any]:
    ids = [{"token_id": token, "token_extra_id": 0} for token in tokens]
    return {"block_hash": block_hash, "tokens": ids, "cache_level": level, "priority": 35, **more}


def store(*blocks: dict[str, Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    data = {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}
    return {"event_id": 1, "data": data, "window_size": 64, **more}


def test_an_unknown_engine_is_named() -> None:
    with pytest.raises(InvalidSetting, match="nothing"):
        adapter_of("nothing")


class TestTrtllm:
    def test_a_store_is_a_chain_without_its_partial_end(self) -> None:
        decoded = decode("trtllm", store(block(1, 1, 2), block(-1, 3, 4), block(3, 5)))
        hashes = (1, 2**64 - 1)
        assert decoded.events == [RawStored(hashes, None, pack_tokens([1, 2, 3, 4]))]
        assert kinds(decoded) == ["partial_block"]

    def test_a_level_of_its_own_is_a_tier_of_its_own(self) -> None:
        decoded = decode("trtllm", store(block(1, 1, 2), block(2, 3, 4, level=1)))
        assert [(e.tier, e.parent) for e in decoded.events if isinstance(e, RawStored)] == [
            (Tier.hbm, None),
            (Tier.dram, 1),
        ]

    def test_a_removal_names_no_level_so_every_level_in_use_is_meant(self) -> None:
        adapter = adapter_of("trtllm")
        removal = msgspec.json.encode({"data": {"type": "removed", "block_hashes": [1]}})
        assert adapter.decode(removal).events == [RawRemoved((1,))]
        levels = {"type": "created", "num_blocks_per_cache_level": [9, 9]}
        adapter.decode(msgspec.json.encode({"data": levels}))
        tiers = [e.tier for e in adapter.decode(removal).events if isinstance(e, RawRemoved)]
        assert tiers == [Tier.hbm, Tier.dram]

    def test_a_move_is_held_in_both_places_for_a_moment(self) -> None:
        levels = {"old_value": 0, "new_value": 1}
        moved = {"data": {"type": "updated", "block_hash": 1, "cache_level": levels}}
        assert decode("trtllm", moved).events == [
            RawStored((1,), None, b"", Tier.dram),
            RawRemoved((1,), Tier.hbm),
        ]

    @pytest.mark.parametrize(
        ("more", "kind"),
        [
            ({"mm_keys": [{"hash": "a"}]}, "unknown_extra"),
            ({"lora_id": 3}, "unnamed_lora"),
            ({"cache_salt": "s"}, "unknown_extra"),
        ],
    )
    def test_a_block_that_is_more_than_its_tokens_is_residency_only(
        self, more: dict[str, Any], kind: str
    ) -> None:
        decoded = decode("trtllm", store(block(1, 1, 2, **more), block(2, 3, 4)))
        assert decoded.events == [RawStored((1, 2), None, b"")]
        assert kinds(decoded) == [kind]

    def test_windows_are_groups_and_the_widest_is_full(self) -> None:
        decoded = decode(
            "trtllm", [store(block(1, 1, 2), window_size=8), store(block(1, 1, 2), window_size=64)]
        )
        assert [e for e in decoded.events if isinstance(e, RawGroupSeen)] == [
            RawGroupSeen(0, "sliding_window", 8, 2),
            RawGroupSeen(1, "full_attention", 0, 2),
        ]

    def test_f40_a_bad_event_costs_only_itself(self) -> None:
        good = store(block(1, 1, 2), attention_dp_rank=3)
        decoded = decode(
            "trtllm", [good, {"data": {"type": "what"}}, 5, store(block("x", 1)), good]
        )
        assert len(decoded.events) == 2
        assert decoded.rank == 3
        assert kinds(decoded) == ["unknown_event", "malformed", "bad_hash"]

    def test_the_streaming_format_is_vllms(self) -> None:
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [1],
            "parent_block_hash": None,
            "token_ids": [1, 2],
            "block_size": 2,
            "lora_id": None,
            "medium": "GPU",
            "mm_keys": [[]],
        }
        seen = {**event, "block_hashes": [2], "mm_keys": [[{"hash": "a"}]]}
        text = {**event, "block_hashes": [3], "token_ids": ["a", "b"]}
        payload = msgspec.msgpack.encode([1.0, [event, seen, text], 1])
        decoded = adapter_of("trtllm").decode(payload)
        stores = [e for e in decoded.events if isinstance(e, RawStored)]
        assert [bool(e.tokens) for e in stores] == [True, False, False]
        assert kinds(decoded) == ["unknown_extra", "token_text"]
        assert decoded.rank == 1


class TestMooncake:
    def envelope(self, **more: Any) -> dict[str, Any]:
        fields = {"event_type": "stored", "block_size": 2, "medium": "cpu", "seq_hashes": [1]}
        return {**fields, "token_ids": [1, 2], **more}

    def test_msgpack_and_json_say_the_same(self) -> None:
        one, many = self.envelope(), [self.envelope(), self.envelope(seq_hashes=[2])]
        for value in (one, many, [1.0, many, 0]):
            packed = adapter_of("mooncake").decode(msgspec.msgpack.encode(value))
            assert packed == decode("mooncake", value)
            assert packed.events[0] == RawStored((1,), None, pack_tokens([1, 2]), Tier.dram)

    def test_f48_every_field_of_a_tenant_separates(self) -> None:
        salts = set()
        for fields in (
            {},
            {"additional_salt": "a"},
            {"tenant_id": "a"},
            {"tenant_id": "a", "additional_salt": "a"},
            {"tenant_id": "b", "additional_salt": "a"},
        ):
            (event,) = decode("mooncake", self.envelope(**fields)).events
            assert isinstance(event, RawStored)
            salts.add(event.cache_salt)
        assert len(salts) == 5
        (event,) = decode("mooncake", self.envelope(tenant_id="default")).events
        assert isinstance(event, RawStored)
        assert event.cache_salt is None

    def test_f26_a_later_block_without_its_parent_is_no_root(self) -> None:
        decoded = decode("mooncake", self.envelope(base_block_idx=3))
        assert decoded.events == [RawStored((1,), None, b"", Tier.dram)]
        assert kinds(decoded) == ["no_parent"]

    def test_f42_another_number_of_tokens_is_residency_only(self) -> None:
        decoded = decode("mooncake", self.envelope(token_ids=[1, 2, 3]))
        assert decoded.events == [RawStored((1,), None, b"", Tier.dram)]
        assert kinds(decoded) == ["token_count"]

    def test_f58_an_unknown_medium_is_never_the_best_one(self) -> None:
        decoded = decode("mooncake", self.envelope(medium="FOO"))
        assert isinstance(decoded.events[0], RawStored)
        assert decoded.events[0].tier is Tier.other
        assert kinds(decoded) == ["unknown_medium"]

    def test_a_clear_empties_what_it_names(self) -> None:
        cleared = [{"event_type": "cleared"}, {"event_type": "cleared", "medium": "cpu"}]
        assert decode("mooncake", cleared).events == [RawCleared(Tier.hbm), RawCleared(Tier.dram)]


class TestLmcache:
    def batch(self, kind: str = "store", **more: Any) -> dict[str, Any]:
        head = {"instance_id": "i", "incarnation": 1, "seq": 1, "event_type": kind}
        return {**head, "tier": "l1", "backend": "cpu", "shared": False, "entries": [7], **more}

    def test_tiers_are_ours_and_shared_is_remote(self) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({}, "dram"),
            ({"tier": "l2"}, "ssd"),
            ({"shared": True}, "remote"),
        ]
        for more, tier in cases:
            (event,) = decode("lmcache", self.batch(**more)).events
            assert isinstance(event, RawStored)
            assert event.tier.name == tier

    def test_keys_come_in_many_shapes_and_a_bad_one_costs_itself(self) -> None:
        entries = [{"chunk_hash": "0xaabb"}, {"key": {"hash": 1}}, "not hex", [], {}, True]
        decoded = decode("lmcache", self.batch(entries=entries))
        assert decoded.events == [
            RawStored((b"\xaa\xbb", 1, b"not hex"), None, b"", Tier.dram),
        ]
        assert kinds(decoded) == ["bad_hash"] * 3

    def test_f1_a_new_incarnation_begins_empty_and_an_old_one_is_ignored(self) -> None:
        adapter = adapter_of("lmcache")
        for incarnation, events in ((1, 1), (2, 2), (1, 0)):
            payload = msgspec.json.encode(self.batch(incarnation=incarnation))
            found = adapter.decode(payload)
            assert len(found.events) == events
        assert kinds(found) == ["stale_incarnation"]

    def test_reading_changes_nothing(self) -> None:
        assert decode("lmcache", [self.batch("access"), self.batch("config")]).events == []


@pytest.mark.parametrize("engine", ["trtllm", "mooncake", "lmcache"])
@pytest.mark.parametrize("payload", [b"", b"{", b"[1]", b"\xc1", b"7", b"[" * 10_000])
def test_what_is_no_batch_is_said_so(engine: str, payload: bytes) -> None:
    with pytest.raises(MalformedBatch):
        adapter_of(engine).decode(payload)
