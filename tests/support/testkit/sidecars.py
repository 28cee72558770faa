"""Sidecars for tests: in this process over any bus, or as the real process beside an engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvatlas.events.bus import Bus, Message
from kvatlas.events.streams import KV_EVENTS
from kvatlas.reference.clock import ScaledClock
from kvatlas.reference.engine import EngineOptions, ReferenceEngine
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.ids import InstanceId
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingReader, RingWriter
from kvatlas.worker_hooks.sidecar.channel import SidecarChannel
from kvatlas.worker_hooks.sidecar.exchange import make_pool
from kvatlas.worker_hooks.sidecar.launch import SidecarProcess, start_sidecar
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from kvatlas.worker_hooks.sidecar.service import Sidecar
from kvatlas.worker_hooks.transfer.memory import MemoryFabric
from kvatlas.worker_hooks.transfer.pool import ServePool
from testkit.fold import Fold

DESCRIPTOR = NamespaceDescriptor(4)
BLOCK_BYTES = 1024
NUM_BLOCKS = 48


def sidecar_options(folder: Path, worker: str = "w", **more: object) -> SidecarOptions:
    """Return options of a worker whose files lie in a folder; `more` replaces or adds some."""
    options: dict[str, object] = {
        "nats_url": "",
        "worker": worker,
        "model": "m",
        "descriptor": DESCRIPTOR,
        "kv_fingerprint": bytes(16),
        "num_slots": NUM_BLOCKS,
        "block_bytes": BLOCK_BYTES,
        "ring_path": str(folder / f"{worker}.ring"),
        "pool_path": str(folder / f"{worker}.pool"),
        "socket_path": str(folder / f"{worker}.sock"),
        "digest_seconds": 0.2,
        "lease_ttl_seconds": 2.0,
        "transport": "none",
    }
    return SidecarOptions(**options | more)  # type: ignore[arg-type]


class Beside:
    """A sidecar in this process and the engine's ends of what it is connected by."""

    def __init__(self, options: SidecarOptions, bus: Bus, fabric: MemoryFabric | None) -> None:
        self.options = options
        path = Path(options.ring_path)
        self.ring = RingWriter.create(path, lists=True)
        self.hook = WorkerHook(self.ring)
        self.reader = RingReader(path)
        self.pool = make_pool(options)
        self.sidecar = Sidecar(options, self.reader, bus, self.pool, fabric)
        self.channel = SidecarChannel(Path(options.socket_path))
        self.running: asyncio.Task[str]


@asynccontextmanager
async def beside(
    options: SidecarOptions, bus: Bus, fabric: MemoryFabric | None = None
) -> AsyncIterator[Beside]:
    """Run a sidecar in this process."""
    made = Beside(options, bus, fabric)
    made.running = asyncio.create_task(made.sidecar.run())
    try:
        async with made.channel:
            ready = asyncio.create_task(made.channel.wait_ready(60.0))
            await asyncio.wait((ready, made.running), return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)
            yield made
    finally:
        made.sidecar.stop("test over")
        await made.running
        made.hook.close()
        made.reader.close()
        if made.pool is not None:
            made.pool.close()


class Worker:
    """A reference engine in this process with its sidecar as a process of its own."""

    def __init__(self, options: SidecarOptions, ring: RingWriter) -> None:
        self.options, self.ring = options, ring
        self.instance = options.instance
        self.process: SidecarProcess
        self.channel: SidecarChannel
        self.engine: ReferenceEngine
        self.pool: ServePool


@asynccontextmanager
async def a_worker(
    options: SidecarOptions,
    folder: Path,
    speed: float = 50.0,
    ring_bytes: int = 1 << 20,
    num_blocks: int = NUM_BLOCKS,
) -> AsyncIterator[Worker]:
    """Start both and stop both."""
    worker = Worker(options, RingWriter.create(Path(options.ring_path), ring_bytes, lists=True))
    log = folder / f"{options.worker}.log"
    worker.process = await asyncio.to_thread(start_sidecar, options, log)
    try:
        async with SidecarChannel(Path(options.socket_path)) as worker.channel:
            await worker.channel.wait_ready(60.0)
            worker.pool = ServePool.attach(Path(options.pool_path))
            hook = WorkerHook(worker.ring)
            engine_options = EngineOptions(
                "m", DESCRIPTOR, num_blocks, BLOCK_BYTES, decode_tokens_per_second=1000.0
            )
            worker.engine = ReferenceEngine(
                engine_options, hook, ScaledClock(speed), worker.pool, worker.channel
            )
            async with worker.engine:
                yield worker
    finally:
        await asyncio.to_thread(worker.process.stop)
        worker.ring.close()
        if hasattr(worker, "pool"):
            worker.pool.close()


@asynccontextmanager
async def folded(bus: Bus, *instances: InstanceId) -> AsyncIterator[dict[InstanceId, Fold]]:
    """Follow the log from its beginning, and fold what these instances say."""
    folds = {instance: Fold(instance) for instance in instances}

    def take(message: Message) -> None:
        for fold in folds.values():
            model_and_worker = f".{fold.instance.worker}.{fold.instance.rank}"
            if message.subject.startswith("kv.events.") and message.subject.endswith(
                model_and_worker
            ):
                fold.take_payload(message.payload)

    subscription = await bus.follow(KV_EVENTS, 1, take)
    try:
        yield folds
    finally:
        await subscription.close()
