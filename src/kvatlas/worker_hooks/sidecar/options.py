"""What a sidecar is told when it starts."""

import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from kvatlas import __version__
from kvatlas.events.nats.credentials import login_of
from kvatlas.events.subjects import lease_subject
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import (
    NamespaceDescriptor,
    TierCapacity,
    UnreusableBlocks,
    WorkerInfo,
    WorkerRole,
    host_and_port,
)
from kvatlas.schemas.ids import MAX_NAME_CHARACTERS, InstanceId, Name, Rank, Tier
from kvatlas.schemas.kv_events import LOOKAHEAD_WIRE_VERSION, WIRE_VERSION
from kvatlas.schemas.settings import (
    NixlSettings,
    Replicas,
    ReportingSettings,
    Settings,
    SidecarSettings,
    WireVersion,
)
from kvatlas.worker_hooks.reporting.engine_state.namespace_budgets import NamespaceBudgetSettings

#: what a stopping sidecar takes beyond `stop_seconds`: its lease, its transport, its connection
STOP_SLACK_SECONDS = 4.0
#: of the operating system
MAX_SOCKET_PATH_BYTES = 103

Seconds = Annotated[float, Meta(gt=0)]


def check_name(key: str, source: str, name: str) -> None:
    """Raise InvalidSetting for what no worker, model or adapter can be called on the wire."""
    try:
        msgspec.convert(name, Name).encode()
    except UnicodeEncodeError as error:
        raise InvalidSetting(key, source, "expected Unicode, found other bytes") from error
    except msgspec.ValidationError as error:
        problem = f"expected 1 to {MAX_NAME_CHARACTERS} characters, found {len(name)}"
        raise InvalidSetting(key, source, problem) from error


class SidecarOptions(ReportingSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One instance, the engine beside it, and how it is reported.

    The engine has made the ring at `ring_path`; the sidecar makes the serve pool at `pool_path`
    (with `num_slots` above 0) and listens at `socket_path`.
    """

    nats_url: str
    worker: str
    rank: Rank = 0
    #: the model of the namespaces; `aliases` are further names that requests may use
    model: str
    aliases: tuple[str, ...] = ()
    adapters: dict[str, str] = field(default_factory=dict)
    base_url: str = ""
    descriptor: NamespaceDescriptor
    #: blocks at the end of a match that the engine computes again, see WorkerInfo
    num_unreusable_trailing_blocks: UnreusableBlocks = 0
    #: KV groups that full-prefix reuse needs
    groups: tuple[int, ...] = (0,)
    role: WorkerRole = WorkerRole.both
    #: 16 bytes; empty means that nothing may be pulled from here or to here
    kv_fingerprint: bytes = b""
    #: blocks that the engine's own memory takes
    num_blocks: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    #: where the engine's own transfer tier listens (host:port); empty where it has none
    p2p_address: str = ""
    #: events come from outside the engine, which tells each copy of a block
    counts_copies: bool = False

    ring_path: str
    socket_path: str
    pool_path: str = ""
    #: slots of the serve pool and bytes of each; 0 serves and pulls nothing
    num_slots: Annotated[int, Meta(ge=0)] = 0
    block_bytes: Annotated[int, Meta(ge=0)] = 0
    #: the pool holds copies, which the fleet knows as `dram`; else it is the engine's own memory
    tells_pool: bool = False
    #: how blocks travel: `nixl`, `memory` within one process, `none`
    transport: Annotated[str, Meta(pattern="^(nixl|memory|none)$")] = "nixl"

    #: host:port for Prometheus, see metrics.py; empty serves none
    metrics_address: str = ""

    #: with `nixl`
    nixl: NixlSettings = NixlSettings()

    #: of the buckets of epochs and leases, where this sidecar has to make them
    replicas: Replicas = 1
    creds_file: str = ""
    nkey_file: str = ""
    #: see FleetSettings
    fleet_key: bytes = b""
    wire_version: WireVersion = WIRE_VERSION
    #: let the tokens of prompts travel in events
    include_tokens: bool = False
    #: how often the inventory is published unasked; has to be less than the stream's retention
    inventory_seconds: Seconds = 3600.0
    #: how long a namespace is muted the first time
    namespace_mute_seconds: Seconds = 1.0
    #: how long a stopping sidecar waits for the broker
    stop_seconds: Seconds = 5.0
    #: and then, at most, for peers that read blocks of it and for pulls under way
    drain_seconds: Annotated[float, Meta(ge=0)] = SidecarSettings().drain_seconds
    #: the sidecar ends with this process; 0 takes the one that writes to the ring
    parent_pid: Annotated[int, Meta(ge=0)] = 0

    def validate(self) -> None:
        """Raise InvalidSetting for the first rule that is broken."""
        check_name("worker", "sidecar", self.worker)
        for name in (self.model, *self.aliases):
            check_name("model", "sidecar", name)
        for name in self.adapters:
            check_name("adapters", "sidecar", name)
        if self.kv_fingerprint and len(self.kv_fingerprint) != 16:
            problem = f"{len(self.kv_fingerprint)} bytes, expected 16 or none"
            raise InvalidSetting("kv_fingerprint", "sidecar", problem)
        if self.num_slots and not (self.pool_path and self.block_bytes):
            problem = f"{self.num_slots} slots need pool_path and block_bytes"
            raise InvalidSetting("num_slots", "sidecar", problem)
        self._check_description()
        if self.metrics_address and host_and_port(self.metrics_address) is None:
            raise InvalidSetting("sidecar.metrics_address", "sidecar", "expected host:port")
        if self.p2p_address and host_and_port(self.p2p_address) is None:
            raise InvalidSetting("p2p_address", "sidecar", "expected host:port")
        for file in filter(None, (self.creds_file, self.nkey_file)):
            login_of(Path(file))
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH_BYTES:
            problem = f"a path of {len(self.socket_path)}, the limit is {MAX_SOCKET_PATH_BYTES}"
            raise InvalidSetting("socket_path", "sidecar", problem)

    def _check_description(self) -> None:
        """Raise InvalidSetting for what readers would refuse of WorkerUp."""
        info = self.worker_info()
        for about in msgspec.structs.fields(WorkerInfo):
            try:
                msgspec.convert(getattr(info, about.name), about.type)
            except msgspec.ValidationError as error:
                raise InvalidSetting(about.name, "sidecar", str(error)) from error

    @property
    def stop_limit_seconds(self) -> float:
        """Seconds after which a stopping sidecar is ended: its own, and those of its parts."""
        return self.stop_seconds + self.drain_seconds + STOP_SLACK_SECONDS

    @property
    def instance(self) -> InstanceId:
        """The instance that the sidecar speaks for."""
        return InstanceId(self.worker, self.rank)

    @property
    def namespace_budgets(self) -> NamespaceBudgetSettings:
        """How much may be told of a namespace."""
        return NamespaceBudgetSettings(
            self.namespace_blocks_per_second,
            self.namespace_burst_blocks,
            self.namespace_mute_seconds,
        )

    @property
    def path_of_pool(self) -> Path:
        """Where the serve pool lies."""
        return Path(self.pool_path)

    @property
    def leasable_tiers(self) -> tuple[Tier, ...]:
        """Where peers can have blocks from: a pool of copies, or all of the engine's memory.

        An engine with a transfer tier of its own finds blocks by hash, wherever they lie.
        """
        if self.p2p_address:
            return tuple(Tier)
        if not self.num_slots or self.transport == "none":
            return ()
        return (Tier.dram,) if self.tells_pool else tuple(Tier)

    def worker_info(self) -> WorkerInfo:
        """Return what WorkerUp says."""
        capacity = self.num_blocks or self.num_slots
        return WorkerInfo(
            base_url=self.base_url,
            models=(self.model, *self.aliases),
            descriptor=self.descriptor,
            # who can lend nothing has no pool to pull into either
            kv_fingerprint=self.kv_fingerprint if self.leasable_tiers else b"",
            tiers=(TierCapacity(Tier.hbm, capacity),) if capacity else (),
            adapters=self.adapters,
            groups=self.groups,
            role=self.role,
            sidecar=lease_subject(self.instance),
            versions={"kvatlas": __version__, **self.versions},
            p2p_address=self.p2p_address,
            leasable_tiers=self.leasable_tiers,
            num_unreusable_trailing_blocks=self.num_unreusable_trailing_blocks,
        )

    @property
    def standing_doubt(self) -> str:
        """Why no reader may call the instance exact: it holds more than it reuses, unsaid."""
        num_blocks = self.num_unreusable_trailing_blocks
        if not num_blocks or self.wire_version >= LOOKAHEAD_WIRE_VERSION:
            return ""
        return (
            f"the engine computes the last {num_blocks} matched blocks again, and readers of wire "
            f"{self.wire_version} do not know that"
        )


def shared_options(settings: Settings) -> dict[str, Any]:
    """Return what the settings say of any sidecar, by its name in `SidecarOptions`."""
    reporting = ReportingSettings.__struct_fields__
    return {name: getattr(settings.sidecar, name) for name in reporting} | {
        "drain_seconds": settings.sidecar.drain_seconds,
        "replicas": settings.log.replicas,
        "fleet_key": settings.fleet.key_bytes,
        "wire_version": settings.fleet.wire_version,
        "nixl": settings.nixl,
        "metrics_address": settings.sidecar.metrics_address,
    }
