"""vLLM's events, in every form that its versions and its imitators give them."""

import struct
from typing import Any

import msgspec
import pytest

from kvatlas.schemas.errors import BatchTooLarge, MalformedBatch
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import Extra
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import BlockStored, SourceDegraded
from kvatlas.worker_hooks.engines.adapter import Decoded
from kvatlas.worker_hooks.engines.msgpack_batches import MAX_EVENTS, MAX_PAYLOAD_BYTES
from kvatlas.worker_hooks.engines.vllm import FIELDS_OF, VllmAdapter
from kvatlas.worker_hooks.engines.vllm_extras import FIRST_TOKEN
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawGroupSeen,
    RawRemoved,
    RawStored,
)
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker

HIGH = 0xC102464DBE767670
TOKENS = [1, 2, 3, 4]
PACKED = struct.pack("<4I", *TOKENS)
#: how many fields of BlockStored each version has
VERSIONS = {"0.10.2": 6, "0.14.1": 7, "0.18.1": 8, "0.20.2": 9, "0.22.1": 11}


def a_store(**fields: Any) -> dict[str, Any]:
    """Return a store of two blocks of two tokens as a map."""
    told = {
        "block_hashes": [HIGH, 5],
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {"type": "BlockStored", **told, **fields}


def as_array(event: dict[str, Any], num_fields: int = 14) -> list[Any]:
    """Return an event as versions up to 0.22 tell it."""
    names = FIELDS_OF[event["type"]][:num_fields]
    return [event["type"], *[event.get(name) for name in names]]


def decode(*events: Any, rank: Any = 0, more: tuple[Any, ...] = ()) -> Decoded:
    return VllmAdapter().decode(msgspec.msgpack.encode([1.5, events, rank, *more]))


def stored(decoded: Decoded) -> RawStored:
    (event,) = [event for event in decoded.events if isinstance(event, RawStored)]
    return event


def kinds(decoded: Decoded) -> list[str]:
    return [rejected.kind for rejected in decoded.rejected]


# --- forms ----------------------------------------------------------


@pytest.mark.parametrize("num_fields", VERSIONS.values(), ids=VERSIONS)
def test_f38_arrays_of_every_version_say_the_same(num_fields: int) -> None:
    decoded = decode(as_array(a_store(), num_fields), ["BlockRemoved", [5], "GPU"])
    assert stored(decoded) == RawStored((HIGH, 5), None, PACKED)
    assert decoded.events[-1] == RawRemoved((5,))
    assert kinds(decoded) == []


@pytest.mark.parametrize(
    "batch",
    [
        [1.5, [a_store()]],
        [1.5, [a_store()], 0],
        [1.5, [a_store()], 0, "later", {"more": 1}],
        [1.5, [msgspec.msgpack.encode(a_store())]],
        [1.5, [msgspec.msgpack.encode(as_array(a_store()))], 0],
    ],
    ids=["two", "three", "more", "map in a bin", "array in a bin"],
)
def test_f38_f39_a_batch_may_be_short_long_or_wrapped(batch: list[Any]) -> None:
    decoded = VllmAdapter().decode(msgspec.msgpack.encode(batch))
    assert stored(decoded) == RawStored((HIGH, 5), None, PACKED)


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode({"ts": 1.5, "events": []}),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode([1.5, {"type": "BlockStored"}]),
        msgspec.msgpack.encode("batch"),
        b"",
        b"\xc1",
        b"\x93\x01",
    ],
)
def test_f39_what_is_no_batch_is_an_error_and_no_empty_batch(payload: bytes) -> None:
    with pytest.raises(MalformedBatch):
        VllmAdapter().decode(payload)


def test_f39_the_storage_publisher_of_llm_d_is_understood() -> None:
    """Two elements, events in bins: its own index refuses them."""
    store = bytes.fromhex(
        "92cb41dac32cd3e23c6391c42397ab426c6f636b53746f726564920102009000c0"
        "ae5348415245445f53544f52414745"
    )
    removal = bytes.fromhex(
        "92cb41dac32cd3e23dbc91c41f93ac426c6f636b52656d6f7665649101ae5348415245445f53544f52414745"
    )
    adapter = VllmAdapter()
    assert stored(adapter.decode(store)).engine_hashes == (1, 2)
    assert adapter.decode(removal).events == [RawRemoved((1,), Tier.other)]


def test_f80_a_payload_beyond_the_limit_is_refused() -> None:
    with pytest.raises(BatchTooLarge):
        VllmAdapter().decode(bytes(MAX_PAYLOAD_BYTES + 1))


def test_f80_a_batch_of_more_events_than_any_step_has_is_cut() -> None:
    decoded = decode(*[["AllBlocksCleared"]] * (MAX_EVENTS + 1))
    assert len(decoded.events) == MAX_EVENTS
    assert kinds(decoded) == ["too_many_events"]


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ({"type": "Teleported"}, "unknown_event"),
        (["Teleported", 1], "unknown_event"),
        ({"kind": "BlockStored"}, "malformed"),
        (7, "malformed"),
        (b"\xc1", "malformed"),
        (a_store(block_hashes=None), "bad_hash"),
        (a_store(block_hashes=[1.5]), "bad_hash"),
        (a_store(block_hashes=["abc"]), "bad_hash"),
        (a_store(parent_block_hash=True), "bad_hash"),
        (a_store(group_idx="first"), "malformed"),
        (a_store(medium=4), "malformed"),
    ],
)
def test_f40_a_bad_event_costs_only_itself(bad: Any, kind: str) -> None:
    good = {"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"}
    decoded = decode(a_store(), bad, good)
    assert [type(event) for event in decoded.events] == [RawStored, RawRemoved]
    assert [(each.position, each.kind) for each in decoded.rejected] == [(1, kind)]
    assert decoded.positions == (0, 2)


def test_f40_bytes_that_are_no_msgpack_cost_only_their_event() -> None:
    good, not_utf8 = msgspec.msgpack.encode(a_store()), b"\x81\xa4type\xa2\xff\xfe"
    payload = b"\x92\xcb" + struct.pack(">d", 1.5) + b"\x93" + good + not_utf8 + good
    decoded = VllmAdapter().decode(payload)
    assert len(decoded.events) == 2
    assert [(each.position, each.kind) for each in decoded.rejected] == [(1, "malformed")]


def test_unknown_fields_are_counted_and_change_nothing() -> None:
    whole = as_array(a_store(), len(FIELDS_OF["BlockStored"]))
    decoded = decode(a_store(colour="red"), [*whole, "one more"])
    assert kinds(decoded) == ["unknown_field", "unknown_field"]
    assert [event for event in decoded.events] == [RawStored((HIGH, 5), None, PACKED)] * 2


# --- hashes, ranks, media ----------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        (0x8000000000000000, 0x8000000000000000),
        (-1, 2**64 - 1),
        (0, 0),
        (bytes(range(32)), bytes(range(32))),
        (bytes(16), bytes(16)),
    ],
)
def test_hashes_come_signed_unsigned_and_whole(told: Any, meant: Any) -> None:
    decoded = decode(a_store(block_hashes=[told, 5], parent_block_hash=told))
    assert stored(decoded).engine_hashes[0] == meant
    assert stored(decoded).parent == meant


@pytest.mark.parametrize(("told", "meant"), [(None, None), (3, 3), (-1, None), ("a", None)])
def test_f57_the_rank_is_the_batchs(told: Any, meant: int | None) -> None:
    assert decode(rank=told).rank == meant


@pytest.mark.parametrize(
    ("medium", "locality", "tier"),
    [
        ("GPU", None, Tier.hbm),
        ("gpu", "LOCAL", Tier.hbm),
        (None, None, Tier.hbm),
        ("CPU", None, Tier.dram),
        ("STORAGE", "LOCAL", Tier.ssd),
        ("STORAGE", "REMOTE", Tier.remote),
        ("CPU", "REMOTE", Tier.remote),
    ],
)
def test_media(medium: str | None, locality: str | None, tier: Tier) -> None:
    assert stored(decode(a_store(medium=medium, locality=locality))).tier is tier


def test_f58_an_unknown_medium_is_a_tier_of_its_own() -> None:
    decoded = decode(a_store(medium="FOO"), a_store(medium="PEERSTORE", locality="REMOTE"))
    assert {event.tier for event in decoded.events} == {Tier.other}  # type: ignore[union-attr]
    assert kinds(decoded) == ["unknown_medium", "unknown_medium"]


def test_f16_a_clear_is_of_the_engines_own_memory() -> None:
    assert decode({"type": "AllBlocksCleared"}).events == [RawCleared(Tier.hbm)]
    assert decode(["AllBlocksCleared"]).events == [RawCleared(Tier.hbm)]


# --- tokens ----------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"token_ids": [1, 2, 3]}, "token_count"),
        ({"token_ids": list(range(192))}, "token_count"),
        ({"token_ids": [[1, 2], [2, 3], [3, 4], [4, 5]]}, "token_pairs"),
        ({"token_ids": ["a", "b", "c", "d"]}, "token_text"),
        ({"token_ids": [1, 2, 3, 2**32]}, "malformed"),
        ({"token_ids": [1, 2, 3, -1]}, "malformed"),
        ({"token_ids": [1, 2, 3, True]}, "malformed"),
        ({"block_size": 4}, "token_count"),
    ],
)
def test_f42_f22_tokens_that_are_not_those_of_the_blocks_name_nothing(
    fields: dict[str, Any], kind: str
) -> None:
    decoded = decode(a_store(**fields))
    assert stored(decoded).tokens == b""
    assert stored(decoded).engine_hashes == (HIGH, 5)
    assert kinds(decoded) == [kind]


def test_f43_a_store_without_tokens_is_no_fault() -> None:
    decoded = decode(a_store(token_ids=[], block_size=0, medium="CPU"))
    assert stored(decoded) == RawStored((HIGH, 5), None, b"", Tier.dram)
    assert kinds(decoded) == []


def test_a_store_of_no_blocks_says_nothing_and_is_no_fault() -> None:
    decoded = decode(a_store(block_hashes=[], token_ids=[1, 2]))
    assert (decoded.events, decoded.rejected) == ([], [])


# --- identity ----------------------------------------------------------


@pytest.mark.parametrize("entry", [["adapter"], [["lora", "adapter"]]], ids=["bare", "tagged"])
def test_f45_an_adapter_is_known_by_its_name(entry: list[Any]) -> None:
    decoded = decode(a_store(lora_id=7, lora_name="adapter", extra_keys=[entry, entry]))
    assert stored(decoded).lora == "adapter"
    assert stored(decoded).cache_salt is None
    assert stored(decoded).extras == ()


@pytest.mark.parametrize("salt", ["tenant-A", ["cache_salt", "tenant-A"]], ids=["bare", "tagged"])
def test_f46_a_salt_is_what_is_left_behind_the_adapter(salt: Any) -> None:
    event = a_store(lora_name="tenant-A", extra_keys=[["tenant-A", salt], ["tenant-A"]])
    assert (stored(decode(event)).lora, stored(decode(event)).cache_salt) == (
        "tenant-A",
        "tenant-A",
    )
    plain = a_store(extra_keys=[[salt], None])
    assert (stored(decode(plain)).lora, stored(decode(plain)).cache_salt) == (None, "tenant-A")


def test_an_image_has_one_place_in_the_prompt() -> None:
    """Blocks of two tokens; the image begins one token into the first and covers the second."""
    decoded = decode(a_store(extra_keys=[[["img", 1]], [["img", -1]]]))
    assert stored(decoded).first_token == FIRST_TOKEN
    assert stored(decoded).extras == (Extra(FIRST_TOKEN + 1, "mm", "img", 3),)


def test_an_image_that_began_before_the_event_names_the_same_blocks() -> None:
    descriptor = NamespaceDescriptor(2)
    whole, parts = EngineStateTracker("m", descriptor), EngineStateTracker("m", descriptor)
    adapter = VllmAdapter()

    def tell(tracker: EngineStateTracker, *events: dict[str, Any]) -> set[bytes]:
        for event in events:
            tracker.handle(adapter.decode(msgspec.msgpack.encode([0.0, [event], 0])).events)
        return {block for block, _ in tracker.residency.blocks(Tier.hbm)}

    keys = [[["img", 1]], [["img", -1]]]
    at_once = tell(whole, a_store(block_hashes=[1, 2], extra_keys=keys))
    one_by_one = tell(
        parts,
        a_store(block_hashes=[1], token_ids=[1, 2], extra_keys=keys[:1]),
        a_store(block_hashes=[2], token_ids=[3, 4], parent_block_hash=1, extra_keys=keys[1:]),
    )
    assert at_once == one_by_one
    assert (
        tell(EngineStateTracker("m", descriptor), a_store(block_hashes=[1, 2])) & at_once == set()
    )


def test_embeddings_name_their_block() -> None:
    decoded = decode(a_store(extra_keys=[[b"\x01\x02"], None]))
    assert stored(decoded).extras == (Extra(FIRST_TOKEN, "prompt_embeds", "0102", 2),)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"extra_keys": [[{"of": "another kind"}], None]}, "unknown_extra"),
        ({"extra_keys": [None, ["text in a later block"]]}, "unknown_extra"),
        ({"extra_keys": [["a", "b"], None]}, "unknown_extra"),
        ({"extra_keys": [None]}, "unknown_extra"),
        ({"extra_keys": [["text"], None], "parent_block_hash": 3}, "unknown_extra"),
        ({"lora_id": 7}, "unnamed_lora"),
        ({"lora_name": 7}, "malformed"),
    ],
)
def test_f49_what_cannot_be_identified_is_held_and_names_nothing(
    fields: dict[str, Any], kind: str
) -> None:
    decoded = decode(a_store(**fields))
    assert stored(decoded).tokens == b""
    assert kinds(decoded) == [kind]


def test_f48_tenants_stay_apart() -> None:
    tracker = EngineStateTracker("m", NamespaceDescriptor(2))
    for number, salt in enumerate(["alice", "bob"]):
        event = a_store(block_hashes=[2 * number, 2 * number + 1], extra_keys=[[salt], None])
        tracker.handle(decode(event).events)
    assert tracker.residency.digest(Tier.hbm).count == 4


# --- groups ----------------------------------------------------------


def test_f56_a_group_is_told_once_and_again_when_it_changes() -> None:
    adapter = VllmAdapter()

    def groups(**fields: Any) -> list[RawGroupSeen]:
        batch = msgspec.msgpack.encode([0.0, [a_store(**fields)], 0])
        return [event for event in adapter.decode(batch).events if isinstance(event, RawGroupSeen)]

    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}
    assert groups(group_idx=1, **window) == [RawGroupSeen(1, "sliding_window", 64, 2)]
    assert groups(group_idx=1, **window) == []
    assert groups(group_idx=1, kv_cache_spec_kind="mamba") == [RawGroupSeen(1, "mamba", 0, 2)]
    assert groups(group_idx=2) == [RawGroupSeen(2, "unknown", 0, 2)]
    assert groups() == []


def test_f51_blocks_of_another_size_than_the_workers_are_refused() -> None:
    tracker = EngineStateTracker("m", NamespaceDescriptor(4))
    (told,) = tracker.handle(decode(a_store()).events)
    assert isinstance(told, SourceDegraded)
    assert "blocks have 2 tokens, told were 4" in told.reason
    assert "--block-tokens 2" in told.reason
    assert tracker.counters.rejected_events == 1


def test_f24_each_block_of_an_event_follows_the_one_before() -> None:
    tracker = EngineStateTracker("m", NamespaceDescriptor(1))
    store = a_store(block_hashes=[1, 2, 3, 4], block_size=1)
    (told,) = [e for e in tracker.handle(decode(store).events) if isinstance(e, BlockStored)]
    assert len(set(told.hashes[i : i + 16] for i in range(0, 64, 16))) == 4


@pytest.mark.parametrize("key", [["new-kind", 1_000_000], ["mm", 2], ["mm", "img", 2]])
def test_an_offset_behind_its_block_is_a_kind_that_nobody_knows(key: list[Any]) -> None:
    decoded = decode(a_store(extra_keys=[[key], None]), a_store())
    assert kinds(decoded) == ["unknown_extra"]
    assert [event.tokens for event in decoded.events] == [b"", PACKED]  # type: ignore[union-attr]
