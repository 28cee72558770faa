"""The router behind a real server: what only happens on a socket."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from kvatlas.router.app import create_app
from testkit.fleet import MODEL, Fleet, a_prompt
from testkit.server import served

LIMIT = 50_000
PROMPT = a_prompt(64)
BODY = msgspec.json.encode({"model": MODEL, "token_ids": PROMPT})


@pytest.fixture(params=["httptools", "h11"])
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    fleet = Fleet()
    fleet.up("w1")
    fleet.holds("w1", PROMPT)
    app = create_app(fleet.router(max_body_bytes=LIMIT))
    async with served(app, http=request.param, timeout_graceful_shutdown=1) as port:
        yield port


class Connection:
    """Bytes to and from the server, without a client's help."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        async with asyncio.timeout(5):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            return int(head.split()[1]), await self._reader.readexactly(length)

    async def rest(self) -> bytes:
        async with asyncio.timeout(5):
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
    return "\r\n".join([*lines, "", ""]).encode() + body


async def is_alive(port: int) -> bool:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        answer = await client.post("/v1/score", content=BODY)
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


async def test_many_clients_at_once(port: int) -> None:
    limits = httpx.Limits(max_connections=32)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}", limits=limits, trust_env=False
    ) as client:
        answers = await asyncio.gather(*(client.post("/v1/route", content=BODY) for _ in range(60)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["decision_id"] for answer in answers}) == 60
