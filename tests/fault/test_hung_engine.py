"""An engine stands still (SIGSTOP) beside a sidecar that lives on, read through an index."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import psutil
import pytest

from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.kv_events import ENGINE_STALLED
from testkit.bridging import Bridged, W, a_fleet
from testkit.commands import started
from testkit.peer import stop
from testkit.waiting import until

FLAGS = (
    *("--set", "sidecar.transport=none"),
    *("--set", "sidecar.engine_silent_seconds=1"),
    *("--set", "sidecar.digest_seconds=0.2"),
)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Bridged]:
    async with a_fleet(tmp_path) as fleet:
        yield fleet


async def test_an_engine_that_stands_still_is_said_to_and_heals_without_a_repair(
    fleet: Bridged,
) -> None:
    async with started("worker", "--nats", fleet.url, "--name", "w", *FLAGS) as worker:
        assert worker.stdout is not None
        url = (await worker.stdout.readline()).decode().split()[-1]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"model": "reference", "prompt": list(range(640)), "max_tokens": 1}
            (await client.post("/v1/completions", json=body)).raise_for_status()
        await until(lambda: fleet.view is not None and fleet.view.trust is Trust.exact)
        repairs = fleet.service.index.stats().inventories
        stop(worker.pid)
        try:
            await until(lambda: fleet.view is not None and bool(fleet.view.stall))
            view = fleet.view
            assert view is not None
            assert view.trust is Trust.degraded
            assert view.stall.startswith(f"doubted: {ENGINE_STALLED}: no sign of life for ")
            assert view.num_blocks == 40  # what it holds is known as before
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        await until(lambda: fleet.view is not None and fleet.view.trust is Trust.exact)
        assert fleet.service.index.stats().inventories == repairs


async def test_a_sidecar_that_stands_still_with_its_engine_blames_no_engine_afterwards(
    fleet: Bridged,
) -> None:
    async with started("worker", "--nats", fleet.url, "--name", "w", *FLAGS) as worker:
        await until(lambda: fleet.view is not None and fleet.view.trust is Trust.exact)
        (sidecar,) = psutil.Process(worker.pid).children()
        for pid in (sidecar.pid, worker.pid):
            stop(pid)
        try:
            # its lease ends meanwhile: it stood still for longer than an engine may
            await until(lambda: fleet.view is not None and fleet.view.trust is Trust.gone)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
            os.kill(sidecar.pid, signal.SIGCONT)
        epoch = fleet.epoch
        await until(lambda: fleet.epoch > epoch and not fleet.is_doubted)
        assert fleet.service.index.instance(W) is not None
        assert not fleet.view or not fleet.view.stall
