"""Two data-parallel ranks of one vLLM server are two instances of one worker.

kvatlas runs inside both. `X-data-parallel-rank` says which rank serves a request; how many of a
prompt's tokens a rank says that it had cached is what the index is held to.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from kvatlas.indexer.reader import InstanceView
from kvatlas.schemas.fleet import NamespaceDescriptor, Trust
from kvatlas.schemas.hashing import BlockHasher, pack_tokens
from kvatlas.schemas.ids import InstanceId
from testkit.bridging import Bridged, a_fleet
from testkit.ports import kept_ports
from testkit.real_engine import engine_python, tiny_models
from testkit.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL, BLOCK_TOKENS = "m", 32
RANKS = (InstanceId("w", 0), InstanceId("w", 1))
#: of each rank; the first block is nobody's
NUM_BLOCKS = 13
START_SECONDS = 300.0
STOP_SECONDS = 30.0
NUM_RESETS = 5
ENVIRONMENT = {
    "KVATLAS_SIDECAR__DIGEST_SECONDS": "0.2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "kvatlas",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}


def chain(tokens: Sequence[int]) -> bytes:
    namespace = NamespaceDescriptor(BLOCK_TOKENS).namespace(MODEL, None, None)
    return BlockHasher(namespace).chain(pack_tokens(list(tokens)))


class Ranks:
    """A server with two ranks, and what the index says of each."""

    def __init__(self, fleet: Bridged, client: httpx.AsyncClient) -> None:
        self._fleet, self._client = fleet, client

    async def complete(self, rank: int, tokens: Sequence[int]) -> int:
        """Let a rank serve a prompt; return how many of its tokens the rank had cached."""
        body = {"model": MODEL, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        answer = await self._client.post(
            "/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}
        )
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0)

    async def store(self, rank: int, tokens: Sequence[int]) -> None:
        """Let a rank serve a prompt of which it holds nothing; return once the index knows."""
        assert await self.complete(rank, tokens) == 0
        full = len(tokens) // BLOCK_TOKENS
        await until(lambda: self.match(rank, tokens) == full)

    async def reset(self) -> None:
        answer = await self._client.post("/reset_prefix_cache")
        assert answer.status_code == 200, answer.text

    def match(self, rank: int, tokens: Sequence[int]) -> int:
        """Return how many leading blocks the index believes that a rank holds."""
        return self._fleet.match(chain(tokens), RANKS[rank])

    def matches(self, tokens: Sequence[int]) -> tuple[int, int]:
        return self.match(0, tokens), self.match(1, tokens)

    def view(self, rank: int) -> InstanceView:
        view = self._fleet.service.index.instance(RANKS[rank])
        assert view is not None
        return view

    def num_blocks(self, rank: int) -> int:
        return self.view(rank).num_blocks

    async def settled(self) -> None:
        """Return when both ranks have told digests twice more, and the index agrees with both."""
        for rank in range(len(RANKS)):
            last = self.view(rank).seq + 2
            await until(lambda rank=rank, last=last: self.view(rank).seq >= last)  # type: ignore[misc]
        assert [self.view(rank).trust for rank in range(len(RANKS))] == [Trust.exact] * 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ranks]:
    folder, python = tmp_path_factory.mktemp("ranks"), engine_python()
    model = tiny_models(python, folder / "models") / "llama"
    port = kept_ports(2)
    async with (
        a_fleet(folder) as fleet,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"{fleet.url}?worker={RANKS[0].worker}&model={MODEL}",
        }
        flags = f"""--model {model} --served-model-name {MODEL} --host 127.0.0.1 --port {port}
            --data-parallel-size {len(RANKS)} --data-parallel-address 127.0.0.1
            --data-parallel-rpc-port {port + 1} --enforce-eager --dtype bfloat16
            --block-size {BLOCK_TOKENS} --max-model-len 256 --max-num-seqs 4
            --num-gpu-blocks-override {NUM_BLOCKS} --enable-prompt-tokens-details""".split()
        server = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", *flags]
        log = folder / "server.log"
        async with a_server([*server, "--kv-events-config", json.dumps(events)], log) as has_ended:
            await wait_until_up(client, has_ended)
            index = fleet.service.index
            await until(lambda: None not in map(index.instance, RANKS))
            yield Ranks(fleet, client)


@asynccontextmanager
async def a_server(command: Sequence[str], log: Path) -> AsyncIterator[Callable[[], bool]]:
    """Run a server until the block ends; yields whether it has ended by itself."""
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=out,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
        try:
            yield lambda: process.returncode is not None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


async def wait_until_up(client: httpx.AsyncClient, has_ended: Callable[[], bool]) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends and not has_ended():
        with contextlib.suppress(httpx.HTTPError):
            if (await client.get("/health")).status_code == 200:
                return
        await asyncio.sleep(0.2)
    pytest.fail("the server is not up, see server.log in the test's folder")


async def test_each_rank_is_an_instance_of_the_one_worker(ranks: Ranks) -> None:
    """A prompt is held by the rank that served it, and by no other."""
    first, second = range(80), range(100, 200)
    await ranks.store(0, first)
    await ranks.store(1, second)
    await ranks.settled()
    assert ranks.matches(first) == (2, 0)
    assert ranks.matches(second) == (0, 3)
    assert await ranks.complete(0, first) == 64
    assert await ranks.complete(1, second) == 96
    assert await ranks.complete(1, first) == 0
    await until(lambda: ranks.matches(first) == (2, 2))
    assert ranks.matches(second) == (0, 3)


async def test_f57_what_one_rank_evicts_the_other_holds_still(ranks: Ranks) -> None:
    shared = [7] * 40 + list(range(60))
    await ranks.store(0, shared)
    await ranks.store(1, shared)
    assert ranks.matches(shared) == (3, 3)
    num_held = ranks.num_blocks(0)
    for token in range(200, 203):  # more than a rank's pool has
        await ranks.complete(1, [token] * 150)
    await until(lambda: ranks.match(1, shared) == 0)
    await ranks.settled()
    assert ranks.matches(shared) == (3, 0)
    assert ranks.num_blocks(0) == num_held
    assert ranks.num_blocks(1) <= NUM_BLOCKS - 1
    assert await ranks.complete(0, shared) == 96
    assert await ranks.complete(1, shared) == 0


async def test_f15_a_reset_of_idle_ranks_is_known_of_both_at_once(ranks: Ranks) -> None:
    """Neither takes a step after the reset; the second has been idle the longer."""
    prompts = (range(30, 130), range(130, 230))
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(NUM_RESETS):
        for rank, prompt in ((1, prompts[1]), (0, prompts[0])):
            await ranks.store(rank, prompt)
        await ranks.settled()
        began = time.monotonic()
        await asyncio.gather(
            ranks.reset(), *(_cleared(ranks, rank, began, took) for rank in (0, 1))
        )
        await ranks.settled()
        assert [ranks.num_blocks(rank) for rank in (0, 1)] == [0, 0]
    assert [await ranks.complete(rank, prompts[rank]) for rank in (0, 1)] == [0, 0]
    figures = {f"reset_to_index_rank{rank}_ms": max(took[rank]) for rank in (0, 1)}
    print(json.dumps(figures))
    assert max(figures.values()) < 1000


async def _cleared(ranks: Ranks, rank: int, began: float, took: tuple[list[float], ...]) -> None:
    """Note when the index has none of a rank's blocks any more."""
    await until(lambda: ranks.num_blocks(rank) == 0)
    took[rank].append(round(1000 * (time.monotonic() - began), 1))
