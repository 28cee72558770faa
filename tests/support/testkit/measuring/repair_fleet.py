"""The workers that the repair benchmark's index hears of, in one process: a hundred at a time.

Each has an outbox and a publisher as in a sidecar, serves `inventory` and holds a lease.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection

import msgspec

from kvatlas.events.bus import Bus, OnRequest, Publisher
from kvatlas.events.codec import encode
from kvatlas.events.leases import LeaseKeeper
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_EVENTS, LEASES_BUCKET
from kvatlas.events.subjects import events_subject, inventory_subject
from kvatlas.indexer.index.packed_digest import digest_of_packed
from kvatlas.schemas.fleet import NamespaceDescriptor, WorkerInfo
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    BlockRemoved,
    BlockStored,
    Digest,
    Inventory,
    KvEvent,
    WorkerUp,
)
from kvatlas.worker_hooks.reporting.inventory import MAX_PART_BLOCKS
from kvatlas.worker_hooks.reporting.outbox import Outbox
from testkit.measuring.http_fleet import BLOCK_TOKENS, EVENT_BLOCKS, HASHER, LOAD_BLOCKS, MODEL

NUM_WORKERS, NUM_HOLDERS, WORKER_BLOCKS = 100, 8, 10_000
#: of a worker's blocks: stored and removed in the batch that is lost
LOST_BLOCKS = 64
STEP_EVENTS = 10
TICK_SECONDS, DIGEST_SECONDS = 0.01, 4.0
_HASH = 16


class RepairWorker:
    """One worker: what it holds, and the batches that say so."""

    def __init__(self, number: int, publisher: Publisher) -> None:
        self.instance = InstanceId(f"w{number}", 0)
        address = f"http://{self.instance.worker}"
        info = WorkerInfo(address, (MODEL,), NamespaceDescriptor(BLOCK_TOKENS), b"f" * 16)
        self._outbox = Outbox(self.instance, WorkerUp(info))
        self._outbox.begin_epoch(1)
        self._publisher = publisher
        self._subject = events_subject(MODEL, self.instance)
        self._work, self._progress = asyncio.Event(), asyncio.Event()
        #: packed hashes: all that stays, and those of the last step
        self._held, self._fresh = b"", b""
        #: sequences that never leave
        self._lost: set[int] = set()
        self._inventory_seq = 0

    async def pump(self) -> None:
        """Publish what is due, as a sidecar does, until cancelled."""
        while True:
            now = time.monotonic()
            batch = self._outbox.next_batch(now, time.time_ns())
            if batch is not None:
                if batch.seq not in self._lost:
                    await self._publisher.publish(self._subject, encode(batch))
                self._progress.set()
                continue
            seconds = self._outbox.seconds_until_due(now)
            if seconds is None:
                self._work.clear()
                await self._work.wait()
            else:
                await asyncio.sleep(seconds)

    async def stored(self) -> None:
        """Return when all that has been said so far is in the log."""
        last = self._outbox.seal()
        self._work.set()
        while self._outbox.last_taken_seq < last:
            self._progress.clear()
            await self._progress.wait()
        await self._publisher.flush()

    def hold(self, chain: bytes) -> None:
        """Store this chain first, and others up to WORKER_BLOCKS."""
        self._held = chain + random.randbytes(_HASH * WORKER_BLOCKS - len(chain))
        size = _HASH * EVENT_BLOCKS
        for at in range(0, len(self._held), size):
            self._say(BlockStored(HASHER.root, self._held[at : at + size]))

    def step(self) -> None:
        """Store fresh blocks, and remove those of the step before."""
        size = _HASH * LOAD_BLOCKS
        fresh = random.randbytes(size * STEP_EVENTS // 2)
        stores = [BlockStored(HASHER.root, each) for each in _cut(fresh, size)]
        removals = [BlockRemoved(HASHER.root, each) for each in _cut(self._fresh, size)]
        self._fresh = fresh
        self._say(*stores, *removals)

    def lose(self) -> None:
        """Let a batch get lost, which is seen with the next one: blocks came, as many went."""
        size = _HASH * LOST_BLOCKS
        came, gone = random.randbytes(size), self._held[-size:]
        self._held = self._held[:-size] + came
        self._outbox.seal()
        self._say(BlockStored(HASHER.root, came), BlockRemoved(HASHER.root, gone))
        self._lost.add(self._outbox.seal())

    def tell_digests(self) -> None:
        """Say count and XOR of each tier."""
        self._say(*self._digests())

    def put_inventory(self) -> int:
        """Say all that is held unless that waits already; return the sequence it begins with."""
        if self._outbox.last_taken_seq >= self._inventory_seq:
            as_of = self._outbox.seal()
            self._inventory_seq = as_of + 1
            self._outbox.add_inventory([self._outbox.up, *self._inventory(as_of)])
            self.tell_digests()
        return self._inventory_seq

    def _inventory(self, as_of: int) -> list[Inventory]:
        events = []
        for tier in Tier:
            held = self._held + self._fresh if tier is Tier.hbm else b""
            parts = _cut(held, _HASH * MAX_PART_BLOCKS) or [b""]
            for number, part in enumerate(parts, 1):
                events.append(Inventory(as_of, number, len(parts), tier, HASHER.root, part))
        return events

    def _digests(self) -> list[Digest]:
        held = digest_of_packed(self._held + self._fresh)
        return [Digest(tier, *(held if tier is Tier.hbm else (0, 0))) for tier in Tier]

    def _say(self, *events: KvEvent) -> None:
        self._outbox.add(events)
        self._work.set()


class RepairFleet:
    """All workers, and how many repairs are under way among them."""

    def __init__(self, bus: Bus) -> None:
        numbers = range(NUM_WORKERS)
        self.workers = [RepairWorker(n, bus.publisher(KV_EVENTS)) for n in numbers]
        self._load: asyncio.Task[None] | None = None
        #: worker -> inventories of it that were asked for and are not in the log yet
        self._under_way: dict[RepairWorker, int] = {}
        self._most, self._num_asked = 0, 0

    async def hold(self, tokens: bytes) -> None:
        """Let the first NUM_HOLDERS hold a prompt, and all as many blocks as each other."""
        for number, worker in enumerate(self.workers):
            worker.hold(HASHER.chain(tokens) if number < NUM_HOLDERS else b"")
            await worker.stored()

    async def load_on(self, steps_per_second: int) -> None:
        """Begin to tell 10 events of 4 blocks a step, half of them removals."""
        self._load = asyncio.create_task(self._tell_steps(steps_per_second))

    async def load_off(self) -> None:
        """Stop that."""
        assert self._load
        self._load.cancel()
        await asyncio.wait((self._load,))

    async def break_all(self) -> float:
        """Let every worker lose a batch and go on; return when that was, by `perf_counter`."""
        self._most, self._num_asked = 0, 0
        began = time.perf_counter()
        for worker in self.workers:
            worker.lose()
            worker.step()
        return began

    async def asked(self) -> tuple[int, int]:
        """Return how often an inventory was asked for, and how many were under way at most."""
        return self._num_asked, self._most

    async def answer(self, worker: RepairWorker) -> bytes:
        """Serve `inventory`, as a sidecar does."""
        self._num_asked += 1
        self._under_way[worker] = self._under_way.get(worker, 0) + 1
        self._most = max(self._most, len(self._under_way))
        first_seq = worker.put_inventory()
        asyncio.create_task(worker.stored()).add_done_callback(lambda _: self._arrived(worker))
        return msgspec.msgpack.encode([first_seq])

    def _arrived(self, worker: RepairWorker) -> None:
        self._under_way[worker] -= 1
        if not self._under_way[worker]:
            del self._under_way[worker]

    async def _tell_steps(self, steps_per_second: int) -> None:
        started, told = time.perf_counter(), 0
        while True:
            due = int((time.perf_counter() - started) * steps_per_second)
            for number in range(told, due):
                self.workers[number % NUM_WORKERS].step()
            told = due
            await asyncio.sleep(TICK_SECONDS)

    async def keep_alive(self) -> None:
        """Say digests now and then, one worker after the other."""
        while True:
            for worker in self.workers:
                await asyncio.sleep(DIGEST_SECONDS / NUM_WORKERS)
                worker.tell_digests()


def speak_for_fleet(nats_url: str, pipe: Connection, niceness: int) -> None:
    """Do what the other end of the pipe asks for, until it asks for nothing."""
    os.nice(niceness)
    asyncio.run(_speak(nats_url, pipe))


async def _speak(nats_url: str, pipe: Connection) -> None:
    async with NatsBus(nats_url) as bus, _leases(bus):
        fleet = RepairFleet(bus)
        for worker in fleet.workers:
            await bus.serve(inventory_subject(worker.instance), _answering(fleet, worker))
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(worker.pump()) for worker in fleet.workers]
            running.append(tasks.create_task(fleet.keep_alive()))
            while (call := await asyncio.to_thread(pipe.recv)) is not None:
                name, *arguments = call
                pipe.send(await getattr(fleet, name)(*arguments))
            for task in running:
                task.cancel()


def _answering(fleet: RepairFleet, worker: RepairWorker) -> OnRequest:
    async def answer(_payload: bytes) -> bytes:
        return await fleet.answer(worker)

    return answer


@contextlib.asynccontextmanager
async def _leases(bus: NatsBus) -> AsyncGenerator[None, None]:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(NUM_WORKERS):
            instance = InstanceId(f"w{number}", 0)
            keeper = LeaseKeeper(bus.keys(LEASES_BUCKET), instance, 1, lambda _: None)
            await stack.enter_async_context(keeper)
        yield


def _cut(packed: bytes, size: int) -> list[bytes]:
    return [packed[at : at + size] for at in range(0, len(packed), size)]
