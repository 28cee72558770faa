"""Batches of every engine version, byte by byte, and what the adapters make of them.

`tests/golden/engine_batches.json` is what the encoders below wrote: it fails where they or the
adapters change. The samples of the engines' own definitions are compared where they lie at hand.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.registry import adapter_of
from kvatlas.worker_hooks.engines.sglang import SglangAdapter
from kvatlas.worker_hooks.engines.vllm import MAX_GROUPS, VllmAdapter
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawGroupSeen,
    RawRemoved,
    RawStored,
)
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "engine_batches.json"
MATRIX = ROOT.parent / "shared" / "captures" / "wire_matrix.json"
TOKENS = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 4))
HASHES = {"vllm": (0xC102464DBE767670, 5), "sglang": (-3, 5)}

OLDEST = "block_hashes parent_block_hash token_ids block_size lora_id"
VLLM_10 = f"{OLDEST} medium"
VLLM_18 = f"{VLLM_10} lora_name extra_keys"
VLLM_22 = f"{VLLM_18} group_idx kv_cache_spec_kind kv_cache_spec_sliding_window"
#: name: whether events are maps, fields of a store, fields of a removal
VERSIONS = {
    "vllm-0.10.2": (False, VLLM_10, "block_hashes medium"),
    "vllm-0.14.1": (False, f"{VLLM_10} lora_name", "block_hashes medium"),
    "vllm-0.18.1": (False, VLLM_18, "block_hashes medium"),
    "vllm-0.20.2": (False, f"{VLLM_18} group_idx", "block_hashes medium group_idx"),
    "vllm-0.22.1": (False, VLLM_22, "block_hashes medium group_idx"),
    "vllm-0.24.0": (True, VLLM_22, "block_hashes medium group_idx"),
    "vllm-0.32.0": (True, f"{VLLM_22} session_id", "block_hashes medium group_idx"),
    "sglang-0.4.7": (False, OLDEST, "block_hashes"),
    "sglang-0.5.9": (False, VLLM_10, "block_hashes medium"),
    "sglang-0.5.20": (True, f"{VLLM_10} cache_salt session_id", "block_hashes medium"),
    "sglang-0.5.23": (True, f"{VLLM_10} cache_salt session_id lora_name", "block_hashes medium"),
}


def encoded(version: str) -> bytes:
    """Return a store, a removal and a clear as this version puts them on the wire."""
    is_map, stored, removed = VERSIONS[version]
    values = {
        "block_hashes": HASHES[version.split("-")[0]],
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "medium": "GPU",
        "extra_keys": [["tenant-A"], None],
        "cache_salt": "tenant-A",
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "session_id": "s1",
    }
    events = []
    for tag, names in (
        ("BlockStored", stored),
        ("BlockRemoved", removed),
        ("AllBlocksCleared", ""),
    ):
        event = msgspec.defstruct(
            tag, [(name, Any) for name in names.split()], tag=tag, array_like=not is_map
        )
        told = {name: values.get(name) for name in names.split()}
        if tag == "BlockRemoved":
            told["block_hashes"] = (5,)
        events.append(event(**told))
    return msgspec.msgpack.encode([1.5, events, None])


def expected(engine: str, fields: set[str]) -> list[Any]:
    """Return the raw events of the batch above where a store has these fields."""
    salt = "tenant-A" if fields & {"extra_keys", "cache_salt"} else None
    hashes = tuple(each & 0xFFFF_FFFF_FFFF_FFFF for each in HASHES[engine])
    kind = "full_attention" if "kv_cache_spec_kind" in fields else "unknown"
    group = [RawGroupSeen(0, kind, 0, 2)] if "group_idx" in fields else []
    store = RawStored(hashes, None, TOKENS, Tier.hbm, None, salt)
    return [*group, store, RawRemoved((5,)), RawCleared(Tier.hbm)]


def matrix() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MATRIX.read_text()) if MATRIX.exists() else {}
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_f38_a_golden_batch_of_each_version(version: str) -> None:
    golden = json.loads(GOLDEN.read_text())[version]
    engine = version.split("-")[0]
    decoded = adapter_of(engine).decode(bytes.fromhex(golden["hex"]))
    assert encoded(version).hex() == golden["hex"]
    assert decoded.events == expected(engine, set(VERSIONS[version][1].split()))
    assert json.loads(msgspec.json.encode(decoded.events)) == golden["events"]
    assert decoded.rejected == []


@pytest.mark.skipif(not MATRIX.exists(), reason="the samples of all versions are not here")
@pytest.mark.parametrize("version", matrix())
def test_f38_a_sample_of_each_versions_own_definitions(version: str) -> None:
    sample, engine = matrix()[version], version.split("-")[0]
    decoded = adapter_of(engine).decode(bytes.fromhex(sample["hex"]))
    found = [event for event in decoded.events if not isinstance(event, RawGroupSeen)]
    wanted = expected(engine, set(sample["stored_fields"]) - {"group_idx"})
    assert found == wanted
    assert decoded.rejected == []
    tracker = EngineStateTracker("m", NamespaceDescriptor(2))
    tracker.handle(decoded.events[:-1])
    first = wanted[0].engine_hashes[0]
    assert tracker.resident() == {0: {Tier.hbm: [first]}}


# --- faults that others had ----------------------------------------------------------


def a_store(*hashes: Any, tokens: int = 0, **fields: Any) -> dict[str, Any]:
    ids = list(range(tokens or 2 * len(hashes)))
    told = {"block_hashes": list(hashes), "token_ids": ids, "block_size": 2, "medium": "GPU"}
    return {"type": "BlockStored", **told, **fields}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


def test_f19_a_store_that_is_its_own_parent_changes_nothing() -> None:
    tracker, adapter = EngineStateTracker("m", NamespaceDescriptor(2)), VllmAdapter()
    tracker.handle(adapter.decode(batch(a_store(1, 2, 3))).events)
    assert tracker.handle(adapter.decode(batch(a_store(9, parent_block_hash=9))).events) == []
    assert tracker.resident() == {0: {Tier.hbm: [1, 2, 3]}}
    assert tracker.counters.rejected_events == 1


def test_f19_a_block_that_is_not_there_spoils_no_removal() -> None:
    tracker, adapter = EngineStateTracker("m", NamespaceDescriptor(2)), VllmAdapter()
    removal = {"type": "BlockRemoved", "block_hashes": [77, 2, 3]}
    tracker.handle(adapter.decode(batch(a_store(1, 2, 3), removal)).events)
    assert tracker.resident() == {0: {Tier.hbm: [1]}}


def test_f31_equal_hashes_of_two_models_are_two_blocks() -> None:
    store, removal = batch(a_store(1, 2)), batch({"type": "BlockRemoved", "block_hashes": [1, 2]})
    trackers = [EngineStateTracker(model, NamespaceDescriptor(2)) for model in ("a", "b")]
    for tracker in trackers:
        tracker.handle(VllmAdapter().decode(store).events)
    names = [{block for block, _ in tracker.residency.blocks(Tier.hbm)} for tracker in trackers]
    assert names[0].isdisjoint(names[1])
    trackers[0].handle(VllmAdapter().decode(removal).events)
    assert trackers[1].resident() == {0: {Tier.hbm: [1, 2]}}


def test_f40_a_page_length_that_no_tokens_bear_out_is_not_believed() -> None:
    decoded = SglangAdapter().decode(
        batch(a_store(1), a_store(2, block_size=2**31 - 1), a_store(3))
    )
    assert [each.kind for each in decoded.rejected] == ["token_count"]
    assert len(decoded.events) == 3


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_f40_a_rank_that_cannot_be_read_costs_no_event(engine: str) -> None:
    removal = msgspec.msgpack.encode({"type": "BlockRemoved", "block_hashes": [9]})
    decoded = adapter_of(engine).decode(b"\x93\x01\x91" + removal + b"\xa2\xff\xfe")
    assert (decoded.events, decoded.rank) == ([RawRemoved((9,))], None)


@pytest.mark.parametrize("event", [{"token_ids": [111222, 7]}, [111222, 7]])
def test_f79_a_reason_quotes_no_token(event: Any) -> None:
    (rejected,) = VllmAdapter().decode(batch(event)).rejected
    assert "111222" not in rejected.reason


def test_f45_an_empty_adapter_is_none() -> None:
    (event,) = VllmAdapter().decode(batch(a_store(1, lora_name=""))).events
    assert isinstance(event, RawStored)
    assert event.lora is None


def test_f56_a_store_without_a_length_changes_no_group() -> None:
    adapter = VllmAdapter()
    placeholder = a_store(2, group_idx=0, token_ids=[], block_size=0)
    found = adapter.decode(batch(a_store(1, group_idx=0), placeholder, a_store(3, group_idx=0)))
    assert [e for e in found.events if isinstance(e, RawGroupSeen)] == [
        RawGroupSeen(0, "unknown", 0, 2)
    ]


def test_f56_a_group_may_change_when_no_more_are_told_apart() -> None:
    adapter = VllmAdapter()
    adapter.decode(batch(*[a_store(n, group_idx=n) for n in range(MAX_GROUPS)]))
    changed = a_store(1, group_idx=1, kv_cache_spec_kind="mamba")
    found = adapter.decode(batch(changed, a_store(9, group_idx=MAX_GROUPS))).events
    assert [e for e in found if isinstance(e, RawGroupSeen)] == [RawGroupSeen(1, "mamba", 0, 2)]
