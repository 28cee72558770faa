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

from kvatlas.indexer.index.kernel import fences as fence_kernel
from kvatlas.indexer.index.naming import InstanceOrdinal
from kvatlas.indexer.index.shared import header as h
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.reader import IndexReader, IndexStats
from kvatlas.schemas.ids import InstanceId

#: the longest that the writer waits for readers that ask it to
MAX_PAUSE_NS = 5_000_000
PAUSE_STEP_SECONDS = 20e-6

_logger = logging.getLogger(__name__)


class PublishedFleet(Struct, frozen=True, array_like=True):
    """All about instances that is not in the arrays.

    Places, trust and whatever else `IndexReader.fleet_version` moves with are as of now, the rest
    as of the last pulse: counts, digests, reasons, and who has said how much.
    """

    places: list[InstanceOrdinal]
    #: of an InstanceView each, so that readers decode who has changed; by name
    views: list[msgspec.Raw]
    stats: IndexStats
    state_digest: str
    convergence_ms: dict[str, float]
    #: see Pulse
    clock_offset_ns: int = 0


class WriterStatus(NamedTuple):
    """How the writer is doing; times are seconds of the monotonic clock."""

    is_ready: bool
    is_connected: bool
    last_in_stream: int
    heard_at: float
    convergence_ms: dict[str, float]
    #: the broker's time less the monotonic clock, in ns
    clock_offset_ns: int = 0


class FoldVersions(Protocol):
    """The fold, as far as the publication asks it."""

    @property
    def fleet_version(self) -> int:
        """See IndexReader."""
        ...

    def changed_since(self, fleet_version: int) -> list[InstanceId] | None:
        """Return who looks otherwise than at a version; None if that may be anybody."""
        ...

    @property
    def places_version(self) -> int:
        """Rises whenever `places` changes."""
        ...

    def places(self) -> list[InstanceOrdinal]:
        """Return every instance that has a place in the index."""
        ...


class _Versions(NamedTuple):
    """What moves with the fleet: the fold, what time lays over it, who has which number."""

    folded: int
    laid_over: int
    places: int


class IndexPublication:
    """Tells readers of `arrays` what an index holds; enter it to change that."""

    def __init__(self, arrays: SharedArrays, index: IndexReader, places: FoldVersions) -> None:
        self._arrays, self._index, self._places = arrays, index, places
        self._header = arrays.header
        self._written = _Versions(-1, -1, -1)
        #: as encoded last
        self._views: dict[InstanceId, msgspec.Raw] = {}
        self._stats, self._state_digest = index.stats(), index.state_digest()
        self._generation = 0
        #: as far as the last attempt to write the fleet showed
        self._has_room = True
        self._encode = msgspec.msgpack.Encoder().encode
        self._convergence_ms: dict[str, float] = {}
        self._clock_offset_ns = 0
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
            if self._versions() != self._written and self._header[h.IS_READY]:
                self._encode_changed()
                self._write_fleet()
            self._header[h.STREAM_SEQUENCE] = self._index.stream_sequence
        finally:
            fence_kernel.close_window(self._header)

    def publish_status(self, pulse: WriterStatus) -> None:
        """Give a sign of life, and bring counts and digests of the fleet up to date."""
        header = self._header
        self._encode_all()  # which takes long, and changes nothing that readers see
        with self:
            self._convergence_ms = pulse.convergence_ms
            self._clock_offset_ns = pulse.clock_offset_ns
            header[h.IS_READY], header[h.IS_CONNECTED] = pulse.is_ready, pulse.is_connected
            header[h.LAST_IN_STREAM] = pulse.last_in_stream
            header[h.HEARD_AT_NS] = int(pulse.heard_at * 1e9)
            header[h.PULSE_NS] = time.monotonic_ns()
            self._write_fleet()

    def end(self) -> None:
        """Say that nobody writes any more."""
        with self:
            self._header[h.IS_ENDED] = 1

    def _versions(self) -> _Versions:
        folded = self._places.fleet_version
        laid_over = self._index.fleet_version - folded
        return _Versions(folded, laid_over, self._places.places_version)

    def _encode_changed(self) -> None:
        """Bring the views of those up to date who look otherwise than when all was written last."""
        changed = self._places.changed_since(self._written.folded)
        is_laid_anew = self._versions().laid_over != self._written.laid_over
        if changed is None or is_laid_anew or not self._views.keys() >= set(changed):
            self._encode_all()
            return
        for name in changed:
            view = self._index.instance(name)
            assert view is not None
            self._views[name] = msgspec.Raw(self._encode(view))

    def _encode_all(self) -> None:
        views = self._index.instances()
        self._views = {view.instance: msgspec.Raw(self._encode(view)) for view in views}
        self._stats, self._state_digest = self._index.stats(), self._index.state_digest()

    def _write_fleet(self) -> None:
        """Write who holds which number; without room for that readers are told to know nobody."""
        self._written = self._versions()
        content = self._encode(
            PublishedFleet(
                self._places.places(),
                list(self._views.values()),
                self._stats,
                self._state_digest,
                self._convergence_ms,
                self._clock_offset_ns,
            )
        )
        try:
            self._arrays.write_file("fleet", self._generation + 1, content)
        except OSError as error:
            # the next pulse tries again
            self._header[h.FLEET_GENERATION] = 0
            if self._has_room:
                problem = f"{error.strerror or error}: {self._arrays.shortage(len(content))}"
                _logger.error("readers of the shared index know nobody: %s", problem)
            self._has_room = False
            return
        if not self._has_room:
            _logger.info("readers of the shared index know who is there again")
        self._has_room = True
        self._generation += 1
        self._header[h.FLEET_GENERATION] = self._generation
        self._header[h.FLEET_BYTES] = len(content)
        self._header[h.FLEET_VERSION] = self._written.folded + self._written.laid_over

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
