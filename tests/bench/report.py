"""Writes docs/benchmarks.md and its pictures from tests/bench/results/*.json; measures nothing.

    .venv/bin/python tests/bench/report.py [--results FOLDER] [--docs FOLDER]

A bench that is unknown here gets the same section, without pictures and targets. What results/ has
as NAME.md beside NAME.json is put into its section, behind the targets: what limits a figure, and
the profile that shows it. Equal results give equal bytes.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

import argparse
import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from textwrap import dedent
from typing import Any

from testkit.measuring.bench import OURS, RESULTS, rounded
from testkit.measuring.plots import draw
from testkit.measuring.targets import TARGETS, Target

DOCS = Path(__file__).parents[2] / "docs"
#: benches in this order, others behind them
ORDER = (
    "index",
    "hashing",
    "scale",
    "ingest",
    "http",
    "decisions",
    "cold_start",
    "repair_storm",
    "coordination",
)
#: tables of more rows are folded away
LONG = 12
INTRO = """\
# Benchmarks

Written by `tests/bench/report.py` from `tests/bench/results/`; do not edit. Each bench runs alone:
its command stands with it, `--quick` measures the headline figures in about a minute, `--save`
keeps the results. Sides take turns, so that they see the same machine; figures are the smallest and
the median of the repetitions. A ratio is the peer's figure over ours: above 1, kvatlas is ahead.
Gates hold before anything is measured; a run with a wrong answer has no figures.
"""

Results = Mapping[str, Any]
Row = Mapping[str, Any]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--docs", type=Path, default=DOCS)
    asked = parser.parse_args()
    found = [json.loads(path.read_text()) for path in sorted(asked.results.glob("*.json"))]
    if not found:
        raise SystemExit(f"no results in {asked.results}: run a bench with --save")
    found.sort(key=lambda results: (place(results["bench"]), results["bench"]))
    sections = [INTRO, *reached(found)]
    for results in found:
        pictures = draw(results["bench"], results["rows"], asked.docs / "benchmarks")
        notes = asked.results / f"{results['bench']}.md"
        sections += section(results, pictures, notes.read_text() if notes.exists() else "")
    asked.docs.mkdir(parents=True, exist_ok=True)
    page = asked.docs / "benchmarks.md"
    page.write_text("\n".join(sections))
    print(page)


def place(bench: str) -> int:
    """Return where a bench stands."""
    return ORDER.index(bench) if bench in ORDER else len(ORDER)


# --- sections ---------------------------------------------------------------------------------


def reached(found: Iterable[Results]) -> Iterator[str]:
    """Yield the table of all targets."""
    yield "## What was to be reached\n"
    rows = []
    for results in found:
        figures = {**results["ratios"], **results["absolutes"]}
        for key, target in TARGETS.get(results["bench"], {}).items():
            if key in figures:
                cells = [results["bench"], f"`{key}`", figures[key], str(target)]
                rows.append([*cells, verdict(target, figures[key])])
    yield table(["bench", "figure", "measured", "target", ""], rows)


def section(
    results: Results, pictures: Sequence[tuple[str, str]], notes: str = ""
) -> Iterator[str]:
    """Yield all about one bench."""
    bench = results["bench"]
    yield f"## {bench}\n"
    yield from what_is_measured(bench)
    yield on_what(results)
    yield folded(f"Gates: {len(results['gates'])}", [f"- {gate}" for gate in results["gates"]])
    targets = TARGETS.get(bench, {})
    for name in ("ratios", "absolutes"):
        if results[name]:
            lines = [
                [f"`{key}`", value, str(targets.get(key, "")), verdict(targets.get(key), value)]
                for key, value in results[name].items()
            ]
            yield table([name, "", "target", ""], lines)
    if notes:
        yield notes
    for title, file in pictures:
        yield f"![{title}](benchmarks/{file})\n"
    for name, rows in cases(results["rows"]).items():
        yield from case_table(name, rows)


def what_is_measured(bench: str) -> Iterator[str]:
    """Yield what the bench's own docstring says; indented lines are its command."""
    script = Path(__file__).with_name(f"{bench}.py")
    if not script.exists():
        return
    for paragraph in (ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n"):
        is_code = paragraph.startswith("    ")
        yield f"```\n{dedent(paragraph)}\n```\n" if is_code else f"{paragraph}\n"


def on_what(results: Results) -> str:
    """Return machine, date and versions in a line each."""
    machine = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    versions = ", ".join(f"{key} {value}" for key, value in results["versions"].items())
    quick = "; a quick run, its figures are rough" if results["quick"] else ""
    return f"{results['date']}{quick}. Machine: {machine}.\nVersions: {versions}.\n"


def verdict(target: Target | None, value: float) -> str:
    """Return met, not met, or nothing where nothing was asked for."""
    if target is None:
        return ""
    return "met" if target.is_met(value) else "**not met**"


# --- rows -------------------------------------------------------------------------------------


def cases(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return rows by case and by form, in the order in which they first came."""
    found: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        found.setdefault((row["case"], is_timed(row)), []).append(row)
    names: dict[str, list[Row]] = {}
    for (case, _), of_case in found.items():
        names[case if case not in names else f"{case}, more"] = of_case
    return names


def is_timed(row: Row) -> bool:
    """Say whether a row is a side's samples, as `Bench.row` writes them."""
    return {"side", "unit", "min", "median"} <= row.keys()


def case_table(name: str, rows: Sequence[Row]) -> Iterator[str]:
    """Yield one case's table, long ones folded away."""
    heads, cells = by_side(rows) if is_timed(rows[0]) else as_they_are(rows)
    made = table(heads, cells)
    if len(cells) > LONG:
        yield folded(f"{name}: {len(cells)} rows", [made])
    else:
        yield f"**{name}**\n\n{made}"


def as_they_are(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return a column per key that any row has."""
    heads = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "case"]
    return heads, [[row.get(head, "") for head in heads] for row in rows]


def by_side(rows: Sequence[Row]) -> tuple[list[str], list[list[Any]]]:
    """Return a line per cell, with the sides beside one another and the peers' minima over ours."""
    sides = sorted({row["side"] for row in rows}, key=lambda side: (side != OURS, side))
    peers = [side for side in sides if side != OURS] if OURS in sides else []
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in _OF_A_SIDE))
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row.get(key, "") for key in keys), {})[row["side"]] = row
    heads = [*keys, *(f"{side}: min / median" for side in sides), *(f"{p} / ours" for p in peers)]
    cells = []
    for line, found in lines.items():
        figures = [samples(found.get(side)) for side in sides]
        cells.append([*line, *figures, *(over_ours(found, peer) for peer in peers)])
    return heads, cells


_OF_A_SIDE = ("case", "side", "min", "median")


def samples(row: Row | None) -> str:
    """Return the smallest and the median."""
    return f"{number(row['min'])} / {number(row['median'])}" if row else ""


def over_ours(found: Mapping[str, Row], peer: str) -> str:
    """Return how far kvatlas is ahead in one cell."""
    if peer not in found or OURS not in found or not found[OURS]["min"]:
        return ""
    return number(rounded(found[peer]["min"] / found[OURS]["min"]))


# --- Markdown ---------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(number, line))} |" for line in lines) + "\n"


def number(value: Any) -> str:
    """Return a figure without exponent, anything else as it is."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value).replace("|", "\\|")


def folded(title: str, lines: Iterable[str]) -> str:
    """Return lines that a reader unfolds."""
    return "\n".join(["<details>", f"<summary>{title}</summary>\n", *lines, "\n</details>\n"])


if __name__ == "__main__":
    main()
