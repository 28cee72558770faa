"""Bytes to batches and back: golden wire, what older and newer readers make of it, and garbage."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvatlas.events.codec import MAX_BATCH_BYTES, DecodedBatch, decode, decode_control, encode
from kvatlas.schemas.errors import BatchTooLarge, MalformedBatch, UnsupportedVersion
from kvatlas.schemas.fleet import NamespaceDescriptor, TierCapacity, WorkerInfo, WorkerRole
from kvatlas.schemas.hashing import HashAlgorithm
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import (
    MAX_MUTED_ROOTS,
    WIRE_VERSION,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ControlRecord,
    Digest,
    EventBatch,
    Inventory,
    KvEvent,
    NamespaceSeen,
    NamespacesOverBudget,
    Resync,
    SourceDegraded,
    WorkerDown,
    WorkerUp,
)
from kvatlas.schemas.routing import Plan
from testkit.builders import ROOT, a_batch, hashes, stored, up

GOLDEN = Path(__file__).parents[1] / "golden" / "wire.json"
VECTORS: dict[str, Any] = json.loads(GOLDEN.read_text())

INFO = WorkerInfo(
    base_url="http://10.0.0.7:8000",
    models=("llama", "alias"),
    descriptor=NamespaceDescriptor(16, HashAlgorithm.sha256_128),
    kv_fingerprint=hashes(7),
    tiers=(TierCapacity(Tier.hbm, 1000), TierCapacity(Tier.dram, 5000)),
    adapters={"sql": "llama"},
    groups=(0, 1),
    role=WorkerRole.decode,
    sidecar="10.0.0.7:9000",
    versions={"vllm": "0.32.0"},
    ends_at_reuse_points=True,
    p2p_address="10.0.0.7:5710",
    leasable_tiers=(Tier.dram,),
)
DRAFTING = WorkerInfo(
    "http://10.0.0.8:8000",
    ("llama",),
    NamespaceDescriptor(16, lookahead_tokens=1),
    num_unreusable_trailing_blocks=1,
)
EVENTS: dict[str, KvEvent] = {
    "stored": BlockStored(ROOT, hashes(1, 2), hashes(9), Tier.dram, b"\1\0\0\0" * 8),
    "stored below the root": BlockStored(ROOT, hashes(1)),
    "removed": BlockRemoved(ROOT, hashes(1, 2), Tier.ssd),
    "cleared": AllBlocksCleared(),
    "tier cleared": AllBlocksCleared(Tier.remote),
    "up": WorkerUp(INFO),
    "down": WorkerDown("shutdown"),
    "namespace": NamespaceSeen(ROOT, "llama", 16, HashAlgorithm.xxh3_128, "sql", salted=True),
    "up of an engine that drafts": WorkerUp(DRAFTING),
    "namespace with lookahead": NamespaceSeen(
        ROOT, "llama", 16, HashAlgorithm.xxh3_128, lookahead_tokens=1
    ),
    "resync": Resync(4, 9),
    "doubted": SourceDegraded("the engine told more than it keeps"),
    "muted": NamespacesOverBudget(hashes(3, 4), "more than 50000 blocks/s"),
    "muted no longer": NamespacesOverBudget(b""),
    "inventory": Inventory(12, 1, 2, Tier.other, ROOT, hashes(1, 2, 3)),
    "digest": Digest(Tier.hbm, 3, 2**64 - 1),
}
MESSAGES: dict[str, EventBatch | ControlRecord] = {
    **{
        name: EventBatch(WIRE_VERSION, "w1", 3, 1_700_000_000_000, 42, 5, (event,))
        for name, event in EVENTS.items()
    },
    "several events": EventBatch(WIRE_VERSION, "ä", 0, 1, 1, 0, tuple(EVENTS.values())),
    "control record": ControlRecord(WIRE_VERSION, "w1", 3, 7, "expired", "lease", "router-1", 5),
}


def readable(value: Any) -> Any:
    """Return untyped msgpack as JSON can say it: bytes are {"hex": ...}."""
    match value:
        case bytes():
            return {"hex": value.hex()}
        case list():
            return [readable(each) for each in value]
        case dict():
            return {key: readable(each) for key, each in value.items()}
    return value


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_wire(name: str) -> None:
    message, vector = MESSAGES[name], VECTORS["messages"][name]
    payload = bytes.fromhex(vector["payload"])
    assert encode(message) == payload
    assert readable(msgspec.msgpack.decode(payload)) == vector["content"]
    if isinstance(message, ControlRecord):
        assert decode_control(payload) == message
    else:
        assert decode(payload) == DecodedBatch(message)


def test_the_golden_file_is_fresh(request: pytest.FixtureRequest) -> None:
    """With --rewrite: fill in payloads and their content."""
    if request.config.getoption("--rewrite"):
        VECTORS["messages"] = {
            name: {
                "content": readable(msgspec.msgpack.decode(encode(message))),
                "payload": encode(message).hex(),
            }
            for name, message in MESSAGES.items()
        }
        GOLDEN.write_text(json.dumps(VECTORS, indent=1, ensure_ascii=False) + "\n")
    assert VECTORS["messages"].keys() == MESSAGES.keys()


# --- readers of other versions ------------------------------------------------------------------


def wire(*events: Any, v: int = WIRE_VERSION, more: tuple[Any, ...] = ()) -> bytes:
    return msgspec.msgpack.encode([v, "w1", 0, 1, 1, 0, events, *more])


def test_an_unknown_event_is_skipped_and_its_neighbours_are_kept() -> None:
    decoded = decode(wire(stored(1), ["teleported", 1, 2], stored(2)))
    assert decoded.batch.events == (stored(1), stored(2))
    (skipped,) = decoded.rejected
    assert (skipped.position, skipped.kind) == (1, "unknown")
    assert "teleported" in skipped.reason


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (["stored", ROOT, b"123", None, 0], "stored"),
        (["stored", ROOT[:15], hashes(1), None, 0], "stored"),
        (["stored"], "stored"),
        (["removed", ROOT, hashes(1), 9], "removed"),
        (["inventory", 1, 0, 1, 0, ROOT, b""], "inventory"),
        (["muted", ROOT[:15], "why"], "muted"),
        (["muted", bytes(16 * (MAX_MUTED_ROOTS + 1)), "why"], "muted"),
        (["digest", 0, "many", 0], "digest"),
        (["up", ["url", ["m"], [0]]], "up"),
        ({"tag": "stored"}, "malformed"),
        ([], "malformed"),
        (7, "malformed"),
        ([7], "malformed"),
        (None, "malformed"),
    ],
)
def test_a_bad_event_costs_itself_only(event: Any, kind: str) -> None:
    decoded = decode(wire(stored(1), event, stored(2)))
    assert decoded.batch.events == (stored(1), stored(2))
    assert [(each.position, each.kind) for each in decoded.rejected] == [(1, kind)]


def test_fields_that_a_newer_writer_added_are_ignored() -> None:
    event = msgspec.to_builtins(stored(1), builtin_types=(bytes,))
    newer = msgspec.to_builtins(up(), builtin_types=(bytes,))
    newer[1].append("new in info")
    decoded = decode(wire([*event, "new"], newer, v=WIRE_VERSION + 1, more=("new", 1)))
    assert decoded.batch.events == (stored(1), up())
    assert decoded.rejected == ()


def test_fields_with_defaults_may_be_missing() -> None:
    assert decode(wire(["stored", ROOT, hashes(1)])).batch.events == (stored(1),)


def test_a_newer_major_is_refused_by_name_even_when_nothing_else_is_known_of_it() -> None:
    for payload in (wire(v=200), msgspec.msgpack.encode([250, {"all": "new"}])):
        with pytest.raises(UnsupportedVersion) as refused:
            decode(payload)
        assert refused.value.supported == WIRE_VERSION
        with pytest.raises(UnsupportedVersion):
            decode_control(payload)


# --- garbage ------------------------------------------------------------------------------------

DEEP = b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode(a_batch())[:-1],
        b"\x93\x01\x02\x03",
        b"\x90",
        b"\xa3abc",
        DEEP,
        msgspec.msgpack.encode([WIRE_VERSION, "w", 0, 0, 1, 0, []]),
        msgspec.msgpack.encode([WIRE_VERSION, "w", 0, 1, 0, 0, []]),
        msgspec.msgpack.encode([WIRE_VERSION, "w", -1, 1, 1, 0, []]),
        msgspec.msgpack.encode([WIRE_VERSION, "w", 2**32, 1, 1, 0, []]),
        msgspec.msgpack.encode([WIRE_VERSION, "w", 0, 1, 1, 0, None]),
        msgspec.msgpack.encode([WIRE_VERSION, b"w", 0, 1, 1, 0, []]),
        msgspec.msgpack.encode({"v": WIRE_VERSION}),
    ],
    ids=lambda payload: payload[:12].hex(),
)
def test_an_envelope_that_is_none_is_named(payload: bytes) -> None:
    with pytest.raises(MalformedBatch):
        decode(payload)


def test_an_event_nested_without_end_costs_no_more_than_its_batch() -> None:
    with pytest.raises(MalformedBatch):
        decode(wire(stored(1), msgspec.Raw(DEEP)))


def test_an_event_nested_deeply_is_skipped() -> None:
    decoded = decode(wire(stored(1), msgspec.Raw(b"\x91" * 200 + b"\xc0")))
    assert decoded.batch.events == (stored(1),)
    assert [each.kind for each in decoded.rejected] == ["malformed"]


def test_a_payload_over_the_limit_is_not_looked_at() -> None:
    with pytest.raises(BatchTooLarge) as refused:
        decode(bytes(MAX_BATCH_BYTES + 1))
    assert refused.value.limit_bytes == MAX_BATCH_BYTES
    with pytest.raises(BatchTooLarge):
        decode_control(bytes(MAX_BATCH_BYTES + 1))


@pytest.mark.parametrize("kind", ["", "expired ", "resurrected"])
def test_a_record_of_an_unknown_kind_is_named(kind: str) -> None:
    record = ControlRecord(WIRE_VERSION, "w1", 0, 1, kind, "lease", "r", 0)
    with pytest.raises(MalformedBatch):
        decode_control(encode(record))


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(payload: bytes) -> None:
    for read in (decode, decode_control):
        with suppress(MalformedBatch):
            read(payload)


@given(st.sampled_from(sorted(MESSAGES)), st.integers(0, 500), st.binary(min_size=1, max_size=3))
@example("stored", 0, b"\x98")
def test_a_damaged_payload_raises_nothing_else(name: str, at: int, damage: bytes) -> None:
    payload = bytearray(encode(MESSAGES[name]))
    payload[at % len(payload) : at % len(payload) + len(damage)] = damage
    for read in (decode, decode_control):
        with suppress(MalformedBatch):
            read(bytes(payload))


@pytest.mark.parametrize(
    "info",
    [
        WorkerInfo("http://x", (), NamespaceDescriptor(16), adapters={"sql": "base"}),
        WorkerInfo("http://x", ("m" * 257,), NamespaceDescriptor(16)),
        WorkerInfo("http://x", ("m",), NamespaceDescriptor(16), adapters={"": "m"}),
        WorkerInfo("http://" + "x" * 2_048, ("m",), NamespaceDescriptor(16)),
        WorkerInfo("http://x", ("m",) * 257, NamespaceDescriptor(16)),
        WorkerInfo("http://x", ("m",), NamespaceDescriptor(16), sidecar="x" * 2_049),
        WorkerInfo("http://x", ("m",), NamespaceDescriptor(16), versions={"v": "x" * 257}),
        WorkerInfo("http://x", ("m",), NamespaceDescriptor(16), kv_fingerprint=bytes(65)),
        WorkerInfo(
            "http://x",
            ("m",),
            NamespaceDescriptor(16),
            adapters=dict.fromkeys(map(str, range(4_097)), "m"),
        ),
    ],
    ids=[
        "no model",
        "a name that fits into no subject",
        "an adapter without a name",
        "a long address",
        "many models",
        "a long subject",
        "a long version",
        "a long fingerprint",
        "many adapters",
    ],
)
def test_a_worker_that_nobody_could_ask_for_is_skipped(info: WorkerInfo) -> None:
    decoded = decode(encode(a_batch(WorkerUp(info), stored(1))))
    assert [skipped.kind for skipped in decoded.rejected] == ["up"]
    assert decoded.batch.events == (stored(1),)


@pytest.mark.parametrize("epoch", [0, -1, 2**44 + 1, 2**60])
def test_an_epoch_that_no_later_one_could_pass_is_refused(epoch: int) -> None:
    with pytest.raises(MalformedBatch, match="`int`"):
        decode(encode(a_batch(stored(1), epoch=epoch)))


@pytest.mark.parametrize("step", [{"rank": 2**70}, {"rank": -1}, {"worker": "w" * 257}])
def test_a_plan_from_outside_is_bounded(step: dict[str, Any]) -> None:
    good = {"worker": "w", "rank": 0, "first_block": 0, "num_blocks": 1}
    plan = {"block_tokens": 16, "reuse_blocks": 0, "compute_tokens": 1, "pulls": [good | step]}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
