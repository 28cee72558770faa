"""Who holds a prompt that came without a plan: asked of a router, never waited for."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Plan, PullStep
from kvatlas.worker_hooks.connector.finding import HolderFinder, Pending
from testkit.waiting import until

OWN = InstanceId("w1", 0)
TOKENS = list(range(40))


def candidate(worker: str, match_tokens: int, rank: int = 0) -> dict[str, Any]:
    return {"worker": worker, "rank": rank, "match_tokens": match_tokens, "cost_ms": 1.5}


@contextmanager
def a_router(status: int, content: bytes, gate: threading.Event | None = None) -> Iterator[Any]:
    """Serve one answer to everything; yields the URL and the bodies that came."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            bodies.append({"path": self.path, **json.loads(self.rfile.read(size))})
            if gate is not None:
                gate.wait(10)
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *_: Any) -> None:  # noqa: A002 - its name in the base
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        if gate is not None:
            gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


async def answer_of(finder: HolderFinder, salt: str | None = None) -> Plan | None:
    answers: list[Plan | None] = []

    def is_there() -> bool:
        found = finder.find("r", TOKENS, salt)
        if not isinstance(found, Pending):
            answers.append(found)
        return bool(answers)

    await until(is_there)
    finder.close()
    return answers[0]


def finder_of(url: str, **more: Any) -> HolderFinder:
    return HolderFinder(url, "m", OWN, 8, 5.0, **more)


async def test_the_longest_other_holder_is_pulled_from_with_the_next_as_fallback() -> None:
    score = {"candidates": [candidate("w1", 40), candidate("w2", 16), candidate("w3", 33, rank=1)]}
    with a_router(200, json.dumps(score).encode()) as (url, bodies):
        plan = await answer_of(finder_of(url), "tenant")
    assert plan == Plan(8, 0, (PullStep("w3", 1, 0, 4, (InstanceId("w2", 0),)),), 8)
    (body,) = bodies
    assert body["path"] == "/v1/score"
    assert (body["model"], body["token_ids"], body["cache_salt"]) == ("m", TOKENS, "tenant")


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (200, b'{"candidates": []}'),
        (200, json.dumps({"candidates": [candidate("w1", 40), candidate("w2", 7)]}).encode()),
        (200, b"<html>"),
        (200, b'{"candidates": 7}'),
        (404, b'{"type": "unknown_model"}'),
        (500, b""),
    ],
    ids=["nobody", "only this one", "html", "another shape", "unknown model", "failure"],
)
async def test_no_answer_that_helps_means_no_pull(status: int, content: bytes) -> None:
    with a_router(status, content) as (url, _):
        assert await answer_of(finder_of(url)) is None


async def test_a_router_that_is_away_means_no_pull() -> None:
    assert await answer_of(finder_of("http://127.0.0.1:1")) is None


def test_a_router_that_is_slow_is_given_up_at_its_time() -> None:
    now, gate = [0.0], threading.Event()
    with a_router(200, b'{"candidates": []}', gate) as (url, _):
        finder = finder_of(url, clock=lambda: now[0])
        assert finder.find("r", TOKENS, None) is Pending.pending
        now[0] = 4.9
        assert finder.find("r", TOKENS, None) is Pending.pending
        now[0] = 5.0
        assert finder.find("r", TOKENS, None) is None
        gate.set()
        finder.close()
