"""Three nats-servers that are one JetStream cluster, and what a test does to them.

Each is an `EmbeddedServer` with a folder of its own. With `with_cutters` every route between two of
them passes through a proxy (two a pair, one for each who connects), and the address that they tell
one another leads nowhere, so that `isolate` cuts a node off from the others and from nobody else.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvatlas.events.nats.embedded.server import EmbeddedServer
from testkit.ports import kept_port
from testkit.proxy import Proxy, proxy_to

NUM_NODES = 3
#: busy machines elect slowly
WAIT_SECONDS = 60.0
POLL_SECONDS = 0.02
MONITOR_SECONDS = 2.0

_SETTINGS = """\
server_name: {name}
cluster {{
  name: kvatlas
  listen: "127.0.0.1:{port}"
  routes: [{routes}]
  {more}
}}
"""
#: nobody listens there: what nodes tell one another must not lead around the cutters; and clients
#: are not told of other nodes, so that one stays where it is
_BEHIND_CUTTERS = 'advertise: "127.0.0.1:9", no_advertise: true'


class Node:
    """One server of the cluster."""

    def __init__(self, name: str, folder: Path, settings: str) -> None:
        self.name, self.folder = name, folder
        self.server = EmbeddedServer(folder, kept_port(), settings)

    @property
    def url(self) -> str:
        """The address for clients."""
        return self.server.url

    @property
    def store(self) -> Path:
        """The folder of its streams."""
        return self.folder / "streams"

    def send(self, signal_number: signal.Signals) -> None:
        """Send a signal to the server."""
        assert self.server.pid is not None
        os.kill(self.server.pid, signal_number)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the server's clock, so to say: it answers nobody and loses nothing."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    async def monitor(self, path: str) -> dict[str, Any]:
        """Return what the server says about itself; empty when it says nothing."""
        ports = self.folder / f"nats-server_{self.server.pid}.ports"
        with suppress(OSError, TimeoutError, json.JSONDecodeError):
            address = urlsplit(json.loads(ports.read_bytes())["monitoring"][0])
            async with asyncio.timeout(MONITOR_SECONDS):
                answer = await _get(address.hostname or "", address.port or 0, path)
            found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
            return found
        return {}

    async def is_healthy(self, what: str = "") -> bool:
        """Say whether it has all that it should have of every stream, or of `what`."""
        return (await self.monitor(f"/healthz?{what}")).get("status") == "ok"

    async def leader_of(self, stream: str) -> str:
        """Return the name of a stream's leader as far as this node knows, or nothing."""
        found = await self.monitor("/jsz?accounts=true&streams=true")
        for account in found.get("account_details") or ():
            for detail in account.get("stream_detail") or ():
                if detail["name"] == stream:
                    return str((detail.get("cluster") or {}).get("leader") or "")
        return ""


class Cluster:
    """The nodes; all of them run when a test gets it."""

    def __init__(self, nodes: list[Node], cutters: dict[tuple[int, int], Proxy]) -> None:
        self.nodes = nodes
        #: (from, to) -> what the one reaches the other through
        self._cutters = cutters

    @property
    def urls(self) -> list[str]:
        """The addresses of all nodes."""
        return [node.url for node in self.nodes]

    def others(self, node: Node) -> list[Node]:
        """Return all nodes but one."""
        return [other for other in self.nodes if other is not node]

    def isolate(self, node: Node, is_silent: bool = False) -> None:
        """Cut a node off from the others: connections break, or `is_silent` say nothing more."""
        number = self.nodes.index(node)
        for pair, cutter in self._cutters.items():
            if number in pair:
                (cutter.stall if is_silent else cutter.refuse)()

    def heal(self) -> None:
        """Let all nodes reach one another."""
        for cutter in self._cutters.values():
            cutter.restore()

    async def leader(self, stream: str, asked: Node | None = None) -> Node:
        """Return the leader of a stream, by one node's account or by that of two of them."""
        async with asyncio.timeout(WAIT_SECONDS):
            while True:
                told = [await node.leader_of(stream) for node in ([asked] if asked else self.nodes)]
                for node in self.nodes:
                    if told.count(node.name) >= min(len(told), 2):
                        return node
                await asyncio.sleep(POLL_SECONDS)

    async def until_healthy(self, what: str = "") -> None:
        """Return when every node has all that it should have."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not all([await node.is_healthy(what) for node in self.nodes]):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)


@asynccontextmanager
async def nats_cluster(
    folder: Path,
    with_cutters: bool = False,
    more: Callable[[int, Path], str] = lambda _number, _folder: "",
) -> AsyncIterator[Cluster]:
    """Run a cluster in folders below one; `more` gives a node further settings."""
    async with AsyncExitStack() as stack:
        yield await _started(stack, folder, with_cutters, more)


async def _started(
    stack: AsyncExitStack, folder: Path, with_cutters: bool, more: Callable[[int, Path], str]
) -> Cluster:
    ports = [kept_port() for _ in range(NUM_NODES)]
    cutters: dict[tuple[int, int], Proxy] = {}
    if with_cutters:
        for pair in ((a, b) for a in range(NUM_NODES) for b in range(NUM_NODES) if a != b):
            target = f"nats://127.0.0.1:{ports[pair[1]]}"
            cutters[pair] = await stack.enter_async_context(proxy_to(target))
    nodes: list[Node] = []
    for number in range(NUM_NODES):
        others = [other for other in range(NUM_NODES) if other != number]
        settings = _SETTINGS.format(
            name=f"n{number}",
            port=ports[number],
            routes=", ".join(
                f'"{cutters[number, other].url if cutters else f"nats://127.0.0.1:{ports[other]}"}"'
                for other in others
            ),
            more=_BEHIND_CUTTERS if with_cutters else "",
        )
        home = folder / f"n{number}"
        nodes.append(Node(f"n{number}", home, settings + more(number, home)))
    for node in nodes:
        stack.push_async_callback(node.server.kill)  # nothing of it is needed any more
    starts = (node.server.start() for node in nodes)
    for failure in await asyncio.gather(*starts, return_exceptions=True):
        if failure is not None:
            raise failure
    cluster = Cluster(nodes, cutters)
    await cluster.until_healthy("js-meta-only=true")
    return cluster


async def _get(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        return await reader.read()
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
