"""Roles that start before their broker, and live through its absence: real processes, real HTTP."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import EmbeddedServer, embedded_server
from testkit.commands import run_command, running, started
from testkit.ports import kept_port

WAIT_SECONDS = 40.0
ASK = {"model": "m", "token_ids": [1, 2, 3]}


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A broker that is away: its port is known, and `restart` makes it come."""
    async with embedded_server(tmp_path / "nats", kept_port()) as server:
        await server.stop()
        yield server


class Answer(NamedTuple):
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Asker:
    """Asks over one connection, for as long as the server keeps it open."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def get(self, path: str) -> Answer:
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: Any) -> Answer:
        return await self._ask("POST", path, body)

    async def until(self, path: str, status: int, part: bytes = b"") -> Answer:
        """Return the first answer with a status and a part in it."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                answer = await self.get(path)
                if answer.status == status and part in answer.body:
                    return answer
                await asyncio.sleep(0.05)

    async def _ask(self, method: str, path: str, body: Any) -> Answer:
        async with self._session.request(method, self._url + path, json=body) as answer:
            return Answer(answer.status, answer.headers, await answer.read())


def one_connection() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1))


async def test_a_router_without_its_broker_says_so_and_needs_no_restart(
    broker: EmbeddedServer,
) -> None:
    with_user = broker.url.replace("nats://", "nats://somebody:secret@")
    async with (
        running("router", "--nats", with_user, "--port", "0", "--json") as addresses,
        one_connection() as session,
    ):
        assert addresses["nats"] == broker.url
        router = Asker(session, addresses["router"])
        assert (await router.get("/healthz")).json["status"] == "ok"
        for answer in (await router.get("/readyz"), await router.post("/v1/route", ASK)):
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert answer.json["detail"].startswith(f"no broker at {broker.url}: trying for ")
        measured = (await router.get("/metrics")).body
        assert b"\nkv_connected 0.0\n" in measured
        assert b"\nkv_ready 0.0\n" in measured

        await broker.restart()
        assert (await router.until("/readyz", 200)).json["connected"] is True
        asked = await router.post("/v1/route", ASK)
        assert (asked.status, asked.json["detail"]) == (404, "no worker serves model 'm'")
        assert b"\nkv_connected 1.0\n" in (await router.get("/metrics")).body

        await broker.kill()
        await router.until("/readyz", 200, b'"connected":false')
        assert (await router.get("/v1/workers")).status == 200
        await broker.restart()
        await router.until("/readyz", 200, b'"connected":true')


@pytest.mark.parametrize("routers", ["0", "1"])
async def test_all_in_one_listens_before_its_broker_is_there(
    broker: EmbeddedServer, routers: str
) -> None:
    port = kept_port()
    arguments = ["--nats", broker.url, "--port", str(port), "--routers", routers, "--json"]
    async with started("serve", *arguments) as process, one_connection() as session:
        router = Asker(session, f"http://127.0.0.1:{port}")
        await until_it_listens(port)
        assert (await router.get("/healthz")).status == 200
        assert broker.url in (await router.until("/readyz", 503, b"no broker")).json["detail"]
        await broker.restart()
        assert process.stdout is not None
        said = json.loads(await process.stdout.readline())
        assert said["router"] == f"http://127.0.0.1:{port}"
        async with one_connection() as anew:
            await Asker(anew, said["router"]).until("/readyz", 200)


async def test_an_index_listens_before_its_broker_is_there(broker: EmbeddedServer) -> None:
    async with (
        running("indexer", "--nats", broker.url, "--port", "0", "--json") as addresses,
        one_connection() as session,
    ):
        index = Asker(session, addresses["indexer"])
        assert broker.url in (await index.until("/readyz", 503)).json["detail"]
        await broker.restart()
        await index.until("/readyz", 200)
        assert (await index.get("/v1/index/tree")).status == 200


async def test_a_router_that_reads_a_shared_index_starts_without_a_broker(
    broker: EmbeddedServer, tmp_path: Path
) -> None:
    await broker.restart()
    shared = ["--set", f"indexer.shared_folder={tmp_path}/index"]
    arguments = ["--nats", broker.url, "--port", "0", "--json", *shared]
    async with running("indexer", *arguments) as addresses, one_connection() as session:
        index = Asker(session, addresses["indexer"])
        await index.until("/readyz", 200)
        await broker.kill()
        await index.until("/readyz", 200, b'"connected":false')
        of_several = ["--set", "router.is_port_shared=true"]
        async with (
            running("router", *arguments, *of_several) as others,
            one_connection() as another,
        ):
            assert (await Asker(another, others["own"]).until("/healthz", 200)).status == 200
            router = Asker(another, others["router"])
            assert (await router.until("/readyz", 200)).json["connected"] is False
            assert (await router.post("/v1/route", ASK)).status == 404
            await broker.restart()
            await router.until("/readyz", 200, b'"connected":true')


async def test_what_no_waiting_would_mend_ends_a_router_at_once(broker: EmbeddedServer) -> None:
    broker.settings = 'authorization { user: "somebody", password: "secret" }'
    await broker.restart()
    wrong = broker.url.replace("nats://", "nats://somebody:else@"), "nats://127.0.0.1:port"
    ends = await asyncio.gather(
        *(run_command("router", "--nats", url, "--port", "0") for url in wrong)
    )
    for ended, setting in zip(ends, ("credentials", "servers"), strict=True):
        assert (ended.status, ended.out) == (1, ""), ended
        (line,) = ended.err.splitlines()
        assert line.startswith(f"kvatlas: setting {setting} ")
        assert "somebody" not in ended.err
        assert "Traceback" not in ended.err


async def test_a_broker_that_can_never_store_the_log_is_told_once_with_the_setting(
    broker: EmbeddedServer, capfd: pytest.CaptureFixture[str]
) -> None:
    streams = json.dumps(str(broker.streams_folder))
    broker.settings = f"jetstream {{ store_dir: {streams}, max_file_store: 50MB }}"
    await broker.restart()
    port = kept_port()
    arguments = ["--nats", broker.url, "--port", str(port), "--json"]
    async with started("router", *arguments), one_connection() as session:
        await until_it_listens(port)
        router = Asker(session, f"http://127.0.0.1:{port}")
        answer = await router.until("/readyz", 503, b"insufficient storage")
        assert "lower log.max_bytes" in answer.json["detail"]
        measured = (await router.get("/metrics")).body
        assert b'kv_condition{condition="stream_not_declared"} 1.0' in measured
        broker.settings = ""
        await broker.restart()
        await router.until("/readyz", 200)
    log = capfd.readouterr().err
    assert log.count("stream_not_declared: declare KV_EVENTS: ") == 1
    assert log.count("stream_not_declared is over") == 1


async def test_an_account_without_jetstream_is_told_with_what_to_change(
    broker: EmbeddedServer,
) -> None:
    broker.settings = "accounts { A: { users: [ { user: a, password: b } ] } }\nno_auth_user: a"
    await broker.restart()
    port = kept_port()
    async with (
        started("router", "--nats", broker.url, "--port", str(port), "--json"),
        one_connection() as session,
    ):
        await until_it_listens(port)
        router = Asker(session, f"http://127.0.0.1:{port}")
        answer = await router.until("/readyz", 503, b"JetStream not enabled for account")
        assert "enable JetStream for the account" in answer.json["detail"]


@pytest.mark.parametrize("command", ["router", "archive", "worker", "sidecar", "dead-letters"])
async def test_a_file_that_proves_no_user_ends_a_command_with_its_name(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "creds").write_text("no credentials")
    more = {
        "archive": ["--archive", f"sqlite:///{tmp_path}/db"],
        "worker": ["--name", "w1"],
        "sidecar": ["--worker", "w", "--model", "m", "--ring", "r", "--socket", "s"],
    }
    arguments = ["--nats", "nats://127.0.0.1:1", "--creds", f"{tmp_path}/creds"]
    ended = await run_command(command, *arguments, *more.get(command, []))
    assert (ended.status, ended.out) == (1, "")
    (line,) = ended.err.splitlines()
    assert line.startswith(f"kvatlas: nats.credentials (--creds) {tmp_path}/creds: expected")


async def test_a_router_that_waits_ends_with_its_parent(broker: EmbeddedServer) -> None:
    parent = await asyncio.create_subprocess_exec("sleep", "600")
    try:
        arguments = ["--nats", broker.url, "--port", "0", "--json"]
        async with started("router", *arguments, "--parent-pid", str(parent.pid)) as process:
            assert process.stdout is not None
            assert await process.stdout.readline()
            parent.kill()
            async with asyncio.timeout(WAIT_SECONDS):
                assert await process.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.kill()
        await parent.wait()


async def test_a_bus_can_be_left_just_as_an_attempt_to_connect_fails(
    broker: EmbeddedServer,
) -> None:
    """nats-py overhears a cancellation that comes at the same time."""
    before = asyncio.all_tasks()
    for num_turns in range(12):
        opening = asyncio.create_task(NatsBus(broker.url).open())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        time.sleep(0.02)  # noqa: ASYNC251 - the refusal and what follows come in one turn
        opening.cancel()
        await asyncio.wait((opening,), timeout=WAIT_SECONDS)
        assert asyncio.all_tasks() == before


async def until_it_listens(port: int) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return await writer.wait_closed()
