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
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvatlas.events.bus import StreamSpec
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from testkit.measuring import Bench, Peer
from testkit.measuring.ingest_plans import (
    NUM_WORKERS,
    ONE_BY_ONE,
    RAW_STREAM,
    Coalescing,
    Held,
    Plan,
)
from testkit.measuring.ingest_processes import Fleet, remotes

#: between two looks at what is visible; the peer's side does the same
PAUSE_SECONDS = 0.005
WAIT_SECONDS = 120.0
PEER_THREADS = 1
OURS, AS_SIDECAR, PEER = "kvatlas", "kvatlas, as the sidecar does it", "dynamo"


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
