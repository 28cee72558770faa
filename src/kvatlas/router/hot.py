"""The routes that every request takes: score, route, and the reports of its end.

    plain HTTP/1.1 --HotProtocol--> HotRoutes.answer --> Router        answered where it is read
    any other form --uvicorn------> HotRoutes, as bare ASGI --^

Bodies are read under a limit and parsed by router/requests.py; nothing else stands between the
socket and the router. Whatever else is asked goes on to the control API.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from kvatlas.router.answers import ReportAnswer
from kvatlas.router.problems import MEDIA_TYPE, Boundary, Problem, headers_of, problem, problem_of
from kvatlas.router.requests import (
    MAX_REPORT_BYTES,
    SALT_HEADER,
    decode_report,
    decode_score_request,
)
from kvatlas.router.service import Router
from kvatlas.schemas.errors import InvalidRequest, KvatlasError, PromptTooLarge, RequestTooSlow
from kvatlas.schemas.settings import RouterSettings

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
#: told the route's template and the status of each answer
OnAnswer = Callable[[str, int], None]

SCORE, ROUTE = "/v1/score", "/v1/route"
REPORTS = "/v1/requests/"
PREFILLED, DONE = "/prefilled", "/done"
MAX_DECISION_ID = 128

#: a client that sends slower than this holds memory for nothing
MAX_BODY_SECONDS = 30.0

_SALT_HEADER = SALT_HEADER.encode()
_encode = msgspec.json.Encoder().encode


class ClientGone(ConnectionError):
    """The client left before its request was complete: nobody waits for an answer."""


class Asked(NamedTuple):
    """What stands before the body of a request for a hot route."""

    template: str
    path: str
    query: bytes
    content_type: str
    #: of the salt's header, which may stand there once
    salts: tuple[bytes, ...]


class HotRoutes:
    """Answers the hot routes of one router; one that does not decide only scores."""

    def __init__(
        self, router: Router, settings: RouterSettings, on_answer: OnAnswer, decides: bool
    ) -> None:
        self._router, self._settings, self._on_answer = router, settings, on_answer
        self._decides = decides

    def template(self, path: str) -> str | None:
        """Return the template of a path that is answered here, None for any other."""
        if path == SCORE or (path == ROUTE and self._decides):
            return path
        if not self._decides:
            return None
        if path.startswith(REPORTS):
            for end in (DONE, PREFILLED):
                if path.endswith(end) and "/" not in _decision_id(path, end):
                    return f"{REPORTS}{{decision_id}}{end}"
        return None

    def max_body_bytes(self, template: str) -> int:
        """Return how large the body of a request for this template may be."""
        return self._settings.max_body_bytes if template in (SCORE, ROUTE) else MAX_REPORT_BYTES

    def answer(self, asked: Asked, body: bytes) -> bytes | Problem:
        """Answer one POST with a body within the limit, and count it. Never raises."""
        found: bytes | Problem | None = None
        with Boundary(asked.template) as boundary:
            try:
                found = self._answer(asked, body)
            except KvatlasError as error:
                found = problem_of(error)
        if boundary.failed or found is None:
            found = problem(500, "an unexpected error; the log has it")
        self.count(asked.template, found)
        return found

    def count(self, template: str, answer: bytes | Problem) -> None:
        """Count an answer that is about to be sent."""
        self._on_answer(template, answer.status if isinstance(answer, Problem) else 200)

    def _answer(self, asked: Asked, body: bytes) -> bytes:
        template = asked.template
        if template in (SCORE, ROUTE):
            if len(asked.salts) > 1:
                raise InvalidRequest(SALT_HEADER, "stands there twice")
            salt = asked.salts[0] if asked.salts else None
            request = decode_score_request(
                body, asked.content_type, self._settings, asked.query, salt
            )
            ask = self._router.score if template == SCORE else self._router.route
            return _encode(ask(request))
        report = decode_report(body, asked.content_type)
        if template.endswith(DONE):
            decision_id = _decision_id(asked.path, DONE)
            outcome = self._router.done(decision_id, report)
        else:
            decision_id = _decision_id(asked.path, PREFILLED)
            outcome = self._router.prefilled(decision_id, report)
        return _encode(ReportAnswer(decision_id, outcome.applied))

    async def __call__(self, template: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request for a path with this template."""
        if scope["method"] != "POST":
            answer: bytes | Problem = problem(405, f"{template} takes POST only")
            self.count(template, answer)
        else:
            asked, declared_bytes = _asked(template, scope)
            try:
                body = await read_body(receive, declared_bytes, self.max_body_bytes(template))
            except ClientGone:
                return
            except InvalidRequest as error:
                answer = problem_of(error)
                self.count(template, answer)
            else:
                answer = self.answer(asked, body)
        await send_answer(send, answer)


async def read_body(receive: Receive, declared_bytes: int, limit_bytes: int) -> bytes:
    """Return the body of a request, reading no more than the limit.

    Raises PromptTooLarge, from the declared length if there is one, RequestTooSlow and ClientGone.
    """
    if declared_bytes > limit_bytes:
        raise PromptTooLarge("body", f"{declared_bytes} bytes, the limit is {limit_bytes}")
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            return await _whole_body(receive, limit_bytes)
    except TimeoutError:
        raise _too_slow() from None


def _too_slow() -> RequestTooSlow:
    return RequestTooSlow("body", f"not complete after {MAX_BODY_SECONDS:g} s")


async def _whole_body(receive: Receive, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if chunk := message.get("body", b""):
            num_bytes += len(chunk)
            if num_bytes > limit_bytes:
                raise PromptTooLarge("body", f"more bytes than the limit of {limit_bytes}")
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def send_answer(send: Send, answer: bytes | Problem) -> None:
    """Send a JSON body, or a problem with its status."""
    status, headers, body = _parts(answer)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _parts(answer: bytes | Problem) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    status, media_type, body = 200, b"application/json", answer
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(answer, Problem):
        status, media_type, body = answer.status, MEDIA_TYPE.encode(), answer.encoded()
        headers = [(k.encode(), v.encode()) for k, v in headers_of(status).items()]
        if status == 405:
            headers.append((b"allow", b"POST"))
    assert isinstance(body, bytes)
    headers += [(b"content-type", media_type), (b"content-length", b"%d" % len(body))]
    return status, headers, body


def _decision_id(path: str, end: str) -> str:
    return path[len(REPORTS) : -len(end)][:MAX_DECISION_ID]


def _asked(template: str, scope: Scope) -> tuple[Asked, int]:
    """Return what is asked, and the declared length of the body."""
    content_type, declared_bytes, salts = "", 0, []
    for name, value in scope["headers"]:
        if name == b"content-type":
            content_type = value.decode("latin-1")
        elif name == b"content-length" and value.isdigit():
            declared_bytes = int(value)
        elif name == _SALT_HEADER:
            salts.append(value)
    asked = Asked(template, scope["path"], scope["query_string"], content_type, tuple(salts))
    return asked, declared_bytes


# --- plain requests, answered where they are read -----------------------------------------

#: more than clients send, and far below what others take
MAX_HEAD_BYTES = 8_192
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
#: a head that every reader of HTTP understands alike: no folded lines, no odd characters
_PLAIN_HEAD = re.compile(
    rb"POST (/v1/[0-9A-Za-z_\-/]+)(?:\?([!-~]*))? HTTP/1\.1\r\n"
    rb"((?:%b:[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*)\r\n" % _TOKEN
)
#: headers that change how a message is read, or what becomes of its connection
_NOT_PLAIN = frozenset([b"transfer-encoding", b"expect", b"upgrade", b"connection", b"trailer"])
#: but this one says what holds anyway
_KEEP_ALIVE = (b"connection", b"keep-alive")
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


class _Pending(NamedTuple):
    """A request whose head has been read."""

    asked: Asked
    body_at: int
    end: int


class HotProtocol(asyncio.Protocol):
    """Answers plain requests for hot routes at once: no task, no scope, one write an answer.

    Takes the place of uvicorn's own protocol in `uvicorn.Config(http=...)`. The first request that
    is not plain, or is for another route, goes to uvicorn with the rest of its connection; so
    uvicorn alone judges whatever might be read in two ways.
    """

    #: whose requests are answered, set by `protocol_of`
    routes: ClassVar[HotRoutes]

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._config, self._server, self._app_state = config, server_state, app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._received = bytearray()
        self._pending: _Pending | None = None
        self._is_paused = self._is_ending = False
        self._idle_seconds = max(config.timeout_keep_alive, 1)
        #: of the last answer, or of the head of a request that is not complete; None before both
        self._since: float | None = None
        self._look: asyncio.TimerHandle | None = None

    # --- what the transport says ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._work()

    def pause_writing(self) -> None:
        """Read nothing from a client that does not take its answers."""
        self._is_paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_paused = False
        self._transport.resume_reading()
        self._work()

    def shutdown(self) -> None:
        """End the connection, after the request that is under way."""
        self._is_ending = True
        if self._pending is None:
            self._transport.close()

    # --- requests ---------------------------------------------------------------------------

    def _work(self) -> None:
        """Answer a request if all of it is there; what is behind it waits for its turn."""
        if not self._received or self._is_paused or self._transport.is_closing():
            return
        if self._pending is None:
            self._pending = self._read_head()
            if self._pending is None:
                self._hand_over()
                return
            self._since = self._loop.time()
        if len(self._received) >= self._pending.end:
            self._answer(self._pending)
            if self._received:
                self._loop.call_soon(self._work)

    def _answer(self, pending: _Pending) -> None:
        with memoryview(self._received) as received:
            body = bytes(received[pending.body_at : pending.end])
        del self._received[: pending.end]
        self._pending = None
        self._since = self._loop.time()
        self._server.total_requests += 1
        self._send(self.routes.answer(pending.asked, body))
        if self._is_ending:
            self._transport.close()

    def _send(self, answer: bytes | Problem) -> None:
        status, headers, body = _parts(answer)
        lines = [_STATUS_LINES[status]]
        for name, value in (*self._server.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        if self._is_ending:
            lines.append(b"connection: close\r\n")
        self._transport.write(b"".join([*lines, b"\r\n", body]))

    def _read_head(self) -> _Pending | None:
        """Return the request that has begun; None if it is not plain, or not for us."""
        head = _PLAIN_HEAD.match(self._received, 0, MAX_HEAD_BYTES)
        if head is None:
            return None
        path = head[1].decode("ascii")
        template = self.routes.template(path)
        fields = [line.partition(b":") for line in head[3].split(b"\r\n")[:-1]]
        headers = [(name.lower(), value.strip(b" \t")) for name, _, value in fields]
        odd = [
            name
            for name, value in headers
            if name in _NOT_PLAIN and (name, value.lower()) != _KEEP_ALIVE
        ]
        lengths = [value for name, value in headers if name == b"content-length"]
        if template is None or len(lengths) != 1 or not lengths[0].isdigit():
            return None
        if odd or len(lengths[0]) > 18:
            return None
        num_bytes = int(lengths[0])
        if num_bytes > self.routes.max_body_bytes(template):
            return None
        types = [value for name, value in headers if name == b"content-type"]
        content_type = types[-1].decode("latin-1") if types else ""
        salts = tuple(value for name, value in headers if name == _SALT_HEADER)
        asked = Asked(template, path, head[2] or b"", content_type, salts)
        return _Pending(asked, head.end(), head.end() + num_bytes)

    def _hand_over(self) -> None:
        """Let uvicorn have the connection, from the request on that has begun."""
        self._leave()
        make = cast(Callable[..., asyncio.Protocol], AutoHTTPProtocol)
        protocol = make(
            config=self._config,
            server_state=self._server,
            app_state=self._app_state,
            _loop=self._loop,
        )
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        received, self._received = bytes(self._received), bytearray()
        protocol.data_received(received)

    # --- time -------------------------------------------------------------------------------

    def _look_later(self) -> None:
        """Look at the clock now and then: a timer for each request would cost each of them."""
        self._look = self._loop.call_later(self._idle_seconds, self._look_at_clock)

    def _look_at_clock(self) -> None:
        """End a connection that is idle for too long, or sends its body too slowly."""
        seconds = 0.0 if self._since is None else self._loop.time() - self._since
        if self._pending is None and seconds >= self._idle_seconds:
            self._transport.close()
        elif self._pending is not None and seconds >= MAX_BODY_SECONDS:
            answer = problem_of(_too_slow())
            self.routes.count(self._pending.asked.template, answer)
            self._is_ending = True
            self._send(answer)
            self._transport.close()
        else:
            self._look_later()

    def _leave(self) -> None:
        self._connections.discard(self)
        if self._look is not None:
            self._look.cancel()

    @property
    def _connections(self) -> set[Any]:
        return cast(set[Any], self._server.connections)


def protocol_of(routes: HotRoutes) -> type[HotProtocol]:
    """Return the protocol that answers these routes, for `uvicorn.Config(http=...)`."""
    return type("RoutesProtocol", (HotProtocol,), {"routes": routes})
