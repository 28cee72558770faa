"""Reference workers as child processes, for `kvatlas serve --workers N`."""

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator

import msgspec
from msgspec import Struct

from kvatlas.common.runtime_folder import runtime_folder
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.runtime.stopping import end_at_once
from kvatlas.schemas.errors import WorkerNotStarted
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.settings import Settings, environment_of

START_SECONDS = 60.0
STOP_SECONDS = 15.0
LOOK_SECONDS = 0.05

_logger = logging.getLogger(__name__)


class EngineOptions(Struct, frozen=True):
    """How many reference workers, of which kind; see `kvatlas worker --help`."""

    workers: int
    blocks_per_worker: int
    block_bytes: int
    block_tokens: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    speed: float


@contextlib.asynccontextmanager
async def worker_fleet(
    engines: EngineOptions, settings: Settings, nats_url: str, index: IndexService
) -> AsyncGenerator[list[Process], None]:
    """Run the workers while the block runs; yields when the index knows all of them.

    A worker that ends later is not started again: its blocks leave the index, as in a real fleet,
    and the log says so.
    """
    before = {view.instance: view.epoch for view in index.index.instances()}
    with runtime_folder() as folder:
        workers: list[Process] = []
        watches: list[asyncio.Task[None]] = []
        environment = _environment(settings, nats_url)
        try:
            for number in range(engines.workers):
                arguments = _arguments(engines, f"w{number}", str(folder))
                worker = await asyncio.create_subprocess_exec(
                    *arguments, stdin=DEVNULL, stdout=DEVNULL, env=environment
                )
                workers.append(worker)
            await _until_known(workers, index, before)
            watches = [
                asyncio.create_task(_tell_end(f"w{number}", worker))
                for number, worker in enumerate(workers)
            ]
            yield workers
        finally:
            for watch in watches:
                watch.cancel()
            ending = [
                end_at_once(worker, STOP_SECONDS, f"worker w{number}")
                for number, worker in enumerate(workers)
            ]
            await asyncio.gather(*ending)


def _environment(settings: Settings, nats_url: str) -> dict[str, str]:
    """Return the environment of a worker: its broker too, for all users see command lines."""
    at = msgspec.structs.replace(settings.nats, url=nats_url, folder="")
    told = msgspec.structs.replace(settings, nats=at)
    return {**os.environ, **environment_of(told, "nats", "log", "fleet", "sidecar", "nixl")}


def _arguments(engines: EngineOptions, name: str, folder: str) -> list[str]:
    options = {
        "--name": name,
        "--folder": f"{folder}/{name}",
        "--blocks": engines.blocks_per_worker,
        "--block-bytes": engines.block_bytes,
        "--block-tokens": engines.block_tokens,
        "--prefill-tokens-per-second": engines.prefill_tokens_per_second,
        "--decode-tokens-per-second": engines.decode_tokens_per_second,
        "--speed": engines.speed,
        "--parent-pid": os.getpid(),
    }
    given = [(flag, str(value)) for flag, value in options.items()]
    command = [sys.executable, "-P", "-m", "kvatlas", "worker"]
    return [*command, *(word for pair in given for word in pair)]


async def _until_known(
    workers: list[Process], index: IndexService, before: dict[InstanceId, int]
) -> None:
    """Return when as many workers as were started have introduced themselves to the index.

    A kept log may still name those of an earlier run: only epochs newer than `before` count.
    """

    def num_known() -> int:
        views = index.index.instances()
        return sum(v.info is not None and v.epoch > before.get(v.instance, 0) for v in views)

    try:
        async with asyncio.timeout(START_SECONDS):
            while num_known() < len(workers):
                if ended := [w.returncode for w in workers if w.returncode is not None]:
                    raise WorkerNotStarted(f"a reference worker ended with status {ended[0]}")
                await asyncio.sleep(LOOK_SECONDS)
    except TimeoutError as error:
        raise WorkerNotStarted(f"no reference worker within {START_SECONDS} s") from error


async def _tell_end(name: str, worker: Process) -> None:
    status = await worker.wait()
    _logger.error("worker %s has ended with status %d and is not started again", name, status)
