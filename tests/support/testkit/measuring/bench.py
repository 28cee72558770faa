"""One benchmark: its command line, its rows, and the JSON that it ends with.

    bench = Bench("index", __doc__)
    samples = bench.alternate({"kvatlas": ours, "dynamo": theirs}, repetitions=9)
    bench.row("match", "us", samples, blocks=512)        one row per side: min and median
    bench.ratio("match_512", theirs / ours)              above 1: kvatlas is ahead
    bench.finish()                                       last line: JSON

Gates come first: `bench.gate(...)` stops the run before any figure of a wrong answer is printed.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from testkit.measuring.machine import machine, versions

RESULTS = Path(__file__).parents[3] / "bench" / "results"
OURS = "kvatlas"

Cell = str | int | float | bool


class Stopped(SystemExit):
    """A gate did not hold: there is nothing to measure."""


class Bench:
    """Collects what one benchmark measured.

    `--quick` measures the headline cells only, with few repetitions; `--peer none` leaves the peer
    out; `--save` writes the results to tests/bench/results/NAME.json.
    """

    def __init__(self, name: str, description: str | None) -> None:
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--quick", action="store_true", help="headline cells, few repetitions")
        parser.add_argument("--peer", choices=("dynamo", "none"), default="dynamo")
        parser.add_argument("--save", action="store_true", help="write the results to results/")
        asked = parser.parse_args()
        self.name = name
        self.is_quick: bool = asked.quick
        self.has_peer: bool = asked.peer != "none"
        self._saves: bool = asked.save
        self.machine, self.versions = machine(), versions()
        self.rows: list[dict[str, Cell]] = []
        self.ratios: dict[str, float] = {}
        self.absolutes: dict[str, float] = {}
        self.gates: list[str] = []

    def gate(self, what: str, holds: bool) -> None:
        """Note that something holds, or stop the run with exit status 1."""
        if not holds:
            raise Stopped(f"{self.name}: does not hold: {what}")
        self.gates.append(what)

    def alternate(
        self, sides: Mapping[str, Callable[[], float]], repetitions: int
    ) -> dict[str, list[float]]:
        """Return what each side's calls returned, taken in turn: all see the same machine."""
        samples: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(repetitions):
            for side, measure in sides.items():
                samples[side].append(measure())
        return samples

    def row(
        self, case: str, unit: str, samples: Mapping[str, Sequence[float]], **cell: Cell
    ) -> None:
        """Add a row for each side that was measured, and print it."""
        for side, values in samples.items():
            row: dict[str, Cell] = {"case": case, **cell, "side": side, "unit": unit}
            row |= {"min": rounded(min(values)), "median": rounded(statistics.median(values))}
            self.rows.append(row)
            print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)

    def figure(self, case: str, **cell: Cell) -> None:
        """Add a row of another form, and print it."""
        row: dict[str, Cell] = {"case": case}
        row |= {name: rounded(v) if isinstance(v, float) else v for name, v in cell.items()}
        self.rows.append(row)
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)

    def ratio(self, key: str, value: float) -> None:
        """Note how far kvatlas is ahead: above 1, it is."""
        self.ratios[key] = rounded(value)

    def ratio_of_times(self, key: str, samples: Mapping[str, Sequence[float]], peer: str) -> None:
        """Note the peer's smallest time over ours, if the peer was measured."""
        if peer in samples:
            self.ratio(key, min(samples[peer]) / min(samples[OURS]))

    def absolute(self, key: str, value: float) -> None:
        """Note a figure that stands without a peer."""
        self.absolutes[key] = rounded(value)

    def finish(self) -> None:
        """Print everything as one line of JSON; write it where `--save` asked for that."""
        results = {
            "bench": self.name,
            "date": datetime.now(UTC).date().isoformat(),
            "quick": self.is_quick,
            "machine": self.machine,
            "versions": self.versions,
            "gates": self.gates,
            "rows": self.rows,
            "ratios": self.ratios,
            "absolutes": self.absolutes,
        }
        if self._saves:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{self.name}.json").write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results), flush=True)


def rounded(value: float) -> float:
    """Return four significant digits."""
    return float(f"{value:.4g}")
