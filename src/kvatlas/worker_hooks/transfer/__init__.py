"""How bytes of blocks move between pools; `nixl_transport` is not imported from here."""

from kvatlas.worker_hooks.transfer.memory import MemoryFabric, MemorySource, MemoryTransport
from kvatlas.worker_hooks.transfer.transport import (
    BouncePlaces,
    ReadOutcome,
    ReadStatus,
    Row,
    Source,
    SourceRef,
    Transport,
    metadata_version,
)

__all__ = [
    "BouncePlaces",
    "MemoryFabric",
    "MemorySource",
    "MemoryTransport",
    "ReadOutcome",
    "ReadStatus",
    "Row",
    "Source",
    "SourceRef",
    "Transport",
    "metadata_version",
]
