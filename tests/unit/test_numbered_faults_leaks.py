"""Faults that others had, by number: what is left of those who came and went, and of pulls."""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.streams import events_stream
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.router.service import RouterService
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.settings import RouterSettings
from kvatlas.schemas.transfer import LeaseGranted, LeaseRequest, decode_transfer_answer
from kvatlas.schemas.transfer import encode_transfer as encoded
from kvatlas.worker_hooks.transfer import MemoryFabric, MemorySource
from kvatlas.worker_hooks.transfer.lease_server import LeaseServer
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pool_file import default_folder
from testkit.blocks import a_block, a_chain, a_hash
from testkit.engine_words import chain_of, tokens_of
from testkit.fleet import a_request
from testkit.sidecars import beside, sidecar_options
from testkit.waiting import until

W = InstanceId("w", 0)
BLOCK_BYTES, NUM_SLOTS = 256, 8
FINGERPRINT = bytes(range(16))


# --- namespaces -----------------------------------------------------------------------------------


class Running:
    """Tasks and threads of this process, and the most that there were of them."""

    def __init__(self) -> None:
        self.most = self.now()

    def look(self) -> None:
        self.most = max(self.most, self.now())

    @staticmethod
    def now() -> tuple[int, int]:
        return threading.active_count(), len(asyncio.all_tasks())


async def test_f71_namespaces_come_and_go_without_a_task_or_thread_of_their_own(
    tmp_path: Path,
) -> None:
    """1,000 tenants, each with an adapter, a block and a request, through sidecar and router."""
    broker = MemoryBroker()
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        async with (
            IndexService(bus, IndexState(FlatRadixIndex())) as service,
            beside(sidecar_options(tmp_path), broker.connect()) as one,
        ):
            router = RouterService(service.index, service, RouterSettings(seed=1))
            running = Running()

            async def come_and_go(first: int, count: int) -> None:
                for n in range(first, first + count):
                    tenant, lora = f"tenant{n}", f"adapter{n}"
                    one.hook.stored([n], None, tokens_of(n), lora=lora, cache_salt=tenant)
                await one.channel.flush()
                newest = one.sidecar._outbox.last_taken_seq
                await until(lambda: _seq(service) >= newest)
                for n in range(first, first + count):
                    tokens = list(memoryview(tokens_of(n)).cast("I"))
                    request = a_request(tokens, "m", lora=f"adapter{n}", cache_salt=f"tenant{n}")
                    assert router.score(request).candidates[0].match_tokens == 4
                    one.hook.removed([n])
                running.look()
                await one.channel.flush()

            await come_and_go(1, 10)
            before = running.now()
            for first in range(11, 1_011, 50):
                await come_and_go(first, 50)
            assert running.now() == before
            # a question to the sidecar and its answer are tasks while they are under way
            assert running.most[0] == before[0]
            assert running.most[1] <= before[1] + 5
            view = service.index.instance(W)
            assert view is not None
            await until(lambda: service.state.stats().num_blocks == 0)
            assert set(one.sidecar._reporter._tracker.resident()) == set()


def _seq(service: IndexService) -> int:
    view = service.index.instance(W)
    return view.seq if view else 0


# --- leases ---------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[ServePool]:
    with (
        tempfile.TemporaryDirectory(dir=default_folder()) as folder,
        ServePool.create("w1", NUM_SLOTS, BLOCK_BYTES, folder=Path(folder)) as pool,
    ):
        for number in range(NUM_SLOTS):
            pool.commit(number, a_hash(number), a_block(number, BLOCK_BYTES))
        yield pool


def test_f74_leases_of_pullers_that_died_lapse_and_leave_nothing(pool: ServePool) -> None:
    """A thousand of them never released anything; what they held can be evicted in the end."""
    now_ns = 1_000
    source = MemorySource(MemoryFabric(), "w1/0:1", pool)
    server = LeaseServer(pool, [source], FINGERPRINT, 1, clock_ns=lambda: now_ns)
    for n in range(1_000):
        request = LeaseRequest(
            fingerprint=FINGERPRINT,
            hashes=a_chain(n % NUM_SLOTS),
            ttl_ms=10,
            requester=f"dead{n}",
            transports=("memory",),
        )
        granted = decode_transfer_answer(server.answer(encoded(request)))
        assert isinstance(granted, LeaseGranted)
        assert pool.try_evict([n % NUM_SLOTS], now_ns) == []
        now_ns += 1_000_000
    now_ns += 10_000_000
    server.table.expire(now_ns)
    assert (len(server.table), server.table.leased_bytes) == (0, 0)
    server.table.validate()
    assert server.table._expiries == []
    assert pool.try_evict(list(range(NUM_SLOTS)), now_ns) == list(range(NUM_SLOTS))


# --- pulls ----------------------------------------------------------------------------------------


async def test_f61_what_a_pull_brought_is_known_of_the_puller() -> None:
    fabric, broker = MemoryFabric(), MemoryBroker()
    blocks = chain_of(1, 2)
    with tempfile.TemporaryDirectory(dir=default_folder()) as name:
        a_options, b_options = (
            sidecar_options(Path(name), worker, transport="memory", tells_pool=True)
            for worker in ("a", "b")
        )
        async with broker.connect() as bus:
            await bus.declare_stream(events_stream())
            async with (
                IndexService(bus, IndexState(FlatRadixIndex())) as service,
                beside(a_options, broker.connect(), fabric) as a,
                beside(b_options, broker.connect(), fabric) as b,
            ):
                for one in (a, b):
                    await until(lambda one=one: one.sidecar._exchange is not None)  # type: ignore[misc]
                assert a.pool is not None
                assert b.pool is not None
                for slot, block in enumerate(blocks):
                    a.pool.commit(slot, block, block * (a.pool.block_bytes // 16))
                b.pool.offer([7, 8], b"".join(blocks))
                await b.channel.pull(b"".join(blocks), [7, 8], [InstanceId("a", 0)], 30.0)
                b.hook.stored([1, 2], None, tokens_of(1, 2))  # the engine has loaded them
                both = {(InstanceId("b", 0), tier) for tier in (Tier.hbm, Tier.dram)}
                await until(lambda: both <= set(service.index.holders(blocks[1])))
                b.hook.removed([1, 2])  # and has evicted them; the pool has not
                await b.channel.flush()
                await until(lambda: not both <= set(service.index.holders(blocks[1])))
                [match] = service.index.match(b"".join(blocks))
                assert (match.instance.worker, match.by_tier) == ("b", (0, 2, 0, 0, 0))
