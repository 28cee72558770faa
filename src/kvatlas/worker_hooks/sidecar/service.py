"""What runs in a sidecar: it speaks for the instance on the bus and moves its blocks.

    ring -> EngineStateTracker -> Outbox -> Publisher   what the engine does becomes its events
    bus  -> inventory, lease requests          what readers and peers ask
    engine -> ChannelServer -> BlockExchange   what the engine asks

Everything but the bus works while the broker is away, and what happened meanwhile is published
when it is back.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kvatlas.common.backoff import Backoff
from kvatlas.common.line_writing import num_dropped_lines
from kvatlas.events.bus import Bus, KeyValue, Message, Publisher
from kvatlas.events.codec import decode_control, encode
from kvatlas.events.epochs import allocate_epoch, is_plausible
from kvatlas.events.leases import RELEASE_SECONDS, LeaseKeeper, lease_holder
from kvatlas.events.streams import EPOCHS_BUCKET, KV_EVENTS, LEASES_BUCKET
from kvatlas.events.subjects import (
    control_subject,
    events_subject,
    inventory_subject,
    lease_subject,
)
from kvatlas.schemas.conditions import Conditions, Problems, log_changes
from kvatlas.schemas.errors import (
    BusUnavailable,
    Fenced,
    MalformedBatch,
    StreamRefused,
)
from kvatlas.schemas.kv_events import MUTED_WIRE_VERSION, WorkerDown, WorkerUp
from kvatlas.schemas.transfer import MissingReason, encode_transfer
from kvatlas.worker_hooks.reporting.engine_pulse import LOOK_SECONDS, EnginePulse
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.reporting.outbox import Outbox
from kvatlas.worker_hooks.reporting.reporter import Reporter
from kvatlas.worker_hooks.reporting.ring import RingReader
from kvatlas.worker_hooks.sidecar.channel import (
    Answer,
    ChannelServer,
    Flush,
    Flushed,
    PullBlocks,
    PullEnded,
    Question,
    SidecarStatus,
    StatusRequest,
)
from kvatlas.worker_hooks.sidecar.exchange import BlockExchange, missing_all
from kvatlas.worker_hooks.sidecar.metrics import MISSING, metrics_server
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from kvatlas.worker_hooks.transfer.lease_server import NOT_READY
from kvatlas.worker_hooks.transfer.memory import MemoryFabric
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pool_watch import PoolWatch

#: how often the ring is looked at while events come
POLL_SECONDS = 0.001
#: without events for so long, we sleep until the engine wakes us, or as long as SLEEP_SECONDS
QUIET_SECONDS, SLEEP_SECONDS = 0.005, 0.05
#: bytes of the ring handled before other tasks run: a few milliseconds
SLICE_BYTES = 128 * 1024
RETRY_SECONDS, LAST_RETRY_SECONDS = 0.2, 5.0
#: how often the serve pool is looked at for blocks that came and went
POOL_SECONDS = 0.02
#: before the inventory that follows a batch which the broker refuses: what refuses one may refuse
#: that as well, and then as often as it is tried
REFUSED_SECONDS, MAX_REFUSED_SECONDS = 1.0, 60.0
#: reasons of missing blocks that are told apart: peers name them
MAX_REASONS = 32
#: an expired instance does not come back faster than this
MIN_EPOCH_SECONDS = 1.0
#: what an index needs to act on an ended lease; the key lives that much shorter, so that a worker's
#: blocks leave the answers within its lease time
NOTICE_SECONDS = 1.0

#: why a sidecar ended that a newer epoch has replaced
FENCED = "fenced"

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Sidecar:
    """One instance's sidecar. `run` returns why it ended."""

    def __init__(
        self,
        options: SidecarOptions,
        ring: RingReader,
        bus: Bus,
        pool: ServePool | None = None,
        fabric: MemoryFabric | None = None,
    ) -> None:
        self._options, self._ring, self._bus = options, ring, bus
        self._pool, self._fabric = pool, fabric
        self._instance = options.instance
        self._subject = events_subject(options.model, options.instance)
        tracker = EngineStateTracker(
            options.model,
            options.descriptor,
            options.groups,
            options.fleet_key,
            include_tokens=options.include_tokens,
            counts_copies=options.counts_copies,
            has_pool=options.tells_pool,
            tells_mutes=options.wire_version >= MUTED_WIRE_VERSION,
            standing_doubt=options.standing_doubt,
        )
        up = WorkerUp(options.worker_info())
        self._outbox = Outbox(
            options.instance,
            up,
            options.max_outbox_bytes,
            options.coalesce_bytes,
            options.coalesce_seconds,
            options.max_outbox_seconds,
            options.wire_version,
        )
        self._reporter = Reporter(tracker, self._outbox, options.namespace_budgets)
        self._publisher: Publisher | None = None
        self._exchange: BlockExchange | None = None
        #: of the last batch that the publisher has accepted in this epoch
        self._accepted_seq = 0
        #: pulsed whenever a batch has been accepted; set whenever there is something to publish
        self._progress, self._work = asyncio.Event(), asyncio.Event()
        self._is_epoch_over = asyncio.Event()
        #: an epoch of this name that was seen in the log; ours has to be above
        self._seen_epoch = 0
        #: pulls of the engine under way; none begins once it has said goodbye
        self._num_pulls, self._is_leaving = 0, asyncio.Event()
        self._is_lease_free = asyncio.Event()
        self._is_lease_free.set()
        self._refusals = Backoff(REFUSED_SECONDS, MAX_REFUSED_SECONDS, 2 * MAX_REFUSED_SECONDS)
        self._stopping: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        #: "missing_REASON", of blocks that a pull did not bring, from the first one on
        self._counters = dict.fromkeys(
            [
                "refused_batches",
                "published_batches",
                "epochs",
                "superseded",
                "pulled_blocks",
                "engine_stalls",
            ],
            0,
        )

    def stop(self, reason: str) -> None:
        """Let `run` flush and return; only the first reason counts."""
        if not self._stopping.done():
            self._stopping.set_result(reason)

    async def run(self) -> str:
        """Serve until stopped or fenced; then publish what is left and WorkerDown."""
        self._ring.want_listing()
        path = Path(self._options.socket_path)
        metrics = metrics_server(
            self._options.metrics_address,
            self._instance,
            lambda: self._status(0),
            self._bus.conditions,
        )
        async with asyncio.TaskGroup() as tasks, ChannelServer(path, self._answer), metrics:
            draining = tasks.create_task(self._drain_loop())
            publication = tasks.create_task(self._digest_loop())
            watching = tasks.create_task(self._watch_engine())
            connection = tasks.create_task(self._connect())
            reason = await self._stopping
            draining.cancel()
            publication.cancel()
            watching.cancel()
            if reason != FENCED:
                await self._publish_down(reason)
                await self._finish_transfers()
            connection.cancel()
        return reason

    # --- from the ring to the outbox -------------------------------------------------------

    async def _drain_loop(self) -> None:
        last_busy = 0.0
        woken, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._ring.pipe, woken.set)
        try:
            while True:
                now = time.monotonic()
                if self._drain_slice():
                    last_busy = now
                    # more may wait already; let the others run in between
                    await asyncio.sleep(0 if self._ring.waiting_bytes else POLL_SECONDS)
                elif now - last_busy < QUIET_SECONDS:
                    await asyncio.sleep(POLL_SECONDS)
                elif self._ring.fall_asleep():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(SLEEP_SECONDS):
                            await woken.wait()
                    self._ring.wake_up()
                    woken.clear()
                else:  # something waits that cannot be read, yet or ever
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            loop.remove_reader(self._ring.pipe)

    def _drain_slice(self) -> bool:
        """Report what waits in the ring, up to a slice; return whether there was anything."""
        records, now = self._ring.read(SLICE_BYTES), time.monotonic()
        for happened in self._reporter.keep_budgets(now):
            _logger.warning("%s: %s", self._instance, happened)
            self._work.set()
        if not records:
            return False
        reported = self._reporter.report(records, self._ring.writer_lists, now)
        if reported.wants_listing:
            self._ring.want_listing()
        if reported.is_restarted:
            self._is_epoch_over.set()
        self._work.set()
        return True

    async def _digest_loop(self) -> None:
        """Say now and then what is held, though nothing happens."""
        last_inventory = time.monotonic()
        while True:
            await asyncio.sleep(self._options.digest_seconds)
            self._outbox.age_out(time.monotonic())
            if not self._bus.connected or self._outbox.epoch is None:
                continue
            if time.monotonic() - last_inventory >= self._options.inventory_seconds:
                self._reporter.promise_inventory()
                last_inventory = time.monotonic()
            else:
                self._reporter.put_digests()
            self._work.set()

    async def _watch_engine(self) -> None:
        """Say when the engine stops giving signs of life, and when it gives them again."""
        pulse = EnginePulse(self._options.engine_silent_seconds)
        while True:
            self._ring.beat()
            if pulse.look(self._ring.beats, self._ring.head, time.monotonic()):
                is_stalled = pulse.is_stalled
                self._counters["engine_stalls"] += is_stalled
                _logger.warning(
                    "%s: the engine %s",
                    self._instance,
                    f"has given no sign of life for {pulse.silence_seconds:.0f} s"
                    if is_stalled
                    else "gives signs of life again",
                )
                self._reporter.stall(pulse.silence_seconds if is_stalled else None)
                self._work.set()
            await asyncio.sleep(LOOK_SECONDS)

    def _retract(self, hashes: bytes) -> None:
        """A peer asked for blocks that are not there: tell the index, if it believes in them."""
        self._reporter.retract(hashes)
        self._work.set()

    # --- the bus ---------------------------------------------------------------------------

    async def _connect(self) -> None:
        """Join the bus, however long the broker takes, and serve on it."""
        async with self._bus, asyncio.TaskGroup() as tasks:
            self._publisher = self._bus.publisher(KV_EVENTS)
            tasks.create_task(self._publish_loop())
            tasks.create_task(self._live())
            tasks.create_task(self._watch_control())
            await self._bus.serve(inventory_subject(self._instance), self._answer_inventory)
            if self._pool is not None:
                await self._bus.serve(lease_subject(self._instance), self._answer_lease)
                tasks.create_task(self._exchange_blocks(self._pool))
                if self._options.tells_pool:
                    tasks.create_task(self._watch_pool(PoolWatch(self._pool)))

    async def _live(self) -> None:
        """Hold one epoch after the other; a new one begins when the last was declared dead.

        None begins, and the lease is given back, once the instance has said that it leaves.
        """
        while not self._is_leaving.is_set():
            began = time.monotonic()
            epoch = await self._new_epoch()
            keys = self._bus.keys(LEASES_BUCKET)
            ttl_seconds = max(self._options.lease_ttl_seconds - NOTICE_SECONDS, 1.0)
            self._is_lease_free.clear()
            try:
                async with LeaseKeeper(
                    keys, self._instance, epoch, self._on_fenced, ttl_seconds=ttl_seconds
                ):
                    if self._is_leaving.is_set():
                        return
                    self._begin_epoch(epoch)
                    await self._is_epoch_over.wait()
                if self._is_leaving.is_set():
                    return
                if self._seen_epoch > epoch:
                    await self._yield_to_holder(keys, epoch)
            except Fenced as fenced:
                self._on_fenced(fenced)
                return
            finally:
                self._is_lease_free.set()
            await asyncio.sleep(max(began + MIN_EPOCH_SECONDS - time.monotonic(), 0))

    async def _new_epoch(self) -> int:
        keys = self._bus.keys(EPOCHS_BUCKET)

        async def allocate() -> int:
            now_ms = time.time_ns() // 1_000_000
            return await allocate_epoch(keys, self._instance, now_ms, above=self._seen_epoch)

        return await _retrying("no epoch", allocate)

    async def _yield_to_holder(self, keys: KeyValue, epoch: int) -> None:
        """Raise Fenced if a higher epoch of this name lives: then this process is not the one."""

        async def find() -> int | None:
            return await lease_holder(keys, self._instance, epoch)

        holder = await _retrying("no sight of the lease", find)
        if holder is not None and holder > epoch:
            raise Fenced(str(self._instance), epoch, holder)

    def _begin_epoch(self, epoch: int) -> None:
        self._is_epoch_over.clear()
        self._reporter.begin_epoch(epoch)
        self._accepted_seq = 0
        self._counters["epochs"] += 1
        self._pulse()
        if self._exchange is not None:
            self._exchange.begin_epoch(epoch)
        self._work.set()

    def _on_fenced(self, fenced: Fenced) -> None:
        _logger.error(
            "%s: another process runs under this worker's name, which has to be unique; "
            "this one stops",
            fenced,
        )
        self.stop(FENCED)

    async def _watch_control(self) -> None:
        """Notice that others have declared our epoch dead: what it still says counts no more."""

        def on_message(message: Message) -> None:
            try:
                record = decode_control(message.payload)
            except MalformedBatch:
                return
            epoch = self._outbox.epoch
            if record.instance != self._instance or epoch is None:
                return
            if record.kind == "expired" and record.epoch > max(epoch, self._seen_epoch):
                self._on_superseded(epoch, record.epoch, message.broker_ns // 1_000_000)
            if record.epoch != epoch:
                return
            if record.kind == "expired":
                _logger.warning("epoch %s was declared dead: %s", record.epoch, record.reason)
                self._is_epoch_over.set()
            else:
                _logger.error("this instance is %s: %s", record.kind, record.reason)

        async def follow() -> None:
            first = await self._bus.last_sequence(KV_EVENTS) + 1
            subject = control_subject(self._instance)
            await self._bus.follow(KV_EVENTS, first, on_message, subjects=subject)

        await _retrying(f"cannot follow {KV_EVENTS}", follow)

    def _on_superseded(self, epoch: int, higher: int, broker_ms: int) -> None:
        """Begin an epoch above one that was seen and is over: ours is ignored because of it."""
        if not is_plausible(higher, epoch, max(broker_ms, time.time_ns() // 1_000_000)):
            _logger.error("a record about epoch %d, far ahead of the clock, is ignored", higher)
            return
        _logger.warning(
            "epoch %d of this name was seen, which is over: epoch %d is ignored because of it, and"
            " a new one begins",
            higher,
            epoch,
        )
        self._seen_epoch = higher
        self._counters["superseded"] += 1
        self._is_epoch_over.set()

    async def _publish_loop(self) -> None:
        assert self._publisher is not None
        while True:
            now = time.monotonic()
            batch = self._outbox.next_batch(now, time.time_ns())
            if batch is not None:
                try:
                    await self._publisher.publish(self._subject, encode(batch))
                except StreamRefused as error:
                    self._on_refused(batch.seq, error)
                if batch.epoch == self._outbox.epoch:
                    self._accepted_seq = batch.seq
                self._counters["published_batches"] += 1
                self._pulse()
            elif self._owes_inventory:
                if pause := self._refusals.seconds_left(now):
                    await self._wait_for_work(pause)
                else:
                    self._reporter.put_inventory()
            elif (due := self._outbox.seconds_until_due(now)) is not None:
                await asyncio.sleep(due)
            else:
                await self._wait_for_work(None)

    @property
    def _owes_inventory(self) -> bool:
        return self._outbox.is_lost and self._outbox.is_empty and not self._stopping.done()

    async def _wait_for_work(self, seconds: float | None) -> None:
        """Return when something was put into the outbox, or after so many seconds."""
        self._work.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._work.wait()

    def _on_refused(self, seq: int, error: StreamRefused) -> None:
        """A batch is gone for good, a gap that readers see; the inventory after it heals.

        It is put off for longer each time, and each putting off is logged once.
        """
        self._counters["refused_batches"] += 1
        self._outbox.lose(seq)
        now = time.monotonic()
        if not self._refusals.seconds_left(now):
            pause = self._refusals.next(now)
            _logger.error(
                "the broker refuses events of %s: %s; the next inventory in %g s",
                self._instance,
                error,
                pause,
            )

    async def _answer_inventory(self, _payload: bytes) -> bytes:
        """Publish the inventory, unless one still waits; answer [sequence of its first part]."""
        first_seq = self._reporter.promise_inventory()
        self._work.set()
        return msgspec.msgpack.encode([first_seq])

    # --- blocks ----------------------------------------------------------------------------

    async def _exchange_blocks(self, pool: ServePool) -> None:
        await self._until(lambda: self._outbox.epoch is not None)
        epoch = self._outbox.epoch
        assert epoch is not None
        async with BlockExchange(
            self._options, pool, epoch, self._bus.request, self._retract, self._fabric
        ) as exchange:
            exchange.begin_epoch(self._outbox.epoch or epoch)  # it may be another by now
            self._exchange = exchange
            self._pulse()
            await asyncio.get_running_loop().create_future()

    async def _answer_lease(self, payload: bytes) -> bytes:
        """Answer a peer; while the transport loads, that it has to come again."""
        if self._exchange is None:
            return encode_transfer(NOT_READY)
        return await self._exchange.answer_lease(payload)

    async def _watch_pool(self, watch: PoolWatch) -> None:
        while True:
            came, left = watch.poll()
            if came or left:
                self._reporter.move_pooled(came, left)
                self._work.set()
            await asyncio.sleep(POOL_SECONDS)

    # --- the engine's questions ------------------------------------------------------------

    async def _answer(self, question: Question) -> Answer:
        match question:
            case PullBlocks() if self._is_leaving.is_set():
                return missing_all(question, MissingReason.no_transport)
            case PullBlocks():
                self._num_pulls += 1
                try:
                    return await self._pull(question)
                finally:
                    self._num_pulls -= 1
            case Flush(id):
                await self._flush()
                return Flushed(id, self._outbox.epoch or 0, self._outbox.last_seq)
            case StatusRequest(id):
                return self._status(id)

    async def _pull(self, question: PullBlocks) -> Answer:
        """Pull blocks. The transport loads for seconds after the start: wait for it, if in time."""
        began = time.monotonic()
        if self._exchange is None and self._pool is not None and self._bus.connected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(question.deadline_ms / 1000):
                    await self._until(lambda: self._exchange is not None)
        left_ms = question.deadline_ms - int(1000 * (time.monotonic() - began))
        if self._exchange is None or left_ms <= 0:
            is_loading = self._pool is not None and self._exchange is None
            reason = MissingReason.not_ready if is_loading else MissingReason.no_transport
            ended = missing_all(question, reason)
        else:
            asked = msgspec.structs.replace(question, deadline_ms=left_ms)
            ended = await self._exchange.pull(asked)
        self.count_pull(ended)
        return ended

    def count_pull(self, ended: PullEnded) -> None:
        """Count what a pull brought, and what it did not bring for which reason."""
        self._counters["pulled_blocks"] += len(ended.held)
        for reason, number in Counter(reason for _, reason in ended.missing).items():
            name = f"{MISSING}{reason}"
            if name not in self._counters and (
                not reason.isidentifier() or self._num_reasons >= MAX_REASONS
            ):
                name = f"{MISSING}other"
            if name not in self._counters:
                _logger.warning("a pull lacks %s blocks: %s; counted from now on", number, reason)
            self._counters[name] = self._counters.get(name, 0) + number

    @property
    def _num_reasons(self) -> int:
        return sum(name.startswith(MISSING) for name in self._counters)

    async def _flush(self) -> None:
        """Return when the bus has stored all that the ring has now."""
        await self._drain_written()
        await self._until(lambda: self._outbox.epoch is not None)
        epoch: int | None = None
        while epoch != self._outbox.epoch or self._outbox.is_lost:
            # what is lost is made good by an inventory, and a stopping sidecar sends none any more
            await self._until(lambda: not self._outbox.is_lost)
            epoch = self._outbox.epoch
            await self._until_accepted()
        await self._until_stored()

    async def _drain_written(self) -> None:
        """Report what is in the ring now, and leave others their turn; not what comes meanwhile."""
        end = self._ring.head
        # once in any case: a loss that no record follows is behind the last record
        while self._drain_slice() and self._ring.tail < end:  # noqa: ASYNC110 - the ring has it
            await asyncio.sleep(0)

    async def _until_accepted(self) -> None:
        """Return when the publisher has all that is in the outbox now, or the epoch is over."""
        epoch, last_seq = self._outbox.epoch, self._outbox.seal()
        self._work.set()
        await self._until(lambda: self._accepted_seq >= last_seq or self._outbox.epoch != epoch)

    async def _until_stored(self) -> None:
        assert self._publisher is not None
        with contextlib.suppress(StreamRefused):  # what it lost is repaired where it publishes
            await self._publisher.flush()

    def _pulse(self) -> None:
        """Wake whoever waits for progress."""
        self._progress.set()
        self._progress.clear()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._progress.wait()

    def unsent(self) -> str:
        """Return what a sidecar that ends now leaves unsaid; from any thread."""
        num_batches = max(self._outbox.last_seq - self._accepted_seq, 0)
        ring, waiting = self._ring.waiting_bytes, self._outbox.waiting_bytes
        return f"{num_batches} batches ({waiting} bytes) and {ring} bytes of the ring"

    def _status(self, question_id: int) -> SidecarStatus:
        return SidecarStatus(
            question_id,
            self._outbox.epoch or 0,
            self._outbox.last_seq,
            self._bus.connected,
            self._reporter.num_blocks,
            self._outbox.waiting_bytes,
            self._exchange.transport if self._exchange is not None else "",
            self._counters | self._reporter.counters() | {"dropped_log_lines": num_dropped_lines()},
        )

    async def _publish_down(self, reason: str) -> None:
        """Publish what is left; gives up after `stop_seconds` when the broker is away."""
        with contextlib.suppress(TimeoutError, BusUnavailable):
            async with asyncio.timeout(self._options.stop_seconds):
                await self._drain_written()
                if self._outbox.epoch is None:
                    return  # the fleet does not know this instance
                self._outbox.add([WorkerDown(reason)])
                await self._until_accepted()
                await self._until_stored()

    async def _finish_transfers(self) -> None:
        """Let peers read what they have leases of, and pulls under way end; begin no new ones.

        For `drain_seconds` at most: a peer that has died holds its leases to their end.
        """
        end_at = time.monotonic() + self._options.drain_seconds
        self._is_leaving.set()
        # who has said that it leaves and keeps its lease is taken for one that somebody else
        # said it of, and asked to begin an epoch
        self._is_epoch_over.set()
        if self._exchange is not None:
            self._exchange.grant_no_more()
        while self._num_transfers and time.monotonic() < end_at:
            self._ring.beat()
            await asyncio.sleep(POOL_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._is_lease_free.wait()

    @property
    def _num_transfers(self) -> int:
        lent = 0 if self._exchange is None else self._exchange.num_leases
        return lent + self._num_pulls


async def _retrying(problem: str, action: Callable[[], Awaitable[T]]) -> T:
    """Return what the action returns once the broker lets it; say each reason for a delay once.

    What is refused is tried again ever later, as an operator has to do something about it.
    """
    conditions, pauses = Conditions(), Backoff(RETRY_SECONDS, LAST_RETRY_SECONDS)
    log_changes(conditions, _logger)
    trouble = Problems(conditions, problem)
    while True:
        try:
            found = await action()
        except (BusUnavailable, StreamRefused) as error:
            trouble.add(str(error))
            is_refused = isinstance(error, StreamRefused)
            await asyncio.sleep(pauses.next(time.monotonic()) if is_refused else RETRY_SECONDS)
        else:
            trouble.end()
            return found
