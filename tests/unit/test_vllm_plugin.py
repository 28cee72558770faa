"""The parts of vLLM's plugin that need no vLLM, with events of the same fields as its own."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.vllm import VllmAdapter
from kvatlas.worker_hooks.raw_events import RawEngineBatch, RawHeld, decode_raw
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingReader, RingWriter
from kvatlas.worker_hooks.vllm_plugin.facts import (
    dropped_blocks,
    full_groups,
    hash_lookahead,
    weights_digest,
    why_no_exchange,
)
from kvatlas.worker_hooks.vllm_plugin.publisher import AUDIT_SECONDS, EngineReports
from kvatlas.worker_hooks.vllm_plugin.told_blocks import PublishedBlocks

BLOCK_TOKENS = 2


class BlockStored(Struct, tag=True, omit_defaults=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class BlockRemoved(Struct, tag=True, omit_defaults=True):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Struct, tag=True):
    pass


def hash_of(name: int) -> bytes:
    return name.to_bytes(32, "big")


def stored(*names: int, parent: int | None = None) -> BlockStored:
    tokens = [token for name in names for token in (name, name + 1)]
    above = None if parent is None else hash_of(parent)
    hashes = [hash_of(name) for name in names]
    return BlockStored(hashes, above, tokens, BLOCK_TOKENS, None, "GPU", None)


def removed(*names: int) -> BlockRemoved:
    return BlockRemoved([hash_of(name) for name in names], "GPU")


class Engine:
    """Reports into a ring, and an edge that reads it."""

    def __init__(self, ring: Path) -> None:
        self.hook = WorkerHook(RingWriter.create(ring, lists=True))
        self.reader = RingReader(ring)
        self.tracker = EngineStateTracker("m", NamespaceDescriptor(BLOCK_TOKENS))
        self.cached: set[bytes] = set()
        self.now = 0.0
        self.reports = EngineReports(
            self.hook,
            3,
            lambda engine_hash, _group: engine_hash in self.cached,
            lambda: len(self.cached),
            clock=lambda: self.now,
        )

    def step(self, *events: Any) -> None:
        self.reports.batch(1.5, list(events))

    def heard(self) -> list[Any]:
        """Return what the ring has, engine batches as the adapter reads them."""
        said: list[Any] = []
        for record in self.reader.read():
            assert isinstance(record, bytes)
            event = decode_raw(record)
            if isinstance(event, RawEngineBatch):
                said += VllmAdapter().decode(event.payload).events
            else:
                said.append(event)
        return said

    def held(self) -> set[Any]:
        self.tracker.handle(self.heard())
        resident = self.tracker.resident()
        return set(resident.get(0, {}).get(Tier.hbm, []))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path / "ring")
    yield made
    made.reports.close()
    made.reader.close()


def test_a_step_reaches_the_ring_in_the_engines_own_format(engine: Engine) -> None:
    engine.step(stored(1, 2), removed(2))
    (record,) = engine.reader.read()
    assert isinstance(record, bytes)
    batch = decode_raw(record)
    assert isinstance(batch, RawEngineBatch)
    assert VllmAdapter().decode(batch.payload).rank == 3
    assert [event["type"] for event in msgspec.msgpack.decode(batch.payload)[1]] == [
        "BlockStored",
        "BlockRemoved",
    ]


def test_f20_a_removal_that_leaves_a_copy_behind_is_not_told(engine: Engine) -> None:
    engine.cached = {hash_of(1)}
    engine.step(stored(1), stored(1))
    engine.step(removed(1))
    assert engine.held() == {hash_of(1)}
    engine.cached = set()
    engine.step(removed(1))
    assert engine.held() == set()


def test_f15_a_clear_is_told_and_forgotten(engine: Engine) -> None:
    engine.step(stored(1, 2))
    engine.step(AllBlocksCleared())
    assert engine.held() == set()


def test_a_listing_tells_what_is_held_and_no_more(engine: Engine) -> None:
    engine.step(stored(1, 2, 3), stored(4, parent=3), removed(3), stored(9), removed(9))
    engine.heard()
    engine.reader.want_listing()
    engine.hook.pump()
    assert engine.held() == {hash_of(1), hash_of(2), hash_of(4)}


def test_now_and_then_the_engines_own_count_is_told(engine: Engine) -> None:
    engine.cached = {hash_of(1), hash_of(2)}
    engine.step(stored(1))
    assert not any(isinstance(event, RawHeld) for event in engine.heard())
    engine.now = AUDIT_SECONDS
    engine.step(stored(2))
    assert RawHeld(2) in engine.heard()


def test_what_cannot_be_told_is_counted_and_never_raised(engine: Engine) -> None:
    engine.step(object(), stored(1))
    assert engine.reports.num_failed == 1
    engine.step(stored(2))
    assert hash_of(2) in engine.held()


def test_told_blocks_share_a_payload_and_lose_it_with_the_last() -> None:
    told = PublishedBlocks()
    told.stored((0, "GPU"), [b"a", b"b"], msgspec.msgpack.encode("store"))
    told.removed((0, "GPU"), [b"a"])
    (batch,) = told.batches()
    assert msgspec.msgpack.decode(batch)[1][1]["block_hashes"] == [b"a"]
    told.removed((0, "GPU"), [b"b", b"unknown"])
    assert list(told.batches()) == []


class SlidingWindowSpec:
    pass


class FullAttentionSpec:
    pass


def kv_cache(*specs: object) -> Any:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def config(tensor: int = 1, pipeline: int = 1) -> Any:
    parallel = SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    return SimpleNamespace(parallel_config=parallel)


def test_only_groups_that_need_every_block_count() -> None:
    assert full_groups(kv_cache(SlidingWindowSpec(), FullAttentionSpec())) == (1,)
    assert full_groups(kv_cache(FullAttentionSpec())) == (0,)


def test_blocks_travel_where_an_engine_has_them_in_one_piece() -> None:
    plain = kv_cache(FullAttentionSpec())
    assert why_no_exchange(config(), plain) == ""
    assert "spread" in why_no_exchange(config(tensor=2), plain)
    assert "hybrid" in why_no_exchange(config(), kv_cache(SlidingWindowSpec(), FullAttentionSpec()))


def test_weights_that_replace_others_under_one_path_have_another_digest(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"a" * 200_000)
    before = weights_digest(str(tmp_path))
    weights.write_bytes(b"a" * 199_999 + b"b")
    assert weights_digest(str(tmp_path)) != before
    assert weights_digest("org/name-on-a-hub") == ""


def drafting(eagle: bool = True, drops: bool | None = None, **engine: Any) -> Any:
    """Return the part of vLLM's configuration that says what a drafter needs."""
    speculative = SimpleNamespace(use_eagle=lambda: eagle)
    if drops is not None:
        speculative.use_eagle_block_drop = lambda: drops
    return SimpleNamespace(speculative_config=speculative, **engine)


@pytest.mark.parametrize(
    ("config", "lookahead", "dropped"),
    [
        (SimpleNamespace(), 0, 0),
        (SimpleNamespace(speculative_config=None), 0, 0),
        # before 0.33, which always drops
        (drafting(), 0, 1),
        (drafting(eagle=False), 0, 0),
        # 0.33: lookahead hashes, else the block is dropped, unless told not to
        (drafting(drops=True, num_hash_lookahead_tokens=1), 1, 0),
        (drafting(drops=True, num_hash_lookahead_tokens=3), 3, 0),
        (drafting(drops=True, num_hash_lookahead_tokens=0), 0, 1),
        (drafting(drops=False, num_hash_lookahead_tokens=0), 0, 0),
    ],
)
def test_what_the_engine_says_of_its_drafter(config: Any, lookahead: int, dropped: int) -> None:
    assert (hash_lookahead(config), dropped_blocks(config)) == (lookahead, dropped)
