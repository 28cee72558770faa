"""Plain requests for hot routes, answered where they are read, in front of uvicorn's own protocol.

    bytes --is the head plain, its route hot?--> HotRoutes.answer --> one write
                         no --> BoundedProtocol (uvicorn), with the rest of the connection

RouterApp names it to the server of the app; without it every route works too, at a higher cost.
"""

import asyncio
import re
from typing import Any, ClassVar, NamedTuple, cast

import uvicorn
from uvicorn.server import ServerState

from kvatlas.router.http.bodies.bodies import SALT_HEADER
from kvatlas.router.http.hot_routes import HotRoutes, RequestHead
from kvatlas.router.http.problems import Problem, problem, problem_of
from kvatlas.router.http.server.bounded import (
    NO_ROOM,
    BoundedProtocol,
    bounded_protocol,
    too_many_connections,
)
from kvatlas.router.http.server.connection import Lifetime, Phase, raw_answer
from kvatlas.router.http.server.hosts import HostRules
from kvatlas.router.http.server.limits import HttpLimits
from kvatlas.router.http.server.messages import too_slow

#: more than clients send, and far below what others take
MAX_HEAD_BYTES = 8_192
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
#: a head that every reader of HTTP understands alike: no folded lines, no odd characters
_PLAIN_HEAD = re.compile(
    rb"POST (/v1/[0-9A-Za-z_\-/]+)(?:\?([!-~]*))? HTTP/1\.1\r\n"
    rb"((?:%b:[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*)\r\n" % _TOKEN
)
#: what a server that leaves adds to all answers; see runtime/http_server.py
CLOSE = (b"connection", b"close")
#: headers that change how a message is read, or what becomes of its connection
_NOT_PLAIN = frozenset(
    [
        *(b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"connection"),
        *(b"trailer", b"origin"),
    ]
)
#: but this one says what holds anyway
_KEEP_ALIVE = (b"connection", b"keep-alive")
_SALT_HEADER = SALT_HEADER.encode()
#: headers that are looked at
_READ = _NOT_PLAIN | {b"content-length", b"content-type", b"host", _SALT_HEADER}
_HEADER = b"%b: %b\r\n"
#: what stands before the body of an answer that is no problem
_OK_HEAD = b"HTTP/1.1 200 OK\r\n%bcontent-type: application/json\r\ncontent-length: %d\r\n"


class _Pending(NamedTuple):
    """A request whose head has been read."""

    asked: RequestHead
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

    #: set by `protocol_of`
    routes: ClassVar[HotRoutes]
    limits: ClassVar[HttpLimits]
    hosts: ClassVar[HostRules]
    #: that of all other requests
    other: ClassVar[type[BoundedProtocol]]

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
        self._is_reading = True

    # --- what the transport says ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._lifetime = Lifetime(self.limits, self._loop, self._late)
        if not self.limits.admit(self):
            self._transport.write(too_many_connections())
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self.limits.leave(self)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        if self._lifetime.is_ending:
            return
        if not self._received:
            self._received = data
        else:
            if isinstance(self._received, bytes):
                self._received = bytearray(self._received)
            self._received += data
            if self._pending is not None and not self._lifetime.came(len(data)):
                self._end(self._pending, problem(503, NO_ROOM))
                return
        self._answer_next()

    def pause_writing(self) -> None:
        """Read nothing from a client that does not take its answers."""
        self._is_paused = True
        self._lifetime.unread_since = self._loop.time()
        self._read(False)

    def resume_writing(self) -> None:
        self._is_paused = False
        self._lifetime.unread_since = None
        self._answer_next()

    def shutdown(self) -> None:
        """End the connection, after the request that is under way."""
        self._is_ending = True
        if self._pending is None:
            self._transport.close()

    @property
    def idle_since(self) -> float | None:
        """When it began to wait for a request; None while one is under way."""
        return self._lifetime.idle_since

    def evict(self) -> None:
        """End at once."""
        self._transport.abort()

    # --- requests ---------------------------------------------------------------------------

    def _answer_next(self) -> None:
        """Answer a request if all of it is there; what is behind it waits for its turn.

        Meanwhile nothing is read, so that no more waits than came at once.
        """
        if self._is_paused or self._transport.is_closing() or self._lifetime.is_ending:
            return
        if self._received and self._pending is None:
            self._pending = self._read_head()
            if self._pending is None:
                self._hand_over()
                return
            if len(self._received) < self._pending.end:
                self._lifetime.enter(Phase.BODY)
                if not self._lifetime.came(len(self._received)):
                    self._end(self._pending, problem(503, NO_ROOM))
                    return
        if self._pending is not None and len(self._received) >= self._pending.end:
            self._answer(self._pending)
            if self._received:
                self._loop.call_soon(self._answer_next)
        if self._received or not self._is_reading:
            self._read(self._wants_more())

    def _wants_more(self) -> bool:
        """Whether no complete request waits, and answers are taken."""
        return not self._is_paused and (self._pending is not None or not self._received)

    def _read(self, is_wanted: bool) -> None:
        if is_wanted is not self._is_reading and not self._transport.is_closing():
            self._is_reading = is_wanted
            if is_wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

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
        self._lifetime.body_done()
        self._lifetime.enter(Phase.IDLE)
        self._server.total_requests += 1
        self._send(self.routes.answer(pending.asked, body))
        if self._is_ending or self._defaults.closes:
            self._transport.close()

    def _send(self, answer: bytes | Problem) -> None:
        lines = self._default_lines()
        closes = self._is_ending and not self._defaults.closes
        if isinstance(answer, bytes):
            ending = b"connection: close\r\n\r\n" if closes else b"\r\n"
            head = _OK_HEAD % (lines, len(answer))
            self._transport.write(b"".join((head, ending, answer)))
        else:
            self._transport.write(raw_answer(answer, lines, is_last=closes))

    def _end(self, pending: _Pending, answer: Problem) -> None:
        """Refuse the request that is under way, and end the connection."""
        self.routes.count(pending.asked.template, answer)
        self._received = b""
        lines = self._default_lines()
        raw = raw_answer(answer, lines, is_last=not self._defaults.closes)
        self._lifetime.end(self._transport, raw)

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
        content_type, lengths, salts, num_hosts = b"", [], [], 0
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
            elif name == b"host":
                num_hosts += 1
                if value not in self.hosts.known and not self.hosts.accepts(value):
                    return None
            elif (name, value.lower()) != _KEEP_ALIVE:
                return None
        if num_hosts > 1 or len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
            return None
        num_bytes = int(lengths[0])
        if num_bytes > self.routes.max_body_bytes(template):
            return None
        query, kind = head[2] or b"", content_type.decode("latin-1")
        asked = RequestHead(template, path, query, kind, tuple(salts))
        return _Pending(asked, head.end(), head.end() + num_bytes)

    def _hand_over(self) -> None:
        """Let uvicorn have the connection, from the request on that has begun."""
        self._leave()
        self._read(True)
        protocol = self.other(self._config, self._server, self._app_state, self._loop)
        self._transport.set_protocol(protocol)
        received, self._received = bytes(self._received), b""
        protocol.take_over(self._transport, self, received)

    def _late(self, phase: Phase) -> None:
        """End a connection that is idle for too long, or sends its body too slowly."""
        if phase is Phase.BODY and self._pending is not None:
            self._end(self._pending, problem_of(too_slow()))
        else:
            self._lifetime.end(self._transport)

    def _leave(self) -> None:
        self._connections.discard(self)
        self._lifetime.over()

    @property
    def _connections(self) -> set[Any]:
        return cast(set[Any], self._server.connections)


def protocol_of(routes: HotRoutes, limits: HttpLimits, hosts: HostRules) -> type[HotProtocol]:
    """Return the protocol that answers these routes, for `uvicorn.Config(http=...)`."""
    own = {"routes": routes, "limits": limits, "hosts": hosts, "other": bounded_protocol(limits)}
    return type("RoutesProtocol", (HotProtocol,), own)
