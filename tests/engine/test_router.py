"""Two real vLLM servers behind the router: sessions stay with their prefix, the doctor agrees.

One engine reports by the plugin inside it, one through `kvatlas bridge`, and a third one is started
without the flag that either needs. All HTTP is what a client would send.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from testkit.ports import kept_port
from testkit.real_engine import engine_python, tiny_models

KVATLAS = (sys.executable, "-P", "-m", "kvatlas")
MODEL, ADAPTER = "m", "a"
BLOCK_TOKENS = 32
START_SECONDS = 300.0
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def until(is_so: Callable[[], bool], seconds: float, what: str) -> None:
    """Return once it is so: another process, which nothing tells of."""
    ends = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < ends, f"{what} took more than {seconds} s"
        time.sleep(0.05)


@contextmanager
def a_process(command: Sequence[str | Path], log: Path, **environment: str) -> Iterator[None]:
    """Run a process until the block ends; its output is in `log`."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT | environment,
            start_new_session=True,
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def is_up(url: str) -> bool:
    try:
        return bool(httpx.get(url, timeout=2).status_code == 200)
    except httpx.HTTPError:
        return False


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


class Engine:
    """One vLLM server, with its KV events to `publishes`."""

    def __init__(self, python: str, name: str, model: Path, port: int) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.events, self.replays = kept_port(), kept_port()
        flags = f"""--model {model} --served-model-name {MODEL} --host 127.0.0.1 --port {port}
            --enforce-eager --dtype bfloat16 --block-size {BLOCK_TOKENS} --max-model-len 512
            --max-num-seqs 4 --num-gpu-blocks-override 65 --enable-prompt-tokens-details""".split()
        server = [python, "-P", "-m", "vllm.entrypoints.openai.api_server"]
        self.command: list[str | Path] = [*server, *flags]

    def publishes(self, endpoint: str, **more: str) -> "Engine":
        """Let it publish to an endpoint; returns itself."""
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        self.command += ["--kv-events-config", json.dumps(config | more)]
        return self

    def bridge(self, nats_url: str) -> list[str | Path]:
        flags = f"""bridge --engine vllm --worker {self.name} --model {MODEL} --nats {nats_url}
            --endpoint tcp://127.0.0.1:{self.events} --rank 0 --block-tokens {BLOCK_TOKENS}
            --replay-endpoint tcp://127.0.0.1:{self.replays} --base-url {self.url}""".split()
        return [*KVATLAS, *flags]

    def complete(self, tokens: Sequence[int], **more: Any) -> int:
        """Serve a prompt; return how many of its tokens the engine says that it had cached."""
        body = {"model": MODEL, "prompt": list(tokens), "max_tokens": 4, "temperature": 0, **more}
        usage = post(f"{self.url}/v1/completions", body)["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


class Fleet:
    """The router, and the engines by the names that it knows."""

    def __init__(
        self,
        router_url: str,
        nats_url: str,
        folder: Path,
        engines: dict[str, Engine],
        tokenizer: Path,
    ) -> None:
        self.router_url, self.nats_url, self.folder = router_url, nats_url, folder
        self.engines, self.tokenizer = engines, tokenizer

    @contextmanager
    def bridged(self, engine: Engine) -> Iterator[None]:
        """Run a bridge beside an engine; it is known when the block begins."""
        log = self.folder / f"{engine.name}-bridge.log"
        with a_process(engine.bridge(self.nats_url), log):
            until(lambda: engine.url in self.base_urls(), 60, f"to know {engine.name}")
            yield

    def base_urls(self) -> set[str]:
        workers = httpx.get(f"{self.router_url}/v1/workers", timeout=10).json()["workers"]
        return {view["base_url"] for view in workers}

    def doctor(self, worker: str, *more: str) -> tuple[int, dict[str, dict[str, str]], str]:
        """Return its status, its findings by check, and what it printed."""
        url = self.engines[worker].url
        command: list[str | Path] = [*KVATLAS, "doctor", "--engine-url", url]
        command += ["--router-url", self.router_url]
        ended = subprocess.run(
            [*command, "--worker", worker, "--json", *more], capture_output=True, text=True
        )
        findings = json.loads(ended.stdout.splitlines()[-1])["findings"]
        return ended.returncode, {found["check"]: found for found in findings}, ended.stdout

    def match(self, worker: str, tokens: Sequence[int], model: str = MODEL) -> int:
        """Return how many tokens the router believes that a worker holds."""
        body = {"model": model, "token_ids": list(tokens), "max_candidates": 100}
        for candidate in post(f"{self.router_url}/v1/score", body)["candidates"]:
            if candidate["worker"] == worker:
                return int(candidate["match_tokens"])
        return 0

    def wait_until_known(self, worker: str, tokens: Sequence[int], model: str = MODEL) -> None:
        full = len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
        until(lambda: self.match(worker, tokens, model) >= full, 10, "events of a request")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder, python = tmp_path_factory.mktemp("router"), engine_python()
    models = tiny_models(python, folder / "models")
    model = models / "llama"
    inside, beside, silent = (Engine(python, f"e{n}", model, kept_port()) for n in range(3))
    with ExitStack() as running:
        serving = folder / "serve.log"
        running.enter_context(a_process([*KVATLAS, "serve", "--port", "0", "--json"], serving))
        until(lambda: serving.read_text().endswith("}\n"), 60, "the router's start")
        urls = json.loads(serving.read_text().splitlines()[-1])
        said = f"worker={inside.name}&base_url={inside.url}&adapters={ADAPTER}"
        inside.publishes(f"{urls['nats']}?{said}")
        inside.command += ["--enable-lora", "--max-lora-rank", "8"]
        inside.command += ["--lora-modules", f"{ADAPTER}={models / 'lora'}"]
        beside.publishes(f"tcp://*:{beside.events}", replay_endpoint=f"tcp://*:{beside.replays}")
        engines = {engine.name: engine for engine in (inside, beside, silent)}
        for engine in engines.values():
            running.enter_context(a_process(engine.command, folder / f"{engine.name}.log"))
        found = Fleet(urls["router"], urls["nats"], folder, engines, model)
        for engine in engines.values():
            wait_until_up(engine)
        running.enter_context(found.bridged(beside))
        until(lambda: inside.url in found.base_urls(), 60, f"to know {inside.name}")
        yield found


def wait_until_up(engine: Engine) -> None:
    until(lambda: is_up(f"{engine.url}/health"), START_SECONDS, f"the start of {engine.name}")


def a_session(seed: int, num_tokens: int) -> list[int]:
    return [(seed * 31 + n * n * (seed + 3) + n) % 240 for n in range(num_tokens)]


def test_the_second_request_of_a_session_goes_where_its_prefix_is(fleet: Fleet) -> None:
    """Six sessions of three growing requests: each stays, and is cached as far as predicted."""
    placed: dict[int, str] = {}
    for num_tokens, held_before in ((100, 0), (170, 96), (300, 160)):
        for session in range(6):
            tokens = a_session(session, num_tokens)
            asked = {"model": MODEL, "token_ids": tokens}
            routed = post(f"{fleet.router_url}/v1/route", asked)
            engine = fleet.engines[routed["worker"]]
            assert routed["base_url"] == engine.url
            assert placed.setdefault(session, engine.name) == engine.name
            cached = engine.complete(tokens, kv_transfer_params=routed["kv_transfer_params"])
            assert cached == routed["match_tokens"] == held_before, (session, num_tokens)
            post(f"{fleet.router_url}/v1/requests/{routed['decision_id']}/done", {})
            fleet.wait_until_known(engine.name, tokens)
    assert set(placed.values()) == {"e0", "e1"}


@pytest.mark.parametrize(("worker", "unseen"), [("e0", {"engine_hashes"}), ("e1", set())])
def test_the_doctor_finds_nothing_at_a_healthy_engine(
    fleet: Fleet, worker: str, unseen: set[str]
) -> None:
    """The bridged engine's own hashes can be seen at its socket; the other one has none."""
    tokenizer = ["--tokenizer", str(fleet.tokenizer)]
    endpoint = ["--events-endpoint", f"tcp://127.0.0.1:{fleet.engines[worker].events}"]
    status, findings, told = fleet.doctor(worker, *tokenizer, *([] if unseen else endpoint))
    assert status == 0, told
    assert {check for check, found in findings.items() if found["status"] != "ok"} == unseen, told


def test_a_request_for_an_adapter_is_matched_apart_from_its_model(fleet: Fleet) -> None:
    tokens, engine = a_session(50, 100), fleet.engines["e0"]
    asked = {"model": ADAPTER, "token_ids": tokens}
    engine.complete(tokens)
    fleet.wait_until_known("e0", tokens)
    routed = post(f"{fleet.router_url}/v1/route", asked)
    assert (routed["worker"], routed["match_tokens"]) == ("e0", 0)
    assert engine.complete(tokens, model=ADAPTER) == 0
    fleet.wait_until_known("e0", tokens, model=ADAPTER)
    routed = post(f"{fleet.router_url}/v1/route", asked)
    assert engine.complete(tokens, model=ADAPTER) == routed["match_tokens"] == 96


def test_f54_a_conversation_is_cached_as_the_router_predicts(fleet: Fleet) -> None:
    engine = fleet.engines["e0"]
    content = " ".join(f"t{n}" for n in a_session(40, 150))
    messages = [{"role": "user", "content": content}]
    asked = {"model": MODEL, "messages": messages}
    tokens = post(f"{engine.url}/tokenize", asked)["tokens"]
    post(f"{engine.url}/v1/chat/completions", asked | {"max_tokens": 1})
    fleet.wait_until_known("e0", tokens)
    usage = post(f"{engine.url}/v1/chat/completions", asked | {"max_tokens": 1})["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    assert usage["prompt_tokens_details"]["cached_tokens"] == fleet.match("e0", tokens)


def test_f52_the_doctor_names_the_flag_of_events_that_is_missing(fleet: Fleet) -> None:
    with fleet.bridged(fleet.engines["e2"]):
        status, findings, told = fleet.doctor("e2", "--wait-seconds", "2")
    assert status == 1
    assert findings["overlap"]["says"].startswith("silent miss"), told
    assert findings["events"]["status"] == "fail"
    assert "--kv-events-config" in findings["events"]["change"]
