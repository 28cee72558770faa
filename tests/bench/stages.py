"""Where the microseconds of a score by hash go: timers around the stages of `kvatlas serve`.

    .venv/bin/python tests/bench/stages.py [--form by_hash|by_hash_octets|json|packed]

Asks 8,192 tokens of a fleet of 16 as the HTTP bench does, and prints the round trip, then each
stage: the median, and what it took at best. A stage contains those indented below it; a timer costs
about 0.3 us, all of them together about 5 us of the round trip. No bench of its own: saves nothing.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

import argparse
import atexit
import functools
import random
import statistics
import time
from collections import defaultdict
from typing import Any

from kvatlas.__main__ import main as kvatlas
from kvatlas.router import service
from kvatlas.router.decision.candidates import CandidateFinder
from kvatlas.router.http import hot_protocol
from kvatlas.router.http import hot_routes as hot
from kvatlas.router.service import RouterService
from testkit.measuring.http_client import microseconds_of
from testkit.measuring.http_fleet import NUM_HOLDERS
from testkit.measuring.http_sides import kvatlas_side

ASKS, ROUNDS, TOKENS = 200, 10, 8_192
#: owner, name, what it is
STAGES: tuple[tuple[Any, str, str], ...] = (
    (hot_protocol.HotProtocol, "data_received", "from the read bytes to the written answer"),
    (hot_protocol.HotProtocol, "_read_head", "  head of the request"),
    (hot, "decode_score_request", "  body to typed request"),
    (RouterService, "score", "  score"),
    (CandidateFinder, "gather", "    candidates, what they hold, their load"),
    (CandidateFinder, "_held", "      of that, the match of the chain"),
    (service, "scores_of", "    terms of the eight cheapest"),
    (hot, "encoded", "  answer to JSON"),
    (hot_protocol.HotProtocol, "_send", "  write: system call, client woken"),
)


def time_stages() -> None:
    """Put a timer around each stage; print what they saw when the process ends."""
    seen: dict[str, list[float]] = defaultdict(list)

    def timed(call: Any, stage: str) -> Any:
        @functools.wraps(call)
        def timing(*arguments: Any) -> Any:
            started = time.perf_counter()
            found = call(*arguments)
            seen[stage].append(1e6 * (time.perf_counter() - started))
            return found

        return timing

    for owner, name, stage in STAGES:
        setattr(owner, name, timed(getattr(owner, name), stage))

    def show() -> None:
        for _, _, stage in STAGES:
            if seen[stage]:
                figures = f"{statistics.median(seen[stage]):8.1f} {min(seen[stage]):8.1f}"
                print(f"{figures}  {stage}", file=sys.stderr)

    atexit.register(show)


def main() -> None:
    """Ask, and let the service say what it spent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", default="by_hash")
    asked = parser.parse_args()
    chosen = random.Random(1)
    tokens = [chosen.randrange(150_000) for _ in range(TOKENS)]
    with kvatlas_side([__file__]) as side:
        side.hold(tokens, 0, NUM_HOLDERS - 1)
        request, taken = side.requests(tokens)[asked.form], []
        for _ in range(ROUNDS):
            taken += microseconds_of(side.port, request, ASKS)
    print(f"{statistics.median(taken):8.1f} {min(taken):8.1f}  round trip", file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        time_stages()
        sys.exit(kvatlas())
    main()
