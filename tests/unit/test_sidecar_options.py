"""What a sidecar says of its worker."""

from typing import Any

import pytest

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.sidecar_options import SidecarOptions

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
