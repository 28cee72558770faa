"""How long an index takes to be ready: from a snapshot and what follows it, from the log alone.

    .venv/bin/python tests/bench/cold_start.py [--quick] [--save]

A broker keeps a log of so many distinct blocks: 32 workers in batches of 64 blocks, every eighth
run held by two. `kvatlas indexer` is started as a process; the seconds run from its start until
/readyz says yes. A snapshot stands for all but the last 2,000 messages. Gates: the digest of each
started index is that of a fold of everything.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

import asyncio
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec

from kvatlas.events.bus import Bus, Message
from kvatlas.events.codec import encode
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import KV_EVENTS, decisions_stream, events_stream
from kvatlas.events.subjects import events_subject
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import stimulus_of
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.snapshots.writing import SnapshotSettings, SnapshotStatus
from kvatlas.indexer.warming import warm_kernels
from kvatlas.schemas.fleet import NamespaceDescriptor, WorkerInfo
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import WIRE_VERSION, BlockStored, EventBatch, KvEvent, WorkerUp
from testkit.measuring import Bench
from testkit.measuring.timing import cpu_seconds_of
from testkit.waiting import until

NUM_WORKERS, RUN_BLOCKS, SHARED_EVERY, TAIL_MESSAGES = 32, 64, 8, 2_000
READY_SECONDS = 120.0
SIZES = {"0_2m": 200_000, "2m": 2_000_000, "10m": 10_000_000}


def main() -> None:
    """Measure all sizes."""
    bench = Bench("cold_start", __doc__)
    bench.figure("kernels", seconds=warm_kernels().seconds)
    for label, num_blocks in SIZES.items():
        if not (bench.is_quick and label == "10m"):
            asyncio.run(measure(bench, label, num_blocks))
    bench.finish()


async def measure(bench: Bench, label: str, num_blocks: int) -> None:
    """Measure one size."""
    log = list(the_log(num_blocks))
    digest = fold(bench, log, num_blocks)
    async with broker() as url, NatsBus(url) as bus:
        await bus.declare_stream(events_stream())
        await bus.declare_stream(decisions_stream())
        await publish(bus, log[:-TAIL_MESSAGES])
        status = await take_snapshot(bus)
        await publish(bus, log[-TAIL_MESSAGES:])
        bench.figure(
            "snapshot",
            blocks=num_blocks,
            megabytes=status.num_bytes / 1e6,
            pause_ms=1e3 * status.pause_seconds,
            upload_seconds=status.upload_seconds,
        )
        del log  # it would take memory from the index that is measured

        cpu_seconds: dict[str, list[float]] = {"snapshot": [], "log alone": []}

        def start(side: str) -> float:
            found = started_index(url, 86_400 if side == "snapshot" else 0)
            bench.gate(f"{label}: equal digests", found.state_digest == digest)
            cpu_seconds[side].append(found.cpu_seconds)
            return found.seconds

        repetitions = 2 if bench.is_quick or label == "10m" else 5
        sides = {"snapshot": lambda: start("snapshot"), "log alone": lambda: start("log alone")}
        samples = await asyncio.to_thread(bench.alternate, sides, repetitions)
    bench.row("ready", "s", samples, blocks=num_blocks)
    bench.row("ready, processor time", "s", cpu_seconds, blocks=num_blocks)
    bench.absolute(f"seconds_{label}", min(samples["snapshot"]))
    bench.absolute(f"seconds_{label}_log_alone", min(samples["log alone"]))
    bench.absolute(f"pause_ms_{label}", 1e3 * status.pause_seconds)
    bench.ratio(
        f"log_alone_over_snapshot_{label}", min(samples["log alone"]) / min(samples["snapshot"])
    )


def fold(bench: Bench, log: list[tuple[str, bytes]], num_blocks: int) -> str:
    """Tell how long folding the log takes; return the digest that every start has to end in."""
    state = IndexState(FlatRadixIndex())
    started = time.perf_counter()
    for at, (subject, payload) in enumerate(log, 1):
        state.handle(stimulus_of(Message(at, subject, payload, at)))
    seconds = time.perf_counter() - started
    bench.figure("fold", blocks=num_blocks, messages=len(log), seconds=seconds)
    return state.state_digest()


class Started(msgspec.Struct):
    """An index that was started and stopped again."""

    seconds: float
    #: of its processor time, which others on the machine do not lengthen much
    cpu_seconds: float
    state_digest: str


class IndexAnswer(msgspec.Struct):
    """What /v1/index/stats says that matters here."""

    state_digest: str


def started_index(url: str, snapshot_seconds: int) -> Started:
    """Start an index in a process, wait until it is ready, stop it."""
    options = [
        f"indexer.snapshot_seconds={snapshot_seconds}",
        "indexer.snapshot_messages=1000000000",
    ]
    command = [sys.executable, "-P", "-m", "kvatlas", "indexer", "--port", "0", "--json"]
    command += ["--nats", url]
    for option in options:
        command += ["--set", option]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = msgspec.json.decode(process.stdout.readline(), type=dict[str, str])["indexer"]
        while not is_ready(address):
            if time.perf_counter() - started > READY_SECONDS:
                raise TimeoutError(f"not ready after {READY_SECONDS} s")
            time.sleep(0.005)
        seconds, cpu_seconds = time.perf_counter() - started, cpu_seconds_of(process.pid)
        with urllib.request.urlopen(f"{address}/v1/index/stats") as answer:
            found = msgspec.json.decode(answer.read(), type=IndexAnswer)
        return Started(seconds, cpu_seconds, found.state_digest)
    finally:
        process.terminate()
        process.wait()


def is_ready(address: str) -> bool:
    """Ask /readyz."""
    try:
        with urllib.request.urlopen(f"{address}/readyz"):
            return True
    except urllib.error.HTTPError:
        return False


async def take_snapshot(bus: Bus) -> SnapshotStatus:
    """Have an index read the log and take a snapshot as a replica does."""
    settings = SnapshotSettings(seconds=1.0, messages=1)
    async with IndexService(bus, IndexState(FlatRadixIndex()), snapshots=settings) as service:
        await service.wait_ready()
        status = service.snapshots
        assert status is not None
        await until(lambda: status.num_written > 0, READY_SECONDS)
        return status


async def publish(bus: Bus, messages: list[tuple[str, bytes]]) -> None:
    """Store messages in the log."""
    publisher = bus.publisher(KV_EVENTS)
    for subject, payload in messages:
        await publisher.publish(subject, payload)
    await publisher.flush()


@asynccontextmanager
async def broker() -> AsyncIterator[str]:
    """Run a broker in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="kvatlas-cold-") as folder:
        async with embedded_server(Path(folder)) as server:
            yield server.url


def the_log(num_blocks: int) -> Iterator[tuple[str, bytes]]:
    """Yield subject and payload of each message."""
    names = [InstanceId(f"worker-{number:02}", 0) for number in range(NUM_WORKERS)]
    seqs = dict.fromkeys(names, 0)
    parents: dict[InstanceId, bytes | None] = dict.fromkeys(names)
    info = WorkerInfo("http://127.0.0.1:1", ("model",), NamespaceDescriptor(16))
    root = bytes(15) + b"\x01"

    def message(name: InstanceId, event: KvEvent) -> tuple[str, bytes]:
        seqs[name] += 1
        batch = EventBatch(WIRE_VERSION, name.worker, name.rank, 1, seqs[name], 0, (event,))
        return events_subject("model", name), encode(batch)

    for name in names:
        yield message(name, WorkerUp(info))
    for number in range(num_blocks // RUN_BLOCKS):
        name, other = names[number % NUM_WORKERS], names[(number + 1) % NUM_WORKERS]
        # a new chain from time to time
        parent = parents[name] if number % 1_000 >= NUM_WORKERS else None
        hashes = os.urandom(16 * RUN_BLOCKS)
        parents[name] = hashes[-16:]
        stored = BlockStored(root, hashes, parent, Tier.hbm)
        yield message(name, stored)
        if number % SHARED_EVERY == 0:
            yield message(other, stored)


if __name__ == "__main__":
    main()
