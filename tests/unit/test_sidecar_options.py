"""What a sidecar says of its worker."""

from typing import Any

import msgspec
import pytest

from kvatlas.reference.worker import WorkerOptions
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.settings import ReportingSettings, Settings, SidecarSettings
from kvatlas.worker_hooks.bridge.options import BridgeOptions
from kvatlas.worker_hooks.raw_events import RawRestarted
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.sidecar.options import SidecarOptions, shared_options
from testkit.trackers import doubts

POOL: dict[str, Any] = {"num_slots": 4, "block_bytes": 64, "pool_path": "/p"}
EVERY = tuple(Tier)


@pytest.mark.parametrize(
    ("more", "leasable_tiers"),
    [
        ({}, ()),
        (POOL, EVERY),
        (POOL | {"tells_pool": True}, (Tier.dram,)),
        (POOL | {"tells_pool": True, "transport": "none"}, ()),
        ({"p2p_address": "10.0.0.1:5710"}, EVERY),
    ],
    ids=[
        "no pool",
        "its memory is the pool",
        "a pool of copies",
        "no transport",
        "a tier of its own",
    ],
)
def test_what_peers_can_have(more: dict[str, Any], leasable_tiers: tuple[Tier, ...]) -> None:
    fingerprint = b"f" * 16
    options = SidecarOptions(
        nats_url="nats://h:4222",
        worker="w",
        model="m",
        descriptor=NamespaceDescriptor(16),
        kv_fingerprint=fingerprint,
        ring_path="/r",
        socket_path="/s",
        **more,
    )
    info = options.worker_info()
    assert info.leasable_tiers == leasable_tiers
    # who lends nothing pulls nothing: nobody's KV fits
    assert info.kv_fingerprint == (fingerprint if leasable_tiers else b"")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"worker": ""}, "worker .* expected 1 to 256 characters, found 0"),
        ({"worker": "w" * 257}, "worker .* found 257"),
        ({"worker": "\udcff"}, "worker .* expected Unicode, found other bytes"),
        ({"model": ""}, "model .* found 0"),
        ({"aliases": ("m", "")}, "model .* found 0"),
        ({"adapters": {"": "m"}}, "adapters .* found 0"),
    ],
)
def test_names_that_the_wire_cannot_carry_start_no_sidecar(more: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {"worker": "w" * 256, "model": "m"}
    options = SidecarOptions(
        nats_url="nats://h:4222",
        descriptor=NamespaceDescriptor(16),
        ring_path="/r",
        socket_path="/s",
        **given,
    )
    options.validate()
    with pytest.raises(InvalidSetting, match=says):
        msgspec.structs.replace(options, **more).validate()


def test_what_all_sidecars_are_told_alike_stands_once() -> None:
    others = {"drain_seconds", "replicas", "fleet_key", "wire_version", "nixl", "metrics_address"}
    shared = {*ReportingSettings.__struct_fields__, *others}
    assert shared_options(Settings()).keys() == shared
    assert shared <= set(SidecarOptions.__struct_fields__)
    for says_anew in (SidecarSettings, SidecarOptions, BridgeOptions, WorkerOptions):
        own = vars(says_anew)["__annotations__"].keys()
        assert not own & ReportingSettings.__struct_fields__


@pytest.mark.parametrize(
    ("dropped", "wire_version", "is_doubtful"),
    [(0, 100, False), (1, 102, False), (1, 101, True), (2, 100, True)],
)
def test_readers_that_do_not_know_of_dropped_blocks_call_no_such_worker_exact(
    dropped: int, wire_version: int, is_doubtful: bool
) -> None:
    options = SidecarOptions(
        nats_url="nats://h:4222",
        worker="w",
        model="m",
        descriptor=NamespaceDescriptor(4),
        num_unreusable_trailing_blocks=dropped,
        wire_version=wire_version,
        ring_path="/r",
        socket_path="/s",
    )
    assert options.worker_info().num_unreusable_trailing_blocks == dropped
    tracker = EngineStateTracker("m", options.descriptor, standing_doubt=options.standing_doubt)
    reasons = doubts(tracker.degradation_notices())
    assert bool(reasons) == is_doubtful
    assert all(f"last {dropped} matched blocks" in reason for reason in reasons)
    tracker.handle([RawRestarted("again")])
    assert doubts(tracker.degradation_notices()) == reasons
