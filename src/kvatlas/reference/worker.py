"""A worker to try things with: the reference engine, its sidecar, and HTTP in front.

reference/http.py has its routes.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator
from pathlib import Path

from msgspec import Struct

from kvatlas.common.own_files import FOLDER_MODE
from kvatlas.common.runtime_folder import runtime_folder
from kvatlas.reference.clock import ScaledClock
from kvatlas.reference.engine import EngineOptions, ReferenceEngine
from kvatlas.reference.http import create_worker_app
from kvatlas.runtime.http_server import http_server, process_limits
from kvatlas.runtime.stopping import Stopped
from kvatlas.schemas.errors import (
    FolderUnusable,
    SidecarEnded,
)
from kvatlas.schemas.fleet import KvLayout
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.settings import Settings
from kvatlas.worker_hooks.reporting.engine_pulse import LOOK_SECONDS, EnginePulse
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingWriter
from kvatlas.worker_hooks.sidecar.beside_engine import SIDECAR_SILENT_SECONDS
from kvatlas.worker_hooks.sidecar.channel import SidecarChannel
from kvatlas.worker_hooks.sidecar.launch import FENCED_STATUS, SidecarProcess, start_sidecar
from kvatlas.worker_hooks.sidecar.options import SidecarOptions, shared_options
from kvatlas.worker_hooks.sidecar.process import process_ended, signals_call
from kvatlas.worker_hooks.sidecar.stop_deadline import begin_stop_with, end_of
from kvatlas.worker_hooks.transfer.pool import ServePool

#: the engine's loop pumps many times as often
LOOP_SECONDS = 2.0


_logger = logging.getLogger(__name__)


class WorkerOptions(Struct, frozen=True):
    """One reference worker; `folder` takes its shared memory, its ring and its socket."""

    name: str
    settings: Settings
    host: str = "127.0.0.1"
    port: int = 0
    model: str = "reference"
    num_blocks: int = 1_000
    block_bytes: int = 16_384
    block_tokens: int = 16
    prefill_tokens_per_second: float = 20_000.0
    decode_tokens_per_second: float = 50.0
    speed: float = 1.0
    folder: str = ""
    #: the worker stops when this process ends; 0 watches none
    parent_pid: int = 0

    def fingerprint(self) -> bytes:
        """Return what has to be equal for two reference workers to exchange KV."""
        layout = KvLayout(
            self.model, "bytes", "shake_128", 1, 1, self.block_tokens, self.block_bytes
        )
        return layout.fingerprint()


async def run_worker(options: WorkerOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; `announce` is told the URL.

    On SIGTERM the sidecar ends first and says that the worker is down, so that routers leave it
    out; requests are served for `sidecar.drain_seconds` more, without pulls.
    Raises SidecarEnded when the sidecar ends by itself, such as for a newer process of this name.
    """
    if options.parent_pid:
        begin_stop_with(end_of(options.parent_pid))
    stopped, at = Stopped(), options.settings.router
    with _folder(options) as folder, contextlib.closing(stopped):
        async with (
            signals_call(stopped.ask),
            http_server(options.host, options.port, at, process_limits(at)) as server,
            _engine(options, server.url, folder, stopped) as (engine, channel, sidecar),
            server.serving(
                create_worker_app(
                    engine,
                    channel,
                    options.model,
                    lambda: stopped.is_draining,
                    at.max_body_bytes,
                    InstanceId(options.name, 0),
                )
            ) as served,
        ):

            def drain() -> float:
                served.end_connections()
                sidecar.begin_stop()
                return options.settings.sidecar.drain_seconds

            stopped.drain = drain
            announce(server.url)
            watch = asyncio.create_task(_stop_with_parent(options.parent_pid, stopped))
            await stopped.wait()
            watch.cancel()
            if (status := sidecar.exit_status) == FENCED_STATUS:
                raise SidecarEnded(f"another process runs under the name of {options.name}")
            if status:
                raise SidecarEnded(f"the sidecar ended with status {status}")


@contextlib.contextmanager
def _folder(options: WorkerOptions) -> Generator[Path, None, None]:
    """Yield where the worker's files lie: given, or in shared memory and gone afterwards."""
    if options.folder:
        folder = Path(options.folder)
        try:
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise FolderUnusable(folder, error.strerror or str(error), "--folder") from error
        yield folder
        return
    with runtime_folder() as folder:
        yield folder


@contextlib.asynccontextmanager
async def _engine(
    options: WorkerOptions, base_url: str, folder: Path, stopped: Stopped
) -> AsyncGenerator[tuple[ReferenceEngine, SidecarChannel, SidecarProcess], None]:
    ring = RingWriter.create(folder / "ring", lists=True)
    with contextlib.closing(WorkerHook(ring)) as hook:
        sidecar_options = _sidecar_options(options, base_url, folder)
        sidecar = start_sidecar(sidecar_options)
        watch = asyncio.create_task(_watch(sidecar, ring, stopped))
        try:
            async with SidecarChannel(Path(sidecar_options.socket_path)) as channel:
                await _until_ready(channel, sidecar)
                with ServePool.attach(sidecar_options.path_of_pool) as pool:
                    clock = ScaledClock(options.speed)
                    engine = ReferenceEngine(_engine_options(options), hook, clock, pool, channel)
                    async with engine:
                        hook.start_beats(LOOP_SECONDS)
                        yield engine, channel, sidecar
        finally:
            watch.cancel()
            await asyncio.to_thread(sidecar.stop)


async def _until_ready(channel: SidecarChannel, sidecar: SidecarProcess) -> None:
    ready = asyncio.create_task(channel.wait_ready())
    ended = asyncio.create_task(process_ended(sidecar.pid))
    try:
        await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise SidecarEnded(f"the sidecar ended with status {sidecar.exit_status} at its start")
        ready.result()
    finally:
        for task in (ready, ended):
            task.cancel()
        await asyncio.wait((ready, ended))


async def end_hung(sidecar: SidecarProcess, ring: RingWriter) -> None:
    """End a sidecar that gives no sign of life any more."""
    pulse = EnginePulse(SIDECAR_SILENT_SECONDS)
    while not pulse.is_stalled:
        await asyncio.sleep(LOOK_SECONDS)
        pulse.look(ring.reader_beats, 0, time.monotonic())
    _logger.error("the sidecar gave no sign of life for %.0f s: killed", pulse.silence_seconds)
    await asyncio.to_thread(sidecar.kill)


async def _watch(sidecar: SidecarProcess, ring: RingWriter, stopped: Stopped) -> None:
    """Stop the worker when its sidecar ends or hangs: without one it would hold blocks unheard of.

    A worker that drains is known to be down.
    """
    hung = asyncio.create_task(end_hung(sidecar, ring))
    try:
        await process_ended(sidecar.pid)
    finally:
        hung.cancel()
    if not stopped.is_draining:
        stopped.set()


async def _stop_with_parent(parent_pid: int, stopped: asyncio.Event) -> None:
    if parent_pid:
        await process_ended(parent_pid)
        stopped.set()


def _engine_options(options: WorkerOptions) -> EngineOptions:
    return EngineOptions(
        model=options.model,
        descriptor=options.settings.fleet.descriptor(options.block_tokens),
        num_blocks=options.num_blocks,
        block_bytes=options.block_bytes,
        prefill_tokens_per_second=options.prefill_tokens_per_second,
        decode_tokens_per_second=options.decode_tokens_per_second,
        pull_deadline_seconds=options.settings.sidecar.pull_deadline_seconds,
        fleet_key=options.settings.fleet.key_bytes,
    )


def _sidecar_options(options: WorkerOptions, base_url: str, folder: Path) -> SidecarOptions:
    return SidecarOptions(
        nats_url=options.settings.nats.url,
        creds_file=options.settings.nats.credentials,
        worker=options.name,
        model=options.model,
        base_url=base_url,
        descriptor=options.settings.fleet.descriptor(options.block_tokens),
        kv_fingerprint=options.fingerprint(),
        num_blocks=options.num_blocks,
        ring_path=str(folder / "ring"),
        socket_path=str(folder / "socket"),
        pool_path=str(folder / "pool"),
        num_slots=options.num_blocks,
        block_bytes=options.block_bytes,
        transport=options.settings.sidecar.transport,
        **shared_options(options.settings),
    )
