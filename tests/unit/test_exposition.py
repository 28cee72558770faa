"""What /metrics and /v1/workers show of large fleets and of workers that are gone, bit by bit."""

import asyncio
import re
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvatlas.router import service
from kvatlas.router.http import exposition
from kvatlas.router.http.app import RouterApp, create_app
from kvatlas.router.http.exposition import Exposition
from kvatlas.router.http.metrics import MAX_COUNTED_WORKERS, ROUTED, WorkerCounts
from testkit.fleet import Fleet, a_prompt, a_request

SLICES = 5


async def asked(app: RouterApp, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        return await client.get(path)


def series_of(text: str, worker: str) -> set[str]:
    """Return the names of the series that have a worker as a label."""
    return set(re.findall(rf'^(\w+){{.*worker="{worker}"', text, re.MULTILINE))


async def test_the_text_is_what_the_library_writes() -> None:
    registry = CollectorRegistry()
    Gauge("kv_plain", "a gauge", registry=registry).set(1.5)
    odd = Counter("kv_odd", "with \\ and\nlines", ["b", "a"], registry=registry)
    odd.labels('say "x"', "back\\slash\nline").inc()
    odd.labels("", "z").inc(float("inf"))
    Histogram("kv_some_seconds", "times", registry=registry).observe(0.3)
    Counter("kv_never", "no label yet", ["worker"], registry=registry)
    assert await Exposition(registry).text() == generate_latest(registry)


async def test_each_family_is_there_once_however_many_its_parts() -> None:
    fleet = Fleet()
    for number in range(100):
        fleet.up(f"w{number:03}")
    text = (await asked(create_app(fleet.router()), "/metrics")).text
    heads = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(heads) == len(set(heads))
    assert len(re.findall(r"^kv_worker_blocks{", text, re.MULTILINE)) == 100
    # all samples of a family stand together, below its head
    for block in text.split("# HELP ")[1:]:
        head, *lines = block.splitlines()
        assert all(line.startswith(("# TYPE ", head.split(" ")[0])) for line in lines)


@pytest.mark.parametrize("path", ["/metrics", "/v1/workers"])
async def test_others_have_their_turn_meanwhile(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "SLICE_SECONDS", 0.0)
    fleet = Fleet()
    for number in range(200):
        fleet.up(f"w{number:03}")
    app = create_app(fleet.router())
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    await asked(app, "/healthz")
    before, turns = turns, 0
    await asked(app, path)
    task.cancel()
    assert turns > before + SLICES


async def test_workers_may_come_and_go_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "SLICE_SECONDS", 0.0)
    fleet = Fleet()
    for number in range(100):
        fleet.up(f"w{number:03}")
    app = create_app(fleet.router())
    asking = [asyncio.create_task(asked(app, path)) for path in ("/metrics", "/v1/workers")]
    number = 100
    while not all(task.done() for task in asking):
        fleet.up(f"w{number:03}")
        fleet.down(f"w{number - 50:03}")
        number += 1
        await asyncio.sleep(0)
    assert [task.result().status_code for task in asking] == [200, 200]


async def test_the_list_of_workers_is_as_before() -> None:
    fleet = Fleet()
    for number in range(3):
        fleet.up(f"w{number}")
    fleet.down("w1")
    answer = await asked(create_app(fleet.router()), "/v1/workers")
    found: dict[str, Any] = msgspec.json.decode(answer.content)
    assert list(found) == ["workers", "stream_sequence", "index_age_ms", "connected"]
    assert [each["worker"] for each in found["workers"]] == ["w0", "w1", "w2"]
    assert answer.content.endswith(b"}\n")
    empty = msgspec.json.decode((await asked(create_app(Fleet().router()), "/v1/workers")).content)
    assert empty["workers"] == []


async def test_the_series_of_a_worker_end_with_it() -> None:
    fleet = Fleet()
    fleet.up("w1")
    router = fleet.router()
    app = create_app(router)
    transport = httpx.ASGITransport(app)
    body = {"model": "m", "token_ids": a_prompt(64)}
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        for report in ({"failed": True}, {"local_blocks": 1, "computed_tokens": 48}):
            routed = (await client.post("/v1/route", json=body)).json()
            done = f"/v1/requests/{routed['decision_id']}/done"
            assert (await client.post(done, json=report)).status_code == 200
            fleet.up("w1", epoch=2)
            router.clock.advance(60)
        await client.post("/v1/route", json=body)
        before = series_of((await client.get("/metrics")).text, "w1")
        assert before > {
            "kv_worker_trust",
            "kv_worker_blocks",
            "kv_worker_in_flight",
            "kv_routed_requests_total",
            "kv_failed_requests_total",
            "kv_actual_reuse_tokens_total",
        }
        workers = (await client.get("/v1/workers")).json()["workers"]
        assert workers[0]["load"]["in_flight"] == 1
        fleet.down("w1")
        text = (await client.get("/metrics")).text
        assert series_of(text, "w1") == set()
        assert 'kv_workers{trust="gone"} 1.0' in text
        workers = (await client.get("/v1/workers")).json()["workers"]
        assert (workers[0]["trust"], workers[0]["load"]) == ("gone", None)
        fleet.up("w1", epoch=3)
        text = (await client.get("/metrics")).text
        assert "kv_worker_trust" in series_of(text, "w1")
        assert "kv_routed_requests_total" not in series_of(text, "w1")


def test_the_counters_of_workers_are_bounded_between_scrapes() -> None:
    counts = WorkerCounts()
    for number in range(MAX_COUNTED_WORKERS + 5):
        counts.add(ROUTED, f"w{number}")
    live = {f"w{number}" for number in range(MAX_COUNTED_WORKERS + 5)}
    samples = [sample for family in counts.families(live) for sample in family.samples]
    assert len(samples) == MAX_COUNTED_WORKERS


@pytest.mark.parametrize("comes_true", [True, False])
async def test_predictions_are_judged_by_what_the_worker_holds(comes_true: bool) -> None:
    fleet = Fleet()
    fleet.up("w1")
    router = fleet.router()
    app = create_app(router)
    prompts = [a_prompt(64, start=1_000 * number) for number in range(20)]
    for prompt in prompts:
        router.route(a_request(prompt))
        if comes_true:
            fleet.holds("w1", prompt)
    router.clock.advance(60)
    router.score(a_request(a_prompt(64, start=99_000)))  # which lets them expire
    text = (await asked(app, "/metrics")).text
    assert f"kv_overlay_confirmed_total {20.0 * comes_true}" in text
    assert f"kv_overlay_expired_total {20.0 * (not comes_true)}" in text


async def test_predictions_are_judged_without_a_scrape_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_LAPSED", 3)
    fleet = Fleet()
    fleet.up("w1")
    router = fleet.router()
    for number in range(20):
        router.route(a_request(a_prompt(64, start=1_000 * number)))
        router.clock.advance(60)
    assert router.overlay.num_lapsed <= 4


async def test_workers_are_listed_as_of_one_stream_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though another process goes on writing the index while they are gathered."""
    fleet = Fleet()
    for name in ("w1", "w2", "w3"):
        fleet.up(name)
    router, pauses = fleet.router(), iter(range(4))

    def seqs() -> dict[str, int]:
        return {view.instance.worker: view.seq for view in router.index.instances()}

    known = {router.index.stream_sequence: seqs()}

    async def write(_: exposition.Slices) -> None:
        if next(pauses, None) is not None:
            fleet.tell("w1")
            fleet.tell("w3")
            known[router.index.stream_sequence] = seqs()

    monkeypatch.setattr(exposition.Slices, "when_due", write)
    answer = (await asked(create_app(router), "/v1/workers")).json()
    found = {worker["worker"]: worker["seq"] for worker in answer["workers"]}
    assert found == known[answer["stream_sequence"]]
    assert len(known) > 2
