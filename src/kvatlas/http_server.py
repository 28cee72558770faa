"""uvicorn with an owner: a bound socket first, so that its address is known, then an app on it."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from kvatlas.schemas.errors import InvalidSetting

#: ends a connection behind the answer that has it
CLOSE = (b"connection", b"close")


class _Server(uvicorn.Server):
    """Leaves signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Served:
    """The application behind a server. Another may take its place while the server runs.

    A connection that is open then goes on with the new one, by uvicorn's own protocol.
    """

    def __init__(self, app: Any) -> None:
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

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass on one request."""
        await self.app(scope, receive, send)

    def protocol(self, **connection: Any) -> asyncio.Protocol:
        """Return what reads a new connection; the application may have a protocol of its own."""
        protocol = getattr(self.app, "http_protocol", AutoHTTPProtocol)
        return cast(Callable[..., asyncio.Protocol], protocol)(**connection)


class HttpServer:
    """A listening socket that can serve one application."""

    def __init__(self, listener: socket.socket, host: str) -> None:
        self._listener = listener
        port = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"

    @contextlib.asynccontextmanager
    async def serving(self, app: Any) -> AsyncGenerator[Served, None]:
        """Serve the application while the block runs; requests under way may end first."""
        served = Served(app)
        config = uvicorn.Config(
            served,
            http=cast(type[asyncio.Protocol], served.protocol),
            log_config=None,  # its lines look like ours
            log_level="warning",
            access_log=False,
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
    host: str, port: int, is_port_shared: bool = False
) -> AsyncGenerator[HttpServer, None]:
    """Listen on host and port (0 takes a free one); raises InvalidSetting if that is impossible.

    Processes that share a port each get a part of its connections (SO_REUSEPORT).
    """
    with bound_socket(host, port, is_port_shared) as listener:
        listener.setblocking(False)
        listener.listen(1024)
        yield HttpServer(listener, host)


@contextlib.contextmanager
def bound_socket(
    host: str, port: int, is_port_shared: bool
) -> Generator[socket.socket, None, None]:
    """Yield a socket that has the port and does not listen yet. Raises InvalidSetting."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # named, or asyncio does not set TCP_NODELAY: an answer in two writes then takes 44 ms
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
