"""What a score costs over HTTP, asked by tokens and by hashes, idle and while events are applied.

    kvatlas   `kvatlas serve` with its broker; events come by the log, as an engine's sidecar sends
    dynamo    `python -m dynamo.indexer`; events come over ZMQ, as an engine sends

Both hear of the same 16 workers, of which 8 hold the prompts. One client asks both: a blocking
socket with prepared requests, so that its own cost is small and the same. Each side answers alone,
in turn.

What they answer is not equal. kvatlas says who of the 16 would be chosen, and of the eight cheapest
what each holds by tier and each term of its cost, 2.6 KB; dynamo says the matched tokens of each
holder, 0.8 KB. A hash is 32 hex digits here, and an integer of 64 bits there: 512 of them are 18 KB
and 10 KB. `by_hash_octets` is the 16-byte hashes as they are, 8 KB; the peer is sent its JSON.

Under load a process tells 10,000 events of 4 blocks per second, half of them removals, in
batches of 10, as a busy engine's step does.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

import contextlib
import random
import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

from testkit.measuring import Bench, Stopped
from testkit.measuring.http_client import connected, microseconds_of, requests_per_second
from testkit.measuring.http_fleet import NUM_HOLDERS, NUM_WORKERS
from testkit.measuring.http_sides import Side, dynamo_side, kvatlas_side
from testkit.measuring.timing import percentiles

SIZES = (512, 2_048, 8_192, 131_072)
HEADLINE_TOKENS = 8_192

Latencies = dict[str, list[float]]


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
        if size == HEADLINE_TOKENS and form in ("json", "packed", "by_hash", "by_hash_octets"):
            key = f"{form}_512" if form.startswith("by_hash") else f"{form}_{size}"
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
                p99=percentiles(taken)["p99"],
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
            idle, loaded = (percentiles(taken[load][name])["p99"] for load in ("idle", "loaded"))
            key = "p99_loaded_over_idle" if name == "kvatlas" else f"{name}_p99_loaded_over_idle"
            self.bench.absolute(key if form == "json" else f"{key}_{form}", loaded / idle)


def main() -> None:
    """Run the benchmark."""
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
