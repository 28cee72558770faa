"""Run every benchmark, one after the other, and write the page of their results.

    python tests/bench/all.py [--quick] [--peer dynamo|none] [--only NAME ...]

Each runs as a process of its own and saves its JSON to results/; one that fails is told at the end,
and the others go on. The last line is JSON: seconds and exit status of each.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
BENCHES = (
    "hashing",
    "index",
    "http",
    "ingest",
    "decisions",
    "cold_start",
    "repair_storm",
    "coordination",
    "scale",
)
#: the longest that one may take
MAX_SECONDS = 3_600


def main() -> None:
    """Run those that are asked for; exits with another status than 0 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="headline cells, few repetitions")
    parser.add_argument("--peer", choices=("dynamo", "none"), default="dynamo")
    parser.add_argument("--only", nargs="*", choices=BENCHES, default=BENCHES)
    asked = parser.parse_args()
    flags = ["--save", "--peer", asked.peer, *(["--quick"] if asked.quick else [])]
    ended: dict[str, dict[str, float]] = {}
    for name in asked.only:
        print(f"== {name}", flush=True)
        started = time.monotonic()
        command = [sys.executable, str(HERE / f"{name}.py"), *flags]
        status = subprocess.run(command, timeout=MAX_SECONDS, check=False).returncode
        ended[name] = {"seconds": round(time.monotonic() - started, 1), "status": status}
    report = subprocess.run([sys.executable, str(HERE / "report.py")], check=False).returncode
    print(json.dumps({"benches": ended, "report_status": report}))
    sys.exit(any(each["status"] for each in ended.values()) or report)


if __name__ == "__main__":
    main()
