"""An application behind a real socket, on a port of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from kvatlas.router.http.server.limits import Bounds, HttpLimits
from kvatlas.runtime.http_server import http_server
from kvatlas.schemas.settings import RouterSettings


@asynccontextmanager
async def served(app: Any, **options: Any) -> AsyncIterator[int]:
    """Serve an application on this event loop, with plain uvicorn; yields its port."""
    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, **options)
    with config.bind_socket() as socket:
        socket.listen()
        server = uvicorn.Server(config)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[socket]))
            try:
                yield socket.getsockname()[1]
            finally:
                server.should_exit = True


@asynccontextmanager
async def served_within(
    app: Any,
    bounds: Bounds | None = None,
    settings: RouterSettings | None = None,
    limits: HttpLimits | None = None,
) -> AsyncIterator[int]:
    """Serve an application as our roles do; yields its port."""
    limits = limits or HttpLimits(bounds or Bounds())
    async with (
        http_server("127.0.0.1", 0, settings or RouterSettings(), limits) as server,
        server.serving(app),
    ):
        yield int(server.url.rsplit(":", 1)[1])


class Wrapped:
    """An application without a protocol of its own, so that uvicorn's serves all its routes."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
