"""`kvatlas serve --routers N`: one index, several routers in processes of their own, one port."""

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from kvatlas.runtime import router_processes
from kvatlas.schemas.settings import load_settings
from testkit.commands import running
from testkit.peer import stop
from testkit.processes import is_alive, until_ended
from testkit.waiting import until, until_told

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ASK = {"model": "reference", "token_ids": list(range(100, 420))}


async def each_connection_anew(method: str, url: str, body: Any = None) -> tuple[int, Any]:
    """Ask over a connection of its own, so that any of the routers may get it."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, json=body) as response,
    ):
        return response.status, json.loads(await response.read())


async def test_routers_share_index_port_and_load(tmp_path: Any) -> None:
    arguments = ("--routers", "3", "--workers", "2", "--port", "0", "--data", str(tmp_path))
    async with running("serve", *arguments, "--json") as addresses:
        url = addresses["router"]
        routers = alive_routers()
        assert len(routers) == 3

        answers = [await each_connection_anew("POST", f"{url}/v1/route", ASK)]

        async def all_have_heard() -> bool:
            numbers = [await num_in_flight(addresses[f"router_{number}"]) for number in (1, 2, 3)]
            return numbers == [1, 1, 1]

        await until_told(all_have_heard)
        answers += [await each_connection_anew("POST", f"{url}/v1/route", ASK) for _ in range(11)]
        assert {status for status, _ in answers} == {200}
        # one prompt: whichever router was asked, it knew what the others had decided
        assert len({answer["worker"] for _, answer in answers}) == 1
        ids = [answer["decision_id"] for _, answer in answers]
        deciding = {decision_id[12:20] for decision_id in ids}
        assert len(deciding) > 1
        counts = [await num_routed(addresses[f"router_{number}"]) for number in (1, 2, 3)]
        assert (sum(counts), sum(count > 0 for count in counts)) == (12, len(deciding))

        for decision_id in ids:
            status, found = await each_connection_anew("GET", f"{url}/v1/decisions/{decision_id}")
            assert (status, found["id"]) == (200, decision_id)
        reports = [
            await each_connection_anew("POST", f"{url}/v1/requests/{each}/done", {}) for each in ids
        ]
        assert [status for status, _ in reports] == [200] * len(ids)

        async def nobody_is_loaded() -> bool:
            return not any([await num_in_flight(url) for _ in range(6)])

        await until_told(nobody_is_loaded)

        status, _ = await each_connection_anew("GET", f"{addresses['indexer']}/v1/index/tree")
        assert status == 200
        status, problem = await each_connection_anew("GET", f"{url}/v1/index/tree")
        assert (status, "ask the index" in problem["detail"]) == (404, True)

        # one dies, another one hangs: its process is there and answers nothing
        routers[0].kill()
        stop(routers[1].pid)
        await until_ended(routers[0])
        await until_ended(routers[1])
        await until(lambda: len(alive_routers()) == 3, 60)

        async def all_are_up() -> bool:
            status, ready = await each_connection_anew("GET", f"{addresses['indexer']}/readyz")
            return status == 200 and not ready.get("conditions")

        await until_told(all_are_up)
        statuses = [(await each_connection_anew("GET", f"{url}/readyz"))[0] for _ in range(8)]
        assert statuses == [200] * 8
    assert not [*filter(is_alive, routers)]


def test_a_router_has_the_settings_of_serve_whatever_it_inherits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVATLAS_ROUTER__SEED", "5")
    settings = load_settings(flags=[("router.seed", "0"), ("fleet.key", "00ff")])
    told = router_processes._environment(settings, "nats://b:4222", Path("/index"), 8081)
    found = load_settings(environment=told)
    own = msgspec.structs.replace(settings.router, port=8081, is_port_shared=True)
    assert (found.router, found.fleet, found.log) == (own, settings.fleet, settings.log)
    assert (found.nats.url, found.indexer.shared_folder) == ("nats://b:4222", "/index")


async def num_in_flight(url: str) -> int:
    status, found = await each_connection_anew("GET", f"{url}/v1/workers")
    assert status == 200
    return sum(worker["load"]["in_flight"] for worker in found["workers"] if worker["load"])


async def num_routed(url: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        found = re.findall(r"^kv_routed_requests_total\{.*\} (.+)$", await response.text(), re.M)
    return sum(map(float, found))


def alive_routers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if is_router(p)]


def is_router(process: psutil.Process) -> bool:
    try:
        return is_alive(process) and "router" in process.cmdline()
    except psutil.NoSuchProcess:
        return False
