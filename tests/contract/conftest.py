"""The brokers that the contracts of the bus run on."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvatlas.events.bus import Bus
from kvatlas.events.embedded import embedded_server
from kvatlas.events.memory_bus import MemoryBroker
from kvatlas.events.nats_bus import NatsBus

Connect = Callable[[], Bus]


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.integration)])
async def connect(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    """Give a function that returns a new connection, to be entered, to one fresh broker."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            broker = MemoryBroker()
            yield broker.connect
        else:
            server = await stack.enter_async_context(embedded_server(tmp_path))
            yield lambda: NatsBus(server.url)


@pytest.fixture
async def bus(connect: Connect) -> AsyncIterator[Bus]:
    async with connect() as bus:
        yield bus
