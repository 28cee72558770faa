"""A TCP proxy that a test can cut, stall and restore: the network between a client and a server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on, both ways, while the gate is open."""

    def __init__(self, target_url: str) -> None:
        target = urlsplit(target_url)
        self._target = (target.hostname or "", target.port or 0)
        self._gate = asyncio.Event()
        self._gate.set()
        self._is_refusing = False
        #: of each connection: set to break it
        self._links: set[asyncio.Event] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.url = ""
        self.num_links = 0

    def cut(self) -> None:
        """Break all connections; new ones are taken."""
        for link in self._links:
            link.set()

    def refuse(self) -> None:
        """Break all connections and each new one until `restore`."""
        self._is_refusing = True
        self.cut()

    def stall(self) -> None:
        """Hold all bytes back until `restore`; nobody is told."""
        self._gate.clear()

    def restore(self) -> None:
        self._is_refusing = False
        self._gate.set()

    async def on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.num_links += 1
        link = asyncio.Event()
        self._links.add(link)
        try:
            if not self._is_refusing:
                await self._join(reader, writer, link)
        finally:
            self._links.discard(link)
            await _close(writer)

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: asyncio.Event
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            return
        ways = (self._pass_on(reader, far_writer), self._pass_on(far_reader, writer), link.wait())
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await _close(far_writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._gate.wait()
            writer.write(data)
            await writer.drain()

    async def close(self) -> None:
        self.refuse()
        self._gate.set()
        while self._tasks:
            await asyncio.wait(self._tasks)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


@asynccontextmanager
async def proxy_to(target_url: str) -> AsyncIterator[Proxy]:
    """Run a proxy on a free loopback port; its `url` stands for the target's."""
    proxy = Proxy(target_url)
    server = await asyncio.start_server(proxy.on_client, "127.0.0.1", 0)
    proxy.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
