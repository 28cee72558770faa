"""The reader's side: an IndexReader over memory that another process writes to.

    version --> follow header, arrays, fleet --> ask --> same version? answer : again

A writer that is silent leaves its last state: answers go on, their trust is `stale`, and the age of
the index grows. One that died in the middle of a change leaves nothing to rely on: nobody holds
anything until a writer is back. A new writer in the same folder is found by the next question.
"""

import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index.kernel import fences as fence_kernel
from kvatlas.indexer.index.naming import NamedIndex
from kvatlas.indexer.index.shared import header as h
from kvatlas.indexer.index.shared.arrays import MappedArrays
from kvatlas.indexer.index.shared.attached import AttachedIndex
from kvatlas.indexer.index.shared.folder import check_readable
from kvatlas.indexer.index.shared.publication import PublishedFleet
from kvatlas.indexer.reader import (
    IndexStats,
    InstanceMatch,
    InstanceSelection,
    InstanceView,
    Lag,
    TreeView,
)
from kvatlas.indexer.serving import WorkersByModel
from kvatlas.indexer.trust_overlay import TrustOverlay
from kvatlas.schemas.errors import FolderUnusable, ForeignFile, IndexUnavailable, NotAnsweredHere
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import NUM_TIERS, InstanceId, Tier

T = TypeVar("T")

#: a writer that is silent for longer is taken for dead
LOST_SECONDS = 3.0
#: attempts before the writer is asked to wait
PATIENT_ATTEMPTS = 3
#: how long the writer is asked to wait, again at each further attempt
PAUSE_NS = 2_000_000
#: a change that takes longer (a sweep of everything, or the writer's death in it) is not waited for
MAX_WINDOW_SECONDS = 0.5
RETRY_SECONDS = 20e-6

_logger = logging.getLogger(__name__)


class _Named(NamedTuple):
    id: InstanceId
    trust: Trust


class AttachedState:
    """An IndexReader of the state that a writer publishes in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._header = np.zeros(fence_kernel.HEADER_WORDS, np.uint64)
        self._file = 0
        self._arrays = MappedArrays(folder)
        self._attached = AttachedIndex()
        self._named = NamedIndex(self._attached)
        self._decode = msgspec.msgpack.Decoder(PublishedFleet).decode
        self._decode_view = msgspec.msgpack.Decoder(InstanceView).decode
        self._fleet: PublishedFleet | None = None
        self._fleet_generation = 0
        self._layout = b""
        #: the layout of the last question: all of one state
        self._asked_layout = b""
        self._views: dict[InstanceId, InstanceView] = {}
        #: as they were written -> what that says
        self._decoded: dict[bytes, InstanceView] = {}
        self._serving = WorkersByModel()
        #: writers so far; their versions of the fleet begin anew
        self._num_writers = 0
        self._pause = fence_kernel.FIRST_PAUSE + os.getpid() % 16
        #: answers that had to be asked for again
        self.num_retries = 0
        #: the writer stood still in the middle of a change when it was asked last
        self._is_stuck = False
        #: times that this began or ended
        self._num_stalls = 0
        #: what the writer left at rest cannot be read
        self._is_unreadable = False
        #: the header whose files could not be read
        self._complained_of = -1
        self._find_writer()

    # --- how the writer is doing ---------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the writer's files are."""
        return self._folder

    @property
    def header(self) -> NDArray[np.uint64]:
        """The shared page; zero before there is a writer."""
        return self._header

    @property
    def is_lost(self) -> bool:
        """Whether nobody writes what can be read: dead, ended, stuck in a change, never there."""
        if self._is_silent():
            self._find_writer()
            return self._is_silent()
        return self._is_unreadable or (self._is_stuck and self._is_within_a_change())

    def _is_within_a_change(self) -> bool:
        return bool(self._header[fence_kernel.VERSION] & np.uint64(1))

    def _is_silent(self) -> bool:
        silent_ns = time.monotonic_ns() - int(self._header[h.PULSE_NS])
        return silent_ns > LOST_SECONDS * 1e9 or bool(self._header[h.IS_ENDED])

    @property
    def stream_sequence(self) -> int:
        return int(self._header[h.STREAM_SEQUENCE])

    @property
    def fleet_version(self) -> int:
        # what is listed while the writer stands still may be older than the version it has told
        told = (self._num_writers << 40) + int(self._header[h.FLEET_VERSION])
        return told + self._num_stalls

    # --- answers: see IndexReader --------------------------------------------------------------

    def match(self, chain: bytes) -> list[InstanceMatch]:
        return self._consistently(lambda: self._named.match(chain), [])

    def held(self, chain: bytes, selection: InstanceSelection) -> NDArray[np.uint32]:
        nothing = np.zeros((len(selection), NUM_TIERS), np.uint32)
        return self._consistently(lambda: self._named.held(chain, selection), nothing)

    def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
        return self._consistently(lambda: self._named.holders(block_hash), [])

    def names(self) -> list[InstanceId]:
        return self._consistently(lambda: list(self._views), list(self._views))

    def instances(self) -> list[InstanceView]:
        return self._consistently(lambda: list(self._views.values()), list(self._views.values()))

    def instance(self, instance: InstanceId) -> InstanceView | None:
        return self._consistently(lambda: self._views.get(instance), self._views.get(instance))

    def serving(self, model: str) -> list[InstanceView]:
        return self._consistently(lambda: self._serving.of(model), self._serving.of(model))

    def copy_tree(self) -> Callable[[], TreeView]:
        raise NotAnsweredHere("the radix tree: ask the index that this router reads")

    def stats(self) -> IndexStats:
        return self._published().stats

    def state_digest(self) -> str:
        return self._published().state_digest

    def digest_steps(self) -> Generator[None, None, str]:
        yield
        return self.state_digest()

    def clock_offset_ns(self) -> int:
        """Return the broker's time less the monotonic clock of this host."""
        found = self._consistently(lambda: self._fleet, self._fleet)
        return 0 if found is None else found.clock_offset_ns

    def convergence_ms(self) -> dict[str, float]:
        """Return what the writer last measured."""
        return {} if self._fleet is None else self._fleet.convergence_ms

    def _published(self) -> PublishedFleet:
        found = self._consistently(lambda: self._fleet, self._fleet)
        if found is None:
            raise IndexUnavailable("no index has been published yet")
        return found

    # --- consistency -----------------------------------------------------------------------------

    def _consistently(self, ask: Callable[[], T], nothing: T) -> T:
        """Return what `ask` says of one state of the index; `nothing` where there is no state.

        Who the workers are is believed from before then; what they hold is not, which `is_lost`
        tells from then on.
        """
        if self.is_lost and self._is_within_a_change():
            return nothing
        attempts, give_up_at = 0, 0.0
        try:
            while True:
                answered, answer = self._try(ask, nothing)
                if answered:
                    self._note_stuck(False)
                    return answer
                attempts += 1
                self.num_retries += 1
                if attempts == 1:
                    give_up_at = time.monotonic() + MAX_WINDOW_SECONDS
                elif time.monotonic() > give_up_at:
                    self._note_stuck(True)
                    return nothing
                if attempts >= PATIENT_ATTEMPTS:
                    self._header[self._pause] = time.monotonic_ns() + PAUSE_NS
                time.sleep(RETRY_SECONDS)
        finally:
            if attempts >= PATIENT_ATTEMPTS:
                self._header[self._pause] = 0

    def _note_stuck(self, is_stuck: bool) -> None:
        self._num_stalls += is_stuck != self._is_stuck
        self._is_stuck = is_stuck

    def _try(self, ask: Callable[[], T], nothing: T) -> tuple[bool, T]:
        """Ask once; return whether nobody wrote meanwhile, and the answer."""
        header = self._header
        version = fence_kernel.version_before(header)
        if version & np.uint64(1):
            return False, nothing
        try:
            has_fleet, layout = self._follow(), self._layout
            # kernels believe the layout, and that of two states leads them out of the arrays
            is_new = layout is not self._asked_layout
            if (is_new or not has_fleet) and not fence_kernel.is_unchanged(header, version):
                return False, nothing
            if not has_fleet:
                return True, nothing
            self._asked_layout = layout
            answer = ask()
        except (
            *(OSError, KeyError, IndexError, ValueError, OverflowError),
            *(msgspec.DecodeError, RecursionError),
        ) as error:
            # half of a change: files that are gone, numbers that stand for nobody
            if fence_kernel.is_unchanged(header, version):
                self._log_unreadable(error)
                self._is_unreadable = True
                return True, nothing
            return False, nothing
        if not fence_kernel.is_unchanged(header, version):
            return False, nothing
        self._is_unreadable = False
        return True, answer

    def _follow(self) -> bool:
        """Bring arrays and fleet up to the header; return whether there is a fleet to speak of."""
        header = self._header
        layout = header[h.MULTIPLIER : h.FIRST_ARRAY + 2 * len(h.ARRAYS)].tobytes()
        if not header[h.IS_READY]:
            return False
        if layout != self._layout:
            self._attached.bind_arrays(header, self._arrays.follow(header))
            self._layout = layout
        generation = int(header[h.FLEET_GENERATION])
        if generation == 0:
            return False  # its writer has no room to say who is who
        if generation != self._fleet_generation:
            token = int(header[h.TOKEN])
            with (self._folder / f"{token:016x}.fleet.{generation}").open("rb") as opened:
                # no more than there is, whatever the header says
                size = os.fstat(opened.fileno()).st_size
                content = opened.read(min(int(header[h.FLEET_BYTES]), size))
            self._load_fleet(self._decode(content))
            self._fleet_generation = generation
        return self._fleet is not None

    def _log_unreadable(self, error: Exception) -> None:
        """Say once what is wrong with the files of a writer."""
        if self._complained_of != self._file:
            self._complained_of = self._file
            _logger.error("the shared index in %s cannot be read: %s", self._folder, error)

    def _load_fleet(self, fleet: PublishedFleet) -> None:
        decoded, known = {}, self._decoded
        for view in map(bytes, fleet.views):
            decoded[view] = known.get(view) or self._decode_view(view)
        views = {view.instance: view for view in decoded.values()}
        gone = self._views.keys() - views.keys()
        changed = [
            (name, view) for name, view in views.items() if self._views.get(name) is not view
        ]
        self._named.load_ordinals(
            fleet.places, [_Named(v.instance, v.trust) for v in views.values()]
        )
        self._serving.update([*changed, *((name, None) for name in gone)])
        self._fleet, self._views, self._decoded = fleet, views, decoded

    def _find_writer(self) -> None:
        """Attach to the folder's writer if it is another one than before."""
        with contextlib.suppress(OSError):
            if (self._folder / h.FILE).lstat().st_ino == self._file:
                return
            try:
                check_readable(self._folder)
            except (ForeignFile, FolderUnusable) as error:
                self._log_unreadable(error)
                return
            found = h.open_header(self._folder / h.FILE)
            if found is None:
                return
            self._header, self._file = found
            self._num_writers += 1
            self._fleet, self._fleet_generation, self._layout = None, 0, b""


class SharedIndexReader:
    """The index and the feed of a router that reads another process's index.

    See IndexReader and IndexFeed. Each answer stands on one state of the index; two answers may
    stand on different ones. Nobody is listed before a writer has caught up with the log.
    Raises ForeignFile for a folder in which another user could write.
    """

    def __init__(self, folder: Path) -> None:
        check_readable(folder)
        self._state = AttachedState(folder)
        self._live = TrustOverlay(self._state)
        #: of the fleet that trust was laid over, and whether its writer was lost
        self._laid: tuple[int, bool] | None = None
        self._began_at = time.monotonic()

    @property
    def num_retries(self) -> int:
        """Answers that had to be asked for again, because somebody wrote meanwhile."""
        return self._state.num_retries

    # --- feed ---------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether a writer has caught up; stays so when it dies."""
        return not (self._state.is_lost and self._state.fleet_version == 0) and bool(
            self._state.header[h.IS_READY]
        )

    @property
    def why_not_ready(self) -> str:
        """What it waits for."""
        if self._state.is_lost:
            return (
                f"no index is written in {self._state.folder}: "
                "start `kvatlas indexer` with the same indexer.shared_folder"
            )
        return f"the shared index is catching up: at {self._state.stream_sequence} of the stream"

    @property
    def connected(self) -> bool:
        """Whether the writer is alive and has its broker."""
        return not self._state.is_lost and bool(self._state.header[h.IS_CONNECTED])

    @property
    def lag(self) -> Lag:
        """How old answers may be; grows without end when the writer is dead."""
        header = self._state.header
        behind = int(header[h.LAST_IN_STREAM]) - int(header[h.STREAM_SEQUENCE])
        heard_at = int(header[h.HEARD_AT_NS]) / 1e9 or self._began_at
        return Lag(max(behind, 0), time.monotonic() - heard_at)

    def convergence_ms(self) -> dict[str, float]:
        """Return what the writer last measured."""
        return self._state.convergence_ms()

    def broker_ns(self) -> int:
        """Return what time it is at the broker, as the writer last knew it."""
        return time.monotonic_ns() + self._state.clock_offset_ns()

    # --- index --------------------------------------------------------------------------------

    @property
    def stream_sequence(self) -> int:
        return self._state.stream_sequence

    @property
    def fleet_version(self) -> int:
        return self._now().fleet_version

    def match(self, chain: bytes) -> list[InstanceMatch]:
        return self._now().match(chain)

    def held(self, chain: bytes, selection: InstanceSelection) -> NDArray[np.uint32]:
        return self._now().held(chain, selection)

    def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
        return self._now().holders(block_hash)

    def names(self) -> list[InstanceId]:
        return self._now().names()

    def instances(self) -> list[InstanceView]:
        return self._now().instances()

    def instance(self, instance: InstanceId) -> InstanceView | None:
        return self._now().instance(instance)

    def serving(self, model: str) -> list[InstanceView]:
        return self._now().serving(model)

    def copy_tree(self) -> Callable[[], TreeView]:
        return self._now().copy_tree()

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncGenerator[None, None]:
        """Each answer stands on one state by itself."""
        yield

    def stats(self) -> IndexStats:
        return self._now().stats()

    def state_digest(self) -> str:
        return self._now().state_digest()

    def digest_steps(self) -> Generator[None, None, str]:
        return self._now().digest_steps()

    def _now(self) -> TrustOverlay:
        """Return the index with the trust that it deserves now."""
        present = self._state.fleet_version, self._state.is_lost
        if present != self._laid:
            self._laid = present
            silent = frozenset(view.instance for view in self._state.instances())
            self._live.update_trust(False, silent if present[1] else frozenset())
        return self._live
