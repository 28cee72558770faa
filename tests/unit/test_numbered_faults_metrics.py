"""F78: whatever goes wrong moves a metric with a name. A table: which fault, which metric.

Index and router are real, over a bus in memory. A row drives its fault and says what has to have
moved since just before. What is counted beside an engine: test_numbered_faults_counters.py.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from prometheus_client import generate_latest

from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS, decisions_stream, events_stream
from kvatlas.events.subjects import inventory_subject
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.budgets import BudgetSettings, EventBudgets
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index import kernel
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.indexer.service.snapshot_metrics import SnapshotCollector
from kvatlas.indexer.snapshots.writing import SnapshotSettings
from kvatlas.router.decision.requests import Report
from kvatlas.router.http.app import create_app
from kvatlas.router.recorder import StreamDecisionLog
from kvatlas.router.replicas.replicas import MAX_WAITING, ReplicaState, RouterReplicas
from kvatlas.router.replicas.signals import Joined
from kvatlas.router.service import RouterService
from kvatlas.schemas.errors import UnknownModel
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import WIRE_VERSION, EventBatch, Resync, WorkerDown
from kvatlas.schemas.settings import RouterSettings
from testkit.builders import MODEL, a_batch, digests, inventory, stored, subject_of, up
from testkit.fleet import TurnedClock, a_prompt, a_request
from testkit.waiting import until

W1 = InstanceId("w1", 0)
PROMPT = a_prompt(64)
SETTINGS = IndexServiceLimits(
    poll_seconds=0.01,
    lease_ended_seconds=0.0,
    lease_missing_seconds=60.0,
    lease_settling_seconds=0.0,
    inventory_jitter_seconds=0.0,
    inventory_retry_seconds=0.01,
    inventory_max_retry_seconds=0.01,
    max_vain_inventory_requests=3,
)
TIGHT = BudgetSettings(bytes_per_second=1_000.0, burst_bytes=10_000.0)
#: looked for often, due never
SNAPSHOTS = SnapshotSettings(seconds=0.05, messages=1_000_000)
_SAMPLE = re.compile(r"^(\w+(?:\{.*\})?) (\S+)$", re.MULTILINE)
EPOCH = 5


class Running:
    """An index, a router over it, and what both show."""

    def __init__(self, broker: MemoryBroker, bus: MemoryBus, own: MemoryBus) -> None:
        self.broker, self.bus, self.own = broker, bus, own
        self.clock = TurnedClock()
        self.index = FlatRadixIndex(max_bytes=1 << 20, segment_cells=64, first_segments=2)
        self.service = IndexService(
            own, IndexState(self.index), settings=SETTINGS, snapshots=SNAPSHOTS
        )
        self.router = RouterService(
            self.service.index,
            self.service,
            RouterSettings(seed=1, request_timeout_seconds=5.0, predicted_seconds=1.0),
            # nobody takes decisions and announcements away: they are not entered
            log=StreamDecisionLog(
                own.publisher(KV_DECISIONS), RouterSettings(max_unrecorded_decisions=1)
            ),
            clock=self.clock,
        )
        state = ReplicaState("me", self.router.loads, self.router.overlay, self.router.failures)
        self.replicas = RouterReplicas(own, state, self.router.log.find)
        self.app = create_app(self.router, replicas=self.replicas)
        self.app.metrics.registry.register(SnapshotCollector(self.service))
        self.metered = self.app._hot._router

    def shown(self) -> dict[str, float]:
        text = generate_latest(self.app.metrics.registry).decode()
        return {name: float(value) for name, value in _SAMPLE.findall(text)}

    async def say(self, *batches: EventBatch) -> None:
        publisher = self.bus.publisher(KV_EVENTS)
        for batch in batches:
            await publisher.publish(subject_of(batch), encode(batch))
        await publisher.flush()

    async def put(self, subject: str, payload: bytes) -> None:
        await self.bus.publisher(KV_EVENTS).publish(subject, payload)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    broker = MemoryBroker()
    async with broker.connect() as bus, broker.connect() as own:
        for stream in (events_stream(), decisions_stream()):
            await bus.declare_stream(stream)
        running = Running(broker, bus, own)
        async with running.service:
            await running.say(a_batch(up(), stored(1), epoch=EPOCH))
            await until(lambda: running.service.state.stream_sequence == 1)
            yield running


# --- what goes wrong ------------------------------------------------------------------------------


async def lose_a_batch(at: Running) -> None:
    await at.say(a_batch(stored(2), epoch=EPOCH, seq=3))


async def repeat_a_batch(at: Running) -> None:
    await at.say(a_batch(stored(1), epoch=EPOCH))


async def lose_events_before_the_log(at: Running) -> None:
    await at.say(a_batch(Resync(2, 2), epoch=EPOCH, seq=2))


async def lose_a_part_of_the_log(at: Running) -> None:
    at.broker.faults.drop_next = 1
    await at.say(*(a_batch(stored(seq), epoch=EPOCH, seq=seq) for seq in (2, 3)))


async def contradict_the_index(at: Running) -> None:
    await at.say(a_batch(*digests(1, 2), epoch=EPOCH, seq=2))


async def repair(at: Running) -> None:
    await contradict_the_index(at)
    await at.say(a_batch(inventory(1, 2, as_of=2), *digests(1, 2), epoch=EPOCH, seq=3))


async def cut_an_inventory(at: Running) -> None:
    await at.say(a_batch(inventory(1, as_of=1, parts=2), stored(2), epoch=EPOCH, seq=2))


async def give_no_inventory(at: Running) -> None:
    async def answer(_: bytes) -> bytes:
        return b""

    await at.bus.serve(inventory_subject(W1), answer)
    await lose_a_batch(at)


async def die(at: Running) -> None:
    await at.say(a_batch(WorkerDown("end"), epoch=EPOCH, seq=2))


async def speak_of_an_epoch_that_is_over(at: Running) -> None:
    await at.say(a_batch(stored(7), epoch=EPOCH - 1, seq=9))


async def speak_after_the_end(at: Running) -> None:
    await die(at)
    await at.say(a_batch(stored(7), epoch=EPOCH, seq=3))


async def speak_a_newer_version(at: Running) -> None:
    await at.say(msgspec.structs.replace(a_batch(), v=WIRE_VERSION + 100))


async def speak_nonsense(at: Running) -> None:
    await at.put("kv.events.model.w1.0", b"\xc1")


async def speak_for_another(at: Running) -> None:
    await at.put(subject_of(a_batch(worker="w2")), encode(a_batch(epoch=9)))


async def flood(at: Running) -> None:
    at.service._budgets = EventBudgets(TIGHT)
    await at.say(*(a_batch(stored(*range(99)), epoch=EPOCH, seq=seq) for seq in range(2, 20)))
    await until(lambda: at.service.state.stats().throttles > 0)
    await at.say(a_batch(stored(3), epoch=EPOCH, seq=20))


async def hold_too_much(at: Running) -> None:
    for seq in range(2, 102):
        blocks = range(1_000 * seq, 1_000 * seq + 1_000)
        await at.say(a_batch(stored(*blocks), epoch=EPOCH, seq=seq))


async def change_memory(at: Running) -> None:
    row = at.index._cells[:, kernel.ROW].nonzero()[0][0]
    at.index._cells[row, kernel.LOW] ^= np.uint32(4)
    at.service._audited_at -= SETTINGS.audit_seconds


async def lose_the_broker(at: Running) -> None:
    at.own.cut()


async def fall_behind(at: Running) -> None:
    at.service._held_back = []  # as while the index is counted anew
    await at.say(*(a_batch(stored(seq), epoch=EPOCH, seq=seq) for seq in (2, 3)))


async def leave_decisions_behind(at: Running) -> None:
    for _ in range(3):
        at.metered.route(a_request(PROMPT, MODEL))


async def leave_announcements_behind(at: Running) -> None:
    for _ in range(MAX_WAITING + 1):
        at.replicas.publish(Joined())


async def predict(at: Running) -> None:
    for _ in range(2):
        at.metered.route(a_request(PROMPT, MODEL))


async def predict_wrongly(at: Running) -> None:
    await predict(at)
    at.clock.advance(2.0)
    at.router.score(a_request(PROMPT, MODEL))


async def fail_a_request(at: Running) -> None:
    at.metered.done(at.metered.route(a_request(PROMPT, MODEL)).decision_id, Report(failed=True))


async def reuse_less_than_expected(at: Running) -> None:
    await predict(at)
    answer = at.metered.route(a_request(PROMPT, MODEL))
    at.metered.done(answer.decision_id, Report(local_blocks=1))


async def report_nothing(at: Running) -> None:
    at.metered.route(a_request(PROMPT, MODEL))
    at.clock.advance(10.0)
    at.metered.route(a_request(PROMPT, MODEL))


async def ask_for_nobody(at: Running) -> None:
    with pytest.raises(UnknownModel):
        at.metered.route(a_request(PROMPT, "nobody's"))


class Row(NamedTuple):
    faults: str
    drive: Callable[[Running], Awaitable[None]]
    metrics: tuple[str, ...]


def worker(name: str, more: str = "") -> str:
    return f'{name}{{rank="0",{more}worker="w1"}}'


TABLE = [
    Row("F3 F4 F7", lose_a_batch, ("kv_gaps_total", "kv_missing_batches_total")),
    Row("F3", lose_a_batch, (worker("kv_worker_trust", 'trust="degraded",'),)),
    Row("F8", repeat_a_batch, ("kv_duplicate_batches_total",)),
    Row("F14", lose_events_before_the_log, ("kv_outbox_dropped_total",)),
    Row("F5 F9 F10", lose_a_part_of_the_log, ("kv_stream_holes_total",)),
    Row("F15 F21 F22 F60", contradict_the_index, ("kv_digest_mismatch_total",)),
    Row("F4 F6", repair, ("kv_repairs_total", "kv_digest_match_total")),
    Row("F6", cut_an_inventory, ("kv_repairs_dropped_total",)),
    Row("F6", give_no_inventory, ("kv_forgotten_total",)),
    Row("F1 F17", die, ('kv_workers{trust="gone"}',)),
    Row("F44", speak_a_newer_version, ('kv_rejected_events_total{kind="version",worker="w1"}',)),
    Row("F39 F40", speak_nonsense, ('kv_rejected_events_total{kind="payload",worker="w1"}',)),
    Row("F80", speak_for_another, ('kv_rejected_events_total{kind="spoofed",worker="w2"}',)),
    Row("F80", flood, ("kv_throttles_total", "kv_throttled_batches_total")),
    Row("F30 F34", hold_too_much, ("kv_index_full_total",)),
    Row("F29 F33", change_memory, ("kv_audit_failures_total",)),
    Row("F12 F76", lose_the_broker, ("-kv_connected",)),
    Row("F8", lose_the_broker, ("kv_snapshots_failed_total",)),
    Row("F11 F76", fall_behind, ("kv_index_lag_sequences",)),
    Row("F2", speak_of_an_epoch_that_is_over, ("kv_late_batches_total",)),
    Row("F17", speak_after_the_end, ("kv_late_batches_total",)),
    Row("F70", leave_decisions_behind, ("kv_decisions_dropped_total",)),
    Row("F68", leave_announcements_behind, ("kv_router_signals_dropped_total",)),
    Row("F66", predict, ("kv_predicted_tokens_total", "kv_overlay_entries")),
    Row("F67", predict_wrongly, ("kv_overlay_expired_total",)),
    Row("F67 F73 F75", fail_a_request, ('kv_failed_requests_total{worker="w1"}',)),
    Row("F52 F67", reuse_less_than_expected, ('kv_expected_reuse_tokens_total{worker="w1"}',)),
    Row("F52 F67", reuse_less_than_expected, ('kv_actual_reuse_tokens_total{worker="w1"}',)),
    Row("F69", report_nothing, ("kv_requests_expired_total",)),
    Row("F62 F65", predict, (worker("kv_worker_in_flight"), worker("kv_worker_queued_seconds"))),
    Row("F45 F53", ask_for_nobody,
        ('kv_request_errors_total{error="UnknownModel",operation="route"}',)),
]  # fmt: skip


def id_of(row: Row) -> str:
    return f"{row.faults}-{row.drive.__name__}"


@pytest.mark.parametrize("row", TABLE, ids=id_of)
async def test_f78_a_fault_moves_its_metric(running: Running, row: Row) -> None:
    before = running.shown()
    await row.drive(running)

    def has_moved() -> bool:
        now = running.shown()
        return all(rise(name, before, now) > 0 for name in row.metrics)

    await until(has_moved)


def rise(name: str, before: dict[str, float], now: dict[str, float]) -> float:
    """Return how far a metric rose, or fell if its name begins with a minus."""
    sign, name = (-1.0, name[1:]) if name.startswith("-") else (1.0, name)
    return sign * (now.get(name, 0.0) - before.get(name, 0.0))
