"""uvicorn with an owner: a bound socket first, so that its address is known, then an app on it."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Generator
from typing import Any

import uvicorn

from kvatlas.schemas.errors import InvalidSetting


class _Server(uvicorn.Server):
    """Leaves signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class HttpServer:
    """A listening socket that can serve one application."""

    def __init__(self, listener: socket.socket, host: str) -> None:
        self._listener = listener
        port = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"

    @contextlib.asynccontextmanager
    async def serving(self, app: Any) -> AsyncGenerator[None, None]:
        """Serve the application while the block runs; requests under way may end first."""
        config = uvicorn.Config(
            app,
            http=getattr(app, "http_protocol", "auto"),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=3,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve([self._listener]))
        try:
            yield
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
            raise InvalidSetting("port", f"{host}:{port}", str(error)) from error
        yield bound
    finally:
        bound.close()
