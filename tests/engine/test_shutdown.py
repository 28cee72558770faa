"""A vLLM server that is told to end: its blocks leave the index by its goodbye, not by its lease.

On SIGTERM the API server kills its engine core with all descendants at once (`shutdown_timeout` 0),
so the sidecar has to be none of them.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil

from kvatlas.schemas.fleet import Trust
from testkit.bridging import a_fleet
from testkit.ports import kept_port
from testkit.real_engine import engine_python, tiny_models
from testkit.waiting import until

START_SECONDS, LEASE_SECONDS, GOODBYE_SECONDS = 300.0, 120.0, 30.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # so that only a goodbye can be in time
    "KVATLAS_SIDECAR__LEASE_TTL_SECONDS": str(LEASE_SECONDS),
}


@asynccontextmanager
async def a_server(python: str, model: Path, nats_url: str, log: Path) -> AsyncIterator[str]:
    port = kept_port()
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"{nats_url}?worker=w&model=m",
    }
    flags = f"""--model {model} --served-model-name m --host 127.0.0.1 --port {port} --enforce-eager
        --dtype bfloat16 --block-size 32 --max-model-len 256 --max-num-seqs 4
        --num-gpu-blocks-override 33""".split()
    server = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", *flags]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *server,
            "--kv-events-config",
            json.dumps(events),
            stdout=out,
            stderr=out,
            env=os.environ | ENVIRONMENT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient() as client:
            await until_up(client, url, process)
        yield url
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(process.pid).children(recursive=True):
                one.kill()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until_up(
    client: httpx.AsyncClient, url: str, process: asyncio.subprocess.Process
) -> None:
    ends = time.monotonic() + START_SECONDS
    while True:
        assert process.returncode is None, "the server has ended"
        assert time.monotonic() < ends, "the server does not start"
        try:
            if (await client.get(f"{url}/health", timeout=2)).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        await asyncio.sleep(0.2)


async def test_a_server_that_is_told_to_end_says_goodbye(tmp_path: Path) -> None:
    python = engine_python()
    model = tiny_models(python, tmp_path / "models") / "llama"
    async with a_fleet(tmp_path) as fleet:
        async with a_server(python, model, fleet.url, tmp_path / "server.log") as url:
            prompt = [(7 * i + 3) % 250 for i in range(100)]
            async with httpx.AsyncClient() as client:
                asked = {"model": "m", "prompt": prompt, "max_tokens": 1}
                answer = await client.post(f"{url}/v1/completions", json=asked, timeout=60)
                assert answer.status_code == 200
            await until(lambda: fleet.view is not None and fleet.view.num_blocks >= 3)
            told = time.monotonic()
        await until(
            lambda: fleet.view is not None and fleet.view.trust is Trust.gone, GOODBYE_SECONDS
        )
        assert fleet.view is not None
        assert fleet.view.trust_reasons == ("down: engine ended",)
        figures = {"sigterm_to_gone_seconds": round(time.monotonic() - told, 3)}
        print(json.dumps(figures))
