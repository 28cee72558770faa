"""A role's broker: given or embedded, reached however long it takes, its streams declared."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from kvatlas.common.backoff import Backoff
from kvatlas.common.runtime_folder import runtime_folder, sweep, temporary_folder
from kvatlas.events.bus import StreamSpec
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.connection import without_user
from kvatlas.events.nats.embedded.keeper import EmbeddedKeeper
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import dead_letters_stream, decisions_stream, events_stream
from kvatlas.schemas.conditions import STREAM_NOT_DECLARED, Conditions
from kvatlas.schemas.errors import BusUnavailable, FolderUnusable, StreamRefused
from kvatlas.schemas.settings import Settings

#: until a stream that the broker does not make is declared again
RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 30.0


@contextlib.asynccontextmanager
async def broker_url(settings: Settings, conditions: Conditions) -> AsyncGenerator[str, None]:
    """Yield the URL of the given broker, or of an embedded one that ends with the block.

    An embedded one is kept of use, and what is wrong with it becomes a condition.
    """
    if settings.nats.url:
        yield settings.nats.url
        return
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FolderUnusable):  # matters only where a folder is needed
            sweep(temporary_folder())
        folder = settings.nats.folder or stack.enter_context(
            runtime_folder(temporary_folder(), "nats")
        )
        async with embedded_server(Path(folder)) as server:
            keeping = asyncio.create_task(EmbeddedKeeper(server, conditions).run())
            try:
                yield server.url
            finally:
                keeping.cancel()
                await asyncio.wait((keeping,))


def shown(url: str) -> str:
    """Return the broker's URL, or several, as it may stand in a log: without credentials."""
    return ",".join(map(without_user, url.split(",")))


@contextlib.asynccontextmanager
async def bus_of(
    settings: Settings, url: str, conditions: Conditions
) -> AsyncGenerator[NatsBus, None]:
    """Yield a bus that `connected` connects; it is closed with the block.

    What is wrong with the broker becomes one of the conditions.
    """
    creds = Path(settings.nats.credentials) if settings.nats.credentials else None
    bus = NatsBus(url, creds_file=creds, replicas=settings.log.replicas, conditions=conditions)
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.asynccontextmanager
async def connected(bus: NatsBus, settings: Settings) -> AsyncGenerator[None, None]:
    """Connect, however long the broker takes to come; keep the streams declared.

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
    streams = _Streams(bus, needed, letters)
    await streams.declare()
    keeping = asyncio.create_task(streams.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))


class _Streams:
    """Declares the streams, again after each connect: a broker may come back without its data."""

    def __init__(self, bus: NatsBus, needed: Sequence[StreamSpec], letters: StreamSpec) -> None:
        self._bus, self._needed, self._letters = bus, needed, letters
        #: stream -> why it is not declared
        self._missing: dict[str, str] = {}
        self._is_back = asyncio.Event()
        bus.on_connection(lambda is_connected: self._is_back.set() if is_connected else None)

    async def declare(self) -> None:
        """Declare what is needed, however long that takes; raises StreamRefused.

        What only takes a start of a cluster, or room on the broker's disk, is waited for.
        """
        for stream in self._needed:
            await self._until_declared(stream, is_needed=True)
        await self._is_declared(self._letters)

    async def keep(self) -> None:
        """Declare all of them again after each connect, and what is missing now and then."""
        while True:
            if not self._missing:
                await self._is_back.wait()
            self._is_back.clear()
            for stream in (*self._needed, self._letters):
                await self._until_declared(stream, is_needed=False)

    async def _until_declared(self, stream: StreamSpec, *, is_needed: bool) -> None:
        pauses = Backoff(RETRY_SECONDS, LAST_RETRY_SECONDS)
        while not await self._is_declared(stream, is_needed=is_needed):
            try:
                async with asyncio.timeout(pauses.next(time.monotonic())):
                    await self._is_back.wait()
                    self._is_back.clear()
            except TimeoutError:
                pass

    async def _is_declared(self, stream: StreamSpec, *, is_needed: bool = False) -> bool:
        try:
            await self._bus.declare_stream(stream)
        except BusUnavailable as error:
            self._missing[stream.name] = str(error)
        except StreamRefused as error:
            if is_needed:
                raise
            self._missing[stream.name] = str(error)
        else:
            self._missing.pop(stream.name, None)
        if not self._missing:
            self._bus.conditions.end(STREAM_NOT_DECLARED)
        elif self._bus.connected:  # else another condition says why
            reasons = "; ".join(self._missing.values())
            is_blocking = any(each.name in self._missing for each in self._needed)
            self._bus.conditions.begin(STREAM_NOT_DECLARED, reasons, is_blocking=is_blocking)
        return stream.name not in self._missing
