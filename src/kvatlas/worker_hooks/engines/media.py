"""Which tier an engine's word for a place of KV stands for."""

from kvatlas.schemas.ids import Tier

#: lower case; what is not here is a tier of its own that earns nothing, never `hbm`
_TIERS = {
    "gpu": Tier.hbm,
    "hbm": Tier.hbm,
    "device": Tier.hbm,
    "cpu": Tier.dram,
    "cpu_pinned": Tier.dram,
    "cpu_tier1": Tier.dram,
    "cpu_tier2": Tier.dram,
    "dram": Tier.dram,
    "host": Tier.dram,
    "host_pinned": Tier.dram,
    "disk": Tier.ssd,
    "nvme": Tier.ssd,
    "ssd": Tier.ssd,
    "storage": Tier.ssd,
    "external": Tier.remote,
    "network": Tier.remote,
    "remote": Tier.remote,
    "shared": Tier.remote,
}


def tier_of(medium: str | None, locality: str | None = None) -> Tier | None:
    """Return the tier of a medium; None where nobody knows it. No medium is the engine's own.

    What is remote to its publisher is `remote`, unless it is on a device, which is never shared.
    """
    if not medium:
        return Tier.hbm
    tier = _TIERS.get(medium.lower())
    is_remote = locality is not None and locality.lower() == "remote"
    if tier is None or tier is Tier.hbm or not is_remote:
        return tier
    return Tier.remote
