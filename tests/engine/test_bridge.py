"""The bridge beside a real vLLM: what the index believes is what the engine's block pool holds.

The engine runs in a process of its own (`engine_main.py`), unmodified but for the options
that turn its events on. Needs the interpreter of an environment with vLLM: KVATLAS_ENGINE_PYTHON,
or that of `.venv-engine`.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, pack_tokens
from kvatlas.worker_hooks.bridge.stimuli import FrameReplayed, ReplayEnded, RequestReplay
from kvatlas.worker_hooks.bridge.zmq_source import ZmqSource
from kvatlas.worker_hooks.engines.vllm import VllmAdapter
from kvatlas.worker_hooks.raw_events import RawStored
from testkit.bridging import Bridged, a_fleet
from testkit.ports import kept_ports
from testkit.real_engine import engine_python, tiny_models
from testkit.waiting import until

HERE = Path(__file__).parent
BLOCK_TOKENS = 32
DESCRIPTOR = NamespaceDescriptor(BLOCK_TOKENS)
START_SECONDS = 180.0


@pytest.fixture(scope="module")
def python() -> str:
    return engine_python()


@pytest.fixture(scope="module")
def models(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models(python, tmp_path_factory.mktemp("models"))


def chain(tokens: list[int], salt: str = "", lora: str = "") -> bytes:
    namespace = DESCRIPTOR.namespace("m", lora or None, salt or None)
    return BlockHasher(namespace).chain(pack_tokens(tokens))


class Engine:
    """The test's end of an engine's process."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.replay_endpoint = f"tcp://127.0.0.1:{port + 1}"

    async def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question).encode() + b"\n")
        line = await self._process.stdout.readline()
        assert line, "the engine has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def held(self, group: int = 0) -> set[bytes]:
        """Return our names of what is in the engine's block pool, as its own events tell them."""
        groups = (await self.ask(do="held"))["groups"]
        names = await self._names()
        return {names[engine_hash] for engine_hash in groups.get(str(group), [])}

    async def _names(self) -> dict[int | bytes, bytes]:
        adapter, names = VllmAdapter(), dict[int | bytes, bytes]()
        for payload in await self._said():
            for event in adapter.decode(payload).events:
                if isinstance(event, RawStored) and event.tokens:
                    _name(event, names)
        return names

    async def _said(self) -> list[bytes]:
        said: list[bytes] = []
        async with ZmqSource(self.endpoint, self.replay_endpoint) as source:
            source.request_replay(RequestReplay(1, 0))
            while not isinstance(heard := await source.next(), ReplayEnded):
                if isinstance(heard, FrameReplayed):
                    said.append(heard.payload)
        return said


def _name(event: RawStored, names: dict[int | bytes, bytes]) -> None:
    """Name the blocks of an event; `names` also keeps, by our name, in which namespace it is."""
    namespace = DESCRIPTOR.namespace("m", event.lora, event.cache_salt)
    hasher = BlockHasher(namespace)
    parent = hasher.root if event.parent is None else names[event.parent]
    named = hasher.chain(event.tokens, event.extras, parent, event.first_token)
    for position, engine_hash in enumerate(event.engine_hashes):
        at = position * BLOCK_HASH_BYTES
        names[engine_hash] = named[at : at + BLOCK_HASH_BYTES]


@asynccontextmanager
async def an_engine(
    python: str, model: Path, port: int, num_blocks: int = 13, lora: bool = False
) -> AsyncIterator[Engine]:
    """Start an engine; it ends when left, by SIGKILL, as a crash would."""
    kv_events = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + 1}"}
    options = {"model": str(model), "num_blocks": num_blocks, "kv_events": kv_events, "lora": lora}
    main = HERE / "engine_main.py"
    process = await asyncio.create_subprocess_exec(
        python,
        str(main),
        json.dumps(options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), START_SECONDS)
        assert json.loads(line) == {"ready": True}
        yield Engine(process, port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class Bench:
    """An engine, and what the index says of it before and after each prompt."""

    def __init__(self, engine: Engine, fleet: Bridged) -> None:
        self.engine, self.fleet = engine, fleet
        #: (predicted, reported) cached tokens of each prompt
        self.hits: list[tuple[int, int]] = []

    async def settled(self) -> None:
        """Wait until the index believes in what the block pool holds."""
        held = await self.engine.held()
        await self.fleet.agrees(lambda: held)

    async def run(self, *prompts: list[int], num: int = 4, salt: str = "", lora: str = "") -> None:
        """Run prompts at once; the first one's cached tokens have to be those foretold."""
        predicted = self._predict(prompts[0], salt, "adapter" if lora else "")
        answer = await self.engine.ask(
            do="generate", prompts=prompts, num=num, salt=salt, lora=lora
        )
        self.hits.append((predicted, answer["cached"][0]))
        assert answer["cached"][0] == predicted

    def _predict(self, prompt: list[int], salt: str, lora: str) -> int:
        """At least one token of a prompt is always computed."""
        matched = self.fleet.match(chain(prompt, salt, lora))
        return min(matched, (len(prompt) - 1) // BLOCK_TOKENS) * BLOCK_TOKENS


BASE = list(range(80))


async def play(bench: Bench) -> None:
    """Play the scenarios, each checked against the block pool."""
    await bench.run(BASE)
    await bench.settled()
    await bench.run(BASE[:64] + list(range(100, 140)))  # a shared prefix
    await bench.settled()
    await bench.run(list(range(10, 40)), num=40)  # blocks that fill while decoding
    await bench.settled()
    await bench.run([200] * 64)  # exactly two blocks, then copies of the last
    for _ in range(2):
        await bench.settled()
        await bench.run([200] * 64)
    await bench.settled()
    for salt in ("tenant-A", "tenant-B", "", "tenant-A"):
        await bench.run([7] * 70, salt=salt)
        await bench.settled()
    for first in (0, 50, 100, 130):  # more than the pool holds: eviction
        await bench.run(list(range(first, first + 96)))
        await bench.settled()
    await bench.run(list(range(130, 226)))
    await bench.settled()
    # preemption: four that do not fit beside each other while they grow
    await bench.run(*[[20 + i] * 90 for i in range(4)], num=60)
    await bench.settled()


async def test_the_index_believes_what_the_block_pool_holds(
    python: str, models: Path, tmp_path: Path
) -> None:
    port = kept_ports(2)
    async with (
        a_fleet(tmp_path) as fleet,
        an_engine(python, models / "llama", port) as engine,
        fleet.bridge(engine.endpoint, engine.replay_endpoint, "--num-blocks", "13"),
    ):
        bench = Bench(engine, fleet)
        await play(bench)
        assert (await engine.ask(do="reset"))["is_reset"]
        # an idle engine keeps its clear to itself: it comes with the next batch
        await engine.ask(do="generate", prompts=[[5] * 33], num=1, salt="", lora="")
        await bench.settled()
        assert fleet.match(chain(BASE)) == 0
        await bench.run([5] * 70)
        await bench.settled()
        assert sum(reported for _, reported in bench.hits) > 0


async def test_a_bridge_restarted_in_the_middle_ends_with_the_same_residency(
    python: str, models: Path, tmp_path: Path
) -> None:
    port = kept_ports(2)
    async with a_fleet(tmp_path) as fleet, an_engine(python, models / "llama", port) as engine:
        bench = Bench(engine, fleet)
        async with fleet.bridge(engine.endpoint, engine.replay_endpoint):
            await bench.run(BASE)
            await bench.settled()
        epoch = fleet.epoch
        # nobody listens meanwhile
        await engine.ask(do="generate", prompts=[[9] * 96], num=40, salt="", lora="")
        async with fleet.bridge(engine.endpoint, engine.replay_endpoint):
            await until(lambda: fleet.epoch > epoch)
            await bench.settled()
            await play(bench)


async def test_an_engine_restarted_in_the_middle_is_another_epoch_and_forgotten(
    python: str, models: Path, tmp_path: Path
) -> None:
    port = kept_ports(2)
    async with a_fleet(tmp_path) as fleet:
        endpoint, replay_endpoint = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"
        async with fleet.bridge(endpoint, replay_endpoint):
            async with an_engine(python, models / "llama", port) as engine:
                bench = Bench(engine, fleet)
                await bench.run(BASE)
                await bench.settled()
                epoch = fleet.epoch
            async with an_engine(python, models / "llama", port) as engine:
                await until(lambda: fleet.epoch > epoch)
                await until(lambda: fleet.match(chain(BASE)) == 0)
                bench = Bench(engine, fleet)
                await play(bench)


async def test_adapters_have_namespaces_of_their_own(
    python: str, models: Path, tmp_path: Path
) -> None:
    port = kept_ports(2)
    async with (
        a_fleet(tmp_path) as fleet,
        an_engine(python, models / "llama", port, lora=True) as engine,
        fleet.bridge(engine.endpoint, engine.replay_endpoint),
    ):
        bench = Bench(engine, fleet)
        for lora in ("", str(models / "lora"), "", str(models / "lora")):
            await bench.run(BASE, lora=lora)
            await bench.settled()
        assert [reported for _, reported in bench.hits] == [0, 0, 64, 64]


async def test_sliding_windows_give_no_false_prefix(
    python: str, models: Path, tmp_path: Path
) -> None:
    port = kept_ports(2)
    async with (
        a_fleet(tmp_path) as fleet,
        an_engine(python, models / "gemma3", port, num_blocks=29) as engine,
        fleet.bridge(engine.endpoint, engine.replay_endpoint),
    ):
        bench = Bench(engine, fleet)
        long = list(range(1, 200))
        for prompt in (long, long, long[:70], long[:64] + [7] * 60, long, [3] * 150, long):
            await bench.run(prompt)
            await heard_all(fleet)
        assert sum(reported for _, reported in bench.hits) > 0


async def heard_all(fleet: Bridged) -> None:
    """Return when the worker has said three times what it holds, with nothing new between."""
    await until(lambda: fleet.view is not None)
    for _ in range(3):
        assert fleet.view is not None
        seq = fleet.view.seq
        await until(partial(_is_beyond, fleet, seq))


def _is_beyond(fleet: Bridged, seq: int) -> bool:
    return fleet.view is not None and fleet.view.seq > seq
