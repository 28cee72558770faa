"""The command line as people use it: real processes, a real broker, real HTTP."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvatlas.demo.fleet_process import get_json
from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS
from kvatlas.schemas.hashing import pack_tokens
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingWriter
from kvatlas.worker_hooks.sidecar.channel import SidecarChannel
from testkit.commands import run_command, running, started
from testkit.waiting import WAIT_SECONDS, until

PROMPT = list(range(100, 200))


async def post_json(url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
        return found


async def workers_of(url: str) -> dict[str, dict[str, Any]]:
    workers = (await get_json(f"{url}/v1/workers"))["workers"]
    return {worker["worker"]: worker for worker in workers}


async def until_blocks(url: str, worker: str, num_blocks: int) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            found = (await workers_of(url)).get(worker)
            if found is not None and found["num_blocks"] == num_blocks:
                return found
            await asyncio.sleep(0.05)


async def serve_prompt(router: str, **more: str) -> str:
    """Route a prompt, serve it where the router says, report it; return the decision's id."""
    asked = {"model": "reference", "token_ids": PROMPT, **more}
    route = await post_json(f"{router}/v1/route", asked)
    body = {
        "model": "reference",
        "prompt": PROMPT,
        "max_tokens": 1,
        "kv_transfer_params": route["kv_transfer_params"],
        **more,
    }
    answer = await post_json(f"{route['base_url']}/v1/completions", body)
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    await post_json(f"{router}/v1/requests/{route['decision_id']}/done", {"ttft_ms": 1})
    return str(route["decision_id"])


async def test_the_demo_ends_with_equal_digests_and_an_equal_replay(tmp_path: Path) -> None:
    archive = f"sqlite:///{tmp_path}/demo.db"
    demo = ["demo", "--requests", "60", "--workers", "2", "--speed", "100", "--archive", archive]
    ended = await run_command(*demo, "--blocks-per-worker", "300", "--json")
    assert ended.status == 0, ended.err
    report = json.loads(ended.out.splitlines()[-1])
    assert report["digest"] == {"equal": True, "workers": 2}
    assert report["replay"]["digest_equal"] is True
    assert report["events"]["published"] == report["events"]["applied"] > 0
    assert (report["events"]["gaps"], report["events"]["rejected"]) == (0, 0)
    assert (
        report["policies"]["kvatlas"]["hit_ratio"] > report["policies"]["round_robin"]["hit_ratio"]
    )
    assert report["policies"]["round_robin"]["pulled_ratio"] == 0
    assert report["pull"]["verified"] == report["pull"]["blocks"]
    again = await run_command("replay", "--archive", archive, "--json")
    assert json.loads(again.out)["batches"] >= report["replay"]["batches"]
    ended = await run_command("demo", "--requests", "1", "--workers", "1", "--archive", archive)
    assert ended.status == 1
    assert "the archive holds another log" in ended.err
    assert f"{archive} has it up to" in ended.err


async def test_roles_run_apart_on_one_broker(tmp_path: Path) -> None:
    archive = f"sqlite:///{tmp_path}/kvatlas.db"
    async with embedded_server(tmp_path / "nats") as broker:
        nats = ("--nats", broker.url)
        async with (
            running("router", *nats, "--port", "0", "--json") as router,
            running("indexer", *nats, "--port", "0", "--json") as indexer,
            running("archive", *nats, "--archive", archive, "--json"),
        ):
            async with (
                running("worker", *nats, "--name", "w0", "--blocks", "50"),
                running("worker", *nats, "--name", "w1", "--blocks", "50"),
            ):
                again = await two_prompts_are_served(router["router"], indexer["indexer"])
            await until_archived(broker.url, archive)
    await the_archive_explains(archive, again, tmp_path)


async def test_a_prompt_with_a_salt_is_found_again_in_a_fleet_with_a_key() -> None:
    keyed = ("--set", "fleet.key=00ff", "--set", "router.predicted_seconds=0")
    async with running("serve", "--workers", "1", *keyed, "--port", "0", "--json") as addresses:
        router = addresses["router"]
        await serve_prompt(router, cache_salt="tenant")
        await until_blocks(router, "w0", 6)
        again = await serve_prompt(router, cache_salt="tenant")
        decision = await get_json(f"{router}/v1/decisions/{again}")
        assert decision["plan"]["reuse_blocks"] == 6


async def two_prompts_are_served(router: str, indexer: str) -> dict[str, Any]:
    """Serve a prompt twice; return the second decision."""
    for name in ("w0", "w1"):
        await until_blocks(router, name, 0)
    first = await serve_prompt(router)
    decision: dict[str, Any] = await get_json(f"{router}/v1/decisions/{first}")
    chosen = decision["chosen"]["worker"]
    held = await until_blocks(router, chosen, 6)
    assert held["trust"] == "exact"
    assert (await until_blocks(indexer, chosen, 6))["digests"] == held["digests"]
    again: dict[str, Any] = await get_json(f"{router}/v1/decisions/{await serve_prompt(router)}")
    assert again["chosen"]["worker"] == chosen
    assert again["plan"]["reuse_blocks"] == 6
    assert await status_of(f"{indexer}/v1/route") in (404, 405)
    return again


async def until_archived(broker_url: str, archive_url: str) -> None:
    """Return once the archive has two decisions, and all that was said till now."""
    async with NatsBus(broker_url) as bus:
        last = await bus.last_sequence(KV_EVENTS)
    with SqlArchive(archive_url, must_exist=True) as archive:
        await until(lambda: archive.cursor(KV_EVENTS) >= last)
        await until(lambda: archive.cursor(KV_DECISIONS) >= 2)


async def status_of(url: str) -> int:
    async with aiohttp.ClientSession() as client, client.post(url, json={}) as answer:
        return answer.status


async def the_archive_explains(archive: str, decision: dict[str, Any], tmp_path: Path) -> None:
    chosen, asked_at = decision["chosen"]["worker"], str(decision["stream_sequence"])
    (tmp_path / "tokens.json").write_text(json.dumps(PROMPT))
    (tmp_path / "tokens.u32").write_bytes(pack_tokens(PROMPT))
    whole = json.loads((await run_command("replay", "--archive", archive, "--json")).out)
    ended = {worker["worker"]: worker["trust"] for worker in whole["workers"]}
    assert ended == {"w0": "gone", "w1": "gone"}
    texts = [("--match", str(tmp_path / name)) for name in ("tokens.json", "tokens.u32")]
    for match in texts:
        found = await run_command(
            "replay", "--archive", archive, *match, "--until-seq", asked_at, "--json"
        )
        assert found.status == 0, found.err
        matches = json.loads(found.out)["matches"]
        assert {m["worker"]: m["num_blocks"] for m in matches}[chosen] == 6
    explained = await run_command("explain", decision["id"], "--archive", archive)
    assert chosen in explained.out
    assert (await run_command("explain", "--archive", archive)).out == explained.out


async def test_a_sidecar_runs_apart_from_its_engine(tmp_path: Path) -> None:
    async with embedded_server(tmp_path / "nats") as broker:
        nats = ("--nats", broker.url)
        ring, socket = tmp_path / "ring", tmp_path / "socket"
        hook = WorkerHook(RingWriter.create(ring))
        apart = [*nats, "--worker", "e0", "--model", "m", "--ring", str(ring)]
        async with (
            running("router", *nats, "--port", "0", "--json") as router,
            started("sidecar", *apart, "--socket", str(socket), "--base-url", "http://e0"),
            SidecarChannel(socket) as channel,
        ):
            await channel.wait_ready(60.0)
            hook.stored([1, 2], None, list(range(32)))
            await channel.flush()
            found = await until_blocks(router["router"], "e0", 2)
            assert found["base_url"] == "http://e0"
        hook.close()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["router"], 1, "give --nats nats://"),
        (["archive", "--nats", "nats://127.0.0.1:1"], 1, "give --archive"),
        (["serve", "--set", "router.prot=1"], 1, "did you mean router.port?"),
        (["serve", "--set", "router.port"], 1, "SECTION.KEY=VALUE"),
        (["serve", "--port", "0", "--policy", "best"], 1, "one of predicted_ttft, round_robin"),
        (["serve", "--port", "0", "--archive", "nonsense://x"], 1, "known databases are sqlite"),
        (["demo", "--workers", "0"], 2, "--workers"),
        (["demo", "--trace", "absent.jsonl"], 1, "absent.jsonl"),
        (["replay", "--archive", "sqlite:///absent.db"], 1, "absent.db"),
        (["explain", "x", "--archive", "sqlite:///absent.db"], 1, "absent.db"),
        (["bogus"], 2, "bogus"),
    ],
)
async def test_wrong_usage_is_one_line_that_names_it(
    arguments: list[str], status: int, says: str
) -> None:
    ended = await run_command(*arguments)
    assert ended.status == status, ended
    assert says in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("role", ["router", "indexer"])
async def test_a_role_that_waits_for_its_broker_can_be_stopped(role: str) -> None:
    async with started(role, "--nats", "nats://127.0.0.1:1", "--port", "0") as process:
        await until_it_listens_to_signals(process.pid)


async def until_it_listens_to_signals(pid: int) -> None:
    """Return when the process catches SIGTERM, as its table of signals tells."""
    caught = 1 << (signal.SIGTERM - 1)
    await until(lambda: bool(caught & int(_signals_caught(pid), 16)))


def _signals_caught(pid: int) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("SigCgt"))


async def test_kernels_are_made_in_advance() -> None:
    ended = await run_command("warm")
    assert (ended.status, ended.err) == (0, "")
    assert "kernels  ready in " in ended.out
    assert "__pycache__" in ended.out
