"""The HTTP surface, in process."""

import asyncio
import logging
from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvatlas import __version__
from kvatlas.indexer.reader import Lag
from kvatlas.router.http.app import RouterApp, create_app
from kvatlas.router.service import RouterService
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher
from testkit.fleet import MODEL, Fleet, RouterUnderTest, a_prompt, a_request

PROMPT = a_prompt(160)
JSON = {"content-type": "application/json"}
MSGPACK = {"content-type": "application/x-msgpack"}
OCTETS = {"content-type": "application/octet-stream"}
PROBLEM = "application/problem+json"


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.up("w1")
    fleet.up("w2")
    fleet.holds("w2", PROMPT, num_blocks=9)
    return fleet


@pytest.fixture
def router(fleet: Fleet) -> RouterUnderTest:
    return fleet.router(max_body_bytes=100_000)


@pytest.fixture
def app(router: RouterUnderTest) -> RouterApp:
    return create_app(router)


@pytest.fixture
async def client(app: RouterApp) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        yield client


def ask(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "token_ids": PROMPT, **more}


class TestScoreAndRoute:
    async def test_a_prompt_is_scored(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/score", json=ask())
        assert answer.status_code == 200
        body = answer.json()
        assert body["chosen"] == ["w2", 0]
        best = body["candidates"][0]
        assert (best["worker"], best["match_tokens"], best["trust"]) == ("w2", 144, "exact")
        assert sum(best["terms"].values()) == pytest.approx(best["cost_ms"])
        assert (body["stream_sequence"], body["connected"]) == (3, True)

    async def test_every_body_gets_the_same_answer(self, client: httpx.AsyncClient) -> None:
        packed = array("I", PROMPT).tobytes()
        chain = BlockHasher(NamespaceDescriptor(16).namespace(MODEL, None, None)).chain(packed)
        digits = [chain[at : at + 16].hex() for at in range(0, len(chain), 16)]
        bodies = [
            (msgspec.json.encode(ask()), JSON),
            (msgspec.json.encode({"model": MODEL, "token_ids_b64": packed}), JSON),
            (msgspec.msgpack.encode({"model": MODEL, "tokens": packed}), MSGPACK),
            (msgspec.msgpack.encode(ask()), MSGPACK),
            (msgspec.json.encode({"model": MODEL, "block_hashes": digits}), JSON),
            (msgspec.msgpack.encode({"model": MODEL, "block_hashes": chain}), MSGPACK),
        ]
        answers = [
            (await client.post("/v1/score", content=body, headers=headers)).json()
            for body, headers in bodies
        ]
        asked = client.post(f"/v1/score?model={MODEL}", content=packed, headers=OCTETS)
        answers.append((await asked).json())
        assert answers[0]["candidates"][0]["match_tokens"] == 144
        assert all(answer == answers[0] for answer in answers)

    async def test_a_salt_beside_octets_stands_in_a_header(
        self, client: httpx.AsyncClient, fleet: Fleet
    ) -> None:
        fleet.holds("w1", PROMPT, cache_salt="alice", num_blocks=5)

        async def matched(salt: str) -> int:
            answer = await client.post(
                f"/v1/score?model={MODEL}",
                content=array("I", PROMPT).tobytes(),
                headers={**OCTETS, "x-kvatlas-cache-salt": salt},
            )
            tokens: int = answer.json()["candidates"][0]["match_tokens"]
            return tokens

        assert [await matched(salt) for salt in ("alice", "bob")] == [80, 0]

    async def test_a_salt_is_said_once(self, client: httpx.AsyncClient) -> None:
        salts = [("x-kvatlas-cache-salt", "a"), ("x-kvatlas-cache-salt", "b")]
        answer = await client.post(
            f"/v1/score?model={MODEL}", content=b"1234", headers=[*OCTETS.items(), *salts]
        )
        assert (answer.status_code, answer.json()["field"]) == (400, "x-kvatlas-cache-salt")

    async def test_a_request_is_routed_reported_and_explained(
        self, client: httpx.AsyncClient
    ) -> None:
        routed = (await client.post("/v1/route", json=ask())).json()
        assert (routed["worker"], routed["rank"], routed["base_url"]) == ("w2", 0, "http://w2")
        assert routed["plan"] == {
            "block_tokens": 16,
            "reuse_blocks": 9,
            "pulls": [],
            "compute_tokens": 16,
        }
        assert routed["kv_transfer_params"]["kvatlas"] == {
            "decision_id": routed["decision_id"],
            "plan": routed["plan"],
        }
        report = {"ttft_ms": 12.0, "computed_tokens": 16, "local_blocks": 9}
        path = f"/v1/requests/{routed['decision_id']}"
        prefilled = await client.post(f"{path}/prefilled", json=report)
        done = await client.post(
            f"{path}/done", content=msgspec.msgpack.encode(report), headers=MSGPACK
        )
        again = await client.post(f"{path}/done")
        assert [a.json()["applied"] for a in (prefilled, done, again)] == [True, True, False]
        decision = (await client.get(f"/v1/decisions/{routed['decision_id']}")).json()
        assert decision["chosen"]["worker"] == "w2"
        assert decision["question"]["prompt_tokens"] == 160

    async def test_the_answer_is_bounded(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/score", json=ask(max_candidates=1))
        assert len(answer.json()["candidates"]) == 1
        assert answer.json()["num_candidates"] == 2

    async def test_a_router_without_a_broker_says_how_old_it_is(
        self, client: httpx.AsyncClient, router: RouterUnderTest
    ) -> None:
        router.still_feed.connected, router.still_feed.lag = False, Lag(0, 7.0)
        for path in ("/v1/score", "/v1/route"):
            body = (await client.post(path, json=ask())).json()
            assert (body["connected"], body["index_age_ms"]) == (False, 7_000)

    async def test_many_ask_while_events_arrive(
        self, client: httpx.AsyncClient, fleet: Fleet, router: RouterUnderTest
    ) -> None:
        async def one(n: int) -> dict[str, Any]:
            fleet.holds(f"w{n % 2 + 1}", a_prompt(64, start=1_000 * (n + 1)))
            prompt = a_prompt(160, start=1_000 * (n + 1))
            answer = await client.post("/v1/route", json=ask(token_ids=prompt))
            assert answer.status_code == 200
            body: dict[str, Any] = answer.json()
            done = await client.post(f"/v1/requests/{body['decision_id']}/done")
            assert done.json()["applied"]
            return body

        answers = await asyncio.gather(*(one(n) for n in range(300)))
        longest = {max(c["match_tokens"] for c in answer["candidates"]) for answer in answers}
        assert longest == {64}
        assert len({answer["decision_id"] for answer in answers}) == 300
        assert len(router.loads) == 0


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/score", {"content": b"{", "headers": JSON}, 400, "body"),
    ("/v1/score", {"json": ask(prompt="x")}, 400, "prompt"),
    ("/v1/score", {"json": {"model": MODEL, "token_ids": [1, -1]}}, 400, "token_ids[1]"),
    ("/v1/route", {"json": {"model": MODEL}}, 400, "token_ids"),
    ("/v1/route", {"json": ask(model="x")}, 404, "model"),
    ("/v1/route", {"json": ask(lora="x")}, 400, "lora"),
    ("/v1/route", {"json": ask(block_hashes=["00" * 16])}, 400, "block_hashes"),
    ("/v1/route?model=m", {"json": ask()}, 400, "query"),
    ("/v1/route?model=m", {"content": b"12345", "headers": OCTETS}, 400, "body"),
    ("/v1/route?cache_salt=s", {"content": b"1234", "headers": OCTETS}, 400, "cache_salt"),
    ("/v1/requests/x/done", {"content": b"1234", "headers": OCTETS}, 415, "content-type"),
    ("/v1/route", {"content": b"{}", "headers": {"content-type": "text/xml"}}, 415, "content-type"),
    ("/v1/route", {"content": b" " * 100_001}, 413, "body"),
    ("/v1/requests/x/done", {"json": {}}, 404, ""),
    ("/v1/requests/x/prefilled", {"json": {}}, 404, ""),
    ("/v1/requests/x/done", {"json": {"ttft_ms": -1}}, 400, "ttft_ms"),
    ("/v1/requests/x/done", {"content": b" " * 70_000}, 413, "body"),
    ("/v1/requests//done", {"json": {}}, 404, ""),
    ("/v1/requests/a/b/done", {"json": {}}, 404, ""),
    ("/v1/nothing", {"json": {}}, 404, ""),
    ("/v1/workers", {"json": {}}, 405, ""),
]


ROUTES_WITHOUT_A_QUERY = [
    "/v1/workers",
    "/v1/index/stats",
    "/v1/decisions/d1",
    "/v1/requests/d1/prefilled",
    "/v1/requests/d1/done",
]


class TestProblems:
    @pytest.mark.parametrize(("path", "sent", "status", "field"), WRONG)
    async def test_what_is_wrong_is_named(
        self,
        client: httpx.AsyncClient,
        path: str,
        sent: dict[str, Any],
        status: int,
        field: str,
    ) -> None:
        answer = await client.post(path, **sent)
        assert answer.status_code == status
        assert answer.headers["content-type"] == PROBLEM
        body = answer.json()
        assert body["status"] == status
        assert body["type"].startswith("urn:kvatlas:problem:")
        assert body["title"]
        assert body["detail"]
        assert body.get("field", "") == field

    @pytest.mark.parametrize("path", ["/v1/score", "/v1/route", "/v1/requests/d1/done"])
    @pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD"])
    async def test_hot_routes_take_post_only(
        self, client: httpx.AsyncClient, method: str, path: str
    ) -> None:
        answer = await client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.headers["content-type"] == PROBLEM
        if method != "HEAD":
            template = path.replace("d1", "{decision_id}")
            assert answer.json()["detail"] == f"{template} takes POST only"

    @pytest.mark.parametrize(
        ("path", "methods"),
        [
            ("/", "GET"),
            ("/healthz", "GET"),
            ("/v1/workers", "GET"),
            ("/v1/index/tree", "GET"),
            ("/v1/decisions/{decision_id}", "GET"),
            ("/openapi.json", "GET, HEAD"),
        ],
    )
    async def test_other_routes_say_what_they_take_alike(
        self, client: httpx.AsyncClient, path: str, methods: str
    ) -> None:
        answer = await client.put(path.replace("{decision_id}", "d1"))
        assert (answer.status_code, answer.headers["content-type"]) == (405, PROBLEM)
        assert {*answer.headers["allow"].split(", ")} == {*methods.split(", ")}
        assert answer.json()["detail"] == f"{path} takes {answer.headers['allow']} only"

    @pytest.mark.parametrize("path", ROUTES_WITHOUT_A_QUERY)
    async def test_a_query_where_none_is_known_is_refused(
        self, client: httpx.AsyncClient, path: str
    ) -> None:
        method = "POST" if path.startswith("/v1/requests") else "GET"
        answer = await client.request(method, f"{path}?dept=3")
        assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)
        told = answer.json()["field"], answer.json()["detail"]
        assert told == ("dept", "unknown in a query; none is known here")

    @pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/metrics", "/openapi.json"])
    async def test_what_probes_and_scrapers_add_is_ignored(
        self, client: httpx.AsyncClient, path: str
    ) -> None:
        assert (await client.get(f"{path}?format=prometheus")).status_code == 200

    async def test_no_route_is_left_out(self, app: RouterApp) -> None:
        other = {"/v1/score", "/v1/route", "/v1/index/tree"}
        other |= {path for path in app.openapi()["paths"] if not path.startswith("/v1/")}
        listed = {path.replace("/d1", "/{decision_id}") for path in ROUTES_WITHOUT_A_QUERY}
        assert listed == {*app.openapi()["paths"]} - other

    @pytest.mark.parametrize(
        ("query", "field", "problem"),
        [
            ("dept=3", "dept", "unknown in a query; known are depth, width"),
            ("depth=3&x", "x", "unknown in a query; known are depth, width"),
            ("depth=3&depth=4", "query", "depth stands there twice"),
        ],
    )
    async def test_an_unknown_name_in_a_query_is_refused(
        self, client: httpx.AsyncClient, query: str, field: str, problem: str
    ) -> None:
        answer = await client.get(f"/v1/index/tree?{query}")
        assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)
        assert (answer.json()["field"], answer.json()["detail"]) == (field, problem)

    @pytest.mark.parametrize("path", ["/v1/score", "/v1/route", "/v1/requests/d1/done"])
    async def test_a_compressed_body_is_refused(self, client: httpx.AsyncClient, path: str) -> None:
        gzip = {**JSON, "content-encoding": "gzip"}
        answer = await client.post(path, content=b"\x1f\x8b", headers=gzip)
        assert (answer.status_code, answer.json()["field"]) == (415, "content-encoding")
        assert answer.json()["detail"] == "gzip is not read, expected a body as it is"

    async def test_a_body_as_it_is_may_be_called_so(self, client: httpx.AsyncClient) -> None:
        as_it_is = {**JSON, "content-encoding": "Identity"}
        answer = await client.post("/v1/score", content=b"", headers=as_it_is)
        assert answer.json()["detail"] == "an empty body, expected a JSON object"

    async def test_a_model_whose_workers_are_gone_may_come_back(
        self, client: httpx.AsyncClient, fleet: Fleet
    ) -> None:
        assert (await client.post("/v1/route", json=ask())).status_code == 200
        fleet.down("w1")
        fleet.down("w2")
        for path in ("/v1/score", "/v1/route"):
            answer = await client.post(path, json=ask())
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            told = answer.json()["field"], answer.json()["detail"]
            gone = "who served it is gone: w1/0 (down: bye), w2/0 (down: bye)"
            assert told == ("model", f"no worker for model 'm': {gone}")

    @pytest.mark.parametrize(
        ("query", "field"),
        [("depth=0", "depth"), ("depth=x", "depth"), ("width=65", "width"), ("depth=1e3", "depth")],
    )
    async def test_a_bad_query_is_named(
        self, client: httpx.AsyncClient, query: str, field: str
    ) -> None:
        answer = await client.get(f"/v1/index/tree?{query}")
        assert (answer.status_code, answer.headers["content-type"]) == (400, PROBLEM)
        assert answer.json()["field"] == field

    async def test_a_missing_decision_is_a_problem(self, client: httpx.AsyncClient) -> None:
        answer = await client.get("/v1/decisions/x")
        assert (answer.status_code, answer.json()["detail"]) == (404, "no decision 'x'")

    async def test_an_index_that_catches_up_is_worth_a_retry(
        self, client: httpx.AsyncClient, router: RouterUnderTest
    ) -> None:
        router.still_feed.is_ready = False
        answer = await client.post("/v1/route", json=ask(model="new"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    @pytest.mark.parametrize("path", ["/v1/score", "/v1/workers"])
    async def test_an_unexpected_error_is_a_problem_and_its_text_stays_here(
        self,
        client: httpx.AsyncClient,
        fleet: Fleet,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        path: str,
    ) -> None:
        def broken(*_: object) -> list[object]:
            raise ZeroDivisionError(f"the prompt was {PROMPT[-2:]}")

        async def send() -> httpx.Response:
            method = "POST" if path == "/v1/score" else "GET"
            return await client.request(method, path, json=ask() if method == "POST" else None)

        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
            patch.setattr(fleet.state, "held" if path == "/v1/score" else "names", broken)
            answer = await send()
        assert (answer.status_code, answer.headers["content-type"]) == (500, PROBLEM)
        assert "unexpected ZeroDivisionError" in caplog.text
        assert str(PROMPT[-2:]) not in caplog.text + answer.text
        assert (await send()).status_code == 200


class TestControl:
    async def test_health(self, client: httpx.AsyncClient) -> None:
        answer = await client.get("/healthz")
        assert answer.json() == {"status": "ok", "version": __version__}

    async def test_ready_means_caught_up(
        self, client: httpx.AsyncClient, router: RouterUnderTest
    ) -> None:
        router.still_feed.is_ready, router.still_feed.lag = False, Lag(40, 1.0)
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert answer.json()["detail"] == "the index is catching up"
        router.still_feed.is_ready = True
        assert (await client.get("/readyz")).json()["status"] == "ready"

    async def test_workers_are_listed_with_load_and_trust(
        self, client: httpx.AsyncClient, fleet: Fleet
    ) -> None:
        fleet.tell("w1", skip=1)
        await client.post("/v1/route", json=ask())
        workers = (await client.get("/v1/workers")).json()["workers"]
        assert [(w["worker"], w["trust"], w["num_blocks"]) for w in workers] == [
            ("w1", "degraded", 0),
            ("w2", "exact", 9),
        ]
        assert workers[0]["trust_reasons"][0].startswith("gap")
        assert workers[1]["load"]["in_flight"] == 1

    async def test_an_instance_without_an_introduction_is_listed(self) -> None:
        fleet = Fleet()
        fleet.up("w1")
        fleet.down("w1")
        transport = httpx.ASGITransport(create_app(fleet.router()))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            [worker] = (await client.get("/v1/workers")).json()["workers"]
        assert (worker["trust"], worker["load"], worker["models"]) == ("gone", None, [])

    async def test_the_index_is_counted(self, client: httpx.AsyncClient) -> None:
        stats = (await client.get("/v1/index/stats")).json()
        assert (stats["index"]["num_blocks"], stats["index"]["batches"]) == (9, 3)

    async def test_the_tree_shows_who_holds_what(self, client: httpx.AsyncClient) -> None:
        [run] = (await client.get("/v1/index/tree?depth=1&width=1")).json()["runs"]
        assert (run["num_blocks"], run["holders"]) == (9, [["w2", 0]])
        assert int(run["hash_key"], 16) > 0

    async def test_the_page_needs_nothing_from_elsewhere(self, client: httpx.AsyncClient) -> None:
        answer = await client.get("/")
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text
        assert "https://" not in answer.text

    async def test_a_recorded_decision_can_be_read_back(
        self, client: httpx.AsyncClient, router: RouterUnderTest
    ) -> None:
        routed = router.route(a_request(PROMPT))
        shown = (await client.get(f"/v1/decisions/{routed.decision_id}")).json()
        as_json = msgspec.json.encode(router.decision(routed.decision_id))
        assert shown == msgspec.json.decode(as_json)


class Samples:
    """Values of metrics by name and label values."""

    def __init__(self, text: str) -> None:
        self._values = {
            (sample.name, frozenset(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, *labels: str) -> float:
        return self._values[name, frozenset(labels)]


class TestMetrics:
    async def read(self, client: httpx.AsyncClient) -> Samples:
        return Samples((await client.get("/metrics")).text)

    async def test_requests_and_errors_are_counted(self, client: httpx.AsyncClient) -> None:
        await client.post("/v1/score", json=ask())
        await client.post("/v1/score", json=ask(model="x"))
        await client.get("/healthz")
        await client.get("/nothing")
        found = await self.read(client)
        assert found("kv_http_requests_total", "/v1/score", "200") == 1
        assert found("kv_http_requests_total", "/v1/score", "404") == 1
        assert found("kv_http_requests_total", "/healthz", "200") == 1
        assert found("kv_http_requests_total", "(unmatched)", "404") == 1
        assert found("kv_request_errors_total", "score", "UnknownModel") == 1

    async def test_hits_and_what_came_of_them_are_counted(self, client: httpx.AsyncClient) -> None:
        routed = (await client.post("/v1/route", json=ask())).json()
        report = {"ttft_ms": 5.0, "local_blocks": 7}
        await client.post(f"/v1/requests/{routed['decision_id']}/done", json=report)
        found = await self.read(client)
        assert found("kv_routed_requests_total", "w2") == 1
        assert found("kv_prompt_tokens_total") == 160
        assert found("kv_hit_tokens_total", "hbm") == 144
        assert found("kv_expected_reuse_tokens_total", "w2") == 144
        assert found("kv_actual_reuse_tokens_total", "w2") == 112
        assert found("kv_decision_seconds_count", "route") == 1
        assert found("kv_ttft_actual_over_expected_count") == 1

    async def test_each_fault_moves_its_metric(
        self, client: httpx.AsyncClient, fleet: Fleet, router: RouterUnderTest
    ) -> None:
        fleet.tell("w1", skip=1)
        router.still_feed.lag, router.still_feed.connected = Lag(3, 4.0), False
        await client.post("/v1/route", json=ask())
        found = await self.read(client)
        assert found("kv_worker_trust", "w1", "0", "degraded") == 1
        assert found("kv_worker_trust", "w1", "0", "exact") == 0
        assert found("kv_gaps_total") == 1
        assert found("kv_index_lag_sequences") == 3
        assert found("kv_index_age_seconds") == 4
        assert found("kv_connected") == 0
        assert found("kv_worker_in_flight", "w2", "0") == 1
        assert found("kv_decisions_dropped_total") == 0

    async def test_no_name_is_given_twice_and_all_are_ours(self, client: httpx.AsyncClient) -> None:
        text = (await client.get("/metrics")).text
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))
        assert all(name.startswith("kv_") for name in names)


async def test_two_routers_have_metrics_of_their_own(fleet: Fleet) -> None:
    apps = [create_app(RouterService(fleet.state, fleet.router().feed)) for _ in range(2)]
    assert apps[0].metrics.registry is not apps[1].metrics.registry


async def test_the_openapi_document_names_every_route(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/",
        "/healthz",
        "/metrics",
        "/readyz",
        "/v1/decisions/{decision_id}",
        "/v1/index/stats",
        "/v1/index/tree",
        "/v1/requests/{decision_id}/done",
        "/v1/requests/{decision_id}/prefilled",
        "/v1/route",
        "/v1/score",
        "/v1/workers",
    }
    text = msgspec.json.encode(document)
    for name in {part.split(b'"')[0] for part in text.split(b"#/components/schemas/")[1:]}:
        assert name.decode() in document["components"]["schemas"]


async def test_an_app_that_does_not_decide_only_scores(router: RouterUnderTest) -> None:
    transport = httpx.ASGITransport(create_app(router, decides=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        assert (await client.post("/v1/score", json=ask())).status_code == 200
        for path in ("/v1/route", "/v1/requests/d1/done", "/v1/requests/d1/prefilled"):
            assert (await client.post(path, json=ask())).status_code == 404
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert "/v1/route" not in paths
        assert "/v1/score" in paths
