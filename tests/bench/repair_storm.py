"""What a router's answers cost while a hundred workers are repaired at the same moment.

    .venv/bin/python tests/bench/repair_storm.py [--quick] [--save]

`kvatlas serve` with its broker holds 100 workers of 10,000 blocks each; one process speaks for all
of them, over the broker, with the outbox of a sidecar. Another asks /v1/score for 8,192 tokens 200
times a second, JSON and octets in turn, and counts from when a request was due. Three loads take
turns: idle, 10,000 events of 4 blocks a second (a quick run: 2,000), and the same while every
worker loses a batch (64 blocks came, 64 went), is asked for its inventory and tells it. A storm
lasts until all 100 are `exact` again; only requests due in it count. Whoever looks at that, 20
times a second, does so under all three loads. Under way is an inventory from the request for it
until the log has it all.

Who shares the machine has longer latencies. The longest turn of the router's event loop, in
processor time, which is what a request may have to wait for, says the same without them.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

import contextlib
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import tempfile
import time
from array import array
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import msgspec

from testkit.measuring import Bench, Stopped, timed_serve
from testkit.measuring.http_client import connected, post
from testkit.measuring.http_fleet import MODEL
from testkit.measuring.http_sides import JSON, OCTETS
from testkit.measuring.repair_fleet import (
    NUM_HOLDERS,
    NUM_WORKERS,
    WORKER_BLOCKS,
    speak_for_fleet,
)
from testkit.measuring.repair_load import REPAIR_SECONDS, Asked, RequestLoad
from testkit.measuring.timing import cpu_seconds_of, percentiles

PROMPT_TOKENS = 8_192
FORMS = ("json", "packed")
LOADS = ("idle", "events", "storm")
TIMED_SERVE = str(Path(timed_serve.__file__))
#: between two loads, for what is left of the one before
PAUSE_SECONDS = 0.3

A_STORM = f"a storm is a gap of each of {NUM_WORKERS}"
TOLD = "each has told its inventory"
HEALED = f"all {NUM_WORKERS} are exact again within {REPAIR_SECONDS:g} s"

Answers = Sequence[tuple[str, float, float]]


class Effort(NamedTuple):
    """How much is measured."""

    repetitions: int
    seconds: float
    #: of the load: one that a router cannot follow, for want of processor, hides what heals
    steps_per_second: int
    #: a hundred workers are other machines: they take no processor from the router; a quick run may
    #: have to share the machine with whoever would leave them none
    fleet_niceness: int


FULL, QUICK = Effort(9, 4.0, 1_000, 10), Effort(2, 1.0, 200, 0)


class Served:
    """`kvatlas serve`, and the process that speaks for the workers."""

    def __init__(self, pid: int, nats_url: str, port: int, niceness: int) -> None:
        self.pid, self.port = pid, port
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=speak_for_fleet, args=(nats_url, theirs, niceness), daemon=True
        )
        self._process.start()

    def tell(self, *call: object) -> Any:
        """Have the fleet do something; return what it answers."""
        self._pipe.send(call)
        return self._pipe.recv()

    def stats(self) -> dict[str, Any]:
        """Return /v1/index/stats."""
        with connected(self.port) as connection:
            found = connection.ask(b"GET /v1/index/stats HTTP/1.1\r\nhost: bench\r\n\r\n")
        index: dict[str, Any] = json.loads(found)["index"]
        return index

    def close(self) -> None:
        """End the fleet's process."""
        self._pipe.send(None)
        self._process.join(10)


@contextlib.contextmanager
def served(turns_file: Path, niceness: int) -> Generator[Served, None, None]:
    """Run both; at the end the file has the longer turns of the router's event loop."""
    command = [sys.executable, "-P", TIMED_SERVE, str(turns_file), "serve", "--port", "0"]
    command += ["--json", "--parent-pid", str(os.getpid())]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        try:
            announced = json.loads(process.stdout.readline())
            port = int(announced["router"].rpartition(":")[2])
            found = Served(process.pid, announced["nats"], port, niceness)
            yield found
            found.close()
        finally:
            process.terminate()


class Measured:
    """What was found under each load."""

    def __init__(
        self, bench: Bench, fleet: Served, load: RequestLoad, steps_per_second: int
    ) -> None:
        self._bench, self._fleet, self._load = bench, fleet, load
        self._steps_per_second = steps_per_second
        #: load -> form -> microseconds of all repetitions, and the p99 of each
        self.taken = {name: {form: list[float]() for form in FORMS} for name in LOADS}
        self.p99s = {name: {form: list[float]() for form in FORMS} for name in LOADS}
        #: load -> from when to when, by `perf_counter`
        self.spans = {name: list[tuple[float, float]]() for name in LOADS}
        self.storm_seconds: list[float] = []
        #: of processor time of the router, in each storm
        self.cpu_seconds: list[float] = []
        self.under_way: list[int] = []
        self.requests: list[int] = []

    def idle(self, seconds: float) -> None:
        """Ask while nothing happens."""
        self._keep("idle", self._load.for_seconds(seconds).answers)

    def events(self, seconds: float) -> None:
        """Ask while events are applied."""
        self._fleet.tell("load_on", self._steps_per_second)
        self._keep("events", self._load.for_seconds(seconds).answers)
        self._fleet.tell("load_off")

    def storm(self) -> None:
        """Ask while events are applied and every worker is repaired."""
        self._fleet.tell("load_on", self._steps_per_second)
        before = self._fleet.stats()
        self._load.begin_until_healed()
        time.sleep(PAUSE_SECONDS)
        cpu_seconds = cpu_seconds_of(self._fleet.pid)
        began = float(self._fleet.tell("break_all"))
        found = self._load.result()
        self.cpu_seconds.append(cpu_seconds_of(self._fleet.pid) - cpu_seconds)
        self._fleet.tell("load_off")
        num_asked, most = self._fleet.tell("asked")
        ended = self._healed_at(found)
        self._check(before, self._fleet.stats())
        self.storm_seconds.append(ended - began)
        self.under_way.append(most)
        self.requests.append(num_asked)
        self._keep("storm", [each for each in found.answers if began <= each[1] <= ended])
        self.spans["storm"][-1] = began, ended

    def _healed_at(self, found: Asked) -> float:
        ended, num_exact = found.looks[-1]
        self._hold(HEALED, num_exact == NUM_WORKERS)
        return ended

    def _check(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        gaps = after["gaps"] - before["gaps"]
        self._hold(A_STORM, gaps == NUM_WORKERS)
        inventories = after["inventories"] - before["inventories"]
        self._hold(TOLD, inventories >= NUM_WORKERS)

    def _hold(self, what: str, holds: bool) -> None:
        """Stop the run, or count the gate once for all repetitions."""
        if not holds or what not in self._bench.gates:
            self._bench.gate(what, holds)

    def _keep(self, name: str, answers: Answers) -> None:
        for form in FORMS:
            taken = [us for asked, _, us in answers if asked == form]
            self.taken[name][form] += taken
            self.p99s[name][form].append(percentiles(taken)["p99"])
        self.spans[name].append((answers[0][1], answers[-1][1]))

    def _tell_turns(self, turns: Sequence[tuple[float, float]]) -> None:
        longest: dict[str, list[float]] = {}
        for name in LOADS:
            longest[name] = [
                1e3 * max((took for at, took in turns if began <= at <= ended), default=0.0)
                for began, ended in self.spans[name]
            ]
            found = {"kvatlas": longest[name]}
            self._bench.row("longest turn of the event loop", "ms of processor", found, load=name)
        self._bench.absolute("longest_turn_ms_storm", statistics.median(longest["storm"]))
        self._bench.absolute("longest_turn_ms_events", statistics.median(longest["events"]))

    def tell(self, turns: Sequence[tuple[float, float]]) -> None:
        """Put all of it into the bench."""
        for form in FORMS:
            for name in LOADS:
                taken = self.taken[name][form]
                figures = percentiles(taken)
                figures["p99_median"] = statistics.median(self.p99s[name][form])
                self._bench.figure(
                    "latency", form=form, load=name, unit="us", asks=len(taken), **figures
                )
            p99 = {name: statistics.median(self.p99s[name][form]) for name in LOADS}
            self._bench.absolute(f"p99_storm_over_events_{form}", p99["storm"] / p99["events"])
        self._tell_turns(turns)
        self._bench.row("storm", "s", {"kvatlas": self.storm_seconds}, workers=NUM_WORKERS)
        of_router = {"kvatlas": self.cpu_seconds}
        self._bench.row("storm, processor time of the router", "s", of_router, workers=NUM_WORKERS)
        self._bench.figure(
            "repairs",
            workers=NUM_WORKERS,
            blocks=NUM_WORKERS * WORKER_BLOCKS,
            requests=max(self.requests),
            under_way_at_most=max(self.under_way),
        )
        self._bench.absolute("storm_seconds", statistics.median(self.storm_seconds))
        self._bench.absolute("inventories_under_way", max(self.under_way))


def requests_of(tokens: list[int]) -> dict[str, bytes]:
    """Return the forms that take turns, and the look at all workers."""
    packed = array("I", tokens).tobytes()
    body = msgspec.json.encode({"model": MODEL, "token_ids": tokens})
    return {
        "json": post("/v1/score", body, JSON),
        "packed": post(f"/v1/score?model={MODEL}", packed, OCTETS),
        "look": post(f"/v1/score?model={MODEL}&max_candidates={NUM_WORKERS}", packed[:64], OCTETS),
    }


def until_held(fleet: Served, requests: dict[str, bytes]) -> None:
    """Return when all hold what they were told to; stops the run when they do not."""
    deadline = time.monotonic() + REPAIR_SECONDS
    with connected(fleet.port) as connection:
        while time.monotonic() < deadline:
            found = json.loads(connection.ask(requests["packed"]))["candidates"]
            held = sum(each["match_tokens"] == PROMPT_TOKENS for each in found)
            num_exact = connection.ask(requests["look"]).count(b'"exact"')
            num_blocks = fleet.stats()["num_blocks"]
            if (held, num_exact) == (NUM_HOLDERS, NUM_WORKERS) and num_blocks >= (
                NUM_WORKERS * WORKER_BLOCKS - (NUM_HOLDERS - 1) * PROMPT_TOKENS // 16
            ):
                return
            time.sleep(0.1)
    raise Stopped("repair_storm: the index does not know in time what is held")


def main() -> None:
    """Run the benchmark."""
    bench = Bench("repair_storm", __doc__)
    effort = QUICK if bench.is_quick else FULL
    tokens = [random.Random(1).randrange(150_000) for _ in range(PROMPT_TOKENS)]
    requests = requests_of(tokens)
    with tempfile.TemporaryDirectory(prefix="kvatlas-storm-") as folder:
        turns_file = Path(folder) / "turns.json"
        with served(turns_file, effort.fleet_niceness) as fleet:
            fleet.tell("hold", array("I", tokens).tobytes())
            until_held(fleet, requests)
            forms = {form: requests[form] for form in FORMS}
            load = RequestLoad(fleet.port, forms, requests["look"], NUM_WORKERS)
            measured = Measured(bench, fleet, load, effort.steps_per_second)
            for _ in range(effort.repetitions):
                measured.idle(effort.seconds)
                time.sleep(PAUSE_SECONDS)
                measured.events(effort.seconds)
                time.sleep(PAUSE_SECONDS)
                measured.storm()
                time.sleep(PAUSE_SECONDS)
            load.close()
        measured.tell(json.loads(turns_file.read_text()))
    bench.finish()


if __name__ == "__main__":
    main()
