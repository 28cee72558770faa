"""Plain requests for hot routes, answered where they are read, in front of uvicorn's own protocol.

    bytes --is the head plain, its route hot?--> HotRoutes.answer --> one write
                         no --> uvicorn, with the rest of the connection

RouterApp names it to whoever serves the app; without it every route works too, at a higher cost.
"""

import asyncio
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple, cast

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.server import ServerState

from kvatlas.router.bodies import SALT_HEADER
from kvatlas.router.hot import MAX_BODY_SECONDS, Asked, HotRoutes, parts_of, too_slow
from kvatlas.router.problems import Problem, problem_of

#: more than clients send, and far below what others take
MAX_HEAD_BYTES = 8_192
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
#: a head that every reader of HTTP understands alike: no folded lines, no odd characters
_PLAIN_HEAD = re.compile(
    rb"POST (/v1/[0-9A-Za-z_\-/]+)(?:\?([!-~]*))? HTTP/1\.1\r\n"
    rb"((?:%b:[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*)\r\n" % _TOKEN
)
#: what a server that leaves adds to all answers; see http_server.py
CLOSE = (b"connection", b"close")
#: headers that change how a message is read, or what becomes of its connection
_NOT_PLAIN = frozenset(
    [b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"connection", b"trailer"]
)
#: but this one says what holds anyway
_KEEP_ALIVE = (b"connection", b"keep-alive")
_SALT_HEADER = SALT_HEADER.encode()
#: headers that are looked at
_READ = _NOT_PLAIN | {b"content-length", b"content-type", _SALT_HEADER}
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_HEADER = b"%b: %b\r\n"
#: what stands before the body of an answer that is no problem
_OK_HEAD = (
    _STATUS_LINES[HTTPStatus.OK] + b"%bcontent-type: application/json\r\ncontent-length: %d\r\n"
)


class _Pending(NamedTuple):
    """A request whose head has been read."""

    asked: Asked
    body_at: int
    end: int


class _Defaults(NamedTuple):
    """The headers of every answer, as a list, as text, and whether they end the connection."""

    headers: list[tuple[bytes, bytes]]
    lines: bytes
    closes: bool


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
        #: what is not answered yet; as it came where that is one piece, which most requests are
        self._received: bytes | bytearray = b""
        self._defaults = _Defaults([], b"", False)
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
        if not self._received:
            self._received = data
        else:
            if isinstance(self._received, bytes):
                self._received = bytearray(self._received)
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
        received = self._received
        with memoryview(received) as view:
            body = bytes(view[pending.body_at : pending.end])
        if len(received) == pending.end:
            self._received = b""
        else:
            # many may have come in one piece: to cut one off has to cost no copy of the others
            rest = received if isinstance(received, bytearray) else bytearray(received)
            del rest[: pending.end]
            self._received = rest
        self._pending = None
        self._since = self._loop.time()
        self._server.total_requests += 1
        self._send(self.routes.answer(pending.asked, body))
        if self._is_ending or self._defaults.closes:
            self._transport.close()

    def _send(self, answer: bytes | Problem) -> None:
        lines = self._default_lines()
        closes = self._is_ending and not self._defaults.closes
        ending = b"connection: close\r\n\r\n" if closes else b"\r\n"
        if isinstance(answer, bytes):
            head = _OK_HEAD % (lines, len(answer))
            self._transport.write(b"".join((head, ending, answer)))
            return
        status, headers, body = parts_of(answer)
        problem_lines = [_STATUS_LINES[status], lines]
        for header in headers:
            problem_lines.append(_HEADER % header)
        self._transport.write(b"".join((*problem_lines, ending, body)))

    def _default_lines(self) -> bytes:
        """Return the headers of every answer; uvicorn makes the list anew once a second."""
        headers = self._server.default_headers
        if headers is not self._defaults.headers:
            lines = b"".join(_HEADER % header for header in headers)
            self._defaults = _Defaults(headers, lines, CLOSE in headers)
        return self._defaults.lines

    def _read_head(self) -> _Pending | None:
        """Return the request that has begun; None if it is not plain, or not for us."""
        head = _PLAIN_HEAD.match(self._received, 0, MAX_HEAD_BYTES)
        if head is None:
            return None
        path = head[1].decode("ascii")
        template = self.routes.template(path)
        if template is None:
            return None
        content_type, lengths, salts = b"", [], []
        for line in head[3].split(b"\r\n"):
            name, _, value = line.partition(b":")
            name = name.lower()
            if name not in _READ:
                continue
            value = value.strip(b" \t")
            if name == b"content-length":
                lengths.append(value)
            elif name == b"content-type":
                content_type = value
            elif name == _SALT_HEADER:
                salts.append(value)
            elif (name, value.lower()) != _KEEP_ALIVE:
                return None
        if len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
            return None
        num_bytes = int(lengths[0])
        if num_bytes > self.routes.max_body_bytes(template):
            return None
        query, kind = head[2] or b"", content_type.decode("latin-1")
        asked = Asked(template, path, query, kind, tuple(salts))
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
        received, self._received = bytes(self._received), b""
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
            answer = problem_of(too_slow())
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
