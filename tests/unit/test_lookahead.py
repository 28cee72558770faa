"""Names that cover tokens behind a block, from an engine's events to the log (ADR-0024).

`golden/vllm_0_33_batches.json` was encoded by the classes of vLLM 0.33.0's own wheel.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.schemas.digest import split_hashes
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, Extra, pack_tokens
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import NamespaceSeen
from kvatlas.worker_hooks.bridge.observed import FirstBlocks, PayloadReader
from kvatlas.worker_hooks.engines.vllm import FIELDS_OF, VllmAdapter
from kvatlas.worker_hooks.raw_events import (
    RawStored,
    RawStoredAhead,
    decode_raw,
    encode_raw,
)
from kvatlas.worker_hooks.recordings.captures import Frame
from kvatlas.worker_hooks.recordings.decoding import DecodeOptions, Decoding
from kvatlas.worker_hooks.recordings.redaction import Redactor
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from testkit.trackers import doubts, held

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm_0_33_batches.json"
CASES: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["cases"]
BY_NAME = {case["name"]: case for case in CASES}
SUCCESSORS = BY_NAME["equal tokens, different successors"]

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])


def descriptor_of(case: dict[str, Any]) -> NamespaceDescriptor:
    ahead = case["lookahead_tokens"]
    return NamespaceDescriptor(case["block_tokens"], lookahead_tokens=ahead)


def payloads_of(case: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(payload) for payload in case["payloads"]]


def names_of(case: dict[str, Any]) -> set[bytes]:
    """Return the names of all blocks of the case's prompts, as a router makes them."""
    namespace = descriptor_of(case).namespace("m", None, case.get("cache_salt"))
    extras = [Extra(**extra) for extra in case.get("extras", [])]
    chains = [BlockHasher(namespace).chain(prompt, extras) for prompt in case["prompts"]]
    return {block for chain in chains for block in split_hashes(chain)}


def told(tracker: EngineStateTracker, *payloads: bytes) -> list[Any]:
    adapter = VllmAdapter()
    return [event for each in payloads for event in tracker.handle(adapter.decode(each).events)]


def as_arrays(payload: bytes) -> bytes:
    """Return a batch of maps with its events as arrays in declared order."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    arrays = [
        [event["type"], *(event.get(name) for name in FIELDS_OF[event["type"]])] for event in events
    ]
    return msgspec.msgpack.encode([ts, arrays, rank])


@cases
@pytest.mark.parametrize("form", [bytes, as_arrays], ids=["maps", "arrays"])
def test_blocks_have_the_names_that_a_router_gives_them(case: dict[str, Any], form: Any) -> None:
    tracker = EngineStateTracker("m", descriptor_of(case))
    payloads = [form(payload) for payload in payloads_of(case)]
    for payload in payloads:
        assert VllmAdapter().decode(payload).rejected == []
    told(tracker, *payloads)
    assert held(tracker) == names_of(case)
    assert tracker.degraded_reason == ""
    hashes = tracker.resident()[0][Tier.hbm]
    found = [each.hex() if isinstance(each, bytes) else each for each in hashes]
    assert sorted(found, key=str) == sorted(case["engine_hashes"], key=str)


def test_equal_tokens_with_other_successors_are_two_blocks_and_the_right_one_goes() -> None:
    tracker = EngineStateTracker("m", descriptor_of(SUCCESSORS))
    told(tracker, *payloads_of(SUCCESSORS))
    one, other = SUCCESSORS["prompts"]
    assert one[:-1] == other[:-1]
    assert tracker.residency.digest(Tier.hbm).count == 3
    told(tracker, *payloads_of(BY_NAME["the one of two with equal tokens is removed"])[2:])
    assert held(tracker) == names_of(SUCCESSORS | {"prompts": [other]})


def test_the_lookahead_is_in_the_root_and_in_what_the_log_says_of_it() -> None:
    tracker = EngineStateTracker("m", descriptor_of(SUCCESSORS))
    (seen,) = [e for e in told(tracker, *payloads_of(SUCCESSORS)) if isinstance(e, NamespaceSeen)]
    assert seen.lookahead_tokens == 1
    assert seen.root == NamespaceDescriptor(4, lookahead_tokens=1).namespace("m", None, None).root()
    assert seen.root != NamespaceDescriptor(4).namespace("m", None, None).root()


@pytest.mark.parametrize(
    ("name", "configured", "found"),
    [
        ("equal tokens, different successors", 0, 1),
        ("a chain of draft modules looks three tokens ahead", 1, 3),
        ("without lookahead hashes", 1, 0),
    ],
)
def test_another_lookahead_than_configured_is_said_with_the_flag_and_names_nothing(
    name: str, configured: int, found: int
) -> None:
    tracker = EngineStateTracker("m", NamespaceDescriptor(4, lookahead_tokens=configured))
    (reason,) = doubts(told(tracker, payloads_of(BY_NAME[name])[0]))
    assert f"cover {found} tokens behind a block, configured are {configured}" in reason
    assert f"--lookahead-tokens {found}" in reason
    assert held(tracker) == set()


@pytest.mark.parametrize(
    "lists", [[[9]], [[9], []], [[9], [8, 7]], [[9], ["x"]], [[9], 8], [[9], [2**32]]]
)
def test_a_window_that_is_not_full_names_nothing_and_is_held(lists: Any) -> None:
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "token_ids": [1, 2, 3, 4],
    }
    event |= {"block_size": 2, "lookahead_token_ids": lists}
    payload = msgspec.msgpack.encode([0.0, [event], 0])
    (rejected,) = VllmAdapter().decode(payload).rejected
    assert rejected.kind in ("lookahead", "malformed", "token_text")
    tracker = EngineStateTracker("m", NamespaceDescriptor(2, lookahead_tokens=1))
    told(tracker, payload)
    assert (held(tracker), tracker.num_blocks, tracker.degraded_reason) == (set(), 2, "")


def test_embeddings_under_a_lookahead_name_nothing() -> None:
    """The engine's digest is of the whole window, of which no prompt says the parts."""
    event: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": [1],
        "token_ids": [1, 2],
        "block_size": 2,
    }
    event |= {"lookahead_token_ids": [[3]], "extra_keys": [[b"\1\2"]]}
    decoded = VllmAdapter().decode(msgspec.msgpack.encode([0.0, [event], 0]))
    assert [each.kind for each in decoded.rejected] == ["unknown_extra"]
    assert [each.tokens for each in decoded.events if isinstance(each, RawStored)] == [b""]


def test_a_store_in_the_ring_has_its_lookahead_and_one_without_is_as_before() -> None:
    plain = RawStored((1,), None, pack_tokens([1, 2]))
    ahead = RawStoredAhead((1,), None, pack_tokens([1, 2]), ahead=pack_tokens([3]))
    assert [decode_raw(encode_raw(each)) for each in (plain, ahead)] == [plain, ahead]
    assert plain.lookahead == b""
    assert len(msgspec.msgpack.decode(encode_raw(plain))) == 10


def test_what_lies_behind_a_first_block_tells_no_engine_from_another() -> None:
    """Two hashes of equal first blocks are no sign that the engine began anew."""
    event = {"type": "BlockStored", "token_ids": [1, 2, 3, 4], "block_size": 4}
    reader, firsts = PayloadReader(VllmAdapter()), FirstBlocks()
    for engine_hash, successor in ((1, 5), (2, 6)):
        more = {"block_hashes": [engine_hash], "lookahead_token_ids": [[successor]]}
        observed = reader(msgspec.msgpack.encode([0.0, [event | more], 0]))
        assert (observed.block_tokens, observed.lookahead_tokens) == (4, 1)
        assert not firsts.contradict(observed)
        firsts.observe(observed)


@cases
def test_a_redacted_recording_has_no_token_and_comes_to_as_many_blocks(
    case: dict[str, Any],
) -> None:
    redactor = Redactor(b"key")
    redacted = [redactor.payload(payload) for payload in payloads_of(case)]
    for payload in redacted:
        for event in msgspec.msgpack.decode(payload)[1]:
            lists = [event.get("token_ids", []), *(event.get("lookahead_token_ids") or [])]
            said = {token for each in lists for token in each}
            assert not said & {token for prompt in case["prompts"] for token in prompt}
    tracker = EngineStateTracker("m", descriptor_of(case))
    told(tracker, *redacted)
    assert tracker.residency.digest(Tier.hbm).count == len(names_of(case))


def test_a_redacted_array_has_no_token_either() -> None:
    payload = Redactor(b"key").payload(as_arrays(payloads_of(SUCCESSORS)[0]))
    (event,) = msgspec.msgpack.decode(payload)[1]
    assert [len(each) for each in event[-1]] == [1, 1]
    assert not {token for each in event[-1] for token in each} & set(SUCCESSORS["prompts"][0])


@cases
def test_a_recording_is_decoded_with_the_lookahead_that_it_shows(case: dict[str, Any]) -> None:
    frames = [Frame(payload, "kv@w@m", number) for number, payload in enumerate(payloads_of(case))]
    decoding = Decoding(frames, DecodeOptions(engine="vllm"))
    first, *_ = decoding.story()
    ahead = case["lookahead_tokens"]
    assert first == "w: model m, blocks of 4 tokens" + (f" and {ahead} behind them" * bool(ahead))
    assert decoding.counts.rejected == {}
