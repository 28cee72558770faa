"""Puts the parts together: the control plane in one process, or one role of it.

serve    broker (embedded or given) + index + router (+ archive, + reference engines)
router   index + router          indexer   index          archive   archive

An index whose memory is shared (`serve --routers N`, `indexer.shared_folder`) is read by routers in
other processes, which then have none of their own.
"""

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

from kvatlas.events.archiver import Archiver
from kvatlas.events.bus import Bus, StreamSpec
from kvatlas.events.embedded import EmbeddedServer, embedded_server
from kvatlas.events.nats_bus import NatsBus
from kvatlas.events.streams import KV_DECISIONS, decisions_stream, events_stream
from kvatlas.http_server import http_server
from kvatlas.indexer.flat import FlatRadixIndex
from kvatlas.indexer.index import PrefixIndex
from kvatlas.indexer.reader import IndexReader
from kvatlas.indexer.reference import ReferenceIndex
from kvatlas.indexer.service import IndexService
from kvatlas.indexer.shared.arrays import SharedArrays
from kvatlas.indexer.shared.reader import SharedIndexReader
from kvatlas.indexer.snapshot_metrics import SnapshotCollector
from kvatlas.indexer.snapshot_writing import SnapshotSettings
from kvatlas.indexer.state import IndexState
from kvatlas.indexer.warming import warm_kernels
from kvatlas.router.app import create_app
from kvatlas.router.recorder import StreamDecisionLog
from kvatlas.router.service import IndexFeed, RouterService
from kvatlas.router.siblings import Siblings, SiblingState
from kvatlas.router_processes import router_processes
from kvatlas.runtime_folder import runtime_folder
from kvatlas.schemas.errors import (
    BusUnavailable,
    InvalidSetting,
    ServerNotStarted,
    StreamRefused,
)
from kvatlas.schemas.settings import Settings
from kvatlas.worker_fleet import EngineOptions, worker_fleet
from kvatlas.worker_hooks.process import process_ended, signals_call

BROKER_RETRY_SECONDS = 1.0
#: loading kernels from the cache takes less
LONG_WARM_SECONDS = 1.0

_logger = logging.getLogger(__name__)


async def serve_all(
    settings: Settings,
    engines: EngineOptions,
    as_json: bool,
    parent_pid: int = 0,
    num_routers: int = 0,
) -> None:
    """Run everything until SIGTERM or SIGINT, or until the parent process ends (0: no matter).

    With `num_routers` they are processes of their own, which read this one's index; 0 is one here.
    """
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        stopped = await enter(_until_stopped())
        nats_url = await enter(_broker(settings))
        bus = await enter(_bus(settings, nats_url))
        await enter(_archive(settings, bus, stopped))
        folder = _shared_folder(settings)
        if num_routers and folder is None:
            folder = stack.enter_context(runtime_folder()) / "index"
        service = await enter(_index(settings, bus, stopped, folder))
        urls = {}
        if not num_routers:
            urls["router"] = await enter(_router(settings, bus, service.index, service))
        await enter(worker_fleet(engines, settings, nats_url, service))
        await service.wait_ready()
        if num_routers and folder is not None:
            urls["router"] = await enter(router_processes(num_routers, settings, nats_url, folder))
            urls["indexer"] = await enter(_index_pages(settings, service, settings.router.host, 0))
        _announce(as_json, **urls, nats=nats_url, archive=settings.archive.url)
        if parent_pid:
            await enter(_stopping_with(process_ended(parent_pid), stopped))
        await stopped.wait()


async def serve_router(settings: Settings, as_json: bool, parent_pid: int = 0) -> None:
    """Run a router on an existing broker until SIGTERM or SIGINT, or the parent's end (0: no).

    Its index is its own, or another process's if `indexer.shared_folder` names one.
    """
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        stopped = await enter(_until_stopped())
        bus = await enter(_bus(settings, settings.nats.url))
        if settings.indexer.shared_folder:
            await _warm()
            reader = SharedIndexReader(Path(settings.indexer.shared_folder))
            router_url = await enter(_router(settings, bus, reader, reader))
        else:
            service = await enter(_index(settings, bus, stopped))
            router_url = await enter(_router(settings, bus, service.index, service))
        _announce(as_json, router=router_url, nats=settings.nats.url)
        if parent_pid:
            await enter(_stopping_with(process_ended(parent_pid), stopped))
        await stopped.wait()


async def serve_indexer(settings: Settings, as_json: bool) -> None:
    """Run an index that answers questions and decides nothing, until SIGTERM or SIGINT."""
    folder = _shared_folder(settings)
    async with (
        _until_stopped() as stopped,
        _bus(settings, settings.nats.url) as bus,
        _index(settings, bus, stopped, folder) as service,
        _index_pages(settings, service, settings.router.host, settings.router.port) as url,
    ):
        _announce(as_json, indexer=url, nats=settings.nats.url)
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
    settings: Settings, bus: Bus, stopped: asyncio.Event, shared_folder: Path | None = None
) -> AsyncGenerator[IndexService, None]:
    index: PrefixIndex
    shared: SharedArrays | None = None
    if shared_folder is not None and settings.indexer.kernel != "flat":
        raise InvalidSetting("indexer.kernel", settings.indexer.kernel, "only `flat` can be shared")
    if settings.indexer.kernel == "flat":
        await _warm()
        shared = SharedArrays(shared_folder) if shared_folder else None
        index = FlatRadixIndex(arrays=shared)
    else:
        index = ReferenceIndex()
    async with (
        IndexService(
            bus, IndexState(index), shared=shared, snapshots=_snapshots(settings)
        ) as service,
        _stopping_with(service.failed.wait(), stopped),
    ):
        yield service
    if service.failure is not None:
        raise service.failure


def _snapshots(settings: Settings) -> SnapshotSettings | None:
    at = settings.indexer
    if not at.snapshot_seconds:
        return None
    return SnapshotSettings(
        at.snapshot_seconds, at.snapshot_messages, at.snapshots_kept, at.snapshots_kept_seconds
    )


async def _warm() -> None:
    """Have the kernels before anybody asks, and say so where that takes long."""
    seconds, num_compiled, folder = await asyncio.to_thread(warm_kernels)
    if num_compiled and seconds > LONG_WARM_SECONDS:
        where = f"into {folder}" if folder else "for this process alone: no cache can be written"
        text = f"kernels  {num_compiled} compiled in {seconds:.1f} s, {where}"
        print(f"{text}; `kvatlas warm` does it in advance", file=sys.stderr, flush=True)


def _shared_folder(settings: Settings) -> Path | None:
    return Path(settings.indexer.shared_folder) if settings.indexer.shared_folder else None


@contextlib.asynccontextmanager
async def _index_pages(
    settings: Settings, service: IndexService, host: str, port: int
) -> AsyncGenerator[str, None]:
    """Answer questions about the index over HTTP; yields the URL."""
    async with http_server(host, port) as server:
        router = RouterService(
            service.index, service, settings.router, fleet_key=settings.fleet.key_bytes
        )
        app = create_app(router, decides=False)
        app.metrics.registry.register(SnapshotCollector(service))
        async with server.serving(app):
            yield server.url


@contextlib.asynccontextmanager
async def _router(
    settings: Settings, bus: Bus, index: IndexReader, feed: IndexFeed
) -> AsyncGenerator[str, None]:
    at = settings.router
    async with (
        http_server(at.host, at.port, at.is_port_shared) as server,
        StreamDecisionLog(bus.publisher(KV_DECISIONS), settings.router) as log,
    ):
        router = RouterService(
            index,
            feed,
            settings.router,
            log=log,
            fleet_key=settings.fleet.key_bytes,
        )
        state = SiblingState(router.router_id, router.loads, router.overlay, router.failures)
        async with Siblings(bus, state, router.log.find) as siblings:
            router.say = siblings.say
            app = create_app(router, siblings=siblings)
            if isinstance(feed, IndexService):
                app.metrics.registry.register(SnapshotCollector(feed))
            async with server.serving(app):
                yield server.url


@contextlib.asynccontextmanager
async def _archive(
    settings: Settings, bus: Bus, stopped: asyncio.Event
) -> AsyncGenerator[None, None]:
    if not settings.archive.url:
        yield
        return
    from kvatlas.events.sql_archive import SqlArchive  # 0.2 s, which the other roles are spared

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
