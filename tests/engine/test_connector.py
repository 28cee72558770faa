"""Two real vLLMs: B pulls the prefix that A has computed, or computes it itself.

A's outputs are the judge: greedy, so B has to answer with the same tokens, pulled or not.
"""

import asyncio
import contextlib
import itertools
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats
import psutil
import pytest

from kvatlas.events.subjects import lease_subject
from kvatlas.schemas.errors import Unavailable
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, pack_tokens
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.routing import Plan, PullStep
from testkit.bridging import Bridged, a_fleet
from testkit.commands import running
from testkit.real_engine import EngineProcess, engine_process, engine_python, tiny_models
from testkit.waiting import until

BLOCK_TOKENS = 32
NUM_BLOCKS = 49
DEADLINE_SECONDS = 1.0
#: what a request may take beyond the deadline when a pull fails: none of it is waiting, but the
#: machine may be busy with anything, and what was not pulled is computed
MARGIN_SECONDS = 10.0
A, B = InstanceId("a", 0), InstanceId("b", 0)
HASHER = BlockHasher(NamespaceDescriptor(BLOCK_TOKENS).namespace("m", None, None))
PROMPT = [(7 * i + 3) % 250 for i in range(200)]
NUM_FULL = len(PROMPT) // BLOCK_TOKENS


@pytest.fixture(scope="module")
def python() -> str:
    return engine_python()


@pytest.fixture(scope="module")
def models(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models(python, tmp_path_factory.mktemp("models"))


def chain(tokens: list[int]) -> list[bytes]:
    packed = HASHER.chain(pack_tokens(tokens))
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


def plan(num_blocks: int = NUM_FULL, owner: str = "a") -> dict[str, Any]:
    """Return kv_transfer_params as the router gives them."""
    step = PullStep(owner, 0, 0, num_blocks)
    computed = len(PROMPT) - num_blocks * BLOCK_TOKENS
    built = msgspec.to_builtins(Plan(BLOCK_TOKENS, 0, (step,), computed))
    return {"kvatlas": {"decision_id": "d", "plan": built}}


@asynccontextmanager
async def an_engine(
    python: str,
    models: Path,
    fleet: Bridged,
    name: str,
    query: str = "",
    executor: str = "uni",
    **extra: Any,
) -> AsyncIterator[EngineProcess]:
    options = {
        "executor": executor,
        "model": str(models / "llama"),
        "num_blocks": NUM_BLOCKS,
        "plugins": "kvatlas",
        "kv_events": {"endpoint": f"{fleet.url}?worker={name}&model=m{query}"},
        "kv_transfer": {
            "kv_connector": "KvatlasConnector",
            "kv_connector_module_path": "kvatlas.worker_hooks.vllm_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "serve_blocks": 64,
                "pull_deadline_seconds": DEADLINE_SECONDS,
                **extra,
            },
        },
    }
    fast = {"KVATLAS_SIDECAR__DIGEST_SECONDS": "0.2"}
    async with engine_process(python, options, fast) as engine:
        await until(lambda: fleet.service.index.instance(InstanceId(name, 0)) is not None)
        yield engine


async def computed_by(engine: EngineProcess, fleet: Bridged, prompt: list[int]) -> list[int]:
    """Let A compute a prompt; return its output when the fleet knows that peers can have it."""
    answer = await engine.ask(do="generate", prompts=[prompt], num=8)
    index = fleet.service.index
    await until(lambda: all((A, Tier.dram) in index.holders(block) for block in chain(prompt)))
    output: list[int] = answer["output"][0]
    return output


async def seconds_alone(engine: EngineProcess) -> float:
    """Return how long an engine takes to compute a prompt like PROMPT, once it has done so."""
    for first in (1, 2):
        prompt = [first, *PROMPT[1:]]
        answer = await engine.ask(do="generate", prompts=[prompt], num=8)
        assert answer["cached"] == [0]
    return float(answer["seconds"])


@asynccontextmanager
async def lease_asked(fleet: Bridged) -> AsyncIterator[asyncio.Event]:
    """Listen for lease requests to A: set when the first one is on its way."""
    is_asked = asyncio.Event()

    async def hear(_message: object) -> None:
        is_asked.set()

    client = await nats.connect(fleet.url)
    try:
        await client.subscribe(lease_subject(A), cb=hear)
        await client.flush()
        yield is_asked
    finally:
        await client.close()


async def lends(fleet: Bridged) -> None:
    """Return when A answers requests for leases, be it that one makes no sense."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(Unavailable):
                await fleet.bus.request(lease_subject(A), b"?", 1.0)
                return
            await asyncio.sleep(0.05)


async def pulls_work(a: EngineProcess, b: EngineProcess, fleet: Bridged) -> None:
    """Return when B's transfer process is up: until then pulls say that there is no transport.

    Each try is of a prompt that B has never seen, for what it has computed is in its own pool.
    """
    async with asyncio.timeout(60):
        for number in itertools.count():
            prompt = [(3 * i + number) % 250 for i in range(100)]
            await computed_by(a, fleet, prompt)
            answer = await b.ask(do="generate", prompts=[prompt], num=1, transfer=plan(2))
            if answer["cached"] == [2 * BLOCK_TOKENS]:
                return


@asynccontextmanager
async def two_engines(
    python: str, models: Path, folder: Path, query: str = ""
) -> AsyncIterator[tuple[Bridged, EngineProcess, EngineProcess]]:
    async with (
        a_fleet(folder) as fleet,
        an_engine(python, models, fleet, "a") as a,
        an_engine(python, models, fleet, "b", query) as b,
    ):
        yield fleet, a, b


async def test_b_pulls_what_a_has_computed_and_says_the_same(
    python: str, models: Path, tmp_path: Path
) -> None:
    async with two_engines(python, models, tmp_path) as (fleet, a, b):
        await pulls_work(a, b, fleet)
        expected = await computed_by(a, fleet, PROMPT)
        answer = await b.ask(do="generate", prompts=[PROMPT], num=8, transfer=plan())
        assert answer["cached"] == [NUM_FULL * BLOCK_TOKENS]
        assert answer["output"] == [expected]
        index = fleet.service.index
        # the engine tells its loaded blocks itself, and the pool has them for others
        await until(lambda: all((B, Tier.hbm) in index.holders(block) for block in chain(PROMPT)))
        await until(lambda: all((B, Tier.dram) in index.holders(block) for block in chain(PROMPT)))
        again = await b.ask(do="generate", prompts=[PROMPT], num=8)
        assert again["output"] == [expected]
        counted = {
            (name.removeprefix("vllm:kvatlas_"), labels.get("outcome")): value
            for name, labels, value in (await b.ask(do="metrics", prefix="vllm:kvatlas_"))[
                "metrics"
            ]
        }
        assert counted["load_blocks", "held"] >= NUM_FULL
        assert counted["loads", None] >= 2  # and those that have seen that pulls work
        assert counted["load_seconds", None] > 0
        # the same prompt without anything cached, for comparison
        await b.ask(do="reset")
        alone = await b.ask(do="generate", prompts=[PROMPT], num=8)
        assert (alone["cached"], alone["output"]) == ([0], [expected])
        figures = {
            "pulled_blocks": NUM_FULL,
            "seconds_pulled": round(answer["seconds"], 4),
            "seconds_cached": round(again["seconds"], 4),
            "seconds_computed": round(alone["seconds"], 4),
        }
        print(json.dumps(figures))


async def test_the_first_pull_waits_for_the_transport_to_load(
    python: str, models: Path, tmp_path: Path
) -> None:
    async with (
        a_fleet(tmp_path) as fleet,
        an_engine(python, models, fleet, "a") as a,
    ):
        expected = await computed_by(a, fleet, PROMPT)
        await lends(fleet)
        async with an_engine(python, models, fleet, "b", pull_deadline_seconds=60.0) as b:
            answer = await b.ask(do="generate", prompts=[PROMPT], num=8, transfer=plan())
            assert answer["cached"] == [NUM_FULL * BLOCK_TOKENS]
            assert answer["output"] == [expected]
            print(json.dumps({"first_pull_seconds": round(answer["seconds"], 3)}))


@pytest.mark.parametrize("when", ["before", "during"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_an_owner_that_goes_costs_the_deadline_at_most(
    python: str, models: Path, tmp_path: Path, how: signal.Signals, when: str
) -> None:
    """During the pull: as soon as the owner is asked for a lease."""
    async with two_engines(python, models, tmp_path) as (fleet, a, b):
        await pulls_work(a, b, fleet)
        expected = await computed_by(a, fleet, PROMPT)
        alone = await seconds_alone(b)
        family = a.family()
        try:
            if when == "before":
                for process in family:
                    process.send_signal(how)
                answer = await b.ask(do="generate", prompts=[PROMPT], num=8, transfer=plan())
                assert answer["cached"] == [0]
            else:
                async with lease_asked(fleet) as is_asked:
                    asking = asyncio.create_task(
                        b.ask(do="generate", prompts=[PROMPT], num=8, transfer=plan())
                    )
                    await asyncio.wait_for(is_asked.wait(), 30)
                    for process in family:
                        process.send_signal(how)
                    answer = await asking
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
        assert answer["output"] == [expected]
        added = answer["seconds"] - alone
        assert added < DEADLINE_SECONDS + MARGIN_SECONDS
        words = "killed" if how is signal.SIGKILL else "frozen"
        print(json.dumps({f"{words}_{when}_added_seconds": round(added, 3)}))


async def test_a_killed_during_the_pull_is_computed_around(
    python: str, models: Path, tmp_path: Path
) -> None:
    """A stands still from before the pull on, so that the pull is under way when A dies."""
    async with two_engines(python, models, tmp_path) as (fleet, a, b):
        await pulls_work(a, b, fleet)
        expected = await computed_by(a, fleet, PROMPT)
        alone = await seconds_alone(b)
        family = a.family()
        for process in family:
            process.send_signal(signal.SIGSTOP)
        asked = asyncio.create_task(b.ask(do="generate", prompts=[PROMPT], num=8, transfer=plan()))
        await asyncio.sleep(DEADLINE_SECONDS / 2)  # into the middle of the pull
        assert not asked.done()
        for process in family:
            process.send_signal(signal.SIGKILL)
        answer = await asked
        assert answer["output"] == [expected]
        added = answer["seconds"] - alone
        assert added < DEADLINE_SECONDS + MARGIN_SECONDS
        print(json.dumps({"killed_while_frozen_added_seconds": round(added, 3)}))


async def test_kv_of_another_fingerprint_is_not_pulled(
    python: str, models: Path, tmp_path: Path
) -> None:
    query = f"&kv_fingerprint={'ab' * 16}"
    async with two_engines(python, models, tmp_path, query) as (fleet, a, b):
        expected = await computed_by(a, fleet, PROMPT)
        answer = await b.ask(do="generate", prompts=[PROMPT], num=8, transfer=plan())
        assert answer["output"] == [expected]
        assert answer["cached"] == [0]


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_a_reset_of_the_connector_empties_the_pool(
    python: str, models: Path, tmp_path: Path, executor: str
) -> None:
    """As vLLM does when weights are replaced; alone, the prefix cache leaves the pool as it is."""
    async with (
        a_fleet(tmp_path) as fleet,
        an_engine(python, models, fleet, "a", executor=executor) as a,
    ):
        index, blocks = fleet.service.index, chain(PROMPT)

        def tiers() -> set[Tier]:
            return {tier for block in blocks for _, tier in index.holders(block)}

        assert (await a.ask(do="reset", connector=True))["is_reset"]  # before its first step
        expected = await computed_by(a, fleet, PROMPT)
        assert (await a.ask(do="reset"))["is_reset"]
        await until(lambda: tiers() == {Tier.dram})
        again = await a.ask(do="generate", prompts=[PROMPT], num=8)
        assert (again["cached"], again["output"]) == ([0], [expected])
        assert (await a.ask(do="reset", connector=True))["is_reset"]
        await until(lambda: tiers() == set())
        # what is computed from now on is lent again
        assert await computed_by(a, fleet, PROMPT) == expected


async def test_b_finds_a_holder_itself_where_nobody_has_planned(
    python: str, models: Path, tmp_path: Path
) -> None:
    async with (
        a_fleet(tmp_path) as fleet,
        running("router", "--nats", fleet.url, "--port", "0", "--json") as router,
        an_engine(python, models, fleet, "a") as a,
        an_engine(python, models, fleet, "b", router_url=router["router"], find_ms=2000) as b,
    ):
        await pulls_work(a, b, fleet)
        expected = await computed_by(a, fleet, PROMPT)
        answer = await b.ask(do="generate", prompts=[PROMPT], num=8)
        assert answer["cached"] == [NUM_FULL * BLOCK_TOKENS]
        assert answer["output"] == [expected]
