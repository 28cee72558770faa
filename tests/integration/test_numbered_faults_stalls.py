"""Faults that others had, by number: a broker or a writer stands still, and who goes on meanwhile.

Processes are stopped (SIGSTOP), so whatever happens before they go on has not waited for them.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from kvatlas.events.codec import encode
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import EmbeddedServer, embedded_server
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS, decisions_stream, events_stream
from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index.kernel.fences import VERSION
from kvatlas.indexer.index.shared import header as h
from kvatlas.indexer.index.shared.reader import SharedIndexReader
from kvatlas.indexer.reader import IndexReader
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.router.http.app import create_app
from kvatlas.router.recorder import StreamDecisionLog
from kvatlas.router.service import RouterService
from kvatlas.schemas.digest import digest_of
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.settings import RouterSettings
from kvatlas.worker_hooks.raw_events import RawStored
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingWriter
from kvatlas.worker_hooks.sidecar.channel import SidecarChannel
from kvatlas.worker_hooks.sidecar.launch import SidecarProcess, start_sidecar
from testkit import shared_writer_main
from testkit.builders import MODEL, a_batch, stored, subject_of, up
from testkit.engine_words import chain_of, tokens_of
from testkit.peer import stop
from testkit.shared_writer_main import CHAIN
from testkit.sidecars import sidecar_options
from testkit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

W, W1 = InstanceId("w", 0), InstanceId("w1", 0)
IS_SLOW = bool(os.environ.get("KVATLAS_SLOW"))
#: steps of an engine while the broker stands still, each of which is two events
STEPS = 500_000 if IS_SLOW else 20_000
OUTBOX_BYTES = 65_536
#: what a stalled sidecar may grow by, however many events come: window, outbox, garbage
MAX_GROWTH_BYTES = 32 << 20
FAST = IndexServiceLimits(poll_seconds=0.05)


@contextmanager
def standing_still(pid: int | None) -> Iterator[None]:
    assert pid is not None
    stop(pid)
    try:
        yield
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with embedded_server(tmp_path / "nats") as server:
        yield server


# --- the broker stands still ----------------------------------------------------------------------


class Engine:
    """Holds its newest blocks, and tells its hook of each that comes and goes."""

    def __init__(self, hook: WorkerHook, sidecar: SidecarProcess, channel: SidecarChannel) -> None:
        self.hook, self.sidecar, self.channel = hook, sidecar, channel
        self._held: deque[int] = deque()
        self._next = 1
        hook.answer_listings(self._listed)

    def step(self, times: int, room: int = 500) -> None:
        for _ in range(times):
            block, self._next = self._next, self._next + 1
            self.hook.stored((block,), None, tokens_of(block))
            self._held.append(block)
            if len(self._held) > room:
                self.hook.removed((self._held.popleft(),))

    def _listed(self) -> Iterator[RawStored]:
        for block in tuple(self._held):
            if block >= self._held[0]:  # the others have left since
                yield RawStored((block,), None, tokens_of(block))

    def is_known_to(self, index: IndexReader) -> bool:
        self.hook.pump()  # as an idle engine does
        view = index.instance(W)
        held = [chain_of(block)[0] for block in self._held]
        return (
            view is not None
            and view.trust is Trust.exact
            and view.digests == {Tier.hbm: digest_of(held)}
        )


@asynccontextmanager
async def an_engine(folder: Path, url: str) -> AsyncIterator[Engine]:
    """Run an engine in this process and its sidecar beside it, with little room for anything."""
    options = sidecar_options(
        folder,
        nats_url=url,
        num_slots=0,
        pool_path="",
        lease_ttl_seconds=60.0,
        max_outbox_bytes=OUTBOX_BYTES,
        coalesce_bytes=1,
        coalesce_seconds=0.0,
    )
    hook = WorkerHook(RingWriter.create(Path(options.ring_path), 1 << 16, lists=True))
    sidecar = await asyncio.to_thread(start_sidecar, options, folder / "sidecar.log")
    try:
        async with SidecarChannel(Path(options.socket_path)) as channel:
            await channel.wait_ready(60.0)
            yield Engine(hook, sidecar, channel)
    finally:
        await asyncio.to_thread(sidecar.stop)
        hook.close()


async def test_f14_an_engine_does_not_wait_for_a_broker_that_stands_still(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    """Nor for its sidecar. What finds no room is counted where it is lost, and made good."""
    async with NatsBus(server.url) as bus, an_engine(tmp_path, server.url) as engine:
        await bus.declare_stream(events_stream(max_bytes=256 << 20))
        async with IndexService(bus, IndexState(ReferenceIndex()), settings=FAST) as service:
            engine.step(600)
            await until(lambda: engine.is_known_to(service.index), 60.0)
            sidecar = psutil.Process(engine.sidecar.pid)
            before_bytes = sidecar.memory_info().rss
            with standing_still(server.pid):
                for _ in range(10):
                    engine.step(STEPS // 10)
                    await until(lambda: engine.hook._ring.waiting_bytes == 0, 60.0)
                status = await engine.channel.status()
                assert status.counters["outbox_overflows"] > 0
                assert status.waiting_bytes < 2 * OUTBOX_BYTES
                assert sidecar.memory_info().rss - before_bytes < MAX_GROWTH_BYTES
                num_lost = engine.hook.num_lost
                with standing_still(engine.sidecar.pid):
                    engine.step(2_000)
                assert engine.hook.num_lost > num_lost
            await until(lambda: engine.is_known_to(service.index), 60.0)
            told = (await engine.channel.status()).counters["lost_events"]
            assert told == engine.hook.num_lost
            assert service.state.stats().resyncs > 0
            async with IndexService(bus, IndexState(FlatRadixIndex())) as late:
                await late.wait_ready()
                await until(lambda: late.state.stream_sequence == service.state.stream_sequence)
                assert late.state.state_digest() == service.state.state_digest()


async def test_f70_requests_are_answered_while_the_broker_stands_still(
    server: EmbeddedServer,
) -> None:
    """One event loop serves requests, follows the log and records decisions; nothing blocks it."""
    settings = RouterSettings(seed=1, max_unrecorded_decisions=8)
    async with NatsBus(server.url) as bus:
        for stream in (events_stream(max_bytes=64 << 20), decisions_stream(max_bytes=64 << 20)):
            await bus.declare_stream(stream)
        publisher = bus.publisher(KV_EVENTS)
        async with (
            IndexService(bus, IndexState(ReferenceIndex()), settings=FAST) as service,
            StreamDecisionLog(bus.publisher(KV_DECISIONS), settings) as log,
        ):
            app = create_app(RouterService(service.index, service, settings, log=log))
            client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")
            batch = a_batch(up(), stored(1))
            await publisher.publish(subject_of(batch), encode(batch))
            await until(lambda: service.state.stream_sequence == 1)
            async with client:
                with standing_still(server.pid):
                    asking = (
                        client.post("/v1/route", json={"model": MODEL, "token_ids": [1] * 8})
                        for _ in range(50)
                    )
                    answers = await asyncio.gather(*asking)
                    assert [answer.status_code for answer in answers] == [200] * 50
                    assert {answer.json()["worker"] for answer in answers} == {"w1"}
                    assert (await client.get("/metrics")).status_code == 200
                    assert log.num_waiting <= 8
            await until(lambda: log.num_waiting == 0)


async def test_f76_a_broker_that_answers_nobody_is_a_delay_that_shows_and_no_loss(
    server: EmbeddedServer,
) -> None:
    """As between two leaders of a cluster; with one: fault/test_numbered_faults_leader.py."""
    async with NatsBus(server.url, ack_seconds=0.4) as bus, NatsBus(server.url) as far:
        await bus.declare_stream(events_stream(max_bytes=64 << 20))
        publisher = bus.publisher(KV_EVENTS)

        async def publish(first: int, last: int) -> None:
            for seq in range(first, last):
                batch = a_batch(*([up()] if seq == 1 else []), stored(seq), seq=seq)
                await publisher.publish(subject_of(batch), encode(batch))
                if seq % 20 == 0:
                    await asyncio.sleep(0.001)

        async with (
            IndexService(bus, IndexState(ReferenceIndex()), settings=FAST) as one,
            IndexService(far, IndexState(FlatRadixIndex()), settings=FAST) as two,
        ):
            await publish(1, 200)
            await until(lambda: one.state.stream_sequence > 100)
            publishing = asyncio.create_task(publish(200, 600))
            with standing_still(server.pid):
                for service in (one, two):
                    await until(lambda s=service: s.lag.seconds_since_contact > 0.5)  # type: ignore[misc]
            await publishing
            await publisher.flush()
            last = await bus.last_sequence(KV_EVENTS)
            for service in (one, two):
                await until(lambda s=service: s.state.stream_sequence == last)  # type: ignore[misc]
                await until(lambda s=service: s.lag.seconds_since_contact < 0.5)  # type: ignore[misc]
                view = service.index.instance(W1)
                assert view is not None
                assert (view.seq, view.trust, view.num_blocks) == (599, Trust.exact, 599)
                assert service.state.stats().gaps == 0
            assert one.state.state_digest() == two.state.state_digest()


# --- the writer of a shared index stands still ----------------------------------------------------


@contextmanager
def a_writer_that_stops(folder: Path, within_a_change: bool) -> Iterator[SharedIndexReader]:
    """Run a busy writer and stop it outside or in the middle of a change."""
    support = str(Path(shared_writer_main.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, str(shared_writer_main.__file__), str(folder), "4"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONPATH": support},
    ) as process:  # fmt: skip
        try:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            reader = SharedIndexReader(folder)
            opened = h.open_header(folder / h.FILE)
            assert opened is not None
            give_up_at = time.monotonic() + 60
            while {view.trust for view in reader.instances()} != {Trust.exact}:
                assert time.monotonic() < give_up_at
                time.sleep(0.001)
            while True:
                stop(process.pid)
                if bool(opened[0][VERSION] & 1) == within_a_change:
                    break
                assert time.monotonic() < give_up_at
                os.kill(process.pid, signal.SIGCONT)
                time.sleep(0.001)
            yield reader
        finally:
            process.kill()


def test_f36_readers_take_no_lock_that_a_writer_holds(tmp_path: Path) -> None:
    """Stopped between two changes it keeps nothing back: every answer is whole, at once."""
    with a_writer_that_stops(tmp_path, within_a_change=False) as reader:
        num_retries = reader.num_retries
        answers = [reader.match(CHAIN) for _ in range(50)]
        assert answers == answers[:1] * 50
        assert reader.num_retries == num_retries
        lengths = {m.instance.worker: m.num_blocks for m in answers[0]}
        assert lengths.get("a") == lengths.get("b")
        assert reader.instance(InstanceId("a", 0))


def test_f36_a_writer_that_stands_still_within_a_change_is_not_waited_for(tmp_path: Path) -> None:
    """Nobody can know what it holds then: nothing is found, and nobody is called exact."""
    with a_writer_that_stops(tmp_path, within_a_change=True) as reader:
        version, asked_at = reader.fleet_version, time.monotonic()
        assert reader.match(CHAIN) == []
        assert reader.fleet_version != version
        assert {view.trust for view in reader.instances()} == {Trust.stale}
        assert not reader.connected
        assert time.monotonic() - asked_at < 20  # forever, if it waited
