"""The writer's side: windows in which the index changes, and what else readers have to know.

with publication:          the version is odd, readers wait or try again
    state.handle(...)      arrays change in place, instances come and go
                           before it ends: stream sequence, and the fleet if it has changed
"""

import logging
import time
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import msgspec
import numpy as np
from msgspec import Struct

from kvatlas.indexer import fence_kernel
from kvatlas.indexer.naming import Place
from kvatlas.indexer.reader import IndexReader, IndexStats, InstanceView
from kvatlas.indexer.shared import header as h
from kvatlas.indexer.shared.arrays import SharedArrays

#: the longest that the writer waits for readers that ask it to
MAX_PAUSE_NS = 5_000_000
PAUSE_STEP_SECONDS = 20e-6

_logger = logging.getLogger(__name__)


class PublishedFleet(Struct, frozen=True, array_like=True):
    """All about instances that is not in the arrays, as of a stream sequence."""

    stream_sequence: int
    places: list[Place]
    views: list[InstanceView]
    stats: IndexStats
    state_digest: str
    convergence_ms: dict[str, float]


class Pulse(NamedTuple):
    """How the writer is doing; times are seconds of the monotonic clock."""

    is_ready: bool
    is_connected: bool
    last_in_stream: int
    heard_at: float
    convergence_ms: dict[str, float]


class Places(Protocol):
    """The fold, as far as the publication asks it."""

    def places(self) -> list[Place]:
        """Return every instance that has a place in the index."""
        ...


class IndexPublication:
    """Tells readers of `arrays` what an index holds; enter it to change that."""

    def __init__(self, arrays: SharedArrays, index: IndexReader, places: Places) -> None:
        self._arrays, self._index, self._places = arrays, index, places
        self._header = arrays.header
        self._fleet_version = -1
        self._generation = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._convergence_ms: dict[str, float] = {}
        #: windows that were put off because a reader could not get through
        self.num_pauses = 0

    def __enter__(self) -> Self:
        """Begin to change the index, after readers that could not get through otherwise."""
        if fence_kernel.open_window(self._header, False):
            self._let_readers_through()
            fence_kernel.open_window(self._header, True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it: what readers see from now on is of one stream sequence."""
        try:
            # until it is ready nobody is answered, and each new instance would cost a list of all
            if self._index.fleet_version != self._fleet_version and self._header[h.IS_READY]:
                self._write_fleet()
            self._header[h.STREAM_SEQUENCE] = self._index.stream_sequence
        finally:
            fence_kernel.close_window(self._header)

    def pulse(self, pulse: Pulse) -> None:
        """Give a sign of life, and bring counts and digests of the fleet up to date."""
        header = self._header
        with self:
            self._convergence_ms = pulse.convergence_ms
            header[h.IS_READY], header[h.IS_CONNECTED] = pulse.is_ready, pulse.is_connected
            header[h.LAST_IN_STREAM] = pulse.last_in_stream
            header[h.HEARD_AT_NS] = int(pulse.heard_at * 1e9)
            header[h.PULSE_NS] = time.monotonic_ns()
            self._write_fleet()

    def end(self) -> None:
        """Say that nobody writes any more."""
        with self:
            self._header[h.IS_ENDED] = 1

    def _write_fleet(self) -> None:
        """Write who holds which number; without room for that readers are told to know nobody."""
        self._fleet_version = self._index.fleet_version
        content = self._encode(
            PublishedFleet(
                self._index.stream_sequence,
                self._places.places(),
                self._index.instances(),
                self._index.stats(),
                self._index.state_digest(),
                self._convergence_ms,
            )
        )
        try:
            self._arrays.write_file("fleet", self._generation + 1, content)
        except OSError as error:
            # the next pulse tries again
            self._header[h.FLEET_GENERATION] = 0
            _logger.error("readers of the shared index know nobody: %s", error)
            return
        self._generation += 1
        self._header[h.FLEET_GENERATION] = self._generation
        self._header[h.FLEET_BYTES] = len(content)
        self._header[h.FLEET_VERSION] = self._fleet_version

    def _let_readers_through(self) -> None:
        self.num_pauses += 1
        started = time.monotonic_ns()
        pauses = self._header[fence_kernel.FIRST_PAUSE :]
        while True:
            now = time.monotonic_ns()
            # a reader that died keeps asking; its time has passed
            pauses[pauses < np.uint64(now)] = 0
            if not pauses.any() or now - started > MAX_PAUSE_NS:
                return
            time.sleep(PAUSE_STEP_SECONDS)
