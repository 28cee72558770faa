"""What a process says of itself before it is of use, and how its start can be ended."""

import asyncio
import contextlib
import json

import httpx
import pytest

from kvatlas.events.nats.bus import NatsBus
from kvatlas.router.http.app import create_app
from kvatlas.router.http.server.limits import Bounds, HttpLimits
from kvatlas.router.http.startup import StartupApp
from kvatlas.runtime.health_server import Announcement, HealthServer, StartupProgress
from kvatlas.runtime.role import ProcessRole
from kvatlas.runtime.stopping import Stopped, stopping_with, until_stopped
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import Fleet
from testkit.waiting import WAIT_SECONDS


class TestWait:
    def test_it_says_what_for_and_for_how_long(self) -> None:
        now = 100.0
        wait = StartupProgress(lambda: now)
        now = 102.4
        assert (wait.connected, wait.reason) == (False, "starting for 2 s")
        wait.begin_with(NatsBus("nats://user:secret@a:1,nats://b:2"))
        now = 105.4
        assert wait.reason == "no broker at nats://a:1, nats://b:2: trying for 3 s"


class TestWaitingApp:
    @pytest.fixture
    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(StartupApp(StartupProgress(lambda: 0.0), "random"))
        return httpx.AsyncClient(transport=transport, base_url="http://router")

    async def test_it_is_alive_and_can_be_measured(self, client: httpx.AsyncClient) -> None:
        alive = await client.get("/healthz")
        assert (alive.status_code, alive.json()["status"]) == (200, "ok")
        measured = await client.get("/metrics")
        assert measured.status_code == 200
        assert 'policy="random"' in measured.text
        assert "\nkv_ready 0.0\n" in measured.text

    async def test_its_page_is_there_and_reads_what_is_waited_for(
        self, client: httpx.AsyncClient
    ) -> None:
        page = await client.get("/")
        assert (page.status_code, page.headers["cache-control"]) == (200, "no-store")
        assert page.headers["content-type"].startswith("text/html")
        assert "problem.detail" in page.text

    @pytest.mark.parametrize("decides", [True, False])
    async def test_it_describes_the_application_that_follows(self, decides: bool) -> None:
        waiting = StartupApp(StartupProgress(lambda: 0.0), "random", decides=decides)
        app = create_app(Fleet().router(), decides=decides)
        documents = []
        for each in (waiting, app):
            transport = httpx.ASGITransport(each)
            async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
                documents.append((await client.get("/openapi.json")).json())
        assert documents[0] == documents[1]

    @pytest.mark.parametrize("path", ["/readyz", "/v1/workers", "/anything"])
    async def test_all_else_is_to_be_asked_later(
        self, client: httpx.AsyncClient, path: str
    ) -> None:
        for answer in (await client.get(path), await client.post(path, content=b"x")):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.headers["content-type"] == "application/problem+json"
            assert answer.json()["detail"] == "starting for 0 s"


class TestAnnouncement:
    async def test_it_is_said_once_and_leaves_out_what_is_empty(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with Announcement(as_json=True) as announcement:
            announcement.now(router="http://r", archive="")
            announcement.now(router="http://r", archive="sqlite://")
        assert json.loads(capsys.readouterr().out) == {"router": "http://r"}

    async def test_it_does_not_wait_for_a_broker(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvatlas.runtime.health_server.ANNOUNCE_SECONDS", 0.0)
        with Announcement(as_json=False) as announcement:
            announcement.soon(StartupProgress(), router="http://r")
            await asyncio.sleep(0.01)
            assert capsys.readouterr().out == "router   http://r\n"
            announcement.now(router="http://r")
        assert capsys.readouterr().out == ""

    async def test_one_that_fails_before_says_nothing(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvatlas.runtime.health_server.ANNOUNCE_SECONDS", 0.0)
        with Announcement(as_json=False) as announcement:
            announcement.soon(StartupProgress(), router="http://r")
        await asyncio.sleep(0.01)
        assert capsys.readouterr().out == ""


class TestStopped:
    async def test_a_part_that_ends_ends_a_start_that_waits(self) -> None:
        async def ended() -> None:
            return

        async def starting() -> None:
            async with until_stopped() as stopped, stopping_with(ended(), stopped):
                await asyncio.Event().wait()

        await asyncio.wait_for(starting(), WAIT_SECONDS)

    async def test_once_it_is_waited_for_it_cancels_nothing(self) -> None:
        went_on = False
        async with until_stopped() as stopped:
            asyncio.get_running_loop().call_soon(stopped.set)
            await stopped.wait()
            await asyncio.sleep(0)
            went_on = True  # a cancellation would end the block without a word
        assert went_on

    async def test_what_others_cancel_is_cancelled(self) -> None:
        async def starting() -> None:
            async with until_stopped():
                await asyncio.Event().wait()

        task = asyncio.create_task(starting())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TestDrain:
    TERM, INT = "signal SIGTERM", "signal SIGINT"

    async def test_it_ends_after_its_time(self) -> None:
        with contextlib.closing(Stopped()) as stopped:
            stopped.drain = lambda: 0.01
            stopped.ask(self.TERM)
            assert (stopped.is_draining, stopped.is_set()) == (True, False)
            await asyncio.wait_for(stopped.wait(), WAIT_SECONDS)

    @pytest.mark.parametrize("seconds", [0.0, 60.0])
    async def test_a_terminal_ends_it_at_once(self, seconds: float) -> None:
        with contextlib.closing(Stopped()) as stopped:
            stopped.drain = lambda: seconds
            stopped.ask(self.INT)
            assert (stopped.is_draining, stopped.is_set()) == (False, True)

    async def test_without_anything_to_drain_it_ends_at_once(self) -> None:
        stopped = Stopped()
        stopped.ask(self.TERM)
        assert stopped.is_set()

    @pytest.mark.parametrize("second", [TERM, INT, "signal SIGHUP"])
    async def test_a_second_signal_ends_it_sooner(
        self, second: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvatlas.runtime.stopping.REPEAT_SECONDS", 0.0)
        with contextlib.closing(Stopped()) as stopped:
            stopped.drain = lambda: 60.0
            stopped.ask(self.TERM)
            stopped.ask(second)
            assert stopped.is_set()

    async def test_a_signal_to_the_whole_group_and_its_parents_are_one(self) -> None:
        with contextlib.closing(Stopped()) as stopped:
            stopped.drain = lambda: 60.0
            stopped.ask(self.TERM)
            stopped.ask(self.TERM)
            assert not stopped.is_set()

    async def test_a_role_says_that_it_leaves_and_answers_on(self) -> None:
        with contextlib.closing(Stopped()) as stopped, Announcement(as_json=True) as announcement:
            role = ProcessRole(stopped, announcement, drain_seconds=60.0)
            fleet = Fleet()
            fleet.up("w1")
            async with role.parts, role.faces, httpx.AsyncClient() as client:
                face = await role.show(
                    HealthServer(role.wait, RouterSettings(), 0, HttpLimits(Bounds()))
                )
                await face.serve(create_app(fleet.router(), conditions=role.conditions))
                ask = {"model": "m", "token_ids": [1, 2, 3]}
                before = await client.post(f"{face.url}/v1/score", json=ask)
                assert "connection" not in before.headers
                stopped.ask(self.TERM)
                ready = await client.get(f"{face.url}/readyz")
                assert (ready.status_code, "draining" in ready.json()["detail"]) == (503, True)
                assert (await client.get(f"{face.url}/healthz")).status_code == 200
                scored = await client.post(f"{face.url}/v1/score", json=ask)
                assert (scored.status_code, scored.headers["connection"]) == (200, "close")
                wrong = await client.post(f"{face.url}/v1/score", json={})
                assert (wrong.status_code, wrong.headers["connection"]) == (400, "close")
                assert not stopped.is_set()

    @pytest.mark.parametrize("drain_seconds", [0.0, 60.0])
    async def test_a_role_that_serves_nothing_yet_ends_at_once(self, drain_seconds: float) -> None:
        with contextlib.closing(Stopped()) as stopped, Announcement(as_json=True) as announcement:
            role = ProcessRole(stopped, announcement, drain_seconds)
            async with role.parts, role.faces:
                face = await role.show(
                    HealthServer(role.wait, RouterSettings(), 0, HttpLimits(Bounds()))
                )
                await face.serve()
                stopped.ask(self.TERM)
                assert stopped.is_set()

    async def test_a_role_without_a_drain_ends_at_once(self) -> None:
        with contextlib.closing(Stopped()) as stopped, Announcement(as_json=True) as announcement:
            role = ProcessRole(stopped, announcement, drain_seconds=0.0)
            async with role.parts, role.faces:
                face = await role.show(
                    HealthServer(role.wait, RouterSettings(), 0, HttpLimits(Bounds()))
                )
                await face.serve(create_app(Fleet().router()))
                stopped.ask(self.TERM)
                assert stopped.is_set()
