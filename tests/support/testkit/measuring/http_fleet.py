"""The workers that the HTTP benchmark's kvatlas hears of, in a process of their own."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection

from kvatlas.events.bus import Publisher
from kvatlas.events.codec import encode
from kvatlas.events.leases import LeaseKeeper
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_EVENTS, LEASES_BUCKET
from kvatlas.events.subjects import events_subject
from kvatlas.schemas.fleet import NamespaceDescriptor, WorkerInfo
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import (
    WIRE_VERSION,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    WorkerUp,
)

MODEL, BLOCK_TOKENS = "m", 16
NUM_WORKERS, NUM_HOLDERS = 16, 8
EVENT_BLOCKS = 64
LOAD_EVENTS_PER_SECOND, BATCH_EVENTS, LOAD_BLOCKS = 10_000, 10, 4
TICK_SECONDS, KEEP_ALIVE_SECONDS = 0.01, 3.0
HASHER = BlockHasher(NamespaceDescriptor(BLOCK_TOKENS).namespace(MODEL, None, None))


class Worker:
    """What one worker says: batches without holes in their sequence."""

    def __init__(self, number: int, publisher: Publisher) -> None:
        self.instance = InstanceId(f"w{number}", 0)
        self._subject = events_subject(MODEL, self.instance)
        self._publisher = publisher
        self._sequence = 0
        #: blocks of its last batch under load
        self.loaded = b""

    async def tell(self, *events: KvEvent) -> None:
        """Publish its next batch; one without events is a sign of life."""
        self._sequence += 1
        worker, now = self.instance.worker, time.time_ns()
        batch = EventBatch(WIRE_VERSION, worker, 0, 1, self._sequence, now, events)
        await self._publisher.publish(self._subject, encode(batch))

    async def hold(self, chain: bytes) -> None:
        """Store a chain, 64 blocks an event."""
        step, parent = 16 * EVENT_BLOCKS, None
        for at in range(0, len(chain), step):
            await self.tell(BlockStored(HASHER.root, chain[at : at + step], parent))
            parent = chain[at + step - 16 : at + step]

    async def step(self) -> None:
        """Store fresh blocks, and remove those of the step before: the index stays as it is."""
        size, fresh = 16 * LOAD_BLOCKS, random.randbytes(16 * LOAD_BLOCKS * BATCH_EVENTS // 2)
        ats = range(0, len(fresh), size)
        stores = [BlockStored(HASHER.root, fresh[at : at + size]) for at in ats]
        ats = range(0, len(self.loaded), size)
        removals = [BlockRemoved(HASHER.root, self.loaded[at : at + size]) for at in ats]
        self.loaded = fresh
        await self.tell(*stores, *removals)


class Fleet:
    """Sixteen workers, all alive; the last eight do the load."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.workers = [Worker(number, publisher) for number in range(NUM_WORKERS)]
        self._load: asyncio.Task[None] | None = None

    async def up(self) -> None:
        """Let all workers say who they are."""
        for worker in self.workers:
            address = f"http://{worker.instance.worker}"
            info = WorkerInfo(address, (MODEL,), NamespaceDescriptor(BLOCK_TOKENS), b"f" * 16)
            await worker.tell(WorkerUp(info))
        await self._publisher.flush()

    async def hold(self, tokens: bytes, first: int, last: int) -> None:
        """Let the workers from first to last store a prompt."""
        chain = HASHER.chain(tokens)
        for worker in self.workers[first : last + 1]:
            await worker.hold(chain)
        await self._publisher.flush()

    async def load_on(self) -> None:
        """Begin to tell events at the rate of the load."""
        self._load = asyncio.create_task(self._tell_steps())

    async def load_off(self) -> None:
        """Stop that; return when all of it is stored."""
        assert self._load
        self._load.cancel()
        await asyncio.wait((self._load,))
        await self._publisher.flush()

    async def _tell_steps(self) -> None:
        started, told = time.perf_counter(), 0
        while True:
            elapsed = time.perf_counter() - started
            due = int(elapsed * LOAD_EVENTS_PER_SECOND / BATCH_EVENTS)
            for number in range(told, due):
                await self.workers[NUM_HOLDERS + number % NUM_HOLDERS].step()
            told = due
            await asyncio.sleep(TICK_SECONDS)

    async def keep_alive(self) -> None:
        """Say something now and then, so that nobody looks silent."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            for worker in self.workers:
                await worker.tell()


def speak_for_fleet(nats_url: str, pipe: Connection) -> None:
    """Do what the other end of the pipe asks for, until it asks for nothing."""
    asyncio.run(_speak(nats_url, pipe))


async def _speak(nats_url: str, pipe: Connection) -> None:
    async with NatsBus(nats_url) as bus, _leases(bus):
        fleet = Fleet(bus.publisher(KV_EVENTS))
        alive = asyncio.create_task(fleet.keep_alive())
        while (call := await asyncio.to_thread(pipe.recv)) is not None:
            name, *arguments = call
            await getattr(fleet, name)(*arguments)
            pipe.send("done")
        alive.cancel()


@contextlib.asynccontextmanager
async def _leases(bus: NatsBus) -> AsyncGenerator[None, None]:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(NUM_WORKERS):
            instance = InstanceId(f"w{number}", 0)
            keeper = LeaseKeeper(bus.keys(LEASES_BUCKET), instance, 1, lambda _: None)
            await stack.enter_async_context(keeper)
        yield
