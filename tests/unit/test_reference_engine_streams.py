"""Streamed completions of the reference engine: events as its output grows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvatlas.reference.clock import ManualClock
from kvatlas.reference.engine import EngineOptions, ReferenceEngine
from kvatlas.reference.http import create_worker_app
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingWriter
from kvatlas.worker_hooks.transfer.pool import ServePool
from testkit.server import served_within
from testkit.waiting import WAIT_SECONDS, until

ASKED = {"model": "m", "prompt": [1, 2, 3, 4, 5], "max_tokens": 10}


class Engine:
    """A reference engine behind HTTP, whose clock the test turns."""

    def __init__(self, engine: ReferenceEngine, clock: ManualClock, url: str) -> None:
        self.engine, self.clock, self.url = engine, clock, url
        self.client = httpx.AsyncClient(base_url=url, trust_env=False)

    async def turn(self) -> None:
        while True:
            await self.clock.advance(0.01)
            await asyncio.sleep(0)

    async def complete(self, **more: object) -> httpx.Response:
        turning = asyncio.create_task(self.turn())
        async with asyncio.timeout(WAIT_SECONDS):
            answer = await self.client.post("/v1/completions", json={**ASKED, **more})
        turning.cancel()
        return answer


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with an_engine(tmp_path) as found:
        yield found


@asynccontextmanager
async def an_engine(folder: Path) -> AsyncIterator[Engine]:
    pool = ServePool.create("bench", 32, 256, 4, folder)
    hook, clock = WorkerHook(RingWriter.create(folder / "ring", lists=True)), ManualClock()
    options = EngineOptions("m", NamespaceDescriptor(4), 32, 256, 1000.0, 100.0, 2.0)
    engine = ReferenceEngine(options, hook, clock, pool, None)
    app = create_worker_app(engine, None, "m")  # type: ignore[arg-type] # it is not asked here
    try:
        async with engine, served_within(app) as port:
            found = Engine(engine, clock, f"http://127.0.0.1:{port}")
            async with found.client:
                yield found
    finally:
        hook.close()
        pool.close()


def events_of(text: str) -> list[Any]:
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_the_output_comes_in_events_and_ends_as_a_whole_answer_does(engine: Engine) -> None:
    whole = (await engine.complete()).json()
    answer = await engine.complete(stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *parts, last = events_of(answer.text)
    assert len(parts) > 1
    tokens = [token for part in parts for token in part["choices"][0]["token_ids"]]
    assert len(tokens) == whole["usage"]["completion_tokens"] == 10
    assert {part["choices"][0]["finish_reason"] for part in parts} == {None}
    assert last["choices"][0]["finish_reason"] == "length"
    assert {part["object"] for part in parts} == {whole["object"]}
    assert last["kvatlas"]["output_tokens"] == 10
    assert "usage" not in last


async def test_usage_comes_in_an_event_of_its_own_if_it_is_wanted(engine: Engine) -> None:
    await engine.complete()
    answer = await engine.complete(stream=True, stream_options={"include_usage": True})
    *parts, last = events_of(answer.text)
    assert {part["usage"] for part in parts} == {None}
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 10,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


async def test_what_is_refused_has_its_status_also_as_a_stream(engine: Engine) -> None:
    refused = await engine.complete(stream=True, max_tokens=100_000)
    assert refused.status_code == 400
    beside = await engine.complete(stream_options={"include_usage": True})
    assert (beside.status_code, "stream_options" in beside.text) == (400, True)


async def test_a_client_that_leaves_takes_its_request_with_it(engine: Engine) -> None:
    turning = asyncio.create_task(engine.turn())
    asked = {**ASKED, "max_tokens": 100, "stream": True}
    async with engine.client.stream("POST", "/v1/completions", json=asked) as answer:
        async for _ in answer.aiter_lines():
            turning.cancel()
            break
        assert engine.engine.num_running == 1
    await until(lambda: engine.engine.num_running == 0)


async def test_an_engine_that_stops_ends_the_stream_with_an_error(engine: Engine) -> None:
    turning = asyncio.create_task(engine.turn())
    asked = {**ASKED, "max_tokens": 100, "stream": True}
    async with engine.client.stream("POST", "/v1/completions", json=asked) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        turning.cancel()
        await engine.engine.__aexit__(None, None, None)
        rest = [line async for line in lines if line]
    assert '"type":"EngineStopped"' in rest[-1]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_of_another_content_type_is_refused(engine: Engine, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    answer = await engine.client.post("/v1/completions", content=b"{}", headers=headers)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


async def test_a_body_over_the_limit_is_refused_unread(engine: Engine) -> None:
    async def much() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * 1024**2

    headers = {"content-type": "application/json"}
    answer = await engine.client.post("/v1/completions", content=much(), headers=headers)
    assert answer.status_code == 413


async def test_a_page_of_another_host_resets_nothing(engine: Engine) -> None:
    evil = {"origin": "http://evil.example"}
    assert (await engine.client.post("/v1/reset", headers=evil)).status_code == 403
    assert (await engine.client.post("/v1/reset")).json() == {"reset": True}
    assert (await engine.client.get("/health", headers={"host": "evil.example"})).status_code == 421
    assert (await engine.client.head("/health")).status_code == 200
