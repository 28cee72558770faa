"""A storm over a whole fleet of processes, and whether it stayed exact or honest.

    python tests/fault/storm.py --seconds 60 --seed 1 --workers 8 --json

The last line is JSON; the status is 1 unless nothing acknowledged was lost, nothing called exact
was wrong, every request was answered and all readers ended with the same state.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from testkit.storm.fleet import Say, StormOptions, run_storm
from testkit.storm.verifying import Verdict


def main() -> int:
    """Run the storm that the arguments ask for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long things break")
    parser.add_argument("--seed", type=int, default=1, help="of faults, load and prompts")
    parser.add_argument("--workers", type=int, default=8, help="worker processes")
    parser.add_argument(
        "--ops", type=float, default=15.0, help="stores and removals/s, each worker"
    )
    parser.add_argument("--requests", type=float, default=12.0, help="requests per second")
    parser.add_argument("--patience", type=float, default=20.0, help="for a dead router, seconds")
    parser.add_argument("--folder", type=Path, help="keep logs, truths and archive here")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    given = parser.parse_args()
    options = StormOptions(
        given.seconds, given.seed, given.workers, given.ops, given.requests, given.patience
    )
    with tempfile.TemporaryDirectory(prefix="kvatlas-storm-") as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        verdict = asyncio.run(run_storm(options, folder, Say(is_silent=given.json)))
    for example in verdict.examples:
        print(f"  {example}", file=sys.stderr)
    load = round(os.getloadavg()[1], 1)
    print(json.dumps({**summary(options.seed, verdict), "load": load}))
    return 0 if verdict.holds else 1


def summary(seed: int, verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as the last line has it."""
    seconds = sorted(verdict.converge_seconds) or [0.0]
    return {
        "seed": seed,
        "faults": dict(sorted(verdict.faults.items())),
        "acked": verdict.acked,
        "acked_lost": verdict.acked_lost,
        "checked_exact": verdict.checked_exact,
        "wrong_exact": verdict.wrong_exact,
        "unknown_truth": verdict.unknown_truth,
        "requests": verdict.requests,
        "retried": verdict.retried,
        "unanswered": verdict.unanswered,
        "statuses": verdict.statuses,
        "messages": verdict.messages,
        "lost_unacked": verdict.batches_lost_unacked,
        "doubted": verdict.doubted,
        "converge_s": {"p50": round(median(seconds), 2), "max": round(seconds[-1], 2)},
        "converge_by_kind": dict(sorted(verdict.converge_by_kind.items())),
        "not_converged": verdict.not_converged,
        "settled": verdict.is_settled,
        "digest_equal": verdict.digest_equal,
        "contradictions": verdict.contradictions,
        "own_exits": verdict.own_exits,
    }


if __name__ == "__main__":
    sys.exit(main())
