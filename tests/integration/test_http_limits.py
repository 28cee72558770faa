"""What bounds clients that send slowly, send too much, say nothing or do not read."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvatlas.router.http.app import create_app
from kvatlas.router.http.server.bounded import HEAD_SLICE_BYTES
from kvatlas.router.http.server.limits import FREE_BODY_BYTES, MAX_HEAD_BYTES, Bounds, HttpLimits
from kvatlas.router.http.server.messages import read_body, send_answer
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import MODEL, Fleet, a_prompt
from testkit.server import Wrapped, served_within
from testkit.waiting import WAIT_SECONDS, until

PROMPT = a_prompt(64)
BODY = msgspec.json.encode({"model": MODEL, "token_ids": PROMPT})
HEALTHZ = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
SCORE = b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LARGE = BODY + b" " * 400_000


class Connection:
    """Bytes to and from a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        async with asyncio.timeout(WAIT_SECONDS):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            length = int(headers["content-length"])
            return int(head[0].split()[1]), headers, await self._reader.readexactly(length)

    async def status(self) -> int:
        return (await self.answer())[0]

    async def begin_of_answer(self) -> bytes:
        async with asyncio.timeout(WAIT_SECONDS):
            try:
                return await self._reader.readline()
            except ConnectionResetError:
                return b""

    async def rest(self) -> bytes:
        async with asyncio.timeout(WAIT_SECONDS):
            try:
                return await self._reader.read()
            except ConnectionResetError:
                return b""


class Server:
    """A served application, its limits, and connections to it."""

    def __init__(self, port: int, limits: HttpLimits, stack: AsyncExitStack) -> None:
        self.port, self.limits, self._stack = port, limits, stack

    async def connect(self, raw: bytes = b"") -> Connection:
        connection = Connection(*await asyncio.open_connection("127.0.0.1", self.port))
        self._stack.callback(connection.writer.close)
        connection.send(raw)
        return connection

    async def until_refused(self, reason: str, count: int = 1) -> None:
        await until(lambda: self.limits.refused[reason] >= count)


@asynccontextmanager
async def a_server(
    app: Any = None, settings: RouterSettings | None = None, **bounds: Any
) -> AsyncIterator[Server]:
    if app is None:
        app = create_app(a_fleet().router(max_body_bytes=1_000_000))
    limits = HttpLimits(Bounds(**bounds))
    async with (
        AsyncExitStack() as stack,
        served_within(app, limits=limits, settings=settings) as port,
    ):
        yield Server(port, limits, stack)


def a_fleet() -> Fleet:
    fleet = Fleet()
    fleet.up("w1")
    fleet.holds("w1", PROMPT)
    return fleet


def an_app(kind: str) -> Any:
    app = create_app(a_fleet().router(max_body_bytes=1_000_000))
    return app if kind == "hot" else Wrapped(app)


def large(*, is_chunked: bool) -> tuple[bytes, bytes]:
    """Return a request that is large but for its last bytes, and these."""
    if is_chunked:
        chunk = b"%x\r\n%b\r\n" % (len(LARGE), LARGE)
        return SCORE + b"transfer-encoding: chunked\r\n\r\n" + chunk, b"0\r\n\r\n"
    return SCORE + b"content-length: %d\r\n\r\n" % len(LARGE) + LARGE[:-1], LARGE[-1:]


class TestBodies:
    @pytest.mark.parametrize(
        ("kind", "is_chunked"), [("hot", False), ("uvicorn", False), ("hot", True)]
    )
    async def test_unfinished_ones_share_a_budget_and_what_exceeds_it_may_come_again(
        self, kind: str, is_chunked: bool
    ) -> None:
        begin, end = large(is_chunked=is_chunked)
        async with a_server(an_app(kind), max_inflight_body_bytes=800_000) as server:
            held = [await server.connect(begin) for _ in range(2)]
            await until(lambda: server.limits.num_body_bytes > 650_000)
            refused = await server.connect(begin)
            status, headers, body = await refused.answer()
            assert (status, headers["retry-after"]) == (503, "1")
            assert "router.max_inflight_body_bytes" in msgspec.json.decode(body)["detail"]
            assert server.limits.refused["body_budget"] == 1
            small = await server.connect(SCORE + b"content-length: %d\r\n\r\n" % len(BODY))
            small.send(BODY)
            assert await small.status() == 200
            for connection in held:
                connection.send(end)
                assert await connection.status() == 200
            assert server.limits.num_body_bytes == 0
            again = await server.connect(begin + end)
            assert await again.status() == 200

    async def test_a_body_counts_until_its_request_is_answered(self) -> None:
        may_answer = asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            assert scope["type"] == "http"
            await read_body(receive, 0, 1_000_000)
            await may_answer.wait()
            await send_answer(send, b"{}")

        raw = b"".join(large(is_chunked=False))
        async with a_server(slow, max_inflight_body_bytes=500_000) as server:
            first = await server.connect(raw)
            await until(lambda: server.limits.num_body_bytes > 300_000)
            assert await (await server.connect(raw)).status() == 503
            may_answer.set()
            assert await first.status() == 200
            assert server.limits.num_body_bytes == 0

    @pytest.mark.parametrize("kind", ["hot", "uvicorn"])
    async def test_a_client_that_leaves_gives_back_what_it_held(self, kind: str) -> None:
        async with a_server(an_app(kind)) as server:
            connection = await server.connect(large(is_chunked=False)[0])
            await until(lambda: server.limits.num_body_bytes > len(LARGE) - FREE_BODY_BYTES - 10)
            connection.writer.close()
            await until(lambda: server.limits.num_body_bytes == 0)
            await until(lambda: server.limits.num_connections == 0)

    @pytest.mark.parametrize("kind", ["hot", "uvicorn"])
    async def test_one_that_does_not_come_to_its_end_is_given_up(self, kind: str) -> None:
        async with a_server(an_app(kind), body_seconds=0.3) as server:
            connection = await server.connect(large(is_chunked=False)[0])
            status, _, body = await connection.answer()
            assert (status, msgspec.json.decode(body)["field"]) == (408, "body")
            assert await connection.rest() == b""
            assert server.limits.num_body_bytes == 0

    async def test_one_that_is_refused_before_its_end_does_not_hold_its_connection(self) -> None:
        async with a_server(body_seconds=0.3) as server:
            connection = await server.connect(SCORE + b"content-length: 99999999\r\n\r\nx")
            assert await connection.status() == 413
            assert await connection.rest() == b""


class TestPipelinedRequests:
    async def test_only_a_slice_of_them_is_parsed_while_one_waits(self) -> None:
        num_requests, may_answer = 2_000, asyncio.Event()

        async def slow(scope: Any, _: Any, send: Any) -> None:
            assert scope["type"] == "http"
            await may_answer.wait()
            headers = [(b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body"})

        async with a_server(slow) as server:
            gc.collect()
            others = num_waiting()  # of tests before this one
            request = b"GET / HTTP/1.1\r\n\r\n"
            connection = await server.connect(request * num_requests)
            await until(lambda: num_waiting() > others)
            for _ in range(5):  # of the loop's rounds; each would read more
                await asyncio.sleep(0)
            assert num_waiting() - others <= HEAD_SLICE_BYTES // len(request) + 1
            may_answer.set()
            assert {await connection.status() for _ in range(num_requests)} == {200}

    async def test_what_is_malformed_comes_after_the_answers_before_it(self) -> None:
        async with a_server() as server:
            connection = await server.connect(HEALTHZ + b"M\x01 / HTTP/1.1\r\n\r\n")
            assert [await connection.status() for _ in range(2)] == [200, 400]
            assert await connection.rest() == b""
            assert server.limits.refused["malformed"] == 1


def num_waiting() -> int:
    return sum(isinstance(each, RequestResponseCycle) for each in gc.get_objects())


class TestSilence:
    @pytest.mark.parametrize("kind", ["hot", "uvicorn"])
    @pytest.mark.parametrize(
        ("raw", "answer"),
        [
            (b"", b""),
            (b"POST /v1/sco", b"HTTP/1.1 408"),
            (b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\n", b"HTTP/1.1 408"),
            (b"GET /v1/workers HTTP/1.1\r\nx: ", b"HTTP/1.1 408"),
        ],
    )
    async def test_without_a_complete_head_a_connection_ends(
        self, kind: str, raw: bytes, answer: bytes
    ) -> None:
        async with a_server(an_app(kind), head_seconds=0.3) as server:
            connection = await server.connect(raw)
            assert (await connection.rest())[: len(answer) or None] == answer
            assert server.limits.refused["head_seconds"] == 1

    async def test_a_second_head_has_a_deadline_too(self) -> None:
        async with a_server(head_seconds=0.3) as server:
            connection = await server.connect(HEALTHZ + b"GET /")
            assert [await connection.status() for _ in range(2)] == [200, 408]

    @pytest.mark.parametrize(
        "request_", [HEALTHZ, SCORE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY]
    )
    async def test_an_idle_connection_lives_as_long_as_the_setting_says(
        self, request_: bytes
    ) -> None:
        bounds = Bounds.of(RouterSettings(keep_alive_seconds=1))
        async with a_server(
            keep_alive_seconds=bounds.keep_alive_seconds, head_seconds=0.2
        ) as server:
            connection = await server.connect(request_)
            began = asyncio.get_running_loop().time()
            assert await connection.status() == 200
            assert await connection.rest() == b""
            assert asyncio.get_running_loop().time() - began >= 0.9

    async def test_blank_lines_do_not_keep_a_connection(self) -> None:
        async with a_server(keep_alive_seconds=1) as server:
            connection = await server.connect(HEALTHZ)
            assert await connection.status() == 200

            async def blanks() -> None:
                while True:
                    connection.send(b"\r\n")
                    await asyncio.sleep(0.05)

            sending = asyncio.create_task(blanks())
            assert await connection.rest() == b""
            sending.cancel()

    async def test_who_reads_no_answer_is_given_up(self) -> None:
        async def long(scope: Any, _: Any, send: Any) -> None:
            assert scope["type"] == "http"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _n in range(50):
                await send({"type": "http.response.body", "body": b"x" * 10**6, "more_body": True})

        async with a_server(long, unread_seconds=0.3) as server:
            await server.connect(HEALTHZ)
            await server.until_refused("unread_answer")
            await until(lambda: server.limits.num_connections == 0)


class TestHeads:
    @pytest.mark.parametrize(
        "raw",
        [
            b"GET /" + b"a" * 2 * MAX_HEAD_BYTES,
            b"GET /healthz HTTP/1.1\r\nx: " + b"y" * 2 * MAX_HEAD_BYTES,
            b"GET /healthz HTTP/1.1\r\n" + b"x: y\r\n" * MAX_HEAD_BYTES,
        ],
    )
    async def test_a_head_without_end_is_refused_at_the_limit(self, raw: bytes) -> None:
        async with a_server() as server:
            connection = await server.connect(raw)
            assert await connection.status() == 431
            assert server.limits.refused["head_bytes"] == 1

    @pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/metrics", "/v1/workers"])
    async def test_head_is_as_get_without_a_body(self, path: str) -> None:
        async with a_server() as server, a_client(server) as client:
            got, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (got.status_code, b"")
            assert head.headers["content-type"] == got.headers["content-type"]

    async def test_head_of_another_method_is_refused(self) -> None:
        async with a_server() as server, a_client(server) as client:
            assert (await client.head("/v1/score")).status_code == 405


class TestConnections:
    async def test_over_the_bound_the_longest_idle_makes_room(self) -> None:
        async with a_server(max_connections=16) as server:
            silent = [await server.connect() for _ in range(16)]
            await until(lambda: server.limits.num_connections == 16)
            connection = await server.connect(HEALTHZ)
            assert await connection.status() == 200
            assert await silent[0].rest() == b""
            assert server.limits.refused["evicted"] == 1

    async def test_without_idle_ones_a_new_one_is_refused(self) -> None:
        begin, end = large(is_chunked=False)
        async with a_server(max_connections=16) as server:
            busy = [await server.connect(begin) for _ in range(16)]
            await until(lambda: server.limits.num_body_bytes > 16 * 300_000)
            status, headers, _ = await (await server.connect()).answer()
            assert (status, headers["retry-after"]) == (503, "1")
            for connection in busy:
                connection.send(end)
                assert await connection.status() == 200

    async def test_what_was_refused_is_in_the_metrics(self) -> None:
        async with a_server() as server, a_client(server) as client:
            await (await server.connect(b"M\x01 / HTTP/1.1\r\n\r\n")).rest()
            text = (await client.get("/metrics")).text
            assert 'kv_http_refused_total{reason="malformed"} 1.0' in text
            assert "kv_http_connections " in text


def a_client(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False)


FEW_DESCRIPTORS = """
import asyncio, resource, sys
from kvatlas.runtime.http_server import http_server, process_limits
from kvatlas.router.http.server.messages import send_answer
from kvatlas.schemas.settings import RouterSettings
from kvatlas.worker_hooks.log_lines import write_log_lines

async def app(scope, receive, send):
    await send_answer(send, b"{}")

async def main():
    settings = RouterSettings(max_connections=int(sys.argv[1]))
    limits = process_limits(settings)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
    if len(sys.argv) > 2:  # an owner of descriptors that no limit knows
        limits.bounds = type(limits.bounds)(max_connections=100_000)
    async with http_server("127.0.0.1", 0, settings, limits) as server, server.serving(app):
        print(server.url.rsplit(":", 1)[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)

write_log_lines("few")
asyncio.run(main())
"""


@asynccontextmanager
async def few_descriptors(*argv: str) -> AsyncIterator[tuple[int, int, Callable[[], str]]]:
    """Serve in a process that may have 200 descriptors; yields its soft limit, port and end."""
    limit = "ulimit -S -n 100; ulimit -H -n 200; exec"
    process = subprocess.Popen(  # noqa: ASYNC220 - it only begins
        ["bash", "-c", f'{limit} "$@"', "-", sys.executable, "-c", FEW_DESCRIPTORS, *argv],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdout
        soft = int(await asyncio.to_thread(process.stdout.readline))
        port = int(await asyncio.to_thread(process.stdout.readline))
        yield soft, port, lambda: process.communicate("")[1]


@pytest.mark.parametrize("argv", [["4096"], ["4096", "without a bound"]])
async def test_with_more_connections_than_descriptors_others_are_answered(argv: list[str]) -> None:
    async with AsyncExitStack() as stack, few_descriptors(*argv) as (soft, port, ended):
        assert soft == 200
        server = Server(port, HttpLimits(Bounds()), stack)
        for _ in range(300):
            await server.connect()
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                connection = await server.connect(HEALTHZ)
                if (await connection.begin_of_answer())[:12] == b"HTTP/1.1 200":
                    break
        await stack.aclose()
        log = await asyncio.to_thread(ended)
        assert len(log.splitlines()) <= 2, log


class TestHosts:
    @pytest.mark.parametrize("path", ["/v1/score", "/v1/requests/none/done", "/nothing"])
    @pytest.mark.parametrize(
        ("more", "status"),
        [
            ({"host": "evil.example"}, 421),
            ({"origin": "http://evil.example"}, 403),
            ({"origin": "null"}, 403),
            ({"content-type": "text/plain"}, 415),
            ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ],
    )
    async def test_what_a_web_page_can_send_unasked_is_refused(
        self, path: str, more: dict[str, str], status: int
    ) -> None:
        if path == "/nothing" and status == 415:
            status = 404
        async with a_server() as server, a_client(server) as client:
            headers = {"content-type": "application/json", **more}
            answer = await client.post(path, content=BODY, headers=headers)
            assert answer.status_code == status
            assert answer.headers["content-type"] == "application/problem+json"
            own = {"origin": f"http://127.0.0.1:{server.port}", "content-type": "application/json"}
            assert (await client.post("/v1/score", content=BODY, headers=own)).status_code == 200

    async def test_the_setting_names_more_hosts(self) -> None:
        settings = RouterSettings(allowed_hosts="kv.example")
        async with a_server(settings=settings) as server, a_client(server) as client:
            named = {"host": "kv.example", "content-type": "application/json"}
            assert (await client.post("/v1/score", content=BODY, headers=named)).status_code == 200
            other = {"host": "evil.example"}
            assert (await client.get("/healthz", headers=other)).status_code == 421
            assert server.limits.refused["host"] == 1
