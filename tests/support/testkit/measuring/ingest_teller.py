"""The publisher of the ingest benchmark: says what several sidecars would, over one connection."""

import asyncio
import itertools
import os
import random
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

from kvatlas.events.bus import Bus, Publisher
from kvatlas.events.codec import encode
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_EVENTS
from kvatlas.events.subjects import events_subject
from kvatlas.schemas.digest import TierDigest, digest_of, split_hashes
from kvatlas.schemas.fleet import NamespaceDescriptor, WorkerInfo
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import BlockStored, WorkerUp
from kvatlas.worker_hooks.reporting.outbox import Outbox
from testkit.measuring.ingest_plans import (
    BLOCK_TOKENS,
    HASHER,
    MODEL,
    NUM_WORKERS,
    ONE_BY_ONE,
    RAW_STREAM,
    Coalescing,
    Held,
    Plan,
)

#: events of a worker that follow each other in one prompt
CHAIN_EVENTS = 8
#: events that a sidecar takes from its ring before others have their turn
SLICE_EVENTS = 64
UP = WorkerUp(WorkerInfo("", (MODEL,), NamespaceDescriptor(BLOCK_TOKENS)))


class Worker:
    """One instance: its outbox, and the prompt that it stores at present."""

    def __init__(self, name: str, coalescing: Coalescing) -> None:
        self.name, self.subject = name, events_subject(MODEL, InstanceId(name, 0))
        self.outbox = Outbox(
            InstanceId(name, 0), UP, 1 << 30, coalescing.max_bytes, coalescing.seconds
        )
        self.outbox.begin_epoch(1)
        self._chain = b""
        self._num_stored = 0
        self._count = self._xor = 0

    def stored(self, tokens: bytes) -> BlockStored:
        """Return the next event of the prompt, or the first of another one."""
        if self._num_stored % CHAIN_EVENTS == 0:
            self._chain = b""
        self._num_stored += 1
        parent = self._chain[-16:] or None
        hashes = HASHER.chain(tokens, parent=parent)
        self._chain += hashes
        return BlockStored(HASHER.root, hashes, parent)

    def account(self, event: BlockStored) -> None:
        """Note what the index has to hold."""
        count, xor = digest_of(split_hashes(event.hashes))
        self._count, self._xor = self._count + count, self._xor ^ xor

    @property
    def held(self) -> Held:
        """What it has published."""
        return Held(self.name, self._chain, TierDigest(self._count, self._xor))

    def payloads(self) -> Iterator[bytes]:
        """Take what is due."""
        while (batch := self.outbox.next_batch(time.monotonic(), time.time_ns())) is not None:
            yield encode(batch)


class Teller:
    """Publishes what several sidecars would."""

    def __init__(self, url: str, bus: Bus) -> None:
        self._url, self._publisher = url, bus.publisher(KV_EVENTS)
        self._workers: list[Worker] = []
        #: of the next run, made beforehand: messages, or tokens by worker
        self._messages: list[tuple[str, bytes]] = []
        self._tokens: list[tuple[Worker, bytes]] = []

    async def prepare(self, plan: Plan) -> tuple[list[Held], float]:
        """Encode one event a message; return what will be held and bytes per block."""
        await self._introduce(plan, ONE_BY_ONE)
        self._messages = []
        for worker, tokens in _tokens(self._workers, plan):
            event = worker.stored(tokens)
            worker.account(event)
            worker.outbox.add([event])
            self._messages += [(worker.subject, payload) for payload in worker.payloads()]
        assert len(self._messages) == plan.events
        wire = sum(len(payload) for _, payload in self._messages)
        return [worker.held for worker in self._workers], wire / plan.num_blocks

    async def publish(self) -> float:
        """Publish what is prepared; return the seconds until all is stored."""
        started = time.perf_counter()
        for subject, payload in self._messages:
            await self._publisher.publish(subject, payload)
        await self._publisher.flush()
        return time.perf_counter() - started

    async def prepare_tokens(self, plan: Plan) -> list[Held]:
        """Make the prompts that `publish_as_sidecars` hashes; return what will be held."""
        twins = [Worker(name, ONE_BY_ONE) for name in plan.workers]
        await self._introduce(plan, Coalescing())
        self._tokens = list(_tokens(self._workers, plan))
        names = {twin.name: twin for twin in twins}
        for worker, tokens in self._tokens:
            twin = names[worker.name]
            twin.account(twin.stored(tokens))
        return [twin.held for twin in twins]

    async def publish_as_sidecars(self) -> tuple[int, int]:
        """Hash, coalesce, encode and publish; return the number of messages and their bytes."""
        sizes = []
        for begin in range(0, len(self._tokens), SLICE_EVENTS):
            for worker, tokens in self._tokens[begin : begin + SLICE_EVENTS]:
                worker.outbox.add([worker.stored(tokens)])
            for worker in self._workers:
                for payload in worker.payloads():
                    sizes.append(len(payload))
                    await self._publisher.publish(worker.subject, payload)
            await asyncio.sleep(0)
        for worker in self._workers:
            worker.outbox.seal()
            for payload in worker.payloads():
                sizes.append(len(payload))
                await self._publisher.publish(worker.subject, payload)
        await self._publisher.flush()
        return len(sizes), sum(sizes)

    async def pace(
        self, plan: Plan, events_per_second: float, coalescing: Coalescing
    ) -> tuple[list[Held], list[tuple[str, int, list[float]]]]:
        """Publish at a steady rate; return (worker, sequence, when its events were due) of each."""
        await self._introduce(plan, coalescing)
        events = [
            (worker, worker.stored(tokens)) for worker, tokens in _tokens(self._workers, plan)
        ]
        for worker, event in events:
            worker.account(event)
        senders = [_PacedSender(worker, self._publisher) for worker in self._workers]
        by_name = {sender.worker.name: sender for sender in senders}
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(sender.run()) for sender in senders]
            started = time.perf_counter() + 0.05
            for number, (worker, event) in enumerate(events):
                due = started + number / events_per_second
                await _until(due)
                if number % SLICE_EVENTS == 0:
                    await asyncio.sleep(0)  # who is late lets others run, too
                by_name[worker.name].add(event, due)
            for sender in senders:
                await sender.is_idle.wait()
            for task in running:
                task.cancel()
        await self._publisher.flush()
        return [worker.held for worker in self._workers], [
            (sender.worker.name, *sent) for sender in senders for sent in sender.sent
        ]

    async def flood(self, size: int, messages: int, busy_messages: int) -> float:
        """Publish to a stream that nobody reads, with or without batches; return the seconds."""
        async with NatsBus(self._url, busy_messages=busy_messages) as bus:
            publisher = bus.publisher(RAW_STREAM)
            payload = os.urandom(size)
            await publisher.publish("raw.0", payload)
            await publisher.flush()
            started = time.perf_counter()
            for number in range(messages):
                await publisher.publish(f"raw.{number % NUM_WORKERS}", payload)
            await publisher.flush()
            return time.perf_counter() - started

    async def _introduce(self, plan: Plan, coalescing: Coalescing) -> None:
        """Let fresh workers say who they are, before the clock runs."""
        self._workers = [Worker(name, coalescing) for name in plan.workers]
        for worker in self._workers:
            for payload in worker.payloads():
                await self._publisher.publish(worker.subject, payload)
        await self._publisher.flush()


class _PacedSender:
    """What a sidecar does with its outbox."""

    def __init__(self, worker: Worker, publisher: Publisher) -> None:
        self.worker, self._publisher = worker, publisher
        #: when each event that has not left was due
        self.waiting: list[float] = []
        #: (sequence, when its events were due)
        self.sent: list[tuple[int, list[float]]] = []
        self._work = asyncio.Event()
        #: whether everything has left
        self.is_idle = asyncio.Event()

    def add(self, event: BlockStored, due: float) -> None:
        """Put one event into the outbox."""
        self.worker.outbox.add([event])
        self.waiting.append(due)
        self.is_idle.clear()
        self._work.set()

    async def run(self) -> None:
        """Publish what is due until cancelled."""
        outbox = self.worker.outbox
        while True:
            now = time.monotonic()
            batch = outbox.next_batch(now, time.time_ns())
            if batch is not None:
                taken = len(batch.events)
                self.sent.append((batch.seq, self.waiting[:taken]))
                del self.waiting[:taken]
                await self._publisher.publish(self.worker.subject, encode(batch))
            elif (seconds := outbox.seconds_until_due(now)) is not None:
                await asyncio.sleep(seconds)
            else:
                self.is_idle.set()
                self._work.clear()
                await self._work.wait()


async def _until(moment: float) -> None:
    """Return at or after a moment of `perf_counter`."""
    while (early := moment - time.perf_counter()) > 0:  # noqa: ASYNC110 - it is about time
        await asyncio.sleep(early)


def _tokens(workers: list[Worker], plan: Plan) -> Iterator[tuple[Worker, bytes]]:
    """Yield random tokens for each event, in turn over the workers."""
    rng = random.Random(plan.name)
    turns = itertools.islice(itertools.cycle(workers), plan.events)
    return ((worker, rng.randbytes(4 * BLOCK_TOKENS * plan.blocks)) for worker in turns)


@asynccontextmanager
async def teller(bus: Bus, url: str) -> AsyncGenerator[Teller, None]:
    """Run a publisher."""
    yield Teller(url, bus)
