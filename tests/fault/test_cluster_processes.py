"""The processes of a fleet on a cluster of brokers: every one of them keeps what it makes there."""

import asyncio
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import nats
import pytest

from kvatlas.events.leases import lease_key
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import EPOCHS_BUCKET, LEASES_BUCKET
from kvatlas.schemas.ids import InstanceId
from testkit.cluster import Cluster, nats_cluster
from testkit.commands import running
from testkit.waiting import until_told

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

WAIT_SECONDS = 60.0
STREAMS = {
    "KV_EVENTS",
    "KV_DECISIONS",
    "KV_DEAD_LETTERS",
    f"KV_{EPOCHS_BUCKET}",
    f"KV_{LEASES_BUCKET}",
    "OBJ_KV_SNAPSHOTS",
    "KV_kv_snapshot_turns",
}
SETTINGS = (
    "log.replicas=3",
    "log.max_bytes=50000000",
    "log.decisions_max_bytes=10000000",
    "log.dead_letters_max_bytes=1000000",
    "indexer.snapshot_seconds=5",
    "indexer.snapshot_messages=1",
)


def set_flags() -> list[str]:
    return [word for setting in SETTINGS for word in ("--set", setting)]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with nats_cluster(tmp_path) as cluster:
        yield cluster


@asynccontextmanager
async def a_worker(cluster: Cluster, name: str) -> AsyncIterator[None]:
    """Run a reference engine, which starts its sidecar by the module of that name."""
    command = [sys.executable, "-P", "-m", "kvatlas", "worker", "--name", name]
    options = ["--nats", ",".join(cluster.urls), *set_flags(), "--set", "sidecar.transport=none"]
    process = await asyncio.create_subprocess_exec(*command, *options, stdout=DEVNULL)
    try:
        yield
        assert process.returncode is None
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def exact_workers(url: str) -> set[str]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/workers") as answer:
        workers: list[dict[str, Any]] = (await answer.json())["workers"]
    return {each["worker"] for each in workers if each["trust"] == "exact"}


async def replicas_of(cluster: Cluster) -> dict[str, int | None]:
    async with await nats.connect(cluster.urls) as client:
        infos = await client.jsm().streams_info()
    return {str(info.config.name): info.config.num_replicas for info in infos}


async def test_a_lost_node_stops_neither_epochs_nor_leases(
    cluster: Cluster, tmp_path: Path
) -> None:
    common = ["--nats", ",".join(cluster.urls), "--json", *set_flags()]
    http = ["--port", "0"]
    archive = ["--archive", f"sqlite:///{tmp_path}/kvatlas.db"]
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(a_worker(cluster, "w0"))
        router, _, _ = await asyncio.gather(
            *(
                enter(running(*command))
                for command in (
                    ("router", *common, *http),
                    ("indexer", *common, *http),
                    ("archive", *common, *archive),
                )
            )
        )

        async def are_exact(*names: str) -> bool:
            return set(names) <= await exact_workers(router["router"])

        await until_told(lambda: are_exact("w0"), WAIT_SECONDS)
        await until_told(lambda: _has_all(cluster), WAIT_SECONDS)
        assert set((await replicas_of(cluster)).values()) == {3}

        lost = await cluster.leader(f"KV_{EPOCHS_BUCKET}")
        await lost.server.kill()
        left = [node.url for node in cluster.others(lost)]
        async with NatsBus(left, replicas=3) as bus:
            keys, key = bus.keys(LEASES_BUCKET), lease_key(InstanceId("w0", 0))
            before = await keys.get(key)
            assert before is not None

            async def is_renewed() -> bool:
                entry = await keys.get(key)
                return entry is not None and entry.revision > before.revision

            await until_told(is_renewed, WAIT_SECONDS)
            await enter(a_worker(cluster, "w1"))
            await until_told(lambda: are_exact("w0", "w1"), WAIT_SECONDS)


async def _has_all(cluster: Cluster) -> bool:
    found = await replicas_of(cluster)
    return found.keys() >= STREAMS
