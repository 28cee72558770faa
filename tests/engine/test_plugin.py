"""kvatlas inside a real vLLM: the index believes what the engine's block pool holds.

The engine runs in a process of its own (`engine_main.py`) and loads kvatlas by its entry
point. What its block pool holds is named here apart from kvatlas' own path: each prompt's blocks
are hashed twice, as vLLM does it and as we do, so that a digest in the pool gives our name.
"""

import asyncio
import hashlib
import json
import os
import pickle
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, pack_tokens, reuse_point
from testkit.bridging import Bridged, a_fleet
from testkit.real_engine import engine_python, sidecars_of, tiny_models
from testkit.waiting import until

HERE = Path(__file__).parent
BLOCK_TOKENS = 32
DESCRIPTOR = NamespaceDescriptor(BLOCK_TOKENS)
START_SECONDS = 180.0
BASE = list(range(80))


@pytest.fixture(scope="module")
def python() -> str:
    return engine_python()


@pytest.fixture(scope="module")
def models(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models(python, tmp_path_factory.mktemp("models"))


class Names:
    """vLLM's digest of each block that a request may have filled -> our name of it."""

    def __init__(self) -> None:
        self._none_hash = _sha256("vllm-none-hash")
        self._ours: dict[str, bytes] = {}

    def add(self, tokens: list[int], salt: str, lora: tuple[str, str] | None) -> bytes:
        """Name the blocks of a request; return our chain."""
        namespace = DESCRIPTOR.namespace("m", lora[0] if lora else None, salt or None)
        chain = BlockHasher(namespace).chain(pack_tokens(tokens))
        digest = self._none_hash
        for position in range(len(tokens) // BLOCK_TOKENS):
            block = tuple(tokens[position * BLOCK_TOKENS : (position + 1) * BLOCK_TOKENS])
            keys: list[tuple[str, ...]] = [("lora", *lora)] if lora else []
            keys += [("cache_salt", salt)] if salt and not position else []
            digest = _sha256((digest, block, tuple(keys) or None))
            self._ours[digest.hex()] = chain[16 * position : 16 * position + 16]
        return chain

    def of(self, digests: Sequence[str]) -> set[bytes]:
        """Return our names of digests; a block that no request can have filled is an error."""
        return {self._ours[digest] for digest in digests}


def _sha256(content: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)).digest()


class Bench:
    """An engine, and what the index says of it before and after each request."""

    def __init__(self, process: asyncio.subprocess.Process, fleet: Bridged) -> None:
        self._process, self.fleet = process, fleet
        self.pid = process.pid
        self.names = Names()
        #: (foretold, reported) cached tokens of each request
        self.hits: list[tuple[int, int]] = []

    async def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        line = await self._process.stdout.readline()
        assert line, "the engine has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def run(
        self, *prompts: list[int], num: int = 4, salt: str = "", lora: str = ""
    ) -> dict[str, Any]:
        """Run prompts at once; the first one's cached tokens have to be those foretold."""
        adapter = ("adapter", lora) if lora else None
        matched = self.fleet.match(self.names.add(prompts[0], salt, adapter))
        predicted = min(matched, (len(prompts[0]) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS
        answer = await self.ask(do="generate", prompts=prompts, num=num, salt=salt, lora=lora)
        for prompt, output in zip(prompts, answer["output"], strict=True):
            self.names.add(prompt + output, salt, adapter)
        self.hits.append((predicted, answer["cached"][0]))
        assert answer["cached"][0] == predicted
        return answer

    async def settled(self) -> None:
        """Wait until the index believes in exactly what the block pool holds."""
        groups = (await self.ask(do="held"))["groups"]
        assert set(groups) <= {"0"}
        held = self.names.of(groups.get("0", []))
        await self.fleet.agrees(lambda: held)

    async def checked(self, *prompts: list[int], **more: Any) -> None:
        """Run prompts and compare."""
        await self.run(*prompts, **more)
        await self.settled()


@asynccontextmanager
async def a_bench(
    python: str, model: Path, folder: Path, num_blocks: int = 13, lora: bool = False
) -> AsyncIterator[Bench]:
    """Start a broker, an index and an engine with kvatlas in it, worker `w`, model `m`."""
    async with a_fleet(folder) as fleet:
        endpoint = f"{fleet.url}?worker=w&model=m"
        options = {
            "model": str(model),
            "num_blocks": num_blocks,
            "kv_events": {"endpoint": endpoint},
            "lora": lora,
            "plugins": "kvatlas",
        }
        process = await asyncio.create_subprocess_exec(
            python,
            "-P",
            str(HERE / "engine_main.py"),
            json.dumps(options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "KVATLAS_SIDECAR__DIGEST_SECONDS": "0.2"},
        )
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
            assert json.loads(line) == {"ready": True}
            await until(lambda: fleet.view is not None)
            yield Bench(process, fleet)
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def test_the_index_believes_what_the_block_pool_holds(
    python: str, models: Path, tmp_path: Path
) -> None:
    async with a_bench(python, models / "llama", tmp_path) as bench:
        await bench.checked(BASE)
        await bench.checked(BASE[:64] + list(range(100, 140)))  # a shared prefix
        await bench.checked(list(range(10, 40)), num=40)  # blocks that fill while decoding
        for _ in range(3):  # exactly two blocks: copies of the last
            await bench.checked([200] * 64)
        await bench.checked([201] * 40, [201] * 40, num=2)
        for salt in ("tenant-A", "tenant-B", "", "tenant-A"):
            await bench.checked([7] * 70, salt=salt)
        for first in (0, 50, 100, 130, 130):  # more than the pool holds: eviction
            await bench.checked(list(range(first, first + 96)))
        # preemption: four that do not fit beside each other while they grow
        await bench.checked(*[[20 + i] * 90 for i in range(4)], num=60)
        assert sum(reported for _, reported in bench.hits) > 0


async def test_a_reset_of_an_idle_engine_is_known_at_once(
    python: str, models: Path, tmp_path: Path
) -> None:
    async with a_bench(python, models / "llama", tmp_path) as bench:
        await bench.checked(BASE)
        began = time.monotonic()
        assert (await bench.ask(do="reset"))["is_reset"]
        await until(lambda: bench.fleet.match(bench.names.add(BASE, "", None)) == 0)
        print(json.dumps({"reset_to_index_ms": round(1000 * (time.monotonic() - began), 1)}))
        await bench.settled()
        await bench.checked(BASE)


async def test_adapters_have_namespaces_of_their_own(
    python: str, models: Path, tmp_path: Path
) -> None:
    async with a_bench(python, models / "llama", tmp_path, lora=True) as bench:
        for lora in ("", str(models / "lora"), "", str(models / "lora")):
            await bench.checked(BASE, lora=lora)
        assert [reported for _, reported in bench.hits] == [0, 0, 64, 64]


async def test_hybrid_models_are_matched_where_their_windows_are_whole(
    python: str, models: Path, tmp_path: Path
) -> None:
    async with a_bench(python, models / "gemma3", tmp_path, num_blocks=29) as bench:
        long = list(range(1, 200))
        others = (long, long[:70], long[:64] + [7] * 60, long, [3] * 150, long, [3] * 100)
        for prompt in (long, *others):
            await bench.run(prompt)
            groups = (await bench.ask(do="held"))["groups"]
            full = bench.names.of(groups.get("1", []))
            windows = bench.names.of(groups.get("0", []))
            await until(lambda full=full: _believed(bench, full) == full)  # type: ignore[misc]
            assert {block for block in full if bench.fleet.holds(reuse_point(block))} <= windows
        reported = [cached for _, cached in bench.hits]
        assert max(reported) == 192
        assert min(reported) == 0


def _believed(bench: Bench, blocks: set[bytes]) -> set[bytes]:
    """Return what of the blocks the index believes in, and nothing when it knows others besides."""
    view = bench.fleet.view
    believed = {block for block in blocks if bench.fleet.holds(block)}
    points = {block for block in blocks if bench.fleet.holds(reuse_point(block))}
    if view is None or view.num_blocks != len(believed) + len(points):
        return set()
    return believed


async def test_a_killed_sidecar_is_started_again_and_told_what_is_held(
    python: str, models: Path, tmp_path: Path
) -> None:
    async with a_bench(python, models / "llama", tmp_path) as bench:
        await bench.checked(BASE)
        epoch = bench.fleet.epoch
        [sidecar] = sidecars_of(bench.pid)
        sidecar.kill()
        answer = await bench.ask(do="generate", prompts=[BASE], num=4, salt="", lora="")
        assert answer["cached"] == [64]
        await until(lambda: bench.fleet.epoch > epoch)
        await bench.settled()
        await bench.checked(BASE)
