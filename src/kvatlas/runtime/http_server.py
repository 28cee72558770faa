"""uvicorn with an owner: a bound socket first, so that its address is known, then an app on it.

Limits of connections, bodies and time (router/http) hold for every server of a process.
"""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import math
import os
import resource
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, cast

import uvicorn

from kvatlas.router.http.server.bounded import bounded_protocol
from kvatlas.router.http.server.hosts import HostRules
from kvatlas.router.http.server.limits import Bounds, HttpLimits
from kvatlas.router.http.server.messages import Receive, Scope, Send, send_answer
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.settings import RouterSettings

#: connections accepted before what is open gets its turn
ACCEPT_BURST = 64
#: enough for any process, and what tables of descriptors still cost little for
MAX_DESCRIPTORS = 1_048_576
#: between two lines of the log about descriptors that ran out
QUIET_SECONDS = 60.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

_logger = logging.getLogger(__name__)


def process_limits(settings: RouterSettings) -> HttpLimits:
    """Return limits for all HTTP servers of this process, which may then have more descriptors."""
    return HttpLimits(Bounds.of(settings, raise_descriptor_limit()))


def raise_descriptor_limit() -> int:
    """Raise the soft limit of descriptors as far as is allowed; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MAX_DESCRIPTORS if hard == unlimited else min(hard, MAX_DESCRIPTORS)
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system may allow less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MAX_DESCRIPTORS if soft == unlimited else soft


class Listener(socket.socket):
    """A listening socket that goes on without descriptors: it ends what comes, and counts it.

    asyncio would log each of its attempts and try again as often as its backlog is long.
    """

    limits: HttpLimits
    _num_accepted = 0
    #: closed to accept a connection that is then ended; None while none can be had
    _spare: int | None = None
    _said_at: float | None = None

    def listen_within(self, limits: HttpLimits) -> None:
        """Begin to listen."""
        self.limits = limits
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self.setblocking(False)
        self.listen(1024)

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection; raises BlockingIOError if there is none for now."""
        if self._num_accepted >= ACCEPT_BURST:
            self._num_accepted = 0
            raise BlockingIOError
        try:
            accepted = super().accept()
        except OSError as error:
            self._num_accepted = 0
            if error.errno not in _OUT_OF_DESCRIPTORS:
                raise
            if not self._end_next():
                # the next attempt ends asyncio's round, which waits a second before another
                self._num_accepted = ACCEPT_BURST
                raise
            raise BlockingIOError from None
        self._num_accepted += 1
        return accepted

    def close(self) -> None:
        """Listen no more."""
        super().close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def _end_next(self) -> bool:
        """End the next connection unheard; False if not even that is possible."""
        self.limits.refused["descriptors"] += 1
        self.limits.make_room()
        self._say()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):  # it may have left, or the descriptor been taken
                ended, _ = super().accept()
                ended.close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)
        return self._spare is not None

    def _say(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._said_at is None or now - self._said_at >= QUIET_SECONDS:
            self._said_at = now
            _logger.error(
                "no descriptors left: new connections are ended (kv_http_refused_total counts"
                " them); raise the limit (ulimit -n) or lower router.max_connections"
            )


#: ends a connection behind the answer that has it
CLOSE = (b"connection", b"close")


class _Server(uvicorn.Server):
    """Leaves signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Served:
    """The application behind a server. Another may take its place while the server runs.

    A connection that is open then goes on with the new one, by uvicorn's own protocol. Requests
    for hosts of others are refused here, and HEAD is as GET, whatever the application.
    """

    def __init__(self, app: Any, limits: HttpLimits, hosts: HostRules) -> None:
        self._limits, self._hosts = limits, hosts
        self.app = app
        self._server: uvicorn.Server | None = None

    def behind(self, server: uvicorn.Server) -> None:
        """Note which server it is that answers with the application."""
        self._server = server

    def end_connections(self) -> None:
        """End each connection with its next answer, so that clients connect anew, elsewhere."""
        if self._server is None or CLOSE in self._server.config.encoded_headers:
            return
        # what uvicorn makes its headers from once a second, and those that it has made
        self._server.config.encoded_headers.append(CLOSE)
        state = self._server.server_state
        state.default_headers = [*state.default_headers, CLOSE]

    @property
    def app(self) -> Any:
        """The application of new requests."""
        return self._app

    @app.setter
    def app(self, app: Any) -> None:
        self._app = app
        if hasattr(app, "served_under"):
            self._protocol = app.served_under(self._limits, self._hosts)
        else:
            self._protocol = bounded_protocol(self._limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on one request."""
        if scope["type"] == "http":
            if refused := self._hosts.judge(scope["method"], scope["headers"]):
                self._limits.refused["host" if refused.field == "host" else "origin"] += 1
                await send_answer(send, refused)
                return
            if scope["method"] == "HEAD":  # the protocol keeps its scope, and sends no body
                scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)

    def protocol(self, **connection: Any) -> asyncio.Protocol:
        """Return what reads a new connection; the application may have a protocol of its own."""
        return cast(Callable[..., asyncio.Protocol], self._protocol)(**connection)


class HttpServer:
    """A listening socket that can serve one application."""

    def __init__(
        self, listener: Listener, host: str, settings: RouterSettings, limits: HttpLimits
    ) -> None:
        self._listener, self._limits = listener, limits
        address, port = listener.getsockname()[:2]
        self._hosts = HostRules(
            host,
            settings.allowed_hosts,
            is_loopback=ipaddress.ip_address(address.partition("%")[0]).is_loopback,
        )
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"

    @contextlib.asynccontextmanager
    async def serving(self, app: Any) -> AsyncGenerator[Served, None]:
        """Serve the application while the block runs; requests under way may end first."""
        served = Served(app, self._limits, self._hosts)
        config = uvicorn.Config(
            served,
            http=cast(type[asyncio.Protocol], served.protocol),
            ws="none",
            proxy_headers=False,  # no answer depends on them
            log_config=None,  # its lines look like ours
            log_level="warning",
            access_log=False,
            timeout_keep_alive=math.ceil(self._limits.bounds.keep_alive_seconds),
            timeout_graceful_shutdown=3,
        )
        config.load()
        server = _Server(config)
        served.behind(server)
        task = asyncio.create_task(server.serve([self._listener]))
        try:
            yield served
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def http_server(
    host: str,
    port: int,
    settings: RouterSettings,
    limits: HttpLimits,
    is_port_shared: bool = False,
) -> AsyncGenerator[HttpServer, None]:
    """Listen on host and port (0 takes a free one); raises InvalidSetting if that is impossible.

    Processes that share a port each get a part of its connections (SO_REUSEPORT).
    """
    with bound_socket(host, port, is_port_shared) as listener:
        listener.listen_within(limits)
        yield HttpServer(listener, host, settings, limits)


@contextlib.contextmanager
def bound_socket(host: str, port: int, is_port_shared: bool) -> Generator[Listener, None, None]:
    """Yield a socket that has the port and does not listen yet. Raises InvalidSetting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # named, or asyncio does not set TCP_NODELAY: an answer in two writes then takes 44 ms
    bound = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_port_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            bound.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                taken = f"port {port} of {host} is in use: give --port"
                raise InvalidSetting("port", "", taken) from error
            problem = f"{host}:{port}: {error.strerror or error}: look at router.host (a worker's"
            problem += " --host) and --port"
            raise InvalidSetting("router.host", "", problem) from error
        yield bound
    finally:
        bound.close()
