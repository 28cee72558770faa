"""Publish -> visible in the index: how many events a second, and after how long.

    kvatlas   publisher -> nats-server (JetStream, file storage) -> index, a process each
    dynamo    publisher -> `python -m dynamo.indexer` over ZMQ, which keeps nothing

Both sides send the same number of events of the same size, encoded beforehand, one event a message;
the clock runs until the last prompt of each of 8 workers is found by a query. Ours knows its hashes
beforehand; the peer hashes tokens in its indexer. `as the sidecar does it` hashes, coalesces and
encodes on the clock, too.

Who shares the machine has longer times; CPU says what a side costs all the same.

A delay is that of one event: from when it is due at a steady rate to when the index holds it, the
publisher's own lateness included. The events of 8 workers go through 8 outboxes and one publisher.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

import asyncio
import itertools
import multiprocessing
import os
import random
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from kvatlas.events.bus import Bus, Publisher, StreamSpec
from kvatlas.events.codec import encode
from kvatlas.events.embedded import embedded_server
from kvatlas.events.nats_bus import NatsBus
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.events.subjects import events_subject
from kvatlas.indexer.flat import FlatRadixIndex
from kvatlas.indexer.service import IndexService, ServiceSettings
from kvatlas.indexer.state import IndexState
from kvatlas.indexer.stimuli import BatchArrived, Effect, Stimulus
from kvatlas.schemas.digest import TierDigest, digest_of, split_hashes
from kvatlas.schemas.fleet import NamespaceDescriptor, WorkerInfo
from kvatlas.schemas.hashing import BlockHasher, Namespace
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import BlockStored, WorkerUp
from kvatlas.worker_hooks.outbox import COALESCE_BYTES, COALESCE_SECONDS, Outbox
from testkit.measuring import Bench, Peer

MODEL, BLOCK_TOKENS, NUM_WORKERS = "m", 16, 8
#: events of a worker that follow each other in one prompt
CHAIN_EVENTS = 8
#: between two looks at what is visible; the peer's side does the same
PAUSE_SECONDS = 0.005
WAIT_SECONDS = 120.0
#: events that a sidecar takes from its ring before others have their turn
SLICE_EVENTS = 64
PEER_THREADS = 1
RAW_STREAM = "RAW"
OURS, AS_SIDECAR, PEER = "kvatlas", "kvatlas, as the sidecar does it", "dynamo"
HASHER = BlockHasher(Namespace(MODEL, BLOCK_TOKENS))
UP = WorkerUp(WorkerInfo("", (MODEL,), NamespaceDescriptor(BLOCK_TOKENS)))


class Coalescing(NamedTuple):
    """How an outbox puts events together; one byte is one event a message."""

    max_bytes: int = COALESCE_BYTES
    seconds: float = COALESCE_SECONDS


ONE_BY_ONE = Coalescing(1, 0.0)


class Held(NamedTuple):
    """What one worker has published: its last prompt's hashes and what its tier holds."""

    worker: str
    last_chain: bytes
    digest: TierDigest


class Plan(NamedTuple):
    """One run: fresh workers named after it, the same number of events each."""

    name: str
    events: int
    blocks: int

    @property
    def workers(self) -> list[str]:
        return [f"{self.name}-{number}" for number in range(NUM_WORKERS)]

    @property
    def num_blocks(self) -> int:
        return self.events * self.blocks


# --- the index's process ----------------------------------------------------------------------


class WatchedState(IndexState):
    """Notes when each batch has been folded in, while it is watched."""

    folded: list[tuple[str, int, float]] | None = None

    def handle(self, stimulus: Stimulus) -> list[Effect]:
        effects = super().handle(stimulus)
        if self.folded is not None and isinstance(stimulus, BatchArrived):
            batch = stimulus.decoded.batch
            self.folded.append((batch.worker, batch.seq, time.perf_counter()))
        return effects


class Indexer:
    """Answers from an index that follows the log."""

    def __init__(self, state: WatchedState) -> None:
        self._state = state
        #: whose last prompts are not found yet
        self._expected: list[Held] = []

    async def expect(self, held: list[Held]) -> None:
        """Learn what `are_visible` looks for."""
        self._expected = list(held)

    async def are_visible(self) -> bool:
        """Say whether the last prompt of every worker is found, looking one up at a time."""
        while self._expected and self._holds(self._expected[0]):
            del self._expected[0]
        return not self._expected

    async def digests(self, workers: list[str]) -> list[TierDigest]:
        """Return what each worker holds."""
        views = [self._state.instance(InstanceId(worker, 0)) for worker in workers]
        return [view.digests[Tier.hbm] if view else TierDigest() for view in views]

    async def watch(self) -> None:
        """Begin to note when batches are folded in."""
        self._state.folded = []

    async def times(self) -> list[tuple[str, int, float]]:
        """Return (worker, sequence, moment) of each batch since `watch`."""
        return self._state.folded or []

    def _holds(self, held: Held) -> bool:
        return any(
            match.instance.worker == held.worker and 16 * match.num_blocks == len(held.last_chain)
            for match in self._state.match(held.last_chain)
        )


@asynccontextmanager
async def indexer(bus: Bus) -> AsyncGenerator[Indexer, None]:
    """Run an index at the end of the log."""
    state = WatchedState(FlatRadixIndex())
    patient = ServiceSettings(lease_missing_seconds=3600.0)  # nobody here holds a lease
    async with IndexService(bus, state, settings=patient) as service:
        await service.wait_ready()
        yield Indexer(state)


# --- the publisher's process ------------------------------------------------------------------


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
        while (batch := self.outbox.take(time.monotonic(), time.time_ns())) is not None:
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
            batch = outbox.take(now, time.time_ns())
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


# --- processes --------------------------------------------------------------------------------


class Remote:
    """An object in a process of its own: its methods are called by name, one at a time."""

    def __init__(self, role: str, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(role, url, other), daemon=True)
        self._process.start()
        other.close()
        self._pipe.recv()
        self.pid = self._process.pid or 0

    def ask(self, call: str, *arguments: Any) -> Any:
        """Return what the method returns."""
        self.begin(call, *arguments)
        return self.result()

    def begin(self, call: str, *arguments: Any) -> None:
        """Call a method; `result` waits for it."""
        self._pipe.send((call, arguments))

    def result(self) -> Any:
        """Return what the method that was begun returns."""
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)


def _serve(role: str, url: str, pipe: Connection) -> None:
    asyncio.run(_answer(role, url, pipe))


async def _answer(role: str, url: str, pipe: Connection) -> None:
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    async with NatsBus(url) as bus:
        await bus.declare_stream(events_stream())
        role_of = indexer(bus) if role == "indexer" else teller(bus, url)
        async with role_of as served:
            pipe.send(None)
            loop.add_reader(pipe.fileno(), readable.set)
            with suppress(EOFError):
                while True:
                    await readable.wait()
                    readable.clear()
                    if not pipe.poll():
                        continue  # told twice; to wait for it here would stop everything else
                    call, arguments = pipe.recv()
                    try:
                        pipe.send(await getattr(served, call)(*arguments))
                    except Exception as error:  # noqa: BLE001 - told to the other side
                        pipe.send(error)
            loop.remove_reader(pipe.fileno())


class Fleet(NamedTuple):
    """Our three processes."""

    broker_folder: Path
    broker_pid: int
    teller: Remote
    indexer: Remote

    def cpu_seconds(self) -> float:
        """Return what all three have used."""
        return sum(map(cpu_seconds, (self.broker_pid, self.teller.pid, self.indexer.pid)))


def cpu_seconds(pid: int) -> float:
    """Return what a process has used on all CPUs, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def remotes(folder: Path, url: str, broker_pid: int) -> Iterator[Fleet]:
    """Run publisher and index on a broker."""
    with ExitStack() as stack:
        found = [Remote(role, url) for role in ("teller", "indexer")]
        for remote in found:
            stack.callback(remote.close)
        yield Fleet(folder, broker_pid, *found)


# --- what is measured -------------------------------------------------------------------------


class Measure:
    """All cases of the benchmark on one fleet and perhaps a peer."""

    def __init__(self, bench: Bench, fleet: Fleet, peer: Peer | None) -> None:
        self._bench, self._fleet, self._peer = bench, fleet, peer
        self._names = (f"run{number}" for number in itertools.count())
        #: side -> CPU of all its processes in each run, us an event
        self._cpu: dict[str, list[float]] = {}

    def rates(self, blocks: int, events: int, repetitions: int) -> None:
        """Events per second of both sides, and ours as sidecars do it."""
        plan, self._cpu = Plan("", events, blocks), {}
        sides: dict[str, Callable[[], float]] = {
            OURS: lambda: self._our_rate(plan),
            AS_SIDECAR: lambda: self._sidecar_rate(plan),
        }
        if self._peer is not None:
            sides[PEER] = lambda: self._peer_rate(plan)
        found = self._bench.alternate(sides, repetitions)
        self._bench.row("publish to visible", "us/event", found, blocks=blocks, events=events)
        self._bench.row("CPU of all processes", "us/event", self._cpu, blocks=blocks)
        for side, values in found.items():
            self._bench.figure("rate", blocks=blocks, side=side, events_per_s=1e6 / min(values))
        self._bench.ratio_of_times(f"rate_{blocks}", found, PEER)
        as_sidecar = found | {OURS: found[AS_SIDECAR]}
        self._bench.ratio_of_times(f"rate_{blocks}_as_sidecar", as_sidecar, PEER)
        self._bench.absolute(f"events_per_s_{blocks}", 1e6 / min(found[OURS]))
        self._bench.absolute(f"events_per_s_{blocks}_as_sidecar", 1e6 / min(found[AS_SIDECAR]))

    def _fresh(self, plan: Plan) -> Plan:
        return plan._replace(name=next(self._names))

    def _our_rate(self, plan: Plan) -> float:
        plan = self._fresh(plan)
        held, wire = self._fleet.teller.ask("prepare", plan)
        seconds, stored_seconds, disk = self._run(OURS, "publish", held, plan)
        self._bench.figure(
            "bytes per block",
            blocks=plan.blocks,
            side=OURS,
            wire=wire,
            disk=disk,
            stored_after_share=stored_seconds / seconds,
        )
        return 1e6 * seconds / plan.events

    def _sidecar_rate(self, plan: Plan) -> float:
        plan = self._fresh(plan)
        held = self._fleet.teller.ask("prepare_tokens", plan)
        seconds, (num_messages, num_bytes), disk = self._run(
            AS_SIDECAR, "publish_as_sidecars", held, plan
        )
        self._bench.figure(
            "bytes per block",
            blocks=plan.blocks,
            side=AS_SIDECAR,
            wire=num_bytes / plan.num_blocks,
            disk=disk,
            events_per_message=plan.events / num_messages,
        )
        return 1e6 * seconds / plan.events

    def _run(self, side: str, call: str, held: list[Held], plan: Plan) -> tuple[float, Any, float]:
        """Return seconds until all is visible, the publisher's answer, bytes per block on disk."""
        self._fleet.indexer.ask("expect", held)
        disk, cpu = self._disk_bytes(), self._fleet.cpu_seconds()
        started = time.perf_counter()
        self._fleet.teller.begin(call)
        seconds = self._until_visible(started)
        answer = self._fleet.teller.result()
        self._note_cpu(side, self._fleet.cpu_seconds() - cpu, plan)
        self._check(held, plan)
        return seconds, answer, (self._disk_bytes() - disk) / plan.num_blocks

    def _note_cpu(self, side: str, seconds: float, plan: Plan) -> None:
        self._cpu.setdefault(side, []).append(1e6 * seconds / plan.events)

    def _peer_rate(self, plan: Plan) -> float:
        assert self._peer is not None
        wire = self._peer.ask("prepare", events=plan.events, blocks=plan.blocks)
        cpu = self._peer.ask("cpu_seconds")
        seconds = self._peer.ask("publish")
        self._note_cpu(PEER, self._peer.ask("cpu_seconds") - cpu, plan)
        self._gate("the peer holds what it was told", self._peer.ask("are_all_visible"))
        self._bench.figure("bytes per block", blocks=plan.blocks, side=PEER, wire=wire)
        return float(1e6 * seconds / plan.events)

    def _until_visible(self, started: float) -> float:
        while not self._fleet.indexer.ask("are_visible"):
            in_time = time.perf_counter() - started < WAIT_SECONDS
            self._gate("all events become visible", in_time)
            time.sleep(PAUSE_SECONDS)
        self._gate("all events become visible", holds=True)
        return time.perf_counter() - started

    def _check(self, held: list[Held], plan: Plan) -> None:
        found = self._fleet.indexer.ask("digests", plan.workers)
        told = sum(digest.count for digest in found)
        self._gate("the index holds as many blocks as were published", told == plan.num_blocks)
        self._gate("its digests are those of the publisher", found == [h.digest for h in held])

    def _gate(self, what: str, holds: bool) -> None:
        """Stop the run unless it holds; note it once."""
        if not holds or what not in self._bench.gates:
            self._bench.gate(what, holds)

    def _disk_bytes(self) -> int:
        files = self._fleet.broker_folder.glob("streams/**/KV_EVENTS/msgs/*.blk")
        return sum(file.stat().st_size for file in files)

    def delays(self, events_per_second: int, seconds: float, coalescing: Coalescing) -> float:
        """Return the 99th percentile of the delay at a steady rate, in ms."""
        events = int(events_per_second * seconds) // NUM_WORKERS * NUM_WORKERS
        plan = Plan(next(self._names), events, 1)
        self._fleet.indexer.ask("watch")
        held, sent = self._fleet.teller.ask("pace", plan, events_per_second, coalescing)
        self._fleet.indexer.ask("expect", held)
        self._until_visible(time.perf_counter())
        self._check(held, plan)
        folded = {(w, seq): at for w, seq, at in self._fleet.indexer.ask("times")}
        delays: list[float] = sorted(
            1e3 * (folded[worker, seq] - due) for worker, seq, dues in sent for due in dues
        )
        self._gate("every event has a delay", len(delays) == events)
        p50, p99 = delays[events // 2], delays[int(events * 0.99)]
        self._bench.figure(
            "delay",
            events_per_s=events_per_second,
            coalesce_ms=1e3 * coalescing.seconds,
            events_per_message=events / len(sent),
            p50_ms=p50,
            p99_ms=p99,
            max_ms=delays[-1],
        )
        return p99

    def ways(self, size: int, messages: int, repetitions: int) -> None:
        """What a message costs its publisher, answered by itself and in batches."""
        ask = self._fleet.teller.ask
        found = self._bench.alternate(
            {
                "single": lambda: 1e6 * ask("flood", size, messages, 0) / messages,
                "batches": lambda: 1e6 * ask("flood", size, messages, 64) / messages,
            },
            repetitions,
        )
        self._bench.row("publish until stored", "us/message", found, bytes=size)
        self._bench.absolute(
            f"batches_speedup_{size}", min(found["single"]) / min(found["batches"])
        )


def measure(bench: Bench, fleet: Fleet, peer: Peer | None) -> None:
    """Measure everything, or the headline."""
    run = Measure(bench, fleet, peer)
    repetitions = 2 if bench.is_quick else 7
    run.rates(64, 4_000 if bench.is_quick else 16_000, repetitions)
    run.rates(1, 8_000 if bench.is_quick else 48_000, repetitions)
    for size in (500, 1200):
        run.ways(size, 10_000 if bench.is_quick else 60_000, repetitions)
    seconds = 1.5 if bench.is_quick else 8.0
    for rate in (1_000, 10_000):
        bench.absolute(f"delay_p99_ms_{rate}", run.delays(rate, seconds, Coalescing()))
        if not bench.is_quick:
            for pause in (0.0005, 0.005, 0.01):
                run.delays(rate, seconds, Coalescing(seconds=pause))
            run.delays(rate, seconds, ONE_BY_ONE)


def free_port() -> int:
    """Return a port that was free just now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


async def main() -> None:
    """Run the benchmark."""
    bench = Bench("ingest", __doc__)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        async with embedded_server(folder) as server:
            async with NatsBus(server.url) as bus:
                await bus.declare_stream(StreamSpec(RAW_STREAM, ("raw.>",), 1 << 30, 3600.0))
            fleet = stack.enter_context(remotes(folder, server.url, server.pid or 0))
            peer = stack.enter_context(Peer("dynamo_indexer.py")) if bench.has_peer else None
            if peer is not None:
                started = {"port": free_port(), "workers": NUM_WORKERS, "threads": PEER_THREADS}
                bench.versions["ai-dynamo-runtime"] = peer.ask("start", **started)
            measure(bench, fleet, peer)
            stack.close()
    bench.finish()


if __name__ == "__main__":
    asyncio.run(main())
