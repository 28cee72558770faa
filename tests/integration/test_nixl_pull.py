"""Pulls over NIXL between real processes that know nothing of each other."""

import importlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.schemas.errors import TransportUnavailable
from kvatlas.schemas.transfer import (
    LeaseGranted,
    LeaseRequest,
    decode_transfer_answer,
    encode_transfer,
)
from kvatlas.worker_hooks.transfer import BouncePlaces, ReadStatus, Row, SourceRef
from kvatlas.worker_hooks.transfer.nixl.agent import MEANINGS, Nixl
from kvatlas.worker_hooks.transfer.nixl.messages import NixlSettings
from kvatlas.worker_hooks.transfer.nixl.transport import NixlTransport
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pool_file import default_folder
from testkit.blocks import a_chain
from testkit.peer import FINGERPRINT, a_peer
from testkit.pulling import a_fetcher
from testkit.waiting import until, until_told

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=default_folder()) as name:
        yield Path(name)


@pytest.mark.parametrize("ucx_tls", ["", "tcp"], ids=["default", "tcp"])
async def test_blocks_of_another_process_come_as_they_are(folder: Path, ucx_tls: str) -> None:
    numbers = [(7 + 5 * n) % 64 for n in range(64)]
    async with a_fetcher(folder, a_peer(folder, ucx_tls=ucx_tls), nixl=NixlSettings(ucx_tls)) as (
        fetcher,
        [peer],
    ):
        for _ in range(3):  # the second time, slots lie elsewhere
            result = await fetcher.pull(numbers)
            assert (result.held, result.transports) == (list(range(64)), ("nixl",))
            fetcher.check(numbers, result)
        await fetcher.puller.__aexit__(None, None, None)
        assert await peer.control("leases") == 0
        await fetcher.puller.__aenter__()


async def test_what_one_peer_lacks_comes_from_another(folder: Path) -> None:
    numbers = list(range(64))
    async with a_fetcher(folder, a_peer(folder, "w1", num_blocks=10), a_peer(folder, "w2")) as (
        fetcher,
        _,
    ):
        result = await fetcher.pull(numbers)
        assert result.held == numbers
        fetcher.check(numbers, result)
        result = await fetcher.pull([1, 99])
        assert result.missing == [(1, "not_held")]


async def test_a_peer_that_started_again_is_found_under_its_new_epoch(folder: Path) -> None:
    async with a_fetcher(folder, a_peer(folder, epoch=1)) as (fetcher, [peer]):
        await fetcher.pull([1])
        await peer.kill()
        assert (await fetcher.pull([2], deadline_seconds=1.0)).held == []
        async with a_peer(folder, epoch=2) as again:
            fetcher.route = {"another subject": again}
            result = await fetcher.pull([3])
            assert result.held == [0]
            fetcher.check([3], result)


async def test_after_its_lease_a_block_can_be_replaced_and_the_reader_notices(
    folder: Path,
) -> None:
    async with a_fetcher(folder, a_peer(folder, max_ttl_ms=1_000)) as (fetcher, [peer]):
        request = LeaseRequest(
            fingerprint=FINGERPRINT,
            hashes=a_chain(5),
            ttl_ms=1_000,
            requester="test",
            transports=("nixl",),
        )
        payload = await peer.request("", encode_transfer(request), 30.0)
        grant = decode_transfer_answer(payload)
        assert isinstance(grant, LeaseGranted)
        assert not await peer.control("replace", 5, 70)

        async def is_replaced() -> bool:
            return bool(await peer.control("replace", 5, 70))

        await until_told(is_replaced)
        source = SourceRef("nixl", grant.agent, grant.metadata, grant.metadata_version)
        rows = [Row(*row) for row in grant.rows]
        outcome = await fetcher.transport.read(source, rows, 30.0)
        assert outcome.status is ReadStatus.done
        fetcher.pool.offer([0], a_chain(5))
        checksum = int.from_bytes(grant.checksums, "little")
        filled = fetcher.pool.fill(outcome.places, [0], [a_chain(5)], [checksum])
        assert filled.corrupt == [0]
        fetcher.bounce.release(filled.places)
        assert (await fetcher.pull([5])).missing == [(0, "not_held")]


def test_every_exception_of_the_installed_driver_has_a_meaning() -> None:
    names = {error.__name__ for error in Nixl().errors}
    assert names == set(MEANINGS)


@pytest.mark.parametrize("problem", ["import", "backend"])
async def test_a_driver_that_does_not_work_is_a_typed_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    settings = NixlSettings(ucx_tls="none_such" if problem == "backend" else "")
    if problem == "import":
        (folder / "nixl.py").write_text("raise ImportError('not here')")
        monkeypatch.setenv("PYTHONPATH", str(folder))
    with (
        ServePool.create("w1", 1, 4096, 1, folder) as pool,
        pytest.raises(TransportUnavailable, match=r"nixl|NIXL"),
    ):
        async with NixlTransport("w1/0", pool, BouncePlaces(pool.bounce_places()), settings):
            pass


async def test_a_driver_that_loads_slowly_is_waited_for_in_the_background(folder: Path) -> None:
    settings = NixlSettings(start_seconds=0.3)
    with ServePool.create("w1", 1, 4096, 1, folder) as pool:
        async with NixlTransport(
            "w1/0", pool, BouncePlaces(pool.bounce_places()), settings
        ) as nixl:
            assert nixl.reference is None
            source = SourceRef("nixl", "a@1", b"m", 1)
            outcome = await nixl.read(source, [Row(0, 4096, 0)], 1.0)
            assert outcome.status is ReadStatus.failed
            await until(lambda: nixl.reference is not None, 100.0)
            assert nixl.num_restarts > 0
