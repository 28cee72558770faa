"""The router behind a real server: what only happens on a socket."""

import asyncio
from array import array
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from kvatlas.router.http.app import RouterApp, create_app
from kvatlas.router.http.server.limits import Bounds
from testkit.fleet import MODEL, Fleet, a_prompt
from testkit.server import Wrapped, served, served_within
from testkit.waiting import WAIT_SECONDS

LIMIT = 50_000
PROMPT = a_prompt(64)
JSON = {"content-type": "application/json"}
BODY = msgspec.json.encode({"model": MODEL, "token_ids": PROMPT})


def an_app() -> RouterApp:
    fleet = Fleet()
    fleet.up("w1")
    fleet.holds("w1", PROMPT)
    return create_app(fleet.router(max_body_bytes=LIMIT))


@pytest.fixture(params=["uvicorn", "bounded", "hot"])
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    app = an_app()
    if request.param == "uvicorn":
        serving = served(app, timeout_graceful_shutdown=1)
    else:
        serving = served_within(app if request.param == "hot" else Wrapped(app))
    async with serving as port:
        yield port


class Connection:
    """Bytes to and from the server, without a client's help."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        async with asyncio.timeout(WAIT_SECONDS):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            return int(head.split()[1]), await self._reader.readexactly(length)

    async def rest(self) -> bytes:
        async with asyncio.timeout(WAIT_SECONDS):
            return await self._reader.read()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.fixture
async def connection(port: int) -> AsyncIterator[Connection]:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    yield connection
    await connection.close()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    if not any(header.lower().startswith("content-type") for header in headers):
        lines.append("content-type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + body


async def is_alive(port: int) -> bool:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        answer = await client.post("/v1/score", content=BODY, headers=JSON)
        return answer.status_code == 200


async def test_requests_follow_one_another_on_a_connection(connection: Connection) -> None:
    for _ in range(3):
        await connection.send(post("/v1/score", BODY))
        status, body = await connection.answer()
        assert (status, msgspec.json.decode(body)["candidates"][0]["match_tokens"]) == (200, 64)


async def test_a_body_in_pieces_is_read_whole(connection: Connection) -> None:
    raw = post("/v1/route", BODY)
    for at in range(0, len(raw), 50):
        await connection.send(raw[at : at + 50])
        await asyncio.sleep(0)
    assert (await connection.answer())[0] == 200


async def test_a_declared_body_over_the_limit_is_refused_unread(connection: Connection) -> None:
    await connection.send(
        f"POST /v1/route HTTP/1.1\r\nhost: x\r\ncontent-length: {10**12}\r\n\r\n{{".encode()
    )
    status, body = await connection.answer()
    assert status == 413
    assert msgspec.json.decode(body)["detail"] == f"{10**12} bytes, the limit is {LIMIT}"


async def test_an_endless_body_is_refused_at_the_limit(connection: Connection, port: int) -> None:
    await connection.send(
        b"POST /v1/route HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    for _ in range(LIMIT // 1_000 + 1):
        await connection.send(b"3e8\r\n" + b" " * 1_000 + b"\r\n")
    status, body = await connection.answer()
    assert (status, msgspec.json.decode(body)["field"]) == (413, "body")
    assert await is_alive(port)


async def test_a_client_that_leaves_mid_body_costs_nothing(
    connection: Connection, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    await connection.send(post("/v1/route", BODY)[:-10])
    await connection.close()
    assert await is_alive(port)
    assert caplog.text == ""


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"POST /v1/route\r\n\r\n",
        b"POST /v1/route HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/route HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/route HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    ],
)
async def test_what_is_no_http_ends_its_connection_only(
    connection: Connection, port: int, raw: bytes
) -> None:
    await connection.send(raw)
    answer = await connection.rest()
    assert not answer or answer.startswith(b"HTTP/1.1 400")
    assert await is_alive(port)


async def test_each_json_answer_ends_its_line(port: int) -> None:
    """So that a shell's prompt stands below it."""
    asked = [
        ("POST", "/v1/score", BODY, 200),
        ("POST", "/v1/route", BODY, 200),
        ("POST", "/v1/route", b"{", 400),
        ("POST", "/v1/requests/none/done", b"{}", 404),
        *(("GET", path, b"", 200) for path in ("/healthz", "/readyz", "/v1/workers")),
        *(("GET", path, b"", 200) for path in ("/v1/index/stats", "/v1/index/tree")),
        ("GET", "/openapi.json", b"", 200),
        ("GET", "/v1/decisions/none", b"", 404),
        ("GET", "/nothing", b"", 404),
    ]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        for method, path, body, status in asked:
            answer = await client.request(method, path, content=body, headers=JSON)
            assert (path, answer.status_code) == (path, status)
            assert (path, answer.content[-2:]) == (path, b"}\n")
            assert int(answer.headers["content-length"]) == len(answer.content)
            msgspec.json.decode(answer.content)


async def test_many_clients_at_once(port: int) -> None:
    limits = httpx.Limits(max_connections=32)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", limits=limits, trust_env=False
    ) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/route", content=BODY, headers=JSON) for _ in range(60))
        )
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["decision_id"] for answer in answers}) == 60


class TestHotProtocol:
    """What only the protocol in front of uvicorn's does."""

    @pytest.fixture
    async def connection(self) -> AsyncIterator[Connection]:
        app = an_app()
        async with served_within(app, Bounds(keep_alive_seconds=1)) as port:
            connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
            yield connection
            await connection.close()

    async def test_requests_in_one_piece_are_answered_in_order(
        self, connection: Connection
    ) -> None:
        await connection.send(post("/v1/score", BODY) * 2 + post("/v1/score", b"{"))
        assert [(await connection.answer())[0] for _ in range(3)] == [200, 200, 400]

    async def test_another_route_goes_to_uvicorn_with_the_rest_of_its_connection(
        self, connection: Connection
    ) -> None:
        healthz = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
        await connection.send(post("/v1/score", BODY) + healthz + post("/v1/score", BODY))
        bodies = [msgspec.json.decode((await connection.answer())[1]) for _ in range(3)]
        assert bodies[0] == bodies[2]
        assert bodies[1]["status"] == "ok"

    async def test_octets_and_their_query_are_read(self, connection: Connection) -> None:
        packed = array("I", PROMPT).tobytes()
        headers = "Content-Type:application/octet-stream", "X-Kvatlas-Cache-Salt:  s "
        await connection.send(post(f"/v1/score?model={MODEL}", packed, *headers[:1]))
        await connection.send(post(f"/v1/score?model={MODEL}", packed, *headers))
        best = [
            msgspec.json.decode((await connection.answer())[1])["candidates"][0] for _ in range(2)
        ]
        assert [each["match_tokens"] for each in best] == [64, 0]

    async def test_who_says_keep_alive_is_answered_here(
        self, connection: Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delattr("kvatlas.router.http.hot_protocol.HotProtocol._hand_over")
        await connection.send(post("/v1/score", BODY, "Connection: Keep-Alive") * 2)
        assert [(await connection.answer())[0] for _ in range(2)] == [200, 200]

    async def test_the_date_of_answers_goes_on(self) -> None:
        """The headers of every answer are put together once, until uvicorn has new ones."""
        app = an_app()
        async with (
            served_within(app) as port,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
            asyncio.timeout(WAIT_SECONDS),
        ):
            dates = set[str]()
            while len(dates) < 2:
                answer = await client.post("/v1/score", content=BODY, headers=JSON)
                dates.add(answer.headers["date"])
                await asyncio.sleep(0.05)

    async def test_reports_are_taken(self, connection: Connection) -> None:
        await connection.send(post("/v1/route", BODY))
        decision_id = msgspec.json.decode((await connection.answer())[1])["decision_id"]
        await connection.send(post(f"/v1/requests/{decision_id}/done", b""))
        status, body = await connection.answer()
        assert (status, msgspec.json.decode(body)["applied"]) == (200, True)

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            (["content-length: 5"], 400),
            (["transfer-encoding: chunked"], 400),
            (["content-length : 1"], 400),
            ([" folded"], 400),
            (["x\x00y: 1"], 400),
            (["content-encoding: gzip"], 415),
            (["content-encoding: identity"], 200),
            (["expect: nothing"], 200),
            (["connection: close"], 200),
            (["x-long: " + "x" * 9_000], 200),
        ],
    )
    async def test_what_is_not_plain_is_judged_by_uvicorn(
        self, connection: Connection, headers: list[str], status: int
    ) -> None:
        await connection.send(post("/v1/score", BODY, *headers))
        head = (await connection.rest()).partition(b"\r\n")[0]
        assert head.startswith(b"HTTP/1.1 %d" % status)

    async def test_an_idle_connection_is_closed(self, connection: Connection) -> None:
        await connection.send(post("/v1/score", BODY))
        assert (await connection.answer())[0] == 200
        assert await connection.rest() == b""

    async def test_who_takes_no_answers_is_not_read(self, connection: Connection) -> None:
        num_requests = 3_000
        sending = asyncio.create_task(connection.send(post("/v1/score", BODY) * num_requests))
        statuses = [(await connection.answer())[0] for _ in range(num_requests)]
        await sending
        assert statuses == [200] * num_requests

    async def test_an_unexpected_error_is_a_problem(
        self, connection: Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("kvatlas.router.http.hot_routes.decode_score_request", broken)
        await connection.send(post("/v1/score", BODY))
        assert (await connection.answer())[0] == 500


async def test_a_server_that_stops_ends_hot_connections_first() -> None:
    app = an_app()
    async with served_within(app) as port:
        idle, busy = [
            Connection(*await asyncio.open_connection("127.0.0.1", port)) for _ in range(2)
        ]
        await idle.send(post("/v1/score", BODY))
        await idle.answer()
        await busy.send(post("/v1/score", BODY)[:-1])
        stopping = asyncio.create_task(idle.rest())
        # leaving the block asks the server to stop; `busy` may end its request first
        asyncio.get_running_loop().call_later(0.5, lambda: asyncio.ensure_future(end(busy)))
    assert await stopping == b""
    assert b"connection: close" in (await busy.rest()).lower()
    for connection in (idle, busy):
        await connection.close()


async def end(connection: Connection) -> None:
    await connection.send(BODY[-1:])
