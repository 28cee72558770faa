"""The brokers that the contracts of the bus run on."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvatlas.events.bus import Bus
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.nats.publishing.fast_ingest import BUSY_MESSAGES

Connect = Callable[[], Bus]


_NATS = [
    pytest.param(name, marks=pytest.mark.integration) for name in ("nats", "nats always batching")
]


@pytest.fixture(params=["memory", *_NATS])
async def connect(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    """Give a function that returns a new connection, to be entered, to one fresh broker."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            broker = MemoryBroker()
            yield broker.connect
        else:
            server = await stack.enter_async_context(embedded_server(tmp_path))
            busy_messages = BUSY_MESSAGES if request.param == "nats" else 1
            yield lambda: NatsBus(server.url, busy_messages=busy_messages)


@pytest.fixture
async def bus(connect: Connect) -> AsyncIterator[Bus]:
    async with connect() as bus:
        yield bus
