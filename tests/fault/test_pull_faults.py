"""What goes wrong between workers while blocks move, done to real processes."""

import asyncio
import contextlib
import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from kvatlas.common.child_processes import ChildLimits
from kvatlas.worker_hooks.transfer.nixl import transport as nixl_transport
from kvatlas.worker_hooks.transfer.nixl.messages import NixlSettings
from kvatlas.worker_hooks.transfer.pool import SlotState
from kvatlas.worker_hooks.transfer.pool_file import default_folder
from kvatlas.worker_hooks.transfer.pull_protocol import PullSettings
from testkit.blocks import a_block, a_hash
from testkit.peer import PeerProcess, a_peer, stop
from testkit.processes import until_ended
from testkit.pulling import Fetcher, a_fetcher
from testkit.waiting import WAIT_SECONDS, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
]
SMALL = PullSettings(
    batch_blocks=8, max_reads=4, max_batches=8, max_batches_per_owner=8, try_ms=2_000, rest_ms=50
)


Pair = tuple[Fetcher, PeerProcess]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=default_folder()) as name:
        yield Path(name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(folder: Path) -> AsyncIterator[Pair]:
    """A fetcher and a peer on one host; a test may hurt them but not kill the peer itself."""
    async with a_fetcher(folder, a_peer(folder), settings=SMALL) as (fetcher, [peer]):
        yield fetcher, peer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tcp_pair(folder: Path) -> AsyncIterator[Pair]:
    """The same over TCP: a frozen process answers no reads, while with CMA the kernel does."""
    peer = a_peer(folder, "wt", ucx_tls="tcp")
    nixl = NixlSettings("tcp", max_quarantined=16)
    async with a_fetcher(folder, peer, name="ft", num_bounce=32, settings=SMALL, nixl=nixl) as (
        fetcher,
        [running],
    ):
        yield fetcher, running


@contextlib.asynccontextmanager
async def frozen(pid: int) -> AsyncIterator[None]:
    """Stop a process for the time of the block."""
    stop(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# --- the source ------------------------------------------------------------------------------


async def test_bytes_that_rot_after_their_checksum_are_never_held(pair: Pair) -> None:
    fetcher, peer = pair
    await fetcher.pull_until_held([2])
    await peer.control("corrupt", 3)
    result = await fetcher.pull([2, 3, 4])
    assert (result.held, result.missing) == ([0, 2], [(1, "corrupt")])
    assert result.num_checksum_failures == 1 + SMALL.max_retries
    fetcher.check([2, 3, 4], result)
    assert fetcher.pool.state_of(1) is SlotState.offered


async def test_a_source_that_dies_alone_comes_back(pair: Pair) -> None:
    fetcher, peer = pair
    await fetcher.pull_until_held([0])
    os.kill(await peer.source_pid(), signal.SIGKILL)
    result = await fetcher.pull([1, 2])
    fetcher.check([1, 2], result)
    result = await fetcher.pull_until_held([1, 2])
    fetcher.check([1, 2], result)


async def test_a_frozen_source_costs_the_deadline_and_its_places_until_it_goes_on(
    tcp_pair: Pair,
) -> None:
    fetcher, peer = tcp_pair
    await fetcher.pull_until_held([0])
    async with frozen(await peer.source_pid()):
        started = time.monotonic()
        async with asyncio.timeout(WAIT_SECONDS):
            result = await fetcher.pull([1, 2], deadline_seconds=1.0)
        assert time.monotonic() - started > 0.9
        assert result.held == []
        await until(lambda: fetcher.transport.num_quarantined == 1)
        assert fetcher.bounce.num_free == fetcher.bounce.num_places - 2
        assert fetcher.pool.try_evict([0, 1]) == [0, 1]
        fetcher.pool.commit(0, a_hash(50), a_block(50, fetcher.pool.block_bytes))
    await until(lambda: fetcher.transport.num_quarantined == 0)
    assert fetcher.bounce.num_free == fetcher.bounce.num_places
    assert bytes(fetcher.pool.block(0)) == a_block(50, fetcher.pool.block_bytes)
    await fetcher.pull_until_held([3])


async def test_too_many_frozen_reads_cost_the_agent_and_no_byte_lands_late(
    tcp_pair: Pair,
) -> None:
    fetcher, peer = tcp_pair
    await fetcher.pull_until_held([0])
    async with frozen(await peer.source_pid()):
        result = await fetcher.pull(range(24), deadline_seconds=1.0)
        assert result.held == []
        await until(lambda: fetcher.transport.num_recycled == 1)
        await until(lambda: fetcher.bounce.num_free == fetcher.bounce.num_places)
        places = fetcher.bounce.acquire(fetcher.bounce.num_places)
        for place in places:
            fetcher.pool.bytes_at(place)[:] = b"\xaa" * fetcher.pool.block_bytes
    # A source may not survive a reader that is killed over TCP; its sidecar starts another.
    await asyncio.sleep(1.0)  # for what might still come
    assert all(set(fetcher.pool.bytes_at(place)) == {0xAA} for place in places)
    fetcher.bounce.release(places)
    result = await fetcher.pull_until_held([1])
    fetcher.check([1], result)


# --- the puller's own transfer process ---------------------------------------------------------


async def test_the_own_transfer_process_can_die_and_comes_back(pair: Pair) -> None:
    fetcher, _ = pair
    await fetcher.pull_until_held([0])
    before = fetcher.transport.num_restarts
    assert fetcher.transport.pid is not None
    os.kill(fetcher.transport.pid, signal.SIGKILL)
    result = await fetcher.pull([1])
    fetcher.check([1], result)
    await until(lambda: fetcher.transport.num_restarts == before + 1)
    result = await fetcher.pull_until_held([1])
    fetcher.check([1], result)


async def test_a_transfer_process_that_hangs_is_replaced(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.worker_hooks.transfer.nixl.transport.STUCK_SECONDS", 1.0)
    fetcher, _ = pair
    await fetcher.pull_until_held([0])
    before = fetcher.transport.num_restarts
    assert fetcher.transport.pid is not None
    stop(fetcher.transport.pid)
    pull = asyncio.create_task(fetcher.pull([1], deadline_seconds=1.0))
    await until(lambda: fetcher.bounce.num_free < fetcher.bounce.num_places)
    assert (await pull).held == []
    await until(lambda: fetcher.transport.num_restarts == before + 1)
    assert fetcher.bounce.num_free == fetcher.bounce.num_places


async def test_an_idle_transfer_process_that_hangs_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = ChildLimits(600.0, ask_seconds=0.1, answer_seconds=0.5, first_pause_seconds=0.1)
    monkeypatch.setattr(nixl_transport, "LIMITS", impatient)
    async with a_fetcher(folder, name="f7") as (fetcher, _):
        pid = fetcher.transport.pid
        assert pid is not None
        stop(pid)
        await until(lambda: fetcher.transport.pid not in (None, pid))
        assert fetcher.transport.num_restarts == 1


async def test_a_transfer_process_that_dies_in_its_first_moment_is_started_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # dies once, before it has said whether NIXL is there at all
    died = folder / "died"
    script = f'[ -e {died} ] || {{ : > {died}; kill -SEGV $$; }}; exec "$@"'
    command = ("sh", "-c", script, "sh", *nixl_transport.COMMAND)
    monkeypatch.setattr(nixl_transport, "COMMAND", command)
    async with a_fetcher(folder, name="f8") as (fetcher, _):
        await until(lambda: fetcher.transport.pid is not None)
        assert fetcher.transport.num_restarts == 1
    messages = [record.getMessage() for record in caplog.records]
    assert any("f8/0 did not start: it died at its start" in message for message in messages)
    assert not [message for message in messages if "Unknown child process" in message]


# --- whole peers -------------------------------------------------------------------------------


async def test_peers_that_are_silent_or_dead_are_passed_over(folder: Path) -> None:
    async with a_fetcher(
        folder, a_peer(folder, "w2"), a_peer(folder, "w3"), name="f2", settings=SMALL
    ) as (fetcher, [first, _]):
        first.freeze()
        result = await fetcher.pull([1, 2])
        assert result.held == [0, 1]
        assert result.seconds >= 0.4
        first.thaw()
        await first.kill()
        result = await fetcher.pull(range(16))
        assert result.held == list(range(16))
        fetcher.check(range(16), result)


@pytest.mark.parametrize("ucx_tls", ["", "tcp"], ids=["default", "tcp"])
async def test_a_peer_killed_while_blocks_move_leaves_only_whole_blocks(
    folder: Path, ucx_tls: str
) -> None:
    size, numbers = 1 << 20, range(64)
    peer = a_peer(folder, "w4", block_bytes=size, ucx_tls=ucx_tls)
    nixl = NixlSettings(ucx_tls)
    async with a_fetcher(folder, peer, name="f4", block_bytes=size, settings=SMALL, nixl=nixl) as (
        fetcher,
        [running],
    ):
        await fetcher.pull([0])
        source_pid = await running.source_pid()
        pull = asyncio.create_task(fetcher.pull(numbers, deadline_seconds=5.0))
        await until(lambda: any(fetcher.pool.hash_of(slot) for slot in range(1, 64)))
        os.kill(source_pid, signal.SIGKILL)
        running.process.kill()
        result = await pull
        fetcher.check(numbers, result)
        assert {reason for _, reason in result.missing} <= {
            "disconnected",
            "no_responder",
            "owner_resting",
            "timed_out",
            "deadline",
        }


async def test_a_transfer_process_that_hangs_ends_with_its_killed_parent(folder: Path) -> None:
    async with a_peer(folder, "w9") as peer:
        source = psutil.Process(await peer.source_pid())
        stop(source.pid)
        os.kill(peer.process.pid, signal.SIGKILL)
        await until_ended(source)


async def test_nothing_is_left_of_peers_and_pullers(folder: Path) -> None:
    async with a_fetcher(folder, a_peer(folder, "w5"), name="f5") as (fetcher, [peer]):
        pids = [peer.process.pid, await peer.source_pid(), fetcher.transport.pid]
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert [name for name in os.listdir(folder) if name.startswith("kvatlas-w5")] == []
