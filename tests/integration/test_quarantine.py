"""The command that quarantines a worker, with a real broker and a sidecar beside a real ring."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import events_stream
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId
from testkit.commands import run_command
from testkit.engine_words import tokens_of
from testkit.sidecars import DESCRIPTOR, beside, sidecar_options
from testkit.waiting import until

W = InstanceId("w", 0)
CHAIN = BlockHasher(DESCRIPTOR.namespace("m", None, None)).chain(tokens_of(1, 2))


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with embedded_server(tmp_path / "nats") as server:
        yield server.url


async def test_a_worker_is_quarantined_and_released_for_all_readers(
    url: str, tmp_path: Path
) -> None:
    async with NatsBus(url) as bus:
        await bus.declare_stream(events_stream())
        options = sidecar_options(tmp_path, num_slots=0, pool_path="")
        async with (
            IndexService(bus, IndexState(FlatRadixIndex())) as service,
            beside(options, NatsBus(url)) as worker,
        ):

            def trust() -> tuple[Trust | None, tuple[str, ...]]:
                view = service.index.instance(W)
                return (view.trust, view.trust_reasons) if view else (None, ())

            def matched() -> int:
                return sum(match.num_blocks for match in service.index.match(CHAIN))

            worker.hook.stored([1, 2], None, tokens_of(1, 2))
            await worker.channel.flush()
            await until(lambda: (trust(), matched()) == ((Trust.exact, ()), 2))

            done = await run_command("quarantine", "w", "--reason", "bad bytes", "--nats", url)
            assert (done.status, done.err) == (0, "")
            assert done.out.startswith("w/0 epoch ")
            assert done.out.endswith(": bad bytes\n")
            why = ("quarantined: bad bytes",)
            await until(lambda: (trust(), matched()) == ((Trust.degraded, why), 0))

            ended = await run_command("quarantine", "w", "--release", "--rank", "0", "--nats", url)
            assert (ended.status, ended.err) == (0, "")
            assert ended.out.endswith("released by command\n")
            await until(lambda: (trust(), matched()) == ((Trust.exact, ()), 2))


async def test_who_is_not_there_is_not_quarantined(url: str, tmp_path: Path) -> None:
    async with NatsBus(url) as bus:
        await bus.declare_stream(events_stream())
        options = sidecar_options(tmp_path, num_slots=0, pool_path="")
        async with beside(options, NatsBus(url)) as worker:
            await worker.channel.flush()
            for arguments in (["w1"], ["w", "--rank", "1"]):
                done = await run_command("quarantine", *arguments, "--reason", "r", "--nats", url)
                assert done.status == 1
                assert "no living worker" in done.err
                assert "living are 'w'" in done.err
    for arguments in ([], ["--reason", ""], ["--reason", "x" * 10_000]):
        done = await run_command("quarantine", "w", *arguments, "--nats", url)
        assert (done.status, "--reason" in done.err) == (1, True)
