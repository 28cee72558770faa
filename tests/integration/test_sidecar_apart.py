"""Sidecars that outlive the killing of their engine's whole family, to say that it is gone."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import EmbeddedServer, embedded_server
from kvatlas.events.streams import events_stream
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingWriter
from kvatlas.worker_hooks.sidecar import beside_engine
from kvatlas.worker_hooks.sidecar.beside_engine import BesideEngine
from kvatlas.worker_hooks.sidecar.detached import KILLED_STATUS, DetachedSidecar, start_detached
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from testkit.peer import stop
from testkit.processes import until_ended
from testkit.sidecars import folded, sidecar_options
from testkit.waiting import until

W = InstanceId("w", 0)

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open"), reason="no file descriptors of processes here"
)
#: an engine with its sidecar, below a server; what the server starts for it is in its family
SERVER = """
import subprocess, sys
engine = subprocess.Popen([sys.executable, "-P", "-c", sys.argv[1], sys.argv[2]])
engine.wait()
"""
ENGINE = """
import sys, time
import msgspec
from kvatlas.worker_hooks.sidecar.beside_engine import BesideEngine
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
beside = BesideEngine(msgspec.json.decode(sys.argv[1], type=SidecarOptions))
beside.hook.stored([1], None, bytes(16))
print(beside.sidecar.pid, flush=True)
time.sleep(600)
"""


@asynccontextmanager
async def a_broker(folder: Path) -> AsyncIterator[tuple[EmbeddedServer, NatsBus]]:
    async with embedded_server(folder / "nats") as server, NatsBus(server.url) as bus:
        await bus.declare_stream(events_stream())
        yield server, bus


@contextlib.contextmanager
def a_ring(options: SidecarOptions) -> Iterator[None]:
    hook = WorkerHook(RingWriter.create(Path(options.ring_path)))
    yield
    hook.close()


async def test_a_server_that_kills_its_engine_s_family_leaves_a_goodbye(tmp_path: Path) -> None:
    """As vLLM's API server does on SIGTERM."""
    async with a_broker(tmp_path) as (server, bus), folded(bus, W) as folds:
        options = msgspec.json.encode(sidecar_options(tmp_path, nats_url=server.url)).decode()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", SERVER, ENGINE, options), stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        family = [psutil.Process(process.pid)]
        try:
            sidecar = psutil.Process(int(await process.stdout.readline()))
            await until(lambda: len(folds[W].held[Tier.hbm]) == 1)
            family = [*family[0].children(recursive=True), family[0]]
            assert len(family) == 2
            assert sidecar not in family
        finally:
            for one in family:
                with contextlib.suppress(psutil.NoSuchProcess):  # a server ends after its engine
                    one.kill()
            await process.communicate()
        await until(lambda: folds[W].down == "engine ended")
        await until_ended(sidecar)


@pytest.mark.parametrize("ending", ["stop", "kill"])
async def test_its_engine_can_end_it(tmp_path: Path, ending: str) -> None:
    async with a_broker(tmp_path) as (server, bus), folded(bus, W) as folds:
        options = sidecar_options(tmp_path, nats_url=server.url)
        with a_ring(options):
            sidecar = await asyncio.to_thread(start_detached, options)
            assert isinstance(sidecar, DetachedSidecar)
            try:
                await until(lambda: folds[W].epoch > 0)
                before = sidecar.exit_status
                assert before is None
                with pytest.raises(subprocess.TimeoutExpired):
                    sidecar.wait(0)
            finally:
                status = await asyncio.to_thread(getattr(sidecar, ending))
            assert status == sidecar.exit_status == (0 if ending == "stop" else KILLED_STATUS)
            assert sidecar.stop() == status
            if ending == "stop":
                await until(lambda: folds[W].down == "signal SIGTERM")


async def test_one_that_hangs_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_engine, "SIDECAR_SILENT_SECONDS", 2.0)
    async with embedded_server(tmp_path / "nats") as server, NatsBus(server.url) as bus:
        await bus.declare_stream(events_stream(max_bytes=64 << 20))
        options = sidecar_options(tmp_path, nats_url=server.url, num_slots=0, kv_fingerprint=b"")
        beside = await asyncio.to_thread(BesideEngine, options)
        try:
            async with folded(bus, W) as folds:
                await until(lambda: folds[W].epoch > 0)
                epoch, hung = folds[W].epoch, psutil.Process(beside.sidecar.pid)
                stop(hung.pid)
                await until_ended(hung)
                await until(lambda: folds[W].epoch > epoch)
            assert beside.generation == 2
        finally:
            await asyncio.to_thread(beside.close)


def test_one_that_does_not_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ChildProcessError, match="no sidecar"):
        start_detached(sidecar_options(tmp_path, nats_url="nats://127.0.0.1:1"))
    assert set(os.listdir("/proc/self/fd")) <= before  # some of others may end meanwhile


def test_its_own_failure_has_its_own_status(tmp_path: Path) -> None:
    """There is no ring where the options say."""
    sidecar = start_detached(sidecar_options(tmp_path, nats_url="nats://127.0.0.1:1"))
    assert sidecar.wait(60.0) == 1
