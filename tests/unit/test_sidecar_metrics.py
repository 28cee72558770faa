"""What Prometheus reads of a sidecar: its pulls, by reason, and what it publishes."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.streams import events_stream
from kvatlas.schemas.conditions import LOG_NOT_STORED, Conditions
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.transfer import MissingReason
from kvatlas.worker_hooks.sidecar import service as sidecar_service
from kvatlas.worker_hooks.sidecar.channel import PullEnded, SidecarStatus
from kvatlas.worker_hooks.sidecar.metrics import exposition, metrics_server
from testkit.builders import hashes
from testkit.ports import kept_port
from testkit.sidecars import beside, sidecar_options
from testkit.waiting import WAIT_SECONDS

W = InstanceId("w", 0)


def a_status(**counters: int) -> SidecarStatus:
    return SidecarStatus(0, 7, 1, True, 5, 6, "", counters)


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    """A bus for the sidecar to enter, of a broker that has the log."""
    broker = MemoryBroker()
    async with broker.connect() as declaring:
        await declaring.declare_stream(events_stream())
        yield broker.connect()


async def asked(address: str, path: str, method: str = "GET") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{address}{path}") as answer,
    ):
        return answer.status, await answer.text()


def test_each_counter_is_a_series() -> None:
    text = exposition(InstanceId('a"b\\', 3), a_status(pulled_blocks=4, missing_busy=2, epochs=1))
    where = 'worker="a\\"b\\\\\\\\",rank="3"'
    for line in (
        f"kv_sidecar_connected{{{where}}} 1",
        f"kv_sidecar_blocks{{{where}}} 5",
        f"kv_sidecar_waiting_bytes{{{where}}} 6",
        f"kv_pulled_blocks_total{{{where}}} 4",
        f'kv_pull_missing_blocks_total{{{where},reason="busy"}} 2',
        f'kv_sidecar_events_total{{{where},what="epochs"}} 1',
    ):
        assert line in text.splitlines()


async def test_a_sidecar_answers_where_it_is_told_to(tmp_path: Path, bus: MemoryBus) -> None:
    address = f"127.0.0.1:{kept_port()}"
    async with beside(sidecar_options(tmp_path, metrics_address=address), bus) as one:
        await one.channel.pull(hashes(1, 2), (0, 1), (W,), WAIT_SECONDS)
        status, text = await asked(address, "/metrics")
        assert status == 200
        reason = MissingReason.no_transport
        labels = f'worker="w",rank="0",reason="{reason}"'
        assert f"kv_pull_missing_blocks_total{{{labels}}} 2" in text
        assert await asked(address, "/healthz") == (200, "ok\n")
        assert (await asked(address, "/readyz"))[0] == 200
        assert (await asked(address, "/other"))[0] == 404
        assert (await asked(address, "/metrics", "POST"))[0] == 405


async def test_a_taken_address_costs_the_metrics_only(caplog: pytest.LogCaptureFixture) -> None:
    address = f"127.0.0.1:{kept_port()}"
    async with (
        metrics_server(address, W, a_status, Conditions()),
        metrics_server(address, W, a_status, Conditions()),
    ):
        assert (await asked(address, "/healthz"))[0] == 200
    assert f"expected a free address, {address}" in caplog.text


async def test_silent_clients_hold_up_nothing() -> None:
    port = kept_port()
    async with metrics_server(f"127.0.0.1:{port}", W, a_status, Conditions()):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert (await asked(f"127.0.0.1:{port}", "/healthz"))[0] == 200
    for reader, writer in silent:
        assert await asyncio.wait_for(reader.read(), WAIT_SECONDS) == b""
        writer.close()


def test_an_address_is_host_and_port(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="metrics_address"):
        sidecar_options(tmp_path, metrics_address="9100").validate()


async def test_reasons_that_peers_invent_are_bounded(tmp_path: Path, bus: MemoryBus) -> None:
    async with beside(sidecar_options(tmp_path), bus) as one:
        count = sidecar_service.MAX_REASONS + 20
        for number in range(count):
            one.sidecar.count_pull(PullEnded(number, (), ((0, f"reason_{number}"),), 0))
        status = await one.channel.status()
        missing = {k: v for k, v in status.counters.items() if k.startswith("missing_")}
        assert len(missing) == sidecar_service.MAX_REASONS + 1
        assert sum(missing.values()) == count


async def test_a_sidecar_whose_events_are_not_stored_says_so() -> None:
    port, conditions = kept_port(), Conditions()
    conditions.begin(LOG_NOT_STORED, "KV_EVENTS: the broker acknowledges nothing")
    async with (
        metrics_server(f"127.0.0.1:{port}", W, a_status, conditions),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        async with session.get("/readyz") as ready:
            expected = "log_not_stored: KV_EVENTS: the broker acknowledges nothing\n"
            assert (await ready.text()).endswith(expected)
        async with session.get("/metrics") as metrics:
            assert 'condition="log_not_stored"} 1\n' in await metrics.text()
