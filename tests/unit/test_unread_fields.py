"""Fields of engines' events that nobody reads: never passed by in silence, in any format."""

import json
from typing import Any

import msgspec
import pytest

from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import KvEvent
from kvatlas.worker_hooks.engines.registry import adapter_of
from kvatlas.worker_hooks.raw_events import RawEngineBatch, RawRestarted, encode_raw
from kvatlas.worker_hooks.reporting.engine_state.degradation import MAX_FIELDS
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.reporting.outbox import Outbox
from kvatlas.worker_hooks.reporting.reporter import Reporter
from testkit.builders import up
from testkit.engine_words import DESCRIPTOR, MODEL
from testkit.trackers import doubts

TOKENS = list(range(DESCRIPTOR.block_tokens))
VLLM = {"block_hashes": [1], "parent_block_hash": None, "token_ids": TOKENS, "block_size": 4}
VLLM_ARRAY = [[1], None, TOKENS, 4, None, "GPU", None, None, 0, "full_attention", None, None, None]
PULLED: dict[str, Any] = {"event_id": 1, "window_size": 4}
TOKEN_OBJECTS = [{"token_id": n, "token_extra_id": 0} for n in TOKENS]
BLOCK: dict[str, Any] = {"block_hash": 1, "tokens": TOKEN_OBJECTS}
MOONCAKE = {"event_type": "stored", "seq_hashes": [1], "token_ids": TOKENS, "block_size": 4}
LMCACHE = {"instance_id": "i", "incarnation": 1, "seq": 1, "event_type": "store", "tier": "l1"}


def packed(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def a_store(**more: Any) -> dict[str, Any]:
    return {"type": "BlockStored", **VLLM, **more}


def pulled(block: dict[str, Any], data: Any = (), **more: Any) -> bytes:
    stored = {"type": "stored", "parent_hash": None, "blocks": [BLOCK | block], **dict(data)}
    return json.dumps({**PULLED, "data": stored, **more}).encode()


def token_with(**more: Any) -> dict[str, Any]:
    return {"tokens": [{**token, **more} for token in TOKEN_OBJECTS]}


def lmcache(entry: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({**LMCACHE, "entries": [{"key": 7, **entry}], **more}).encode()


#: engine, a batch with a field that nobody reads, its name as it is said
UNREAD = [
    ("vllm", packed(a_store(draft_window=[3])), "BlockStored.draft_window"),
    ("vllm", packed(["BlockStored", *VLLM_ARRAY, None, None, 7]), "BlockStored.#15"),
    ("vllm", packed(msgspec.msgpack.encode(a_store(kind=1))), "BlockStored.kind"),
    (
        "vllm",
        packed({"type": "BlockRemoved", "block_hashes": [1], "of": 2}),
        "BlockRemoved.of",
    ),
    ("vllm", packed(["BlockRemoved", [1], "GPU", 0, None, None, 2]), "BlockRemoved.#5"),
    ("vllm", packed({"type": "AllBlocksCleared", "scope": "lora"}), "AllBlocksCleared.scope"),
    ("sglang", packed(a_store(bigram=True)), "BlockStored.bigram"),
    ("sglang", packed(["BlockStored", *VLLM_ARRAY[:10], 7]), "BlockStored.#10"),
    ("trtllm", packed(a_store(mm_keys=[[]], draft_window=[3])), "BlockStored.draft_window"),
    ("trtllm", pulled({}, draft_window=1), "event.draft_window"),
    ("trtllm", pulled({}, {"draft_window": 1}), "stored.draft_window"),
    ("trtllm", pulled({"draft_window": 1}), "block.draft_window"),
    ("trtllm", pulled(token_with(position=3)), "token.position"),
    ("mooncake", json.dumps({**MOONCAKE, "draft_window": 1}).encode(), "stored.draft_window"),
    ("lmcache", lmcache({}, draft_window=1), "store.draft_window"),
    ("lmcache", lmcache({"draft_window": 1}), "entry.draft_window"),
    ("lmcache", lmcache({"key": {"hash": 7, "draft_window": 1}}), "entry.draft_window"),
]
#: without a value, or listed as harmless
QUIET = [
    ("vllm", packed(a_store(draft_window=None))),
    ("vllm", packed(["BlockStored", *VLLM_ARRAY, None, None, None])),
    ("vllm", packed(a_store(timestamp=1.5, session_id="s", ownership="o"))),
    ("sglang", packed(a_store(locality="LOCAL", session_id="s"))),
    ("trtllm", packed(a_store(mm_keys=[[]]))),
    ("trtllm", pulled({"priority": 35, "cache_level": 0, "mm_keys": []})),
    ("mooncake", json.dumps({**MOONCAKE, "timestamp": 1, "dp_rank": 0}).encode()),
    ("lmcache", lmcache({"kv_rank": 0, "size": 216})),
]


class Reporting:
    """A reporter, and what it has put into its outbox."""

    def __init__(self) -> None:
        self.tracker = EngineStateTracker(MODEL, DESCRIPTOR)
        self._outbox = Outbox(InstanceId("w1", 0), up(MODEL))
        self.reporter = Reporter(self.tracker, self._outbox)
        self.reporter.begin_epoch(1)
        self._now = 0.0

    def told(self, *events: Any) -> list[KvEvent]:
        self._now += 1.0
        self.reporter.report(map(encode_raw, events), writer_lists=False, now=self._now)
        said: list[KvEvent] = []
        while (batch := self._outbox.next_batch(self._now, 0)) is not None:
            said += batch.events
        return said


@pytest.mark.parametrize(("engine", "payload", "name"), UNREAD)
def test_a_field_that_nobody_reads_makes_its_instance_doubtful_by_name(
    engine: str, payload: bytes, name: str
) -> None:
    decoded = adapter_of(engine).decode(payload)
    assert [each.reason for each in decoded.rejected if each.kind == "unknown_field"] == [name]
    reporting = Reporting()
    (reason,) = doubts(reporting.told(RawEngineBatch(engine, payload)))
    assert name in reason
    assert reporting.reporter.counters()["rejected_unknown_field"] == 1
    # it is said again before digests, and once however often the field comes
    assert doubts(reporting.told(RawEngineBatch(engine, payload))) == []
    assert doubts(reporting.tracker.degradation_notices()) == [reason]


@pytest.mark.parametrize(("engine", "payload"), QUIET)
def test_a_field_without_a_value_or_of_no_weight_costs_nothing(engine: str, payload: bytes) -> None:
    reporting = Reporting()
    assert doubts(reporting.told(RawEngineBatch(engine, payload))) == []
    assert reporting.tracker.degraded_reason == ""
    assert "rejected_unknown_field" not in reporting.reporter.counters()


def test_a_field_that_is_not_the_one_that_should_be_there_is_unread_too() -> None:
    payload = packed(["BlockStored", *VLLM_ARRAY, None, "text"])
    reporting = Reporting()
    (reason,) = doubts(reporting.told(RawEngineBatch("vllm", payload)))
    assert "BlockStored.lookahead_token_ids" in reason


def test_the_doubt_lasts_as_long_as_the_engine() -> None:
    reporting = Reporting()
    reporting.told(RawEngineBatch("vllm", packed(a_store(draft_window=[3]))))
    reporting.told(RawEngineBatch("vllm", packed(a_store())))
    assert "BlockStored.draft_window" in reporting.tracker.degraded_reason
    reporting.told(RawRestarted("another one"))
    assert reporting.tracker.degraded_reason == ""


def test_names_of_fields_are_few_and_short() -> None:
    reporting = Reporting()
    fields = {f"{number:03}" + "x" * 500: 1 for number in range(3 * MAX_FIELDS)}
    reporting.told(RawEngineBatch("vllm", packed(a_store(**fields))))
    assert reporting.tracker.degraded_reason.count("BlockStored.") == MAX_FIELDS
    assert "and more" in reporting.tracker.degraded_reason
    assert len(reporting.tracker.degraded_reason) < 1_000
