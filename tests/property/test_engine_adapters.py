"""Whatever bytes an engine sends: a typed error for a batch, a reason for an event, no more."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.schemas.errors import MalformedBatch
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.worker_hooks.engines.registry import ADAPTERS, adapter_of
from kvatlas.worker_hooks.raw_events import RawRemoved, encode_raw
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker

#: a removal that each engine's adapter has to find among anything else
GOOD: dict[str, Any] = {
    "vllm": {"type": "BlockRemoved", "block_hashes": [4711], "medium": "GPU"},
    "sglang": {"type": "BlockRemoved", "block_hashes": [4711], "medium": "GPU"},
    "trtllm": {"type": "BlockRemoved", "block_hashes": [4711], "medium": "GPU"},
    "mooncake": {"event_type": "removed", "seq_hashes": [4711], "medium": "gpu"},
}
KEYS = [
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
    "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    "cache_salt", "locality", "event_type", "seq_hashes", "tenant_id", "dp_rank", "data", "blocks",
    "event_id", "entries", "tier", "seq", "instance_id", "incarnation", "additional_salt",
]  # fmt: skip
TAGS = ["BlockStored", "BlockRemoved", "AllBlocksCleared", "stored", "removed", "cleared", "store"]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 8),
    st.floats(allow_nan=True),
    st.text(max_size=8),
    st.binary(max_size=40),
    st.sampled_from(TAGS),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=4)), inner, max_size=6),
    ),
    max_leaves=8,
)
tagged = st.one_of(
    st.builds(
        lambda tag, rest: {"type": tag, "event_type": tag, **rest},
        st.sampled_from(TAGS),
        st.dictionaries(st.sampled_from(KEYS[1:]), values, max_size=8),
    ),
    st.builds(lambda tag, rest: [tag, *rest], st.sampled_from(TAGS), st.lists(values, max_size=14)),
)
events = st.one_of(values, tagged, tagged.map(msgspec.msgpack.encode))


@pytest.mark.parametrize("engine", ADAPTERS)
@given(payload=st.one_of(st.binary(max_size=200), values.map(msgspec.msgpack.encode)))
def test_any_bytes_are_a_batch_or_a_typed_error(engine: str, payload: bytes) -> None:
    try:
        decoded = adapter_of(engine, 2).decode(payload)
    except MalformedBatch:
        return
    assert all(each.kind and each.reason for each in decoded.rejected)


@pytest.mark.parametrize("engine", GOOD)
@given(before=st.lists(events, max_size=3), after=st.lists(events, max_size=3))
def test_f40_no_neighbour_is_lost(engine: str, before: list[Any], after: list[Any]) -> None:
    batch = msgspec.msgpack.encode([1.5, [*before, GOOD[engine], *after], 0])
    decoded = adapter_of(engine, 2).decode(batch)
    assert any(
        isinstance(event, RawRemoved) and 4711 in event.engine_hashes for event in decoded.events
    )


@pytest.mark.parametrize("engine", ADAPTERS)
@given(told=st.lists(events, max_size=6))
def test_what_comes_out_can_be_held(engine: str, told: list[Any]) -> None:
    try:
        decoded = adapter_of(engine, 2).decode(msgspec.msgpack.encode([1.5, told, 0]))
    except MalformedBatch:
        return
    tracker = EngineStateTracker("m", NamespaceDescriptor(2), counts_copies=True)
    tracker.handle(decoded.events)
    for event in decoded.events:
        assert encode_raw(event)
    tracker.digests()
    list(tracker.inventory(0))
