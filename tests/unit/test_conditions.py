"""What is wrong with a process: told once, with its reason, and again when it is over."""

import logging

import httpx
import pytest

from kvatlas.router.http.app import create_app
from kvatlas.router.http.startup import StartupApp
from kvatlas.runtime.health_server import StartupProgress
from kvatlas.schemas.conditions import ConditionChange, Conditions, log_changes
from testkit.fleet import Fleet


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_condition_is_news_when_it_begins_and_when_its_reason_changes() -> None:
    clock, changes = Clock(), list[ConditionChange]()
    conditions = Conditions(clock)
    conditions.on_change(changes.append)
    assert conditions.begin("log_not_stored", "no answer")
    clock.now += 3
    assert not conditions.begin("log_not_stored", "no answer")
    assert conditions.begin("log_not_stored", "no space left")
    clock.now += 2
    assert conditions.end("log_not_stored")
    assert not conditions.end("log_not_stored")
    seen = [(each.condition.reason, each.is_over, each.seconds) for each in changes]
    assert seen == [
        ("no answer", False, 0.0),
        ("no space left", False, 3.0),
        ("no space left", True, 5.0),
    ]


def test_the_oldest_comes_first_and_what_is_over_is_still_known() -> None:
    clock = Clock()
    conditions = Conditions(clock)
    for name in ("b", "a", "c"):
        conditions.begin(name, f"why {name}", is_blocking=name == "a")
        clock.now += 1
    conditions.end("c")
    assert conditions.reasons == {"b": "why b", "a": "why a"}
    assert conditions.why_not_ready == "why a"
    assert conditions.states == {"b": True, "a": True, "c": False}
    assert conditions.get("c") is None


def test_log_lines_are_one_at_the_beginning_and_one_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    conditions = Conditions(clock)
    log_changes(conditions, logging.getLogger("role"))
    for _ in range(100):
        conditions.begin("broker_away", "no broker at nats://h:4222")
    clock.now += 7
    conditions.end("broker_away")
    assert caplog.messages == [
        "broker_away: no broker at nats://h:4222",
        "broker_away is over after 7.0 s",
    ]


def client_of(app: object) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://r")


async def test_a_router_that_still_answers_is_ready_and_shows_the_reason() -> None:
    conditions, fleet = Conditions(), Fleet()
    fleet.up("w1")
    async with client_of(create_app(fleet.router(), conditions=conditions)) as client:
        assert (await client.get("/readyz")).json()["conditions"] == {}
        conditions.begin("log_not_stored", "KV_EVENTS: no space left")
        answer = await client.get("/readyz")
        assert answer.status_code == 200
        assert answer.json()["conditions"] == {"log_not_stored": "KV_EVENTS: no space left"}
        assert 'kv_condition{condition="log_not_stored"} 1.0' in (await client.get("/metrics")).text
        conditions.end("log_not_stored")
        assert (await client.get("/readyz")).json()["conditions"] == {}
        assert 'kv_condition{condition="log_not_stored"} 0.0' in (await client.get("/metrics")).text


async def test_a_blocking_condition_makes_a_router_not_ready() -> None:
    conditions, fleet = Conditions(), Fleet()
    fleet.up("w1")
    async with client_of(create_app(fleet.router(), conditions=conditions)) as client:
        conditions.begin("draining", "the router is being stopped", is_blocking=True)
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["detail"]) == (503, "the router is being stopped")


async def test_a_process_that_waits_gives_the_reason() -> None:
    conditions = Conditions()
    async with client_of(StartupApp(StartupProgress(lambda: 0.0, conditions), "random")) as client:
        conditions.begin("stream_not_declared", "KV_EVENTS does not fit: lower log.max_bytes")
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        reason = "KV_EVENTS does not fit: lower log.max_bytes"
        assert answer.json()["detail"] == f"starting for 0 s; {reason}"
        text = (await client.get("/metrics")).text
        assert 'kv_condition{condition="stream_not_declared"} 1.0' in text
