"""What a score costs over HTTP, asked by tokens and by hashes, idle and while events are applied.

    kvatlas   `kvatlas serve` with its broker; events come by the log, as an engine's sidecar sends
    dynamo    `python -m dynamo.indexer`; events come over ZMQ, as an engine sends

Both hear of the same 16 workers, of which 8 hold the prompts. One client asks both: a blocking
socket with prepared requests, so that its own cost is small and the same. Each side answers alone,
in turn. Under load a process tells 10,000 events of 4 blocks per second, half of them removals, in
batches of 10, as a busy engine's step does.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

import asyncio
import base64
import contextlib
import json
import multiprocessing
import os
import random
import re
import selectors
import socket
import statistics
import subprocess
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

from kvatlas.events.bus import Publisher
from kvatlas.events.codec import encode
from kvatlas.events.leases import LeaseKeeper
from kvatlas.events.nats_bus import NatsBus
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
from testkit.measuring import Bench, Peer, Stopped

MODEL, BLOCK_TOKENS = "m", 16
NUM_WORKERS, NUM_HOLDERS = 16, 8
EVENT_BLOCKS = 64
SIZES = (512, 2_048, 8_192, 131_072)
HEADLINE_TOKENS = 8_192
LOAD_EVENTS_PER_SECOND, BATCH_EVENTS, LOAD_BLOCKS = 10_000, 10, 4
TICK_SECONDS, KEEP_ALIVE_SECONDS = 0.01, 3.0
CONNECTIONS, WARM_UP_ASKS = 16, 5
#: of XXH3-64, as Dynamo names the tokens of a block
DYNAMO_SEED = 1337
HASHER = BlockHasher(NamespaceDescriptor(BLOCK_TOKENS).namespace(MODEL, None, None))
JSON = "content-type: application/json"
MSGPACK = "content-type: application/x-msgpack"
OCTETS = "content-type: application/octet-stream"

Latencies = dict[str, list[float]]


# --- one client for both sides --------------------------------------------------------------


class Connection:
    """One keep-alive connection that sends prepared requests and returns bodies of answers."""

    _LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> bytes:
        self.socket.sendall(request)
        return self.answer()

    def answer(self) -> bytes:
        received = b""
        while True:
            chunk = self.socket.recv(1 << 18)
            if not chunk:
                raise ConnectionError("the server has hung up")
            received += chunk
            head = received.find(b"\r\n\r\n")
            if head < 0:
                continue
            length = self._LENGTH.search(received, 0, head)
            assert length, received[:head]
            if len(received) >= head + 4 + int(length[1]):
                assert received.startswith(b"HTTP/1.1 200"), received
                return received[head + 4 :]


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: bench", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.contextmanager
def connected(port: int) -> Generator[Connection, None, None]:
    """Yield a connection of its own: a server may end one that idles while the others' turn is."""
    connection = Connection(port)
    try:
        yield connection
    finally:
        connection.socket.close()


def microseconds_of(port: int, request: bytes, count: int) -> list[float]:
    """Ask one after the other, over one connection that has been used before."""
    taken = []
    with connected(port) as connection:
        for _ in range(WARM_UP_ASKS):
            connection.ask(request)
        for _ in range(count):
            started = time.perf_counter()
            connection.ask(request)
            taken.append(1e6 * (time.perf_counter() - started))
    return taken


def requests_per_second(port: int, request: bytes, seconds: float) -> float:
    """Ask over 16 connections, each as soon as its last answer is there."""
    with selectors.DefaultSelector() as ready, contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            connection = stack.enter_context(connected(port))
            ready.register(connection.socket, selectors.EVENT_READ, connection)
            connection.socket.sendall(request)
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            for key, _ in ready.select():
                key.data.answer()
                key.data.socket.sendall(request)
                count += 1
        return count / (time.perf_counter() - started)


def percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


# --- the two sides --------------------------------------------------------------------------


class Side(Protocol):
    """A service that is told of a fleet, and the forms in which it can be asked."""

    port: int

    def hold(self, tokens: list[int], first: int, last: int) -> None:
        """Let the workers from first to last hold a prompt."""
        ...

    def requests(self, tokens: list[int]) -> dict[str, bytes]:
        """Return a prepared request in each form; `json`, `packed` and `by_hash` are among them."""
        ...

    def matches(self, answer: bytes) -> dict[int, int]:
        """Return the matched tokens of each worker that has any."""
        ...

    def loaded(self) -> contextlib.AbstractContextManager[list[float]]:
        """Let events be applied meanwhile; leaves events told per second in the list."""
        ...


class Kvatlas:
    """`kvatlas serve` and a process that speaks for 16 workers."""

    def __init__(self, nats_url: str, port: int) -> None:
        self.port = port
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=speak_for_fleet, args=(nats_url, theirs), daemon=True)
        self._process.start()
        self._call("up")

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(10)

    def hold(self, tokens: list[int], first: int, last: int) -> None:
        self._call("hold", array("I", tokens).tobytes(), first, last)

    def requests(self, tokens: list[int]) -> dict[str, bytes]:
        packed = array("I", tokens).tobytes()
        chain = HASHER.chain(packed)
        hashes = [chain[at : at + 16].hex() for at in range(0, len(chain), 16)]
        hashed = {"model": MODEL, "num_tokens": len(tokens)}
        bodies: dict[str, tuple[Any, str]] = {
            "json": ({"model": MODEL, "token_ids": tokens}, JSON),
            "base64": ({"model": MODEL, "token_ids_b64": base64.b64encode(packed).decode()}, JSON),
            "msgpack": ({"model": MODEL, "tokens": packed}, MSGPACK),
            "by_hash": (hashed | {"block_hashes": hashes}, JSON),
            "by_hash_msgpack": (hashed | {"block_hashes": chain}, MSGPACK),
        }
        coded = {
            form: post("/v1/score", (_json if kind == JSON else msgspec.msgpack.encode)(body), kind)
            for form, (body, kind) in bodies.items()
        }
        return coded | {"packed": post(f"/v1/score?model={MODEL}", packed, OCTETS)}

    def matches(self, answer: bytes) -> dict[int, int]:
        candidates = json.loads(answer)["candidates"]
        return {int(c["worker"][1:]): c["match_tokens"] for c in candidates if c["match_tokens"]}

    @contextlib.contextmanager
    def loaded(self) -> Generator[list[float], None, None]:
        before, started = self._num_events(), time.perf_counter()
        told: list[float] = []
        self._call("load_on")
        yield told
        self._call("load_off")
        told.append((self._num_events() - before) / (time.perf_counter() - started))

    def _num_events(self) -> int:
        request = b"GET /v1/index/stats HTTP/1.1\r\nhost: bench\r\n\r\n"
        with connected(self.port) as connection:
            stats = json.loads(connection.ask(request))
        return int(stats["index"]["events"])

    def _call(self, *call: object) -> None:
        self._pipe.send(call)
        answer = self._pipe.recv()
        if answer != "done":
            raise RuntimeError(answer)


class Dynamo:
    """The peer and its engines, in a process of their own."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        peer.ask("start", port=self.port, workers=NUM_WORKERS, block_tokens=BLOCK_TOKENS)

    def hold(self, tokens: list[int], first: int, last: int) -> None:
        self._peer.ask("hold", tokens=tokens, first=first, last=last)

    def requests(self, tokens: list[int]) -> dict[str, bytes]:
        packed, step = array("I", tokens).tobytes(), 4 * BLOCK_TOKENS
        hashes = [
            xxhash.xxh3_64_intdigest(packed[at : at + step], DYNAMO_SEED)
            for at in range(0, len(packed), step)
        ]
        signed = [each - (1 << 64) if each >> 63 else each for each in hashes]
        by_hash = _json({"model_name": MODEL, "block_hashes": signed})
        by_tokens = post("/query", _json({"model_name": MODEL, "token_ids": tokens}), JSON)
        # the peer reads nothing but JSON: whoever has packed tokens sends it those
        return {
            "json": by_tokens,
            "packed": by_tokens,
            "by_hash": post("/query_by_hash", by_hash, JSON),
        }

    def matches(self, answer: bytes) -> dict[int, int]:
        scores = json.loads(answer)["scores"]
        return {int(worker): ranks["0"] for worker, ranks in scores.items() if ranks["0"]}

    @contextlib.contextmanager
    def loaded(self) -> Generator[list[float], None, None]:
        told: list[float] = []
        self._peer.ask(
            "load_on",
            events_per_second=LOAD_EVENTS_PER_SECOND,
            events=BATCH_EVENTS,
            blocks=LOAD_BLOCKS,
            first=NUM_HOLDERS,
        )
        yield told
        found = self._peer.ask("load_off")
        told.append(found["events"] / found["seconds"])


_json: Callable[[Any], bytes] = msgspec.json.encode


@contextlib.contextmanager
def kvatlas_side() -> Generator[Kvatlas, None, None]:
    command = [sys.executable, "-P", "-m", "kvatlas", "serve", "--port", "0", "--json"]
    command += ["--parent-pid", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            announced = json.loads(process.stdout.readline())
            side = Kvatlas(announced["nats"], int(announced["router"].rpartition(":")[2]))
            yield side
            side.close()
        finally:
            process.terminate()


@contextlib.contextmanager
def dynamo_side() -> Generator[Dynamo, None, None]:
    with Peer("dynamo_indexer_http.py") as peer:
        yield Dynamo(peer)


# --- our fleet, in a process of its own -----------------------------------------------------


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
        self._sequence += 1
        worker, now = self.instance.worker, time.time_ns()
        batch = EventBatch(WIRE_VERSION, worker, 0, 1, self._sequence, now, events)
        await self._publisher.publish(self._subject, encode(batch))

    async def hold(self, chain: bytes) -> None:
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
        for worker in self.workers:
            address = f"http://{worker.instance.worker}"
            info = WorkerInfo(address, (MODEL,), NamespaceDescriptor(BLOCK_TOKENS), b"f" * 16)
            await worker.tell(WorkerUp(info))
        await self._publisher.flush()

    async def hold(self, tokens: bytes, first: int, last: int) -> None:
        chain = HASHER.chain(tokens)
        for worker in self.workers[first : last + 1]:
            await worker.hold(chain)
        await self._publisher.flush()

    async def load_on(self) -> None:
        self._load = asyncio.create_task(self._tell_steps())

    async def load_off(self) -> None:
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


def speak_for_fleet(nats_url: str, pipe: "Pipe") -> None:
    """Do what the other end of the pipe asks for, until it asks for nothing."""
    asyncio.run(_speak(nats_url, pipe))


async def _speak(nats_url: str, pipe: "Pipe") -> None:
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


# --- what is measured -----------------------------------------------------------------------


class Effort(NamedTuple):
    """How much is measured; the last repetition of a cell is as long as its first."""

    sizes: tuple[int, ...]
    repetitions: int
    asks: int
    loaded_asks: int
    seconds: float


FULL = Effort(SIZES, 9, 150, 400, 1.5)
QUICK = Effort((HEADLINE_TOKENS,), 3, 40, 100, 0.4)


class Measured:
    """The sides and their fleets, while the bench lasts."""

    def __init__(self, bench: Bench, sides: Mapping[str, Side], effort: Effort) -> None:
        self.bench, self.sides, self.effort = bench, sides, effort
        chosen = random.Random(1)
        self.prompts = {
            size: [chosen.randrange(150_000) for _ in range(size)] for size in effort.sizes
        }
        self.others = [chosen.randrange(150_000) for _ in range(4_096)]

    def prepare(self) -> None:
        """Let both sides' fleets hold the prompts, and see that both say so."""
        for name, side in self.sides.items():
            side.hold(self.others, NUM_HOLDERS, NUM_WORKERS - 1)
            for tokens in self.prompts.values():
                side.hold(tokens, 0, NUM_HOLDERS - 1)
            last = self.prompts[self.effort.sizes[-1]]
            self._until_held(name, last)
            for tokens in (*self.prompts.values(), last[: len(last) // 2]):
                self._check(name, tokens, len(tokens))
            half = last[: len(last) // 2] + self.others[: len(last) // 2]
            self._check(name, half, len(last) // 2)

    def _until_held(self, name: str, tokens: list[int]) -> None:
        side, deadline = self.sides[name], time.monotonic() + 30
        request = side.requests(tokens)["packed"]
        expected = dict.fromkeys(range(NUM_HOLDERS), len(tokens))
        with connected(side.port) as connection:
            while side.matches(connection.ask(request)) != expected:
                if time.monotonic() > deadline:
                    raise Stopped(f"http: {name} does not know in time what is held")
                time.sleep(0.02)

    def _check(self, name: str, tokens: list[int], num_held: int) -> None:
        side, expected = self.sides[name], dict.fromkeys(range(NUM_HOLDERS), num_held)
        for form, request in side.requests(tokens).items():
            with connected(side.port) as connection:
                found = side.matches(connection.ask(request))
            what = f"{name} {form}: {num_held} of {len(tokens)} tokens at {NUM_HOLDERS} workers"
            self.bench.gate(what, found == expected)

    def latency(self, form: str, size: int) -> None:
        """Measure one form at one size, the sides in turn."""
        pooled: Latencies = {}
        samples = self._alternate(form, size, pooled, self.effort.asks)
        self.bench.row(form, "us", samples, tokens=size, what="min of a repetition")
        self._percentiles(form, size, "idle", pooled)
        if size == HEADLINE_TOKENS and form in ("json", "packed", "by_hash"):
            key = f"{form}_512" if form == "by_hash" else f"{form}_{size}"
            self.bench.ratio_of_times(key, samples, "dynamo")
            if "dynamo" in pooled:
                p50 = statistics.median(pooled["dynamo"]) / statistics.median(pooled["kvatlas"])
                self.bench.ratio(f"{key}_p50", p50)

    def _alternate(
        self, form: str, size: int, pooled: Latencies, asks: int
    ) -> dict[str, list[float]]:
        def measure(name: str, request: bytes) -> float:
            taken = microseconds_of(self.sides[name].port, request, asks)
            pooled.setdefault(name, []).extend(taken)
            return min(taken)

        calls = {
            name: (lambda name=name, request=requests[form]: measure(name, request))
            for name, side in self.sides.items()
            if form in (requests := side.requests(self.prompts[size]))
        }
        return self.bench.alternate(calls, self.effort.repetitions)

    def _percentiles(self, form: str, size: int, load: str, pooled: Latencies) -> None:
        for name, taken in pooled.items():
            self.bench.figure(
                f"{form}_latency",
                tokens=size,
                load=load,
                side=name,
                unit="us",
                p50=statistics.median(taken),
                p99=percentile(taken, 0.99),
                asks=len(taken),
            )

    def under_load(self, form: str) -> None:
        """Measure latency and throughput of a form, idle and loaded in turn."""
        taken: dict[str, Latencies] = {"idle": {}, "loaded": {}}
        rates: dict[str, Latencies] = {"idle": {}, "loaded": {}}
        told: Latencies = {}
        for _ in range(self.effort.repetitions):
            for name, side in self.sides.items():
                request = side.requests(self.prompts[HEADLINE_TOKENS])[form]
                self._ask_for_a_while(name, request, taken["idle"], rates["idle"])
                with side.loaded() as events_per_second:
                    self._ask_for_a_while(name, request, taken["loaded"], rates["loaded"])
                told.setdefault(name, []).extend(events_per_second)
        for load in ("idle", "loaded"):
            self._percentiles(form, HEADLINE_TOKENS, load, taken[load])
            self.bench.row(f"{form}_throughput", "1/s", rates[load], load=load)
        self.bench.row("events_applied", "1/s", told, form=form)
        self._compare_p99(form, taken)

    def _ask_for_a_while(
        self, name: str, request: bytes, taken: Latencies, rates: Latencies
    ) -> None:
        port, asks = self.sides[name].port, self.effort.loaded_asks
        asked = microseconds_of(port, request, asks)
        taken.setdefault(name, []).extend(asked)
        rate = requests_per_second(port, request, self.effort.seconds)
        rates.setdefault(name, []).append(rate)

    def _compare_p99(self, form: str, taken: Mapping[str, Latencies]) -> None:
        for name in self.sides:
            idle, loaded = (percentile(taken[load][name], 0.99) for load in ("idle", "loaded"))
            key = "p99_loaded_over_idle" if name == "kvatlas" else f"{name}_p99_loaded_over_idle"
            self.bench.absolute(key if form == "json" else f"{key}_{form}", loaded / idle)


def main() -> None:
    bench = Bench("http", __doc__)
    effort = QUICK if bench.is_quick else FULL
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {"kvatlas": stack.enter_context(kvatlas_side())}
        if bench.has_peer:
            sides["dynamo"] = stack.enter_context(dynamo_side())
        measured = Measured(bench, sides, effort)
        measured.prepare()
        for size in effort.sizes:
            for form in sides["kvatlas"].requests(measured.prompts[size]):
                measured.latency(form, size)
        for form in ("json", "packed"):
            measured.under_load(form)
    bench.finish()


if __name__ == "__main__":
    main()
