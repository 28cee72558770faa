"""A role's broker: given or embedded, reached however long it takes, its streams declared."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from kvatlas.events.bus import Bus, StreamSpec
from kvatlas.events.embedded import EmbeddedServer, embedded_server
from kvatlas.events.nats_bus import NatsBus
from kvatlas.events.nats_connection import without_user
from kvatlas.events.streams import dead_letters_stream, decisions_stream, events_stream
from kvatlas.runtime_folder import runtime_folder, temporary_folder
from kvatlas.schemas.errors import BusUnavailable, ServerNotStarted, StreamRefused
from kvatlas.schemas.settings import Settings

RETRY_SECONDS = 1.0

_logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def broker_url(settings: Settings) -> AsyncGenerator[str, None]:
    """Yield the URL of the given broker, or of an embedded one that ends with the block."""
    if settings.nats.url:
        yield settings.nats.url
        return
    with contextlib.ExitStack() as stack:
        folder = settings.nats.folder or stack.enter_context(
            runtime_folder(temporary_folder(), "nats")
        )
        async with embedded_server(Path(folder)) as server:
            watch = asyncio.create_task(_keep_up(server))
            try:
                yield server.url
            finally:
                watch.cancel()
                await asyncio.wait((watch,))


async def _keep_up(server: EmbeddedServer) -> None:
    """Start the broker again whenever it ends, which only a crash or a kill does here."""
    while True:
        await server.ended()
        _logger.error("the embedded broker has ended and is started again")
        try:
            await server.restart()
        except ServerNotStarted as error:
            _logger.error("%s", error)
            await asyncio.sleep(RETRY_SECONDS)


def shown(url: str) -> str:
    """Return the broker's URL, or several, as it may stand in a log: without credentials."""
    return ",".join(map(without_user, url.split(",")))


@contextlib.asynccontextmanager
async def bus_of(settings: Settings, url: str) -> AsyncGenerator[NatsBus, None]:
    """Yield a bus that `connected` connects; it is closed with the block."""
    creds = Path(settings.nats.credentials) if settings.nats.credentials else None
    bus = NatsBus(url, creds_file=creds, replicas=settings.log.replicas)
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def connected(bus: NatsBus, settings: Settings) -> AsyncGenerator[None, None]:
    """Connect, however long the broker takes to come, and keep the streams declared.

    Raises InvalidSetting for an address or credentials that are wrong, and StreamRefused.
    """
    log = settings.log
    needed = (
        events_stream(log.max_bytes, log.max_age_seconds, log.replicas),
        decisions_stream(log.decisions_max_bytes, log.decisions_max_age_seconds, log.replicas),
    )
    letters = dead_letters_stream(
        log.dead_letters_max_bytes, log.dead_letters_max_age_seconds, log.replicas
    )
    await bus.open()
    for stream in needed:
        await _declare(bus, stream)
    await _declare_if_possible(bus, letters)
    is_back = asyncio.Event()
    bus.on_connection(lambda is_connected: is_back.set() if is_connected else None)
    declaring = asyncio.create_task(_declare_again(bus, (*needed, letters), is_back))
    try:
        yield
    finally:
        declaring.cancel()
        await asyncio.wait((declaring,))


async def _declare(bus: Bus, stream: StreamSpec) -> None:
    """Declare a stream once the broker can: a cluster that has just started has no leader."""
    while True:
        try:
            await bus.declare_stream(stream)
            return
        except BusUnavailable as error:
            _logger.warning("stream %s: %s; retrying", stream.name, error)
            await asyncio.sleep(RETRY_SECONDS)


async def _declare_if_possible(bus: Bus, stream: StreamSpec) -> None:
    try:
        await bus.declare_stream(stream)
    except (BusUnavailable, StreamRefused) as error:
        _logger.error("stream %s: %s", stream.name, error)


async def _declare_again(bus: Bus, streams: Sequence[StreamSpec], is_back: asyncio.Event) -> None:
    """Declare the streams on each connect: a broker may come back without its data."""
    while True:
        await is_back.wait()
        is_back.clear()
        for stream in streams:
            await _declare_if_possible(bus, stream)
