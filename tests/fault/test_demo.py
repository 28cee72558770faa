"""Faults in the middle of a demo run: the survivors' index is exact again, no request is lost."""

import asyncio
import shutil
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import psutil
import pytest

from kvatlas.demo.fleet_process import FleetAddress, fleet_process
from kvatlas.demo.outcomes import PlayedRequestOutcome
from kvatlas.demo.play import play
from kvatlas.demo.run import MODEL, converge
from kvatlas.demo.sessions import generate_requests
from kvatlas.events.nats.embedded.server import embedded_server
from testkit.ports import kept_port
from testkit.waiting import until, until_told

SPEED = 60.0
REQUESTS = generate_requests(120, seed=1)
#: few enough that workers evict, slow enough that the fault falls into the run
ENGINES = ["--blocks-per-worker", "400", "--block-tokens", "512", "--speed", str(SPEED)]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.demo.run.CONVERGE_SECONDS", 60.0)


def fleet_arguments(*more: str, workers: int) -> list[str]:
    return ["--port", "0", "--workers", str(workers), *ENGINES, *more]


async def play_with_fault(
    fleet: FleetAddress, fault_after: int, fault: "asyncio.Event"
) -> list[PlayedRequestOutcome]:
    num_done = 0

    def on_outcome(_: PlayedRequestOutcome) -> None:
        nonlocal num_done
        num_done += 1
        if num_done == fault_after:
            fault.set()

    return await play(REQUESTS, fleet.router_url, MODEL, SPEED, on_outcome)


def processes_of_worker(fleet: FleetAddress, name: str) -> list[psutil.Process]:
    """The engine's process and its sidecar's."""
    (engine,) = (
        process
        for process in psutil.Process(fleet.pid).children()
        if {"worker", name} <= set(process.cmdline())
    )
    return [engine, *engine.children()]


async def trust_of(fleet: FleetAddress) -> dict[str, tuple[str, int]]:
    workers = (await fleet.get("/v1/workers"))["workers"]
    return {each["worker"]: (each["trust"], each["num_blocks"]) for each in workers}


async def kill_worker_during_run(*, with_sidecar: bool) -> None:
    fault = asyncio.Event()
    settings = ["--set", "sidecar.lease_ttl_seconds=3"]
    async with fleet_process(fleet_arguments(*settings, workers=3)) as fleet:

        async def kill() -> None:
            await fault.wait()
            victims = processes_of_worker(fleet, "w1")
            assert len(victims) == 2
            # the sidecar first, or it says that its engine has ended
            for process in reversed(victims if with_sidecar else victims[:1]):
                process.kill()

        killing = asyncio.create_task(kill())
        outcomes = await play_with_fault(fleet, 40, fault)
        await killing
        assert len(outcomes) == len(REQUESTS)

        async def is_gone() -> bool:
            return (await trust_of(fleet))["w1"] == ("gone", 0)

        await until_told(is_gone)
        assert await converge(fleet) == {"w0": True, "w2": True}
        stats = await fleet.get("/v1/index/stats")
        assert (stats["index"]["gaps"], stats["rejected_total"]) == (0, 0)


async def test_an_engine_killed_during_a_run_is_forgotten_and_the_others_stay_exact() -> None:
    await kill_worker_during_run(with_sidecar=False)


async def test_an_engine_killed_with_its_sidecar_is_forgotten_when_its_lease_ends() -> None:
    await kill_worker_during_run(with_sidecar=True)


async def test_a_broker_restarted_during_a_run_costs_no_request_and_no_event(
    tmp_path: Path,
) -> None:
    fault = asyncio.Event()
    async with (
        embedded_server(tmp_path, kept_port()) as broker,
        fleet_process(fleet_arguments("--nats", broker.url, workers=2)) as fleet,
    ):

        async def restart() -> None:
            await fault.wait()
            await broker.kill()
            await until_disconnected(fleet)
            route: dict[str, object] = {"model": MODEL, "token_ids": [1] * 600}
            answer = await post_json(f"{fleet.router_url}/v1/route", route)
            assert answer["connected"] is False
            await broker.restart()

        restarting = asyncio.create_task(restart())
        outcomes = await play_with_fault(fleet, 40, fault)
        await restarting
        assert len(outcomes) == len(REQUESTS)
        assert sum(outcome.retries for outcome in outcomes) == 0
        assert await converge(fleet) == {"w0": True, "w1": True}
        stats = await fleet.get("/v1/index/stats")
        assert (stats["index"]["gaps"], stats["rejected_total"]) == (0, 0)
        assert stats["connected"] is True


async def until_disconnected(fleet: FleetAddress) -> None:
    async def is_disconnected() -> bool:
        return not (await fleet.get("/v1/index/stats"))["connected"]

    await until_told(is_disconnected)


async def post_json(url: str, body: dict[str, object]) -> dict[str, object]:
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as answer:
        answer.raise_for_status()
        found: dict[str, object] = await answer.json()
        return found


def nats_server_of(fleet: FleetAddress) -> psutil.Process:
    (server,) = (p for p in psutil.Process(fleet.pid).children() if "nats-server" in p.name())
    return server


async def test_an_embedded_broker_that_is_killed_is_started_again() -> None:
    async with fleet_process(fleet_arguments(workers=1)) as fleet:
        nats_server_of(fleet).kill()
        await until_disconnected(fleet)
        outcomes = await play(REQUESTS[:20], fleet.router_url, MODEL, SPEED, lambda _: None)
        assert len(outcomes) == 20
        assert await converge(fleet) == {"w0": True}
        assert (await fleet.get("/v1/index/stats"))["connected"] is True


async def test_a_broker_that_comes_back_empty_is_filled_again(tmp_path: Path) -> None:
    async with (
        embedded_server(tmp_path, kept_port()) as broker,
        fleet_process(fleet_arguments("--nats", broker.url, workers=2)) as fleet,
    ):
        await play(REQUESTS[:20], fleet.router_url, MODEL, SPEED, lambda _: None)
        await broker.kill()
        await until_disconnected(fleet)
        shutil.rmtree(tmp_path / "streams")
        await broker.restart()
        await play(REQUESTS[20:40], fleet.router_url, MODEL, SPEED, lambda _: None)

        async def is_exact() -> bool:
            return {trust for trust, _ in (await trust_of(fleet)).values()} == {"exact"}

        await until_told(is_exact, 40)
        assert await converge(fleet) == {"w0": True, "w1": True}


async def test_a_demo_that_is_told_to_stop_leaves_nothing_behind() -> None:
    command = [sys.executable, "-P", "-m", "kvatlas", "demo", "--requests", "300"]
    command += ["--workers", "2"]
    demo = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)

    def family() -> list[psutil.Process]:
        return psutil.Process(demo.pid).children(recursive=True)

    # the fleet's process, its broker, and an engine with its sidecar for each worker
    await until(lambda: len(family()) >= 6, 60)
    descendants = family()
    demo.terminate()
    _, said = await asyncio.wait_for(demo.communicate(), 60)
    assert demo.returncode == 1
    assert said.decode().strip().endswith("kvatlas: signal SIGTERM")
    gone, alive = psutil.wait_procs(descendants, timeout=60)
    assert (len(gone), alive) == (len(descendants), [])
