"""An application behind a real socket, on a port of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn


@asynccontextmanager
async def served(app: Any, **options: Any) -> AsyncIterator[int]:
    """Serve an application on this event loop; yields its port."""
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
