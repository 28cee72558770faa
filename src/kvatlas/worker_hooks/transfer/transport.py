"""How the bytes of leased blocks come here: the port, and the places where they land.

A *source* stands beside an owner's pool and says how to reach it; a *transport* reads from sources
into bounce places of its own pool. Nothing here verifies bytes: `ServePool.fill` does.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from msgspec import Struct
from xxhash import xxh3_64_intdigest


class Row(NamedTuple):
    """Where a block lies in a source's process."""

    address: int
    length: int
    device: int


class SourceRef(Struct, frozen=True):
    """How to reach a source. `agent` is never used twice: it carries worker and epoch."""

    transport: str
    agent: str
    metadata: bytes
    #: XXH3-64 of the metadata
    metadata_version: int


class ReadStatus(StrEnum):
    """How a read ended."""

    done = "done"
    #: our deadline passed; the peer may be frozen, slow or gone
    timed_out = "timed_out"
    #: the peer is gone, or was lost
    disconnected = "disconnected"
    #: the metadata or rows make no sense to the transport
    refused = "refused"
    #: anything else the driver says
    failed = "failed"
    #: too few bounce places are free; nothing was asked of the peer
    no_room = "no_room"


class ReadOutcome(Struct, frozen=True):
    """What a read left behind."""

    status: ReadStatus
    #: bounce places with the rows' bytes, in their order; the caller gives them back
    places: Sequence[int] = ()
    detail: str = ""
    seconds: float = 0.0


class Transport(Protocol):
    """Reads blocks of peers. Used from one event loop, inside `async with`."""

    @property
    def name(self) -> str:
        """The word for this transport on the wire."""
        ...

    async def connect(self, source: SourceRef, deadline_seconds: float) -> ReadStatus:
        """Prepare for reads, so that the first does not pay for it. Optional, idempotent."""
        ...

    async def read(
        self, source: SourceRef, rows: Sequence[Row], deadline_seconds: float
    ) -> ReadOutcome:
        """Copy the rows, each of one block, to bounce places; neighbours travel as one.

        Ends soon after the deadline whatever the peer does, and raises nothing for what a peer
        does. Bytes may arrive after a read that timed out or was cancelled: its places are then in
        quarantine, given to nobody until the transfer is over.
        """
        ...


class Source(Protocol):
    """The owner's side of a transport."""

    @property
    def reference(self) -> SourceRef | None:
        """How peers reach this source; another after it had to start again, None meanwhile."""
        ...

    def rows(self, places: Sequence[int]) -> list[Row]:
        """Return where peers find the bytes of these places of the pool."""
        ...

    def expect_reads(self, seconds: float) -> None:
        """Be quick to answer peers for at least so long; 0: no read is expected any more."""
        ...


class BouncePlaces:
    """The bounce places of a pool, shared by its transports and its puller, on one event loop.

    A place is free, or with a read, in quarantine, or with whoever got it from a read.
    """

    def __init__(self, places: Sequence[int]) -> None:
        self.num_places = len(places)
        self._free = sorted(places)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, num: int) -> list[int]:
        """Return the first so many free places, neighbours where it can be; none if too few."""
        if num > len(self._free):
            return []
        taken, self._free = self._free[:num], self._free[num:]
        return taken

    def release(self, places: Sequence[int]) -> None:
        """Free places; not always those that were taken, but as many."""
        if len(self._free) + len(places) > self.num_places:
            raise ValueError(f"{len(places)} places too many for {self.num_places}")
        self._free += places
        self._free.sort()


def metadata_version(metadata: bytes) -> int:
    """Return the version of a source's metadata: its hash, never 0."""
    return xxh3_64_intdigest(metadata) or 1
