"""What the scheduler's side of the connector tells the worker's side in a step."""

from dataclasses import dataclass, field

from kvatlas.schemas.ids import InstanceId


@dataclass(frozen=True)
class BlockRun:
    """Blocks of one load that the same owners are asked for, best first."""

    first: int
    num_blocks: int
    owners: tuple[InstanceId, ...]


@dataclass(frozen=True)
class BlockLoad:
    """Blocks to bring into the engine's memory while the request waits."""

    request_id: str
    #: the engine's own blocks, and our hashes of what belongs into them
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    runs: tuple[BlockRun, ...]


@dataclass(frozen=True)
class BlockSave:
    """A block that is complete after this step."""

    block_id: int
    block_hash: bytes


@dataclass(frozen=True)
class SidecarAddress:
    """Where the sidecar of this engine is reached."""

    socket_path: str
    pool_path: str
    #: another one means another sidecar, with another pool at the same path
    generation: int = 1


@dataclass
class Orders:
    """Everything of one step."""

    beside: SidecarAddress | None = None
    #: forget what is in the serve pool, before anything else
    clears: bool = False
    loads: list[BlockLoad] = field(default_factory=list)
    saves: list[BlockSave] = field(default_factory=list)
