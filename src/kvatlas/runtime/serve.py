"""Puts the parts together: the control plane in one process, or one role of it.

serve    broker (embedded or given) + index + router (+ archive, + reference engines)
router   index + router          indexer   index          archive   archive

An index whose memory is shared (`serve --routers N`, `indexer.shared_folder`) is read by routers in
other processes, which then have none of their own.
"""

import asyncio
import contextlib
import gc
import os
import socket
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from kvatlas.common.line_writing import write_line
from kvatlas.common.runtime_folder import runtime_folder
from kvatlas.events.archive.archiver import Archiver
from kvatlas.events.bus import Bus
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_DECISIONS
from kvatlas.indexer.fold.budgets import BudgetSettings
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index.flat import FlatRadixIndex
from kvatlas.indexer.index.port import PrefixIndex
from kvatlas.indexer.index.reference import ReferenceIndex
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.reader import SharedIndexReader
from kvatlas.indexer.reader import IndexReader
from kvatlas.indexer.service.dead_letter_metrics import DeadLetterCollector
from kvatlas.indexer.service.dead_letters import DeadLetterSettings
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.indexer.service.snapshot_metrics import SnapshotCollector
from kvatlas.indexer.snapshots.writing import SnapshotSettings
from kvatlas.indexer.warming import warm_kernels
from kvatlas.router.http.app import RouterApp, create_app
from kvatlas.router.http.archive_app import ArchiveApp, ArchiveCollector
from kvatlas.router.recorder import StreamDecisionLog
from kvatlas.router.replicas.replicas import ReplicaState, RouterReplicas
from kvatlas.router.service import IndexFeed, RouterService
from kvatlas.runtime.broker import broker_url, bus_of, connected, shown
from kvatlas.runtime.health_server import HealthServer
from kvatlas.runtime.role import ProcessRole, role
from kvatlas.runtime.router_processes import kept_port, router_processes
from kvatlas.runtime.stopping import stopping_with
from kvatlas.runtime.worker_fleet import EngineOptions, worker_fleet
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.printable import printable
from kvatlas.schemas.settings import Settings

#: loading kernels from the cache takes less
LONG_WARM_SECONDS = 1.0
#: how long an archive that ends waits for what is in the streams already
CATCH_UP_SECONDS = 5.0


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
    async with role(as_json, parent_pid, settings.router.drain_seconds) as it:
        enter, at, urls = it.parts.enter_async_context, settings.router, dict[str, str]()
        port, folder = at.port, _shared_folder(settings)
        if num_routers:
            port = it.parts.enter_context(kept_port(at.host, port))
            folder = folder or it.parts.enter_context(runtime_folder()) / "index"
        is_port_shared = bool(num_routers) or at.is_port_shared
        face = await it.show(_face(it, settings, port, is_port_shared))
        if num_routers or not at.is_port_shared:  # where others share it, they answer meanwhile
            await face.serve()
        nats_url = await enter(broker_url(settings, it.conditions))
        bus = await enter(bus_of(settings, nats_url, it.conditions))
        await _connect(it, bus, settings)
        archiver = await enter(_archive(it, settings, bus))
        service = await enter(_index(it, settings, bus, folder))
        if not num_routers:
            app, replicas = await enter(_router(it, settings, bus, service.index, service))
            _measure_archive(app, archiver)
            await enter(replicas)
            await face.serve(app)
            urls["router"] = face.url
        await enter(worker_fleet(engines, settings, nats_url, service))
        await service.wait_ready()
        if num_routers and folder is not None:
            routers = router_processes(num_routers, settings, nats_url, folder, port, it.conditions)
            processes = await enter(routers)
            it.on_drain.append(processes.drain)
            urls["router"] = processes.url
            urls |= {f"router_{n}": url for n, url in enumerate(processes.owned, 1)}
            await face.close()
            pages = await it.show(_face(it, settings, 0))
            index_app = _index_app(it, settings, service)
            _measure_archive(index_app, archiver)
            await pages.serve(index_app)
            urls["indexer"] = pages.url
        it.announcement.now(**urls, nats=shown(nats_url), archive=settings.archive.url)
        await it.stopped.wait()


async def serve_router(settings: Settings, as_json: bool, parent_pid: int = 0) -> None:
    """Run a router on an existing broker until SIGTERM or SIGINT, or the parent's end (0: no).

    Its index is its own, or another process's if `indexer.shared_folder` names one; that one it
    reads while there is no broker, too.
    """
    async with role(as_json, parent_pid, settings.router.drain_seconds) as it:
        enter, at = it.parts.enter_async_context, settings.router
        face = await it.show(_face(it, settings, at.port, at.is_port_shared))
        # whoever shares a port has one more, or nobody could ask for its metrics
        own = await it.show(_face(it, settings, 0))
        bus = await enter(bus_of(settings, settings.nats.url, it.conditions))
        if settings.indexer.shared_folder:
            await _warm()
            reader = SharedIndexReader(Path(settings.indexer.shared_folder))
            app, replicas = await enter(_router(it, settings, bus, reader, reader))
            await face.serve(app)
            if at.is_port_shared:
                await own.serve(app)
            it.announcement.soon(
                it.wait, router=face.url, own=own.url, nats=shown(settings.nats.url)
            )
            await _connect(it, bus, settings)
        else:
            if not at.is_port_shared:
                await face.serve()
                it.announcement.soon(it.wait, router=face.url, nats=shown(settings.nats.url))
            await _connect(it, bus, settings)
            service = await enter(_index(it, settings, bus))
            app, replicas = await enter(_router(it, settings, bus, service.index, service))
        await enter(replicas)
        await face.serve(app)
        if at.is_port_shared:
            await own.serve(app)
        it.announcement.now(router=face.url, own=own.url, nats=shown(settings.nats.url))
        await it.stopped.wait()


async def serve_indexer(settings: Settings, as_json: bool) -> None:
    """Run an index that answers questions and decides nothing, until SIGTERM or SIGINT."""
    async with role(as_json, drain_seconds=settings.router.drain_seconds) as it:
        at, limits = settings.router, it.http_limits(settings.router)
        waiting = HealthServer(it.wait, at, at.port, limits, decides=False)
        face = await it.show(waiting)
        await face.serve()
        bus = await it.parts.enter_async_context(bus_of(settings, settings.nats.url, it.conditions))
        it.announcement.soon(it.wait, indexer=face.url, nats=shown(settings.nats.url))
        await _connect(it, bus, settings)
        folder = _shared_folder(settings)
        service = await it.parts.enter_async_context(_index(it, settings, bus, folder))
        await face.serve(_index_app(it, settings, service))
        it.announcement.now(indexer=face.url, nats=shown(settings.nats.url))
        await it.stopped.wait()


async def serve_archive(settings: Settings, as_json: bool) -> None:
    """Write the streams of an existing broker into the archive until SIGTERM or SIGINT.

    What the streams have by then is written before the end, for CATCH_UP_SECONDS at most, and
    `/readyz` says meanwhile that the process drains.
    """
    async with role(as_json) as it:
        at, nats_url = settings.router, settings.nats.url
        limits = it.http_limits(at)
        waiting = HealthServer(it.wait, at, settings.archive.port, limits, decides=False)
        face = await it.show(waiting, outlives_parts=True)
        await face.serve()
        bus = await it.parts.enter_async_context(bus_of(settings, nats_url, it.conditions))
        it.announcement.soon(
            it.wait, archive=settings.archive.url, health=face.url, nats=shown(nats_url)
        )
        await _connect(it, bus, settings)
        archiver = await it.parts.enter_async_context(_archive(it, settings, bus))
        if archiver is not None:
            await face.serve(ArchiveApp(archiver, it.wait))
        it.announcement.now(archive=settings.archive.url, health=face.url, nats=shown(nats_url))
        await it.stopped.wait()
        it.begin_drain("asked to end, it writes what the log has")


def _face(
    it: ProcessRole, settings: Settings, port: int, is_port_shared: bool = False
) -> HealthServer:
    limits = it.http_limits(settings.router)
    return HealthServer(it.wait, settings.router, port, limits, is_port_shared=is_port_shared)


async def _connect(it: ProcessRole, bus: NatsBus, settings: Settings) -> None:
    it.wait.begin_with(bus)
    await it.parts.enter_async_context(connected(bus, settings))
    it.wait.begin("loading the index")


def _service_settings(settings: Settings) -> IndexServiceLimits:
    silence = max(10.0, 3 * settings.sidecar.digest_seconds)
    return IndexServiceLimits(budget=_budget(settings), log_silence_seconds=silence)


@contextlib.asynccontextmanager
async def _index(
    it: ProcessRole, settings: Settings, bus: Bus, shared_folder: Path | None = None
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
    service = IndexService(
        bus,
        IndexState(index),
        settings=_service_settings(settings),
        name=f"{socket.gethostname()}:{os.getpid()}",
        shared=shared,
        snapshots=_snapshots(settings),
        dead_letters=DeadLetterSettings(),
        conditions=it.conditions,
    )
    try:
        async with service, stopping_with(service.failed.wait(), it.stopped):
            yield service
    finally:
        if service.failure is not None:
            raise service.failure


def _budget(settings: Settings) -> BudgetSettings:
    """Return what an instance may say before it is throttled."""
    at = settings.indexer
    return BudgetSettings(
        at.event_bytes_per_second,
        at.event_burst_bytes,
        at.event_throttle_seconds,
        at.max_event_throttle_seconds,
    )


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
    # what compiled code keeps lives as long as the process, and to look through it for garbage
    # would stop every answer for some 20 ms
    gc.collect()
    gc.freeze()
    if num_compiled and seconds > LONG_WARM_SECONDS:
        where = f"into {folder}" if folder else "for this process alone: no cache can be written"
        text = f"kernels  {num_compiled} compiled in {seconds:.1f} s, {where}"
        text = f"{text}; `kvatlas warm` does it in advance"
        write_line(sys.stderr, printable(text))


def _shared_folder(settings: Settings) -> Path | None:
    return Path(settings.indexer.shared_folder) if settings.indexer.shared_folder else None


def _index_app(it: ProcessRole, settings: Settings, service: IndexService) -> RouterApp:
    """Return what answers questions about the index over HTTP."""
    router = RouterService(
        service.index, service, settings.router, fleet_key=settings.fleet.key_bytes
    )
    app = create_app(router, decides=False, conditions=it.conditions)
    _measure(app, service)
    return app


@contextlib.asynccontextmanager
async def _router(
    it: ProcessRole, settings: Settings, bus: Bus, index: IndexReader, feed: IndexFeed
) -> AsyncGenerator[tuple[RouterApp, RouterReplicas], None]:
    """Yield a router's application, and what is to be entered once there is a broker."""
    async with StreamDecisionLog(bus.publisher(KV_DECISIONS), settings.router) as log:
        router = RouterService(
            index,
            feed,
            settings.router,
            log=log,
            fleet_key=settings.fleet.key_bytes,
        )
        state = ReplicaState(
            router.router_id, router.loads, router.overlay, router.failures, router.overdue
        )
        replicas = RouterReplicas(bus, state, router.log.find)
        router.publish = replicas.publish
        app = create_app(router, replicas=replicas, conditions=it.conditions)
        if isinstance(feed, IndexService):
            _measure(app, feed)
        yield app, replicas


def _measure(app: RouterApp, service: IndexService) -> None:
    app.metrics.registry.register(SnapshotCollector(service))
    app.metrics.registry.register(DeadLetterCollector(service))


def _measure_archive(app: RouterApp, archiver: Archiver | None) -> None:
    if archiver is not None:
        app.metrics.registry.register(ArchiveCollector(archiver))


@contextlib.asynccontextmanager
async def _archive(
    it: ProcessRole, settings: Settings, bus: Bus
) -> AsyncGenerator[Archiver | None, None]:
    if not settings.archive.url:
        yield None
        return
    from kvatlas.events.archive.sql import SqlArchive  # 0.2 s, which the other roles are spared

    archive = await asyncio.to_thread(SqlArchive, settings.archive.url)
    with archive:
        async with (
            Archiver(bus, archive, conditions=it.conditions) as archiver,
            stopping_with(archiver.ended.wait(), it.stopped),
        ):
            yield archiver
            await archiver.finish(CATCH_UP_SECONDS)
