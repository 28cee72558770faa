"""A pull with leases and checksums beside the bare NIXL reads of the same blocks."""

import asyncio
import contextlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvatlas.schemas.transfer import (
    LeaseGranted,
    LeaseRequest,
    decode_transfer_answer,
    encode_transfer,
)
from kvatlas.worker_hooks.transfer import ReadStatus, Row, SourceRef
from kvatlas.worker_hooks.transfer.pool_file import default_folder
from testkit.blocks import a_chain
from testkit.peer import FINGERPRINT, PeerProcess, a_peer
from testkit.pulling import Fetcher, a_fetcher

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed"
)
BATCH_BYTES = 4 << 20
SIZES = [(16 << 10, 2048), (64 << 10, 1024), (2 << 20, 64)]
Run = Callable[[Any], Any]


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0] >> 10}K")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Run, Fetcher, PeerProcess, int]]:
    block_bytes, num_blocks = request.param
    with (
        tempfile.TemporaryDirectory(dir=default_folder()) as name,
        asyncio.Runner() as runner,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(name)
        sizes = {"block_bytes": block_bytes, "num_slots": num_blocks}
        running = a_fetcher(
            folder, a_peer(folder, num_blocks=num_blocks, **sizes), num_bounce=num_blocks, **sizes
        )
        fetcher, [peer] = runner.run(running.__aenter__())
        stack.callback(lambda: runner.run(running.__aexit__(None, None, None)))
        runner.run(fetcher.pull([0]))
        yield runner.run, fetcher, peer, num_blocks


def test_pull(benchmark: Any, pair: tuple[Run, Fetcher, PeerProcess, int]) -> None:
    run, fetcher, _, num_blocks = pair
    benchmark.extra_info["bytes"] = num_blocks * fetcher.pool.block_bytes
    slots, hashes, owners = range(num_blocks), a_chain(*range(num_blocks)), fetcher.owners()

    def offer() -> None:
        fetcher.pool.try_evict(slots)
        assert fetcher.pool.offer(slots, hashes)

    def pull() -> None:
        result = run(fetcher.puller.pull(hashes, slots, owners, deadline_seconds=10.0))
        assert len(result.held) == num_blocks

    benchmark.pedantic(pull, setup=offer, rounds=20, warmup_rounds=2)


def test_one_block(benchmark: Any, pair: tuple[Run, Fetcher, PeerProcess, int]) -> None:
    run, fetcher, _, _ = pair
    benchmark.pedantic(lambda: run(fetcher.pull([1])), rounds=200, warmup_rounds=5)


def test_bare_reads(benchmark: Any, pair: tuple[Run, Fetcher, PeerProcess, int]) -> None:
    run, fetcher, peer, num_blocks = pair
    size, batch = fetcher.pool.block_bytes, BATCH_BYTES // fetcher.pool.block_bytes
    benchmark.extra_info["bytes"] = num_blocks * size
    request = LeaseRequest(
        fingerprint=FINGERPRINT,
        hashes=a_chain(0),
        ttl_ms=30_000,
        requester="bench",
        transports=("nixl",),
    )
    grant = decode_transfer_answer(run(peer.request("", encode_transfer(request), 5.0)))
    assert isinstance(grant, LeaseGranted)
    source = SourceRef("nixl", grant.agent, grant.metadata, grant.metadata_version)
    first = grant.rows[0][0]  # block n lies at place n
    rows = [Row(first + n * size, size, 0) for n in range(num_blocks)]

    async def read() -> None:
        reads = (
            fetcher.transport.read(source, rows[at : at + batch], 5.0)
            for at in range(0, num_blocks, batch)
        )
        for outcome in await asyncio.gather(*reads):
            assert outcome.status is ReadStatus.done
            fetcher.bounce.release(outcome.places)

    def change_places() -> None:  # a pull lands elsewhere each time, so bare reads do too
        run(fetcher.pull(range(num_blocks)))

    benchmark.pedantic(lambda: run(read()), setup=change_places, rounds=20, warmup_rounds=2)
