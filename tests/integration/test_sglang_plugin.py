"""SGLang's plugin against a stand-in of its registry: no SGLang runs here, sidecar and log do."""

import json
import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import events_stream
from kvatlas.schemas.digest import split_hashes
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import WorkerUp
from kvatlas.worker_hooks.sglang_plugin import SglangPublisher, register, sidecar_options
from testkit.sglang_stub import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    EventPublisherFactory,
    KVEventBatch,
    ServerArgs,
    sglang_installed,
)
from testkit.sidecars import folded
from testkit.waiting import until

W = InstanceId("w", 1)
#: pages of four tokens; SGLang's hashes are signed
TOKENS = list(range(12))
HASHES = [-(2**63), -5, 7]


@pytest.fixture
def sglang() -> Iterator[ServerArgs]:
    with sglang_installed() as arguments:
        register()
        yield arguments


def a_config(endpoint: str, **more: object) -> str:
    return json.dumps({"publisher": "nats", "endpoint": endpoint, **more})


def stored(salt: str | None = None, first: int = 0) -> BlockStored:
    hashes = [first + n for n in HASHES] if first else HASHES
    return BlockStored(hashes, None, TOKENS, 4, None, "GPU", cache_salt=salt)


def chain(salt: str | None = None) -> set[bytes]:
    return set(
        split_hashes(BlockHasher(NamespaceDescriptor(4).namespace("m", None, salt)).chain(TOKENS))
    )


async def test_what_sglang_publishes_is_what_the_log_holds(
    sglang: ServerArgs, tmp_path: Path
) -> None:
    async with embedded_server(tmp_path / "nats") as server, NatsBus(server.url) as bus:
        await bus.declare_stream(events_stream())
        config = a_config(f"{server.url}?worker=w", reconciliation_enabled=False)
        publisher = EventPublisherFactory.create(config, attn_dp_rank=1)
        try:
            async with folded(bus, W) as folds:
                held = folds[W].held
                publisher.publish(KVEventBatch(0.0, [stored()]))
                await until(lambda: folds[W].held[Tier.hbm] == chain())
                [up] = [event for event in folds[W].events if isinstance(event, WorkerUp)]
                assert (up.info.models, up.info.base_url) == (("m",), "http://127.0.0.1:30000")
                assert up.info.versions["sglang"] == "0.5.23"

                batch = KVEventBatch(0.0, [BlockRemoved([7], "GPU"), stored("t", 100)])
                publisher.publish(batch)
                assert batch.attn_dp_rank == 1
                last = BlockHasher(NamespaceDescriptor(4).namespace("m", None, None))
                kept = set(split_hashes(last.chain(TOKENS[:8]))) | chain("t")
                await until(lambda: folds[W].held[Tier.hbm] == kept)

                publisher.publish(KVEventBatch(0.0, [AllBlocksCleared()]))
                await until(lambda: not folds[W].held[Tier.hbm])
                assert held.keys() == set(Tier)
                publisher.shutdown()
                await until(lambda: folds[W].down != "")
        finally:
            publisher.shutdown()


def test_registering_again_is_no_error(sglang: ServerArgs) -> None:
    register()
    assert list(EventPublisherFactory._registry) == ["nats"]


def test_the_entry_point_is_where_sglang_looks() -> None:
    [found] = entry_points(group="sglang.srt.plugins", name="kvatlas")
    assert found.load() is register


@pytest.mark.parametrize(
    ("endpoint", "named"),
    [
        ("tcp://*:5557", "endpoint"),
        ("nats://h:1?wroker=w", "wroker"),
        ("nats://h:1?block_tokens=0", "block_tokens"),
        ("nats://h:1?kv_fingerprint=abc", "kv_fingerprint"),
        ("nats://h:1?p2p_address=h", "p2p_address"),
    ],
)
def test_f53_a_wrong_endpoint_is_named_and_the_engine_runs_on(
    sglang: ServerArgs, caplog: pytest.LogCaptureFixture, endpoint: str, named: str
) -> None:
    with caplog.at_level(logging.ERROR):
        publisher = EventPublisherFactory.create(a_config(endpoint))
    assert named in caplog.text
    publisher.publish(KVEventBatch(0.0, [stored()]))
    assert isinstance(publisher, SglangPublisher)
    assert publisher.num_failed == 1
    assert isinstance(publisher, EventPublisher)
    assert publisher.describe_local_source(4) is None
    publisher.shutdown()


def test_without_shared_memory_the_engine_runs_on(
    sglang: ServerArgs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("kvatlas.common.runtime_folder.shared_memory", lambda: tmp_path / "shm")
    with caplog.at_level(logging.ERROR):
        publisher = EventPublisherFactory.create(a_config("nats://h:1?worker=w"))
    assert f"kvatlas: no KV events leave this engine: folder {tmp_path}/shm: no" in caplog.text
    publisher.publish(KVEventBatch(0.0, [stored()]))
    assert isinstance(publisher, SglangPublisher)
    assert publisher.num_failed == 1
    assert isinstance(publisher, EventPublisher)
    publisher.shutdown()


def test_a_batch_that_cannot_be_encoded_is_counted_and_logged_once(
    sglang: ServerArgs, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = EventPublisherFactory.create(a_config("nats://127.0.0.1:1"))
    assert isinstance(publisher, SglangPublisher)
    assert isinstance(publisher, EventPublisher)
    try:
        for _ in range(2):
            publisher.publish(KVEventBatch(0.0, [object()]))  # type: ignore[list-item]
        publisher.publish(None)  # type: ignore[arg-type]
    finally:
        publisher.shutdown()
    assert publisher.num_failed == 3
    assert caplog.text.count("cannot be encoded") == 1


def test_the_endpoint_says_more_than_the_engine(sglang: ServerArgs) -> None:
    said = "nats://h:1?worker=w&model=x&block_tokens=64&base_url=http://e&p2p_address=h:5710&adapters=a,b"
    options = sidecar_options(said, 2)
    assert (options.nats_url, options.worker, options.rank) == ("nats://h:1", "w", 2)
    assert (options.model, options.base_url, options.p2p_address) == ("x", "http://e", "h:5710")
    assert options.adapters == {"a": "x", "b": "x"}
    assert options.descriptor == NamespaceDescriptor(64)


def test_what_nobody_tells_is_asked_for_by_name() -> None:
    with pytest.raises(InvalidSetting, match="model"):
        sidecar_options("nats://h:1", 0)


def test_an_sglang_without_the_registry_runs_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        register()
    assert "no registry" in caplog.text
