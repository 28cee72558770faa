"""Benchmarks run, alone and without a peer; nothing here looks at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[1] / "bench"
KEYS = {
    "bench",
    "date",
    "quick",
    "machine",
    "versions",
    "gates",
    "rows",
    "ratios",
    "absolutes",
}


def run(script: str, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    command = [sys.executable, str(BENCH / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=220)
    assert done.returncode == 0, done.stderr
    return done.stdout


def results_of(script: str) -> dict[str, Any]:
    results = json.loads(run(script, "--quick", "--peer", "none").splitlines()[-1])
    assert results.keys() == KEYS
    assert f"{results['bench']}.py" == script
    assert results["quick"]
    assert results["gates"]
    assert all("case" in row for row in results["rows"])
    assert results["ratios"] == {}  # of a peer, and there is none
    found: dict[str, Any] = results
    return found


def test_index() -> None:
    results = results_of("index.py")
    cases = {row["case"] for row in results["rows"]}
    phases = {"stored", "duplicate", "removed", "fold stored", "fold duplicate", "fold removed"}
    forms = {"match", "match as a dict", "match as columns"}
    assert cases >= {f"apply {phase}" for phase in phases} | forms | {"bytes per pair"}
    bounds = {"before_growth", "mean"}
    assert results["absolutes"].keys() >= {f"bytes_per_pair_alone_{bound}" for bound in bounds}


def test_hashing() -> None:
    results = results_of("hashing.py")
    assert {row["tokens"] for row in results["rows"]} == {131_072}
    assert results["absolutes"].keys() == {f"ms_from_{f}_8192_blocks" for f in ("list", "bytes")}


def test_decisions() -> None:
    results = results_of("decisions.py")
    assert {row["candidates"] for row in results["rows"]} == {8, 256}
    ways = {f"{way}_{form}_us_256" for way in ("score", "route") for form in ("json", "by_hash")}
    assert results["absolutes"].keys() >= ways


def test_a_report_of_any_bench(tmp_path: Path) -> None:
    """One that the report does not know has a section too; equal results give equal bytes."""
    known: list[dict[str, Any]] = [
        {"case": "match", "layout": "one chain", "num_blocks": blocks, "holders": 256}
        | {"hit_percent": 100, "side": side, "unit": "us", "min": blocks * 0.1, "median": 2.0}
        for blocks in (512, 2048)
        for side in ("kvatlas", "dynamo")
    ]
    write_results(tmp_path, "index", known, {"apply_removed_64": 2.0, "match_8192": 9.0})
    write_results(tmp_path, "strange", [{"case": "a|b", "x": 1}, {"case": "a|b", "y": "z"}], {})
    (tmp_path / "strange.md").write_text("What limits it.\n")
    pages = []
    for docs in (tmp_path / "one", tmp_path / "two"):
        run("report.py", "--results", str(tmp_path), "--docs", str(docs))
        pages.append({path.name: path.read_bytes() for path in docs.rglob("*.*")})
    assert pages[0] == pages[1]
    assert pages[0].keys() == {"benchmarks.md", "match_by_blocks.png"}
    text = pages[0]["benchmarks.md"].decode()
    assert "| index | `apply_removed_64` | 2 | at least 3 | **not met** |" in text
    assert "| index | `match_8192` | 9 | at least 3 | met |" in text
    assert "What limits it." in text[text.index("## strange") :]
    assert "| 1 |  |" in text


def write_results(
    folder: Path, bench: str, rows: list[dict[str, Any]], ratios: dict[str, float]
) -> None:
    results = {
        "bench": bench,
        "date": "2026-01-01",
        "quick": False,
        "machine": {"cores": 2},
        "versions": {"python": "3.11"},
        "gates": ["right"],
        "rows": rows,
        "ratios": ratios,
        "absolutes": {},
    }
    (folder / f"{bench}.json").write_text(json.dumps(results))
