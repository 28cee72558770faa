"""Puts the parts together: the control plane in one process, or one role of it.

serve    broker (embedded or given) + index + router (+ archive, + reference engines)
router   index + router          indexer   index          archive   archive
"""

import asyncio
import contextlib
import json
import logging
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

from kvatlas.events.archiver import Archiver
from kvatlas.events.bus import Bus, StreamSpec
from kvatlas.events.embedded import EmbeddedServer, embedded_server
from kvatlas.events.nats_bus import NatsBus
from kvatlas.events.sql_archive import SqlArchive
from kvatlas.events.streams import KV_DECISIONS, decisions_stream, events_stream
from kvatlas.http_server import http_server
from kvatlas.indexer.flat import FlatRadixIndex
from kvatlas.indexer.index import PrefixIndex
from kvatlas.indexer.kernel import warm
from kvatlas.indexer.reference import ReferenceIndex
from kvatlas.indexer.service import IndexService
from kvatlas.indexer.state import IndexState
from kvatlas.router.app import create_app
from kvatlas.router.recorder import StreamDecisionLog
from kvatlas.router.service import RouterService
from kvatlas.schemas.errors import BusUnavailable, ServerNotStarted, StreamRefused
from kvatlas.schemas.settings import Settings
from kvatlas.worker_fleet import EngineOptions, worker_fleet
from kvatlas.worker_hooks.process import process_ended, signals_call

BROKER_RETRY_SECONDS = 1.0

_logger = logging.getLogger(__name__)


async def serve_all(
    settings: Settings, engines: EngineOptions, as_json: bool, parent_pid: int = 0
) -> None:
    """Run everything until SIGTERM or SIGINT, or until the parent process ends (0: no matter)."""
    async with (
        _until_stopped() as stopped,
        _broker(settings) as nats_url,
        _bus(settings, nats_url) as bus,
        _archive(settings, bus, stopped),
        _index(settings, bus, stopped) as service,
        _router(settings, bus, service) as router_url,
        worker_fleet(engines, settings, nats_url, service),
    ):
        await service.wait_ready()
        _announce(as_json, router=router_url, nats=nats_url, archive=settings.archive.url)
        async with contextlib.AsyncExitStack() as stack:
            if parent_pid:
                parent = _stopping_with(process_ended(parent_pid), stopped)
                await stack.enter_async_context(parent)
            await stopped.wait()


async def serve_router(settings: Settings, as_json: bool) -> None:
    """Run a router with its own index on an existing broker until SIGTERM or SIGINT."""
    async with (
        _until_stopped() as stopped,
        _bus(settings, settings.nats.url) as bus,
        _index(settings, bus, stopped) as service,
        _router(settings, bus, service) as router_url,
    ):
        _announce(as_json, router=router_url, nats=settings.nats.url)
        await stopped.wait()


async def serve_indexer(settings: Settings, as_json: bool) -> None:
    """Run an index that answers questions and decides nothing, until SIGTERM or SIGINT."""
    async with (
        _until_stopped() as stopped,
        _bus(settings, settings.nats.url) as bus,
        _index(settings, bus, stopped) as service,
        http_server(settings.router.host, settings.router.port) as server,
    ):
        router = RouterService(
            service.index, service, settings.router, fleet_key=settings.fleet.key_bytes
        )
        async with server.serving(create_app(router, decides=False)):
            _announce(as_json, indexer=server.url, nats=settings.nats.url)
            await stopped.wait()


async def serve_archive(settings: Settings, as_json: bool) -> None:
    """Write the streams of an existing broker into the archive until SIGTERM or SIGINT."""
    async with (
        _until_stopped() as stopped,
        _bus(settings, settings.nats.url) as bus,
        _archive(settings, bus, stopped),
    ):
        _announce(as_json, archive=settings.archive.url, nats=settings.nats.url)
        await stopped.wait()


@contextlib.asynccontextmanager
async def _until_stopped() -> AsyncGenerator[asyncio.Event, None]:
    """Yield what a signal sets; a signal that comes while the role still starts ends its start."""
    stopped, role = _Stopped(), asyncio.current_task()
    assert role is not None

    def stop(_: str) -> None:
        stopped.set()
        if not stopped.is_awaited:
            role.cancel()

    async with signals_call(stop):
        try:
            yield stopped
        except asyncio.CancelledError:
            if not stopped.is_set():
                raise


class _Stopped(asyncio.Event):
    """An event that knows whether its role has come to wait for it."""

    is_awaited = False

    async def wait(self) -> Literal[True]:
        self.is_awaited = True
        return await super().wait()


@contextlib.asynccontextmanager
async def _broker(settings: Settings) -> AsyncGenerator[str, None]:
    """Yield the URL of the given broker, or of an embedded one that ends with the block."""
    if settings.nats.url:
        yield settings.nats.url
        return
    with contextlib.ExitStack() as stack:
        folder = settings.nats.folder or stack.enter_context(
            tempfile.TemporaryDirectory(prefix="kvatlas-nats-")
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
            await asyncio.sleep(BROKER_RETRY_SECONDS)


@contextlib.asynccontextmanager
async def _bus(settings: Settings, url: str) -> AsyncGenerator[Bus, None]:
    creds = Path(settings.nats.credentials) if settings.nats.credentials else None
    log = settings.log
    streams = (
        events_stream(log.max_bytes, log.max_age_seconds, log.replicas),
        decisions_stream(log.decisions_max_bytes, log.decisions_max_age_seconds, log.replicas),
    )
    async with NatsBus(url, creds_file=creds, replicas=log.replicas) as bus:
        for stream in streams:
            await bus.declare_stream(stream)
        connected = asyncio.Event()
        bus.on_connection(lambda is_connected: connected.set() if is_connected else None)
        declaring = asyncio.create_task(_declare_again(bus, streams, connected))
        try:
            yield bus
        finally:
            declaring.cancel()
            await asyncio.wait((declaring,))


async def _declare_again(bus: Bus, streams: Sequence[StreamSpec], connected: asyncio.Event) -> None:
    """Declare the streams on each connect: a broker may come back without its data."""
    while True:
        await connected.wait()
        connected.clear()
        for stream in streams:
            try:
                await bus.declare_stream(stream)
            except (BusUnavailable, StreamRefused) as error:
                _logger.error("stream %s: %s", stream.name, error)


@contextlib.asynccontextmanager
async def _index(
    settings: Settings, bus: Bus, stopped: asyncio.Event
) -> AsyncGenerator[IndexService, None]:
    index: PrefixIndex
    if settings.indexer.kernel == "flat":
        await asyncio.to_thread(warm)
        index = FlatRadixIndex()
    else:
        index = ReferenceIndex()
    async with (
        IndexService(bus, IndexState(index)) as service,
        _stopping_with(service.failed.wait(), stopped),
    ):
        yield service
    if service.failure is not None:
        raise service.failure


@contextlib.asynccontextmanager
async def _router(settings: Settings, bus: Bus, service: IndexService) -> AsyncGenerator[str, None]:
    async with (
        http_server(settings.router.host, settings.router.port) as server,
        StreamDecisionLog(bus.publisher(KV_DECISIONS), settings.router) as log,
    ):
        router = RouterService(
            service.index,
            service,
            settings.router,
            log=log,
            fleet_key=settings.fleet.key_bytes,
        )
        async with server.serving(create_app(router)):
            yield server.url


@contextlib.asynccontextmanager
async def _archive(
    settings: Settings, bus: Bus, stopped: asyncio.Event
) -> AsyncGenerator[None, None]:
    if not settings.archive.url:
        yield
        return
    archive = await asyncio.to_thread(SqlArchive, settings.archive.url)
    with archive:
        async with (
            Archiver(bus, archive) as archiver,
            _stopping_with(archiver.ended.wait(), stopped),
        ):
            yield
            await archiver.caught_up()


@contextlib.asynccontextmanager
async def _stopping_with(
    ending: Coroutine[Any, Any, object], stopped: asyncio.Event
) -> AsyncGenerator[None, None]:
    """Stop the role when `ending` returns: half a role looks alive and is not."""
    task = asyncio.ensure_future(ending)
    task.add_done_callback(lambda ended: None if ended.cancelled() else stopped.set())
    try:
        yield
    finally:
        task.cancel()


def _announce(as_json: bool, **addresses: str) -> None:
    """Say where things are, once they can be used."""
    found = {name: address for name, address in addresses.items() if address}
    if as_json:
        print(json.dumps(found), flush=True)
        return
    for name, address in found.items():
        print(f"{name:<8} {address}", flush=True)
