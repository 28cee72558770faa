"""The index service: feeds IndexState from the bus and does what it asks for.

    KV_EVENTS --follow--> stimulus_of --> IndexState.handle --> effects: records, inventories, logs
    leases ----watch----> LeaseExpired ----^
    newest snapshot, then the log from where it ends; a snapshot from time to time (ADR-0008)

Decides nothing about blocks. Any number of replicas run beside each other, each on its own.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Self

from kvatlas.events.bus import Bus, Message, Subscription
from kvatlas.events.codec import encode
from kvatlas.events.leases import LeaseChange, watch_leases
from kvatlas.events.streams import KV_EVENTS, LEASES_BUCKET
from kvatlas.events.subjects import control_subject
from kvatlas.indexer.fold.budgets import EventBudgets
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import (
    AuditFailed,
    BatchArrived,
    Effect,
    HoleSeen,
    LeaseExpired,
    Proposed,
    PublishControl,
    ReportOldEpoch,
    ReportPassed,
    RequestIntroduction,
    RequestInventory,
    Stimulus,
    stimulus_of,
)
from kvatlas.indexer.index.exporting import Room
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.publication import IndexPublication, WriterStatus
from kvatlas.indexer.reader import IndexReader, Lag
from kvatlas.indexer.service.dead_letters import (
    DeadLetterSettings,
    DeadLetterWriter,
    unreadable_message_of,
)
from kvatlas.indexer.service.fold_log import EffectLog
from kvatlas.indexer.service.introductions import Introductions
from kvatlas.indexer.service.inventory_requests import InventoryRequests
from kvatlas.indexer.service.lease_expiry import LeaseExpiry, LogSilence
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.indexer.service.superseded import SupersededEpochs
from kvatlas.indexer.snapshots.format import Anchor, SnapshotInfo
from kvatlas.indexer.snapshots.loading import LoadedSnapshot, load_newest
from kvatlas.indexer.snapshots.writing import (
    SNAPSHOTS_BUCKET,
    SnapshotCut,
    SnapshotSettings,
    SnapshotStatus,
    SnapshotWriter,
)
from kvatlas.indexer.trust_overlay import TrustOverlay
from kvatlas.schemas.conditions import LOG_NOT_STORED, Conditions, log_changes
from kvatlas.schemas.errors import BusUnavailable, StreamRefused
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import WIRE_VERSION, ControlRecord

NOTHING_COMES = (
    f"{KV_EVENTS}: workers renew their leases, and nothing that they publish comes: look at the"
    " broker's log, and whether its disk is full; restart it when there is room"
)
#: a broker that has not said where the log ends for this long may not take renewals either
NO_LEADER_SECONDS = 2.0
#: for how many times as long as it stood still the fold goes on, before it does so again for others
REST_RATIO = 4

_logger = logging.getLogger(__name__)


class IndexService:
    """Keeps an IndexState at the end of the log for as long as it is entered.

    Readers use `index`, which adds what time says to the fold's trust. It answers from the start:
    before `is_ready` everybody is `catching_up`, and while the broker is away the answers grow
    old, which `lag` tells. Entering raises StreamRefused where there is no log and BusUnavailable;
    afterwards no message and no outage stops the service.

    With `snapshots` it starts from the newest one that can be used, and takes part in writing them;
    `loaded` is the one it started from. With `dead_letters` it leaves a letter about each message
    that it cannot read. A log that takes nothing, by all that it sees, is one of `conditions`.
    """

    def __init__(
        self,
        bus: Bus,
        state: IndexState,
        *,
        name: str = "indexer",
        settings: IndexServiceLimits | None = None,
        snapshots: SnapshotSettings | None = None,
        shared: SharedArrays | None = None,
        dead_letters: DeadLetterSettings | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        if conditions is None:
            conditions = Conditions()
            log_changes(conditions, _logger)
        self._conditions = conditions
        self._bus, self.state, self._name = bus, state, name
        self._settings = settings or IndexServiceLimits()
        self._live = TrustOverlay(state)
        self.index: IndexReader = self._live
        self._publication = shared and IndexPublication(shared, self._live, state)
        self._window: AbstractContextManager[object] = self._publication or nullcontext()
        self._log = EffectLog(_logger)
        self.inventories = InventoryRequests(bus, state, self._settings, self._forget_unresponsive)
        self._budgets = EventBudgets(self._settings.budget)
        #: (worker, rank) -> bytes since budgets were last looked at
        self._said: dict[tuple[str, int], int] = {}
        self._lapses = LeaseExpiry(
            self._settings.lease_ended_seconds,
            self._settings.lease_missing_seconds,
            self._settings.lease_settling_seconds,
        )
        self._introductions, self._superseded = Introductions(), SupersededEpochs()
        self._silence = LogSilence(self._settings.log_silence_seconds)
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()
        #: set when a part of the service has ended by an error, which `failure` is
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None
        #: the end of the log when this service started; ready once it is folded in
        self._target = 0
        self._last_in_stream = 0
        self._heard_at = time.monotonic()
        #: broker's time of the newest message, and when it came by our monotonic clock
        self._newest_ns, self._newest_at = 0, 0.0
        #: the newest message of the log, or where the snapshot was taken before there is one
        self._newest: Message | Anchor | None = None
        self.loaded: LoadedSnapshot | None = None
        self._writer: SnapshotWriter | None = None
        if snapshots is not None:
            self._writer = SnapshotWriter(
                bus,
                snapshots,
                name,
                self._cut,
                self._cut_sequence,
                lambda: state.stats().memory_bytes,
            )
        #: None where no letters are asked for
        self.letters = None if dead_letters is None else DeadLetterWriter(bus, name, dead_letters)
        #: publish to fold in ns, of the latest live messages
        self._delays_ns: deque[int] = deque(maxlen=4096)
        #: at most one for each epoch of an instance: the fold proposes an expiry once
        self._records: asyncio.Queue[ControlRecord] = asyncio.Queue()
        self.num_control_records = 0
        #: while the fold stands still, such as for an audit in another thread: what came meanwhile
        self._held_back: list[Callable[[], None]] | None = None
        self._standing, self._rest_until = asyncio.Lock(), 0.0
        self._audited_at = time.monotonic()

    async def __aenter__(self) -> Self:
        try:
            self._target = await self._bus.last_sequence(KV_EVENTS)
            self._last_in_stream = self._target
            self._heard_at = time.monotonic()
            leases = self._bus.keys(LEASES_BUCKET)
            self._subscriptions.append(await watch_leases(leases, self._on_lease))
            if self._writer is not None:
                await self._start_from_snapshot()
            if self.letters is not None:
                await self.letters.begin(self._target)
            first = self.state.stream_sequence + 1
            self._subscriptions.append(
                await self._bus.follow(KV_EVENTS, first, self._on_message, self._on_hole)
            )
        except BaseException:
            await self._close()
            raise
        self._check_ready()
        for part in (
            self._poll(),
            self._publish_records(),
            self.inventories.run(),
            self._ask_unknown(),
        ):
            self._start(part)
        if self._writer is not None:
            self._start(self._writer.run())
        if self.letters is not None:
            self._start(self.letters.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._close()

    async def _close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._publication:
            self._publication.end()

    # --- what others ask ----------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether everything that was in the log when the service started is folded in."""
        return self._ready.is_set()

    @property
    def why_not_ready(self) -> str:
        """How far it has come."""
        behind = self.lag.stream_sequences
        at = f"at {self.state.stream_sequence} of the stream, {behind} behind"
        away = "" if self.connected else "; the broker is away"
        return f"the index is catching up: {at}{away}"

    async def wait_ready(self) -> None:
        """Return when ready."""
        await self._ready.wait()

    @property
    def connected(self) -> bool:
        """Whether the broker is there."""
        return self._bus.connected

    @property
    def lag(self) -> Lag:
        """How old answers may be."""
        behind = max(self._last_in_stream - self.state.stream_sequence, 0)
        return Lag(behind, time.monotonic() - self._heard_at)

    def convergence_ms(self) -> dict[str, float]:
        """Return how long the latest live messages took from the broker's store to the fold.

        By the broker's clock, which is known to half of an exchange with it (BrokerClock).
        """
        delays = sorted(self._delays_ns)
        if not delays:
            return {}
        return {
            name: round(delays[int(part * (len(delays) - 1))] / 1e6, 3)
            for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        }

    def broker_ns(self) -> int:
        """Return what time it is at the broker, by which messages have their times."""
        offset_ns = self._bus.clock_offset_ns
        return self._broker_ns() if offset_ns is None else time.monotonic_ns() + offset_ns

    @property
    def snapshots(self) -> SnapshotStatus | None:
        """What is known of snapshots; None where they are not asked for."""
        return None if self._writer is None else self._writer.status

    # --- snapshots ----------------------------------------------------------------------------

    async def _start_from_snapshot(self) -> None:
        objects = self._bus.objects(SNAPSHOTS_BUCKET)
        self.loaded = await load_newest(self._bus, objects, self.state, self._window)
        if self.loaded is None:
            _logger.info("no snapshot to start from: reading the whole log")
            return
        about, seconds = self.loaded.about, self.loaded.seconds
        self._newest = about.anchor
        if about.anchor is not None:
            self._newest_ns, self._newest_at = about.anchor.broker_ns, time.monotonic()
        _logger.info(
            "snapshot %s of %s: %d blocks, %.1f MB, in %.2f s; %d messages to follow",
            self.loaded.name,
            about.writer,
            about.num_blocks,
            self.loaded.num_bytes / 1e6,
            seconds,
            self._target - about.stream_sequence,
        )

    def _cut_sequence(self) -> int:
        return self.state.stream_sequence if self.is_ready else 0

    def _cut(self, room: Room) -> SnapshotCut | None:
        """Copy the fold between two messages; while this runs nothing is folded in."""
        if not self.is_ready:
            return None
        started = time.perf_counter()
        export = self.state.export(room)
        newest = self._newest
        about = SnapshotInfo(
            stream_sequence=self.state.stream_sequence,
            anchor=Anchor.of(newest) if isinstance(newest, Message) else newest,
            state_digest=self.state.state_digest(),
            num_blocks=self.state.stats().num_blocks,
            taken_ns=time.time_ns(),
            writer=self._name,
        )
        return SnapshotCut(about, export, time.perf_counter() - started)

    # --- the log ------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        if self._held_back is not None:
            self._held_back.append(partial(self._on_message, message))
            return
        stimulus = stimulus_of(message)
        self._handle(stimulus)
        if isinstance(stimulus, BatchArrived):
            key = stimulus.decoded.batch.worker, stimulus.decoded.batch.rank
            self._said[key] = self._said.get(key, 0) + len(message.payload)
        if self.letters is not None and (poison := unreadable_message_of(stimulus)) is not None:
            self.letters.put(message, poison)
        self._newest = message
        self._newest_ns, self._newest_at = message.broker_ns, time.monotonic()
        if self.is_ready:
            if (offset_ns := self._bus.clock_offset_ns) is not None:
                delay_ns = time.monotonic_ns() + offset_ns - message.broker_ns
                self._delays_ns.append(max(delay_ns, 0))
        else:
            self._check_ready()

    def _on_hole(self, expected: int, got: int) -> None:
        if self._held_back is not None:
            self._held_back.append(partial(self._on_hole, expected, got))
            return
        _logger.warning("the log goes on at %d, expected %d", got, expected)
        self._handle(HoleSeen(expected, got))
        # a log that was lost and begun anew ends earlier, and its end is our new target
        self._target = min(self._target, max(got - 1, 0)) if got < expected else self._target
        self._check_ready()

    def _check_ready(self) -> None:
        if not self.is_ready and self.state.stream_sequence >= self._target:
            self._ready.set()
            self._said.clear()  # all of the log at once is nobody's storm
            self._update_trust()
            self._publish_pulse()
            for wanted in self.state.fleet.wanted_inventories():
                self._execute(wanted)

    @asynccontextmanager
    async def still(self) -> AsyncGenerator[None, None]:
        """Fold nothing in for a while, so that all that is read is of one stream sequence.

        Another thread may read meanwhile. What comes waits; for most of the time the fold goes on,
        however often it is asked to stand still.
        """
        async with self._standing:
            await asyncio.sleep(self._rest_until - time.monotonic())
            began = time.monotonic()
            with self._held():
                yield
            seconds = time.monotonic() - began
            self._rest_until = began + (1 + REST_RATIO) * seconds

    @contextmanager
    def _held(self) -> Iterator[list[Callable[[], None]]]:
        """Yield what comes and is not folded in; in the end it is."""
        self._held_back = held_back = list[Callable[[], None]]()
        try:
            yield held_back
        finally:
            self._held_back = None
            for come in held_back:
                come()

    def _handle(self, stimulus: Stimulus) -> None:
        if self._held_back is not None:
            self._held_back.append(partial(self._handle, stimulus))
            return
        with self._window:
            effects = self.state.handle(stimulus)
        for effect in effects:
            self._execute(effect)

    def _execute(self, effect: Effect) -> None:
        match effect:
            case PublishControl(record):
                self._records.put_nowait(record)
            case RequestInventory(instance):
                if self.is_ready:
                    self.inventories.want(instance)
            case RequestIntroduction(instance):
                self._introductions.spoke(instance)
            case ReportOldEpoch(instance, epoch, newer):
                if self.is_ready:
                    self._superseded.spoke(instance, epoch, newer)
            case ReportPassed(instance, epoch, seq, at_seq):
                if self.is_ready:
                    self._superseded.passed(instance, epoch, seq, at_seq)
            case _:
                at = self.state.stream_sequence
                self._log.report(effect, at, is_history=not self.is_ready)

    # --- what this replica finds -----------------------------------------------------------------

    def _check_budgets(self) -> None:
        """Settle what was said since the last look; at once for each message would cost as much."""
        said, broker_ns = self._said, self._broker_ns()
        self._said = {}
        for key, num_bytes in said.items():
            instance = InstanceId(*key)
            known = self.state.instance(instance)
            if known is None:  # a name that somebody speaks in costs no bucket
                continue
            if not self._budgets.spend(instance, num_bytes, broker_ns) and self.is_ready:
                self._propose(instance, known.epoch, "throttled")

    def _forget_unresponsive(self, instance: InstanceId) -> None:
        known = self.state.instance(instance)
        if known is not None and self._bus.connected:
            self._propose(instance, known.epoch, "forgotten")

    def _release_throttled(self) -> None:
        for instance, epoch in self._budgets.due(self.state.fleet.throttled(), self._broker_ns()):
            self._propose(instance, epoch, "released")

    async def _audit_if_due(self) -> None:
        """Count the index anew in a thread; questions are answered meanwhile, messages wait."""
        seconds = self._settings.audit_seconds
        if not seconds or time.monotonic() - self._audited_at < seconds:
            return
        async with self._standing:
            with self._held() as held_back:
                broken = await asyncio.to_thread(self.state.audit)
                self._audited_at = time.monotonic()
                if broken:
                    _logger.error("the memory of the index has changed by itself: %s", broken[:8])
                    held_back.insert(0, partial(self._handle, AuditFailed(broken)))

    def _propose(self, instance: InstanceId, epoch: int, kind: str) -> None:
        self._handle(Proposed(instance, epoch, kind, time.time_ns(), self._name))

    # --- what runs beside ---------------------------------------------------------------------

    def _start(self, part: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(part)
        task.add_done_callback(self._on_end)
        self._tasks.append(task)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("a part of the index service ended", exc_info=error)
            self.failure = error
            self.failed.set()

    async def _poll(self) -> None:
        """Look at the clock: contact with the broker, silence, ended leases."""
        while True:
            await asyncio.sleep(self._settings.poll_seconds)
            try:
                self._last_in_stream = await self._bus.last_sequence(KV_EVENTS)
                self._heard_at = time.monotonic()
                if not self.is_ready and await self._bus.first_sequence(KV_EVENTS) > self._target:
                    # all that we waited for has aged out of the log: the next message tells a hole
                    self._target = 0
                    self._check_ready()
            except (BusUnavailable, StreamRefused) as error:
                _logger.debug("the end of the log is unknown: %s", error)
            self._update_trust()
            if self.is_ready:
                self._check_silence()
                self._expire_leases()
                self._end_superseding()
                self._check_budgets()
                self._release_throttled()
                await self._audit_if_due()
            self._publish_pulse()

    def _publish_pulse(self) -> None:
        """Tell readers in other processes how we are doing."""
        if self._publication:
            self._publication.publish_status(
                WriterStatus(
                    self.is_ready,
                    self._bus.connected,
                    self._last_in_stream,
                    self._heard_at,
                    self.convergence_ms(),
                    self.broker_ns() - time.monotonic_ns(),
                )
            )

    def _update_trust(self) -> None:
        self._live.update_trust(not self.is_ready, self._silent() if self.is_ready else frozenset())

    def _silent(self) -> frozenset[InstanceId]:
        """Return who has said nothing for too long, all by the broker's clock."""
        return self.state.fleet.silent_since(
            self._broker_ns() - int(self._settings.stale_seconds * 1e9)
        )

    def _broker_ns(self) -> int:
        """Return the broker's time by our monotonic clock: no two machines' clocks are compared."""
        return int(self._newest_ns + (time.monotonic() - self._newest_at) * 1e9)

    def _check_silence(self) -> None:
        if self._silence.is_silent(self._newest_at, self._bus.connected, time.monotonic()):
            self._conditions.begin(LOG_NOT_STORED, NOTHING_COMES, source="index")
        else:
            self._conditions.end(LOG_NOT_STORED, source="index")

    def _expire_leases(self) -> None:
        # a cluster between two leaders takes no renewals, though we are connected to it
        silent_seconds = time.monotonic() - self._heard_at
        is_heard = silent_seconds < max(NO_LEADER_SECONDS, 4 * self._settings.poll_seconds)
        is_connected = self._bus.connected and is_heard
        due = self._lapses.due(self.state.fleet.alive(), is_connected, time.monotonic())
        for instance, epoch in due:
            self._handle(LeaseExpired(instance, epoch, time.time_ns(), self._name))

    def _on_lease(self, change: LeaseChange) -> None:
        if change.kind == "alive":
            self._silence.renewed(time.monotonic())
        self._lapses.apply(change)
        self._superseded.take(change)

    def _end_superseding(self) -> None:
        """Have epochs end in which no one who lives can speak, so that it begins one above."""
        fleet = self.state.fleet
        for name in fleet.gone.keys() & self._lapses.held.keys():
            epoch = fleet.instances[name].epoch
            if self._lapses.held[name] == epoch:
                self._superseded.ended(name, epoch)
        for instance, epoch, at_seq in self._superseded.due():
            known = self.state.instance(instance)
            if known is None or known.epoch != epoch or at_seq not in (0, known.seq):
                continue
            _logger.warning(
                "%s lives, and what it says has no effect because of what was said in its name in"
                " epoch %d: it is to begin one above",
                instance,
                epoch,
            )
            if known.trust is not Trust.gone:
                self._handle(LeaseExpired(instance, epoch, time.time_ns(), self._name))
                continue
            # it has ended in the log already, which its instance has not seen
            worker, rank = instance
            now_ns, by = time.time_ns(), self._name
            self._records.put_nowait(
                ControlRecord(WIRE_VERSION, worker, rank, epoch, "expired", "lease", by, now_ns)
            )

    async def _ask_unknown(self) -> None:
        """Have living instances that are not known say what they are, a few at a time."""
        while True:
            await asyncio.sleep(self._settings.poll_seconds)
            if self.is_ready and self._bus.connected:
                known, most = self.state.fleet.instances, self._settings.max_introductions
                now, leased = time.monotonic(), self._lapses.held
                due = self._introductions.due(leased, known.__contains__, most, now)
                await asyncio.gather(*map(self.inventories.ask_once, due))

    async def _publish_records(self) -> None:
        publisher = self._bus.publisher(KV_EVENTS)
        while True:
            record = await self._records.get()
            try:
                await publisher.publish(control_subject(record.instance), encode(record))
                await publisher.flush()
                self.num_control_records += 1
                self._conditions.end(LOG_NOT_STORED, source="records")
            except (StreamRefused, BusUnavailable) as error:
                reason = f"the record about {record.instance} is not in the log: {error}"
                self._conditions.begin(LOG_NOT_STORED, reason, source="records")
                await asyncio.sleep(self._settings.record_retry_seconds)
                self._records.put_nowait(record)  # proposed once only; again does no harm
