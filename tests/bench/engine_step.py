"""What kvatlas costs a vLLM engine's step, the interpreter lock included.

    .venv-engine/bin/python -P tests/bench/engine_step.py [--rounds N] [--steps N]

Three engines in processes of their own play the same requests in turn: without events, with vLLM's
own ZMQ publisher, with kvatlas' (broker and sidecar running beside it, as in production). Each step
of the engine is timed from outside. Besides, `publish` alone: 64 blocks of 16 tokens a batch. The
last line is JSON with p50 and p99 of all steps, and the smallest of each round's p50.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINE_DIR = Path(__file__).parents[1] / "engine"
VARIANTS = ("none", "zmq", "kvatlas")


def main() -> None:
    """Measure all variants in turn, or one of them as a child of that."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--variant", choices=VARIANTS)
    arguments.add_argument("--nats", default="")
    arguments.add_argument("--model", default="")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=400)
    asked = arguments.parse_args()
    if asked.variant:
        print(json.dumps(_measure(asked.variant, asked.nats, asked.model, asked.steps)))
        return
    print(json.dumps(_compare(asked.rounds, asked.steps)))


def _compare(rounds: int, steps: int) -> dict[str, Any]:
    samples: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder, _Broker(Path(folder)) as url:
        models = Path(folder) / "models"
        subprocess.run(
            [sys.executable, "-P", str(ENGINE_DIR / "models.py"), str(models)], check=True
        )
        for _ in range(rounds):
            for variant in VARIANTS:
                command = [sys.executable, "-P", __file__, "--variant", variant, "--nats", url]
                command += ["--model", str(models / "llama"), "--steps", str(steps)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                samples[variant].append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for variant, rounds_of in samples.items():
        every = sorted(step for one in rounds_of for step in one["steps_us"])
        rows.append(
            {
                "events": variant,
                "step p50 us": round(statistics.median(every)),
                "step p99 us": round(every[int(len(every) * 0.99)]),
                "best round's p50 us": round(
                    min(statistics.median(one["steps_us"]) for one in rounds_of)
                ),
                "publish p50 us": min(one["publish_us"] for one in rounds_of),
            }
        )
    what = (
        f"{rounds} rounds of {steps} steps each in turn, 4 requests at once on a tiny model;"
        " `publish` alone with 64 blocks of 16 tokens."
    )
    return {"what": what, "rows": rows}


class _Broker:
    """A nats-server on a free port, of the neighbouring environment `.venv`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> str:
        python = Path(__file__).parents[2] / ".venv" / "bin" / "python"
        code = (
            "import asyncio, sys; from pathlib import Path\n"
            "from kvatlas.events.nats.embedded.server import embedded_server\n"
            "from kvatlas.events.nats.bus import NatsBus\n"
            "from kvatlas.events.streams import events_stream\n"
            "async def main():\n"
            "    folder = Path(sys.argv[1])\n"
            "    async with embedded_server(folder) as server, NatsBus(server.url) as bus:\n"
            "        await bus.declare_stream(events_stream(max_bytes=64 << 20))\n"
            "        print(server.url, flush=True)\n"
            "        await asyncio.to_thread(sys.stdin.read)\n"
            "asyncio.run(main())\n"
        )
        self._process = subprocess.Popen(
            [str(python), "-P", "-c", code, str(self._folder / "nats")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()


def _measure(variant: str, url: str, model: str, num_steps: int) -> dict[str, Any]:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = answers
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "kvatlas" if variant == "kvatlas" else "",
    }
    from vllm import LLM, SamplingParams

    endpoints = {"zmq": "tcp://*:0", "kvatlas": f"{url}?worker=w&model=m"}
    events = {
        "enable_kv_cache_events": variant != "none",
        "publisher": "null" if variant == "none" else "zmq",
        "endpoint": endpoints.get(variant, "tcp://*:0"),
    }
    llm = LLM(
        model=model,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=4,
        block_size=32,
        num_gpu_blocks_override=257,
        enable_prefix_caching=True,
        distributed_executor_backend="uni",
        kv_events_config=events,
    )
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    steps_us: list[float] = []
    request = 0
    while len(steps_us) < num_steps + 50:
        for _ in range(4):
            request += 1
            prompt = [(request * 7 + i) % 250 for i in range(512)]
            engine.add_request(str(request), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            engine.step()
            steps_us.append((time.perf_counter() - began) * 1e6)
    publisher = engine.engine_core.engine_core.scheduler.kv_event_publisher
    return {"steps_us": steps_us[50:], "publish_us": _publish_us(publisher)}


def _publish_us(publisher: Any) -> float:
    """Return the median of publishing a batch of 64 blocks, as the scheduler does."""
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    spent = []
    for number in range(300):
        hashes = [(number * 64 + i).to_bytes(32, "big") for i in range(64)]
        event = BlockStored(hashes, None, list(range(1024)), 16, None, "GPU", None, group_idx=7)
        batch = KVEventBatch(ts=0.0, events=[event])
        began = time.perf_counter()
        publisher.publish(batch)
        spent.append((time.perf_counter() - began) * 1e6)
    return round(statistics.median(spent), 1)


if __name__ == "__main__":
    main()
