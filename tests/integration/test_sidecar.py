"""Reference engines with real sidecar processes over a real broker."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvatlas.events.leases import LeaseChange, watch_leases
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import EmbeddedServer, embedded_server
from kvatlas.events.streams import LEASES_BUCKET, events_stream
from kvatlas.events.subjects import inventory_subject
from kvatlas.reference.kv_bytes import kv_bytes
from kvatlas.reference.requests import Completion, generated_tokens
from kvatlas.schemas.digest import split_hashes
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.routing import Plan, PullStep
from kvatlas.worker_hooks.sidecar.launch import start_sidecar
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from kvatlas.worker_hooks.transfer.pool import ServePool
from testkit.fold import Fold
from testkit.ports import kept_port
from testkit.sidecars import (
    BLOCK_BYTES,
    DESCRIPTOR,
    Worker,
    a_worker,
    folded,
    sidecar_options,
)
from testkit.waiting import until, until_told

W, A, B = (InstanceId(name, 0) for name in ("w", "a", "b"))


def prompt_of(*blocks: int, tail: int = 0) -> bytes:
    tokens = [block * 100 + i for block in blocks for i in range(4)] + [7] * tail
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def chain_of(prompt: bytes, salt: str | None = None) -> list[bytes]:
    return list(split_hashes(BlockHasher(DESCRIPTOR.namespace("m", None, salt)).chain(prompt)))


@asynccontextmanager
async def a_broker(folder: Path) -> AsyncIterator[tuple[EmbeddedServer, NatsBus]]:
    async with embedded_server(folder / "nats", kept_port()) as server, NatsBus(server.url) as bus:
        await bus.declare_stream(events_stream())
        yield server, bus


async def play(worker: Worker, seed: int, num_requests: int, at_once: int = 6) -> list[Completion]:
    """Serve a random workload: shared prefixes, growing conversations, eviction, two tenants."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(at_once)

    async def one() -> Completion:
        async with gate:
            family = rng.randrange(5)
            prompt = prompt_of(
                *range(family * 10, family * 10 + rng.randint(1, 8)), tail=rng.randint(0, 3)
            )
            salt = "tenant" if family == 4 else None
            done = await worker.engine.submit(prompt, rng.randint(1, 20), salt)
            if rng.random() < 0.3:
                grown = prompt + generated_tokens(prompt, done.output_tokens)
                await worker.engine.submit(grown + prompt_of(90), 3, salt)
            worker.engine.store.pool.validate()
            return done

    async with asyncio.TaskGroup() as tasks:
        served = [tasks.create_task(one()) for _ in range(num_requests)]
    return [task.result() for task in served]


async def settled(worker: Worker, fold: Fold) -> None:
    """Wait until the log has all that the worker said, and a digest behind it."""
    worker.engine._hook.pump()
    flushed = await worker.channel.flush()
    digests = fold.num_digests
    await until(lambda: (fold.epoch, fold.seq) >= (flushed.epoch, flushed.seq))
    await until(lambda: fold.num_digests > digests)


def check_equal(worker: Worker, fold: Fold) -> None:
    """Assert that the log, the engine's cache and the pool's memory are the same."""
    cached = set(worker.engine.store.pool.cached_hashes())
    assert fold.is_whole
    assert fold.held[Tier.hbm] == cached
    for block_hash in cached:
        (slot,) = worker.engine.store.pool.match([block_hash])
        assert worker.pool.hash_of(slot) == block_hash
        assert worker.pool.block(slot) == kv_bytes(block_hash, BLOCK_BYTES)


async def test_the_log_says_exactly_what_the_engine_holds(tmp_path: Path) -> None:
    async with a_broker(tmp_path) as (server, bus), folded(bus, W) as folds:
        options = sidecar_options(tmp_path, nats_url=server.url)
        async with a_worker(options, tmp_path) as worker:
            done = await play(worker, seed=1, num_requests=120)
            assert sum(d.local_blocks for d in done) > 0
            await settled(worker, folds[W])
            check_equal(worker, folds[W])
            counters = (await worker.channel.status()).counters
            assert counters["removed_blocks"] > 20
            assert counters["duplicate_blocks"] > 0
            assert counters["unknown_removals"] == counters["rejected_events"] == 0
            assert worker.engine.reset()
            await play(worker, seed=2, num_requests=20)
            await settled(worker, folds[W])
            check_equal(worker, folds[W])
            await bus.request(inventory_subject(W), b"", 30.0)
            await settled(worker, folds[W])
            check_equal(worker, folds[W])
        await until(lambda: folds[W].down != "")
        assert folds[W].down == "signal SIGTERM"
        assert folds[W].gaps == []
        assert worker.process.exit_status == 0
        assert not os.path.exists(options.pool_path)  # noqa: ASYNC240


async def test_nothing_is_lost_while_the_broker_restarts(tmp_path: Path) -> None:
    async with a_broker(tmp_path) as (server, bus), folded(bus, W) as folds:
        options = sidecar_options(tmp_path, nats_url=server.url, lease_ttl_seconds=30.0)
        async with a_worker(options, tmp_path) as worker:
            await play(worker, seed=3, num_requests=20)
            flushed = await worker.channel.flush()
            playing = asyncio.create_task(play(worker, seed=4, num_requests=60))
            await server.kill()
            await playing
            await server.restart()
            await play(worker, seed=5, num_requests=10)
            await settled(worker, folds[W])
            check_equal(worker, folds[W])
            assert folds[W].epoch == flushed.epoch
            assert folds[W].gaps == []


async def test_a_worker_that_starts_before_its_broker_is_heard_when_it_comes(
    tmp_path: Path,
) -> None:
    async with a_broker(tmp_path) as (server, _):
        await server.stop()
        options = sidecar_options(tmp_path, nats_url=server.url)
        async with a_worker(options, tmp_path) as worker:
            await play(worker, seed=6, num_requests=20)
            assert (await worker.channel.status()).epoch == 0
            await server.restart()
            async with NatsBus(server.url) as bus, folded(bus, W) as folds:
                await settled(worker, folds[W])
                check_equal(worker, folds[W])
                assert folds[W].gaps == []


async def test_a_ring_that_overflows_is_made_good_by_a_listing(tmp_path: Path) -> None:
    async with a_broker(tmp_path) as (server, bus), folded(bus, W) as folds:
        options = sidecar_options(tmp_path, nats_url=server.url)
        async with a_worker(options, tmp_path, ring_bytes=4096) as worker:
            await play(worker, seed=7, num_requests=10)
            await worker.channel.flush()
            os.kill(worker.process.pid, signal.SIGSTOP)
            await play(worker, seed=8, num_requests=60)
            assert worker.engine._hook.num_lost > 0
            os.kill(worker.process.pid, signal.SIGCONT)

            async def listed() -> bool:
                counters = (await worker.channel.status()).counters
                return counters["lost_events"] > 0 and worker.engine._hook._listing is None

            await until_told(listed)
            await settled(worker, folds[W])
            await settled(worker, folds[W])
            check_equal(worker, folds[W])


async def test_a_sidecar_that_crashes_is_followed_by_another(tmp_path: Path) -> None:
    async with a_broker(tmp_path) as (server, bus), folded(bus, W) as folds:
        options = sidecar_options(tmp_path, nats_url=server.url)
        async with a_worker(options, tmp_path) as worker:
            await play(worker, seed=9, num_requests=20)
            first = await worker.channel.flush()
            worker.process.kill()
            await play(worker, seed=10, num_requests=20)
            worker.process = await asyncio.to_thread(start_sidecar, options, tmp_path / "log")
            await worker.channel.wait_ready(60.0)
            worker.pool = ServePool.attach(Path(options.pool_path))
            worker.engine.store.move_to(worker.pool)
            await until(lambda: folds[W].epoch > first.epoch)
            await settled(worker, folds[W])
            await settled(worker, folds[W])
            check_equal(worker, folds[W])


async def test_a_prefix_is_pulled_from_a_peer_with_the_right_bytes(tmp_path: Path) -> None:
    pytest.importorskip("nixl", reason="extra `transfer` is not installed")
    async with a_broker(tmp_path) as (server, bus), folded(bus, A, B) as folds:
        a_options, b_options = (
            sidecar_options(tmp_path, name, nats_url=server.url, transport="nixl")
            for name in ("a", "b")
        )
        async with a_worker(a_options, tmp_path) as a, a_worker(b_options, tmp_path) as b:
            for worker in (a, b):
                await ready_to_pull(worker)
            prompt = prompt_of(1, 2, 3, 4, 5, 6, 7, 8, tail=1)
            assert (await a.engine.submit(prompt)).computed_blocks == 8
            plan = Plan(4, 0, (PullStep("a", 0, 0, 8),), 1)
            done = await b.engine.submit(prompt, plan=plan)
            assert (done.local_blocks, done.pulled_blocks, done.computed_blocks) == (0, 8, 0)
            assert done.computed_tokens == 1
            assert (done.pull.verified, done.pull.failed) == (8, 0)
            assert (done.pull.bytes, done.pull.transport) == (8 * BLOCK_BYTES, "nixl")
            for worker, fold in ((a, folds[A]), (b, folds[B])):
                await settled(worker, fold)
                check_equal(worker, fold)
            assert folds[B].held[Tier.hbm] >= set(chain_of(prompt))
            # an owner that is gone is no error: what it has is computed
            a.process.kill()
            other = prompt_of(11, 12, 13, tail=1)
            plan = Plan(4, 0, (PullStep("a", 0, 0, 3),), 1)
            done = await b.engine.submit(other, plan=plan)
            assert (done.pulled_blocks, done.computed_blocks) == (0, 3)


async def test_two_workers_that_pull_from_each_other_while_they_evict_stay_right(
    tmp_path: Path,
) -> None:
    pytest.importorskip("nixl", reason="extra `transfer` is not installed")
    async with a_broker(tmp_path) as (server, bus), folded(bus, A, B) as folds:
        a_options, b_options = (
            sidecar_options(tmp_path, name, nats_url=server.url, transport="nixl")
            for name in ("a", "b")
        )
        async with a_worker(a_options, tmp_path) as a, a_worker(b_options, tmp_path) as b:
            for worker in (a, b):
                await ready_to_pull(worker)
            gate, rng = asyncio.Semaphore(12), random.Random(11)

            async def one(worker: Worker, peer: str) -> Completion:
                async with gate:
                    family, length = rng.randrange(6), rng.randint(3, 9)
                    prompt = prompt_of(*range(family * 10, family * 10 + length), tail=1)
                    plan = Plan(4, 0, (PullStep(peer, 0, 0, length),), 1)
                    return await worker.engine.submit(prompt, rng.randint(1, 9), plan=plan)

            async with asyncio.TaskGroup() as tasks:
                served = [
                    tasks.create_task(one(*pair))
                    for _ in range(100)
                    for pair in ((a, "b"), (b, "a"))
                ]
            pulls = [task.result().pull for task in served]
            assert sum(pull.verified for pull in pulls) > 50
            assert sum(pull.failed for pull in pulls) == 0
            for worker, fold in ((a, folds[A]), (b, folds[B])):
                assert worker.engine.store.pool.num_in_use == 0
                await settled(worker, fold)
                check_equal(worker, fold)


async def ready_to_pull(worker: Worker) -> None:
    async def is_ready() -> bool:
        return (await worker.channel.status()).transport == "nixl"

    await until_told(is_ready)


ENGINE = """
import sys
from pathlib import Path
import msgspec
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.sidecar.launch import start_sidecar
from kvatlas.worker_hooks.reporting.ring import RingWriter
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
options = msgspec.json.decode(sys.argv[1], type=SidecarOptions)
hook = WorkerHook(RingWriter.create(Path(options.ring_path)))
sidecar = start_sidecar(options) if sys.argv[2] == "start" else None
hook.stored([1], None, bytes(16))
print(sidecar.pid if sidecar else 0, flush=True)
sys.stdin.readline()
"""


@asynccontextmanager
async def an_engine(options: SidecarOptions, *, starts_sidecar: bool) -> AsyncIterator[list[int]]:
    """Run an engine of its own process until the end; yield its pid and its sidecar's."""
    engine = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", ENGINE, msgspec.json.encode(options).decode()),
        "start" if starts_sidecar else "",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert engine.stdout is not None
    pids = [engine.pid, int(await engine.stdout.readline())]
    try:
        yield pids
    finally:
        for pid in filter(None, pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await engine.communicate()


async def test_a_sidecar_says_that_its_engine_died(tmp_path: Path) -> None:
    async with a_broker(tmp_path) as (server, bus), folded(bus, W) as folds:
        options = sidecar_options(tmp_path, nats_url=server.url)
        changes: list[LeaseChange] = []
        await watch_leases(bus.keys(LEASES_BUCKET), changes.append)
        async with an_engine(options, starts_sidecar=True) as (engine, _):
            await until(lambda: len(folds[W].held[Tier.hbm]) == 1)
            os.kill(engine, signal.SIGKILL)
            await until(lambda: folds[W].down == "engine ended")
            await until(lambda: changes[-1].kind == "released")


async def test_the_lease_of_an_engine_that_died_with_its_sidecar_runs_out(tmp_path: Path) -> None:
    async with a_broker(tmp_path) as (server, bus), folded(bus, W) as folds:
        options = sidecar_options(tmp_path, nats_url=server.url, lease_ttl_seconds=1.0)
        changes: list[LeaseChange] = []
        await watch_leases(bus.keys(LEASES_BUCKET), changes.append)
        async with an_engine(options, starts_sidecar=True) as pids:
            await until(lambda: len(folds[W].held[Tier.hbm]) == 1 and bool(changes))
            for pid in reversed(pids):  # the sidecar first, or it says that the engine has ended
                os.kill(pid, signal.SIGKILL)
            await until(lambda: changes[-1].kind == "expired")
            assert folds[W].down == ""


async def test_a_sidecar_of_an_operator_ends_with_who_writes_to_the_ring(tmp_path: Path) -> None:
    async with a_broker(tmp_path) as (server, bus), folded(bus, W) as folds:
        options = sidecar_options(tmp_path, nats_url=server.url)
        async with an_engine(options, starts_sidecar=False) as (engine, _):
            running = asyncio.create_task(asyncio.to_thread(_run_sidecar, options))
            await until(lambda: len(folds[W].held[Tier.hbm]) == 1)
            os.kill(engine, signal.SIGKILL)
            assert (await running).returncode == 0
            await until(lambda: folds[W].down == "engine ended")


async def test_a_sidecar_that_cannot_start_says_why(tmp_path: Path) -> None:
    options = sidecar_options(tmp_path, nats_url="nats://127.0.0.1:1")
    done = await asyncio.to_thread(_run_sidecar, options)
    assert done.returncode == 1
    assert "ring" in done.stderr
    assert "Traceback" not in done.stderr


def _run_sidecar(options: SidecarOptions) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvatlas.worker_hooks.sidecar"],
        input=msgspec.json.encode(options).decode(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
