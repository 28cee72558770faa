"""The reference engine on a clock that is turned by hand, with peers that are played."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from kvatlas.reference.clock import ManualClock, settle
from kvatlas.reference.engine import EngineOptions, ReferenceEngine
from kvatlas.reference.kv_bytes import kv_bytes
from kvatlas.reference.requests import Completion, generated_tokens
from kvatlas.schemas.digest import digest_of, split_hashes
from kvatlas.schemas.errors import EngineStopped, InvalidRequest, PromptTooLarge, SidecarUnavailable
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import BlockRemoved, BlockStored
from kvatlas.schemas.routing import Plan, PullStep
from kvatlas.worker_hooks.raw_events import RawEvent, decode_raw
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingReader, RingWriter
from kvatlas.worker_hooks.sidecar.channel import PullEnded
from kvatlas.worker_hooks.transfer.pool import ServePool, SlotState

DESCRIPTOR = NamespaceDescriptor(4)
BLOCK_BYTES = 256
PEER = InstanceId("peer", 0)


class PlayedPeers:
    """Pulls by writing what a test wants, when it wants."""

    def __init__(self, pool: ServePool) -> None:
        self.pool = pool
        self.asked: list[tuple[list[bytes], tuple[int, ...], tuple[InstanceId, ...]]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.missing: set[int] = set()
        self.wrong: set[int] = set()
        self.is_gone = False

    async def pull(
        self,
        hashes: bytes,
        slots: Sequence[int],
        owners: Sequence[InstanceId],
        deadline_seconds: float,
    ) -> PullEnded:
        blocks = list(split_hashes(hashes))
        self.asked.append((blocks, tuple(slots), tuple(owners)))
        await self.may_answer.wait()
        if self.is_gone:
            raise SidecarUnavailable("gone")
        held = [i for i in range(len(blocks)) if i not in self.missing]
        for i in held:
            content = blocks[i] if i not in self.wrong else bytes(16)
            place = self.pool.bounce_places()[0]
            self.pool.bytes_at(place)[:] = kv_bytes(content, BLOCK_BYTES)
            checksum = xxh3_64_intdigest(self.pool.bytes_at(place))
            self.pool.fill([place], [slots[i]], [blocks[i]], [checksum])
        missing = tuple((i, "not_held") for i in sorted(self.missing))
        return PullEnded(1, tuple(held), missing, len(held) * BLOCK_BYTES, "played")


class Bench:
    """An engine with everything around it, and what it reported."""

    def __init__(self, folder: Path, num_blocks: int, decode_rate: float) -> None:
        self.pool = ServePool.create("bench", num_blocks, BLOCK_BYTES, 4, folder)
        self.hook = WorkerHook(RingWriter.create(folder / "ring", lists=True))
        self.reader = RingReader(folder / "ring")
        self.clock = ManualClock()
        self.peers = PlayedPeers(self.pool)
        self.tracker = EngineStateTracker("m", DESCRIPTOR)
        self.events: list[object] = []
        self.raw: list[RawEvent] = []
        options = EngineOptions("m", DESCRIPTOR, num_blocks, BLOCK_BYTES, 1000.0, decode_rate, 2.0)
        self.engine = ReferenceEngine(options, self.hook, self.clock, self.pool, self.peers)

    def check(self) -> None:
        """Assert that engine, memory and the events agree."""
        raw = [decode_raw(record) for record in self.reader.read() if isinstance(record, bytes)]
        self.raw += raw
        self.events += self.tracker.handle(raw)
        block_pool = self.engine.store.pool
        block_pool.validate()
        cached = set(block_pool.cached_hashes())
        assert {block for block, _ in self.tracker.residency.blocks(Tier.hbm)} == cached
        assert self.tracker.residency.digest(Tier.hbm) == digest_of(cached)
        assert self.tracker.counters.unknown_removals == 0
        assert self.tracker.counters.parked_events == 0
        for block_hash in cached:
            (slot,) = block_pool.match([block_hash])
            assert self.pool.hash_of(slot) == block_hash
            assert self.pool.block(slot) == kv_bytes(block_hash, BLOCK_BYTES)

    async def serve(self, prompt: bytes, **more: object) -> Completion:
        """Submit a prompt and turn the clock until it is served."""
        task = asyncio.create_task(self.engine.submit(prompt, **more))  # type: ignore[arg-type]
        while not task.done():
            await self.clock.advance(0.5)
        self.check()
        return await task

    def close(self) -> None:
        self.hook.close()
        self.reader.close()
        self.pool.close()


@asynccontextmanager
async def a_bench(
    folder: Path, num_blocks: int = 32, decode_rate: float = 100.0
) -> AsyncIterator[Bench]:
    bench = Bench(folder, num_blocks, decode_rate)
    try:
        async with bench.engine:
            yield bench
            bench.check()
    finally:
        bench.close()


def prompt_of(*blocks: int, tail: int = 0) -> bytes:
    tokens = [block * 100 + i for block in blocks for i in range(4)] + [7] * tail
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def chain_of(prompt: bytes) -> list[bytes]:
    return list(split_hashes(BlockHasher(DESCRIPTOR.namespace("m", None, None)).chain(prompt)))


def plan_of(first: int, num: int, worker: str = "peer") -> Plan:
    return Plan(4, first, (PullStep(worker, 0, first, num),), 0)


def numbers(done: Completion) -> tuple[int, int, int]:
    return done.local_blocks, done.pulled_blocks, done.computed_blocks


async def test_a_prompt_takes_its_prefill_and_is_cached_afterwards(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        done = await bench.serve(prompt_of(1, 2, 3, tail=2))
        assert numbers(done) == (0, 0, 3)
        assert (done.prompt_blocks, done.prompt_tokens, done.computed_tokens) == (3, 14, 14)
        assert done.queue_ms == 0
        assert done.prefill_ms == done.ttft_ms == done.total_ms == pytest.approx(14.0)
        again = await bench.serve(prompt_of(1, 2, 3, tail=2))
        assert numbers(again) == (3, 0, 0)
        assert again.computed_tokens == 2


async def test_the_last_token_is_computed_in_any_case(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        await bench.serve(prompt_of(1, 2))
        done = await bench.serve(prompt_of(1, 2))
        assert (done.local_blocks, done.computed_tokens) == (1, 4)


async def test_prefills_wait_for_each_other_and_decodes_do_not(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        tasks = [
            asyncio.create_task(bench.engine.submit(prompt_of(n, n + 1), max_tokens=11))
            for n in (10, 20, 30)
        ]
        await settle()
        await bench.clock.advance(1.0)
        done = [await task for task in tasks]
        assert [d.queue_ms for d in done] == pytest.approx([0, 8, 16])
        assert [d.ttft_ms for d in done] == pytest.approx([8, 16, 24])
        assert [d.total_ms for d in done] == pytest.approx([108, 116, 124])
        assert [d.output_tokens for d in done] == [11, 11, 11]


async def test_generated_tokens_fill_blocks_that_the_next_turn_finds(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        first = prompt_of(1, 2, tail=1)
        await bench.serve(first, max_tokens=9)
        grown = first + generated_tokens(first, 9)
        # 18 tokens: 4 full blocks; the last of the output has no KV, and is in the fifth
        assert set(bench.engine.store.pool.cached_hashes()) == set(chain_of(grown))
        done = await bench.serve(grown + prompt_of(5))
        assert done.local_blocks == 4


async def test_salts_separate_tenants(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        await bench.serve(prompt_of(1, 2, 3), cache_salt="a")
        assert (await bench.serve(prompt_of(1, 2, 3), cache_salt="b")).local_blocks == 0
        assert (await bench.serve(prompt_of(1, 2, 3), cache_salt="a")).local_blocks == 2


async def test_removals_are_reported_before_the_store_that_caused_them(tmp_path: Path) -> None:
    async with a_bench(tmp_path, num_blocks=4) as bench:
        await bench.serve(prompt_of(1, 2, 3))
        bench.events.clear()
        await bench.serve(prompt_of(7, 8, 9))
        kinds = [type(event) for event in bench.events]
        assert kinds == [BlockRemoved, BlockStored]
        removed = bench.events[0]
        assert isinstance(removed, BlockRemoved)
        assert list(split_hashes(removed.hashes)) == chain_of(prompt_of(1, 2, 3))[:0:-1]


async def test_two_requests_that_compute_one_block_hold_two_copies(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        prompt = prompt_of(1)
        tasks = [asyncio.create_task(bench.engine.submit(prompt, max_tokens=9)) for _ in range(2)]
        await settle()
        await bench.clock.advance(1.0)
        await asyncio.gather(*tasks)
        bench.check()
        held = [bench.pool.hash_of(slot) for slot in range(32)]
        assert [held.count(block) for block in chain_of(prompt + generated_tokens(prompt, 9))] == [
            2,
            2,
            2,
        ]


async def test_a_reset_empties_an_idle_engine_only(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        await bench.serve(prompt_of(1, 2, 3))
        task = asyncio.create_task(bench.engine.submit(prompt_of(4), max_tokens=5))
        await settle()
        assert not bench.engine.reset()
        await bench.clock.advance(1.0)
        await task
        assert bench.engine.reset()
        bench.check()
        assert bench.engine.store.pool.cached_hashes() == []
        assert (await bench.serve(prompt_of(1, 2, 3))).local_blocks == 0


async def test_a_leased_block_outlives_eviction(tmp_path: Path) -> None:
    async with a_bench(tmp_path, num_blocks=4) as bench:
        await bench.serve(prompt_of(1, 2, 3))
        block = chain_of(prompt_of(1, 2, 3))[2]
        (slot,) = bench.engine.store.pool.match([block])
        bench.pool.lease([slot], [block], 2**63 - 1)
        done = await bench.serve(prompt_of(7, 8, 9))
        assert numbers(done) == (0, 0, 3)
        assert bench.pool.hash_of(slot) == block
        # with all four needed, a request waits for the lease to end
        task = asyncio.create_task(bench.engine.submit(prompt_of(4, 5, 6, tail=3)))
        await bench.clock.advance(1.0)
        assert not task.done()
        bench.pool.set_leases({slot: 0})
        while not task.done():
            await asyncio.sleep(0.001)
            await bench.clock.advance(0.1)
        assert numbers(await task) == (0, 0, 3)


async def test_without_slots_the_youngest_is_preempted_and_comes_back(tmp_path: Path) -> None:
    async with a_bench(tmp_path, num_blocks=8) as bench:
        tasks = [
            asyncio.create_task(bench.engine.submit(prompt_of(n, n + 1), max_tokens=20))
            for n in (10, 20)
        ]
        for _ in range(200):
            await bench.clock.advance(0.05)
            bench.check()
        older, younger = [await task for task in tasks]
        assert (older.num_preemptions, older.output_tokens) == (0, 20)
        assert younger.num_preemptions >= 1
        assert younger.output_tokens == 20
        assert numbers(younger) == (0, 0, 2)
        assert bench.engine.store.pool.num_in_use == 0


async def test_a_plan_pulls_what_is_not_here_and_computes_the_rest(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        prompt = prompt_of(1, 2, 3, 4, 5)
        await bench.serve(prompt_of(1))
        done = await bench.serve(prompt, plan=plan_of(1, 3))
        assert bench.peers.asked[0][0] == chain_of(prompt)[1:4]
        assert bench.peers.asked[0][2] == (PEER,)
        assert numbers(done) == (1, 3, 1)
        assert done.computed_tokens == 4
        assert done.pull.verified == 3
        assert done.pull.bytes == 3 * BLOCK_BYTES
        assert done.pull.transport == "played"
        # pulled blocks are cached and reported like computed ones
        assert (await bench.serve(prompt)).local_blocks == 4


async def test_what_does_not_come_is_computed(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        bench.peers.missing = {1}
        done = await bench.serve(prompt_of(1, 2, 3, 4), plan=plan_of(0, 3))
        assert numbers(done) == (0, 1, 3)
        assert done.pull.missing == 2
        assert bench.engine.store.pool.num_in_use == 0


async def test_a_sidecar_that_is_gone_costs_nothing_but_the_pull(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        bench.peers.is_gone = True
        done = await bench.serve(prompt_of(1, 2, 3, 4), plan=plan_of(0, 3))
        assert numbers(done) == (0, 0, 4)
        assert bench.engine.store.pool.num_in_use == 0


async def test_wrong_bytes_are_noticed_whatever_the_checksum_says(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        bench.peers.wrong = {2}
        done = await bench.serve(prompt_of(1, 2, 3, 4), plan=plan_of(0, 3))
        assert numbers(done) == (0, 2, 2)
        assert (done.pull.verified, done.pull.failed) == (2, 1)


async def test_pulls_run_while_others_are_served(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        bench.peers.may_answer.clear()
        pulling = asyncio.create_task(
            bench.engine.submit(prompt_of(1, 2, 3, 4), plan=plan_of(0, 3))
        )
        await settle()
        assert (await bench.serve(prompt_of(9))).queue_ms == 0
        bench.peers.may_answer.set()
        await settle()
        await bench.clock.advance(1.0)
        done = await pulling
        assert numbers(done) == (0, 3, 1)
        assert done.queue_ms == pytest.approx(500.0)  # of which the pull took all
        assert done.pull.ms == pytest.approx(500.0)


async def test_a_block_is_pulled_once_at_a_time(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        bench.peers.may_answer.clear()
        tasks = [
            asyncio.create_task(bench.engine.submit(prompt_of(1, 2, 3, n), plan=plan_of(0, 3)))
            for n in (10, 11)
        ]
        await settle()
        bench.peers.may_answer.set()
        await settle()
        await bench.clock.advance(1.0)
        first, second = [await task for task in tasks]
        assert numbers(first) == (0, 3, 1)
        assert numbers(second) == (3, 0, 1)
        assert len(bench.peers.asked) == 1


async def test_a_hole_before_the_plan_is_pulled_from_the_first_owner(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        plan = Plan(4, 2, (PullStep("a", 0, 2, 1), PullStep("b", 0, 3, 1)), 0)
        done = await bench.serve(prompt_of(1, 2, 3, 4, 5), plan=plan)
        assert numbers(done) == (0, 4, 1)
        a, b = InstanceId("a", 0), InstanceId("b", 0)
        assert [(len(blocks), owners) for blocks, _, owners in bench.peers.asked] == [
            (3, (a, b)),
            (1, (b, a)),
        ]


async def test_waiting_requests_give_back_what_they_hold_early(tmp_path: Path) -> None:
    async with a_bench(tmp_path, num_blocks=6) as bench:
        running = asyncio.create_task(bench.engine.submit(prompt_of(1), max_tokens=9))
        await bench.clock.advance(0.005)
        bench.peers.may_answer.clear()
        pulling = asyncio.create_task(
            bench.engine.submit(prompt_of(2, 3, 4, tail=1), plan=plan_of(0, 3))
        )
        await settle()
        large = asyncio.create_task(bench.engine.submit(prompt_of(5, 6, 7, 8, tail=1)))
        await settle()
        bench.peers.may_answer.set()
        for _ in range(100):
            await asyncio.sleep(0.001)
            await bench.clock.advance(0.1)
            bench.check()
        await asyncio.gather(running, large)
        done = await pulling
        assert done.pulled_blocks <= 3
        assert bench.engine.store.pool.num_in_use == 0


@pytest.mark.parametrize("when", ["waiting", "pulling", "prefill", "decode"])
async def test_a_request_can_be_given_up_at_any_time(tmp_path: Path, when: str) -> None:
    async with a_bench(tmp_path) as bench:
        plan = plan_of(0, 2) if when == "pulling" else None
        if when == "pulling":
            bench.peers.may_answer.clear()
        others = []
        if when == "waiting":
            others.append(asyncio.create_task(bench.engine.submit(prompt_of(9, 9, 9, 9))))
            await settle()
        task = asyncio.create_task(
            bench.engine.submit(prompt_of(1, 2, 3), max_tokens=50, plan=plan)
        )
        await settle()
        if when == "prefill":
            await bench.clock.advance(0.001)
        if when == "decode":
            await bench.clock.advance(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        bench.peers.may_answer.set()
        await bench.clock.advance(1.0)
        await asyncio.gather(*others)
        assert bench.engine.store.pool.num_in_use == 0
        assert bench.engine.num_waiting == bench.engine.num_running == 0
        bench.check()
        assert numbers(await bench.serve(prompt_of(4, 5))) == (0, 0, 2)


async def test_what_never_fits_is_refused(tmp_path: Path) -> None:
    async with a_bench(tmp_path, num_blocks=4) as bench:
        with pytest.raises(PromptTooLarge):
            await bench.engine.submit(prompt_of(1, 2, 3, 4), max_tokens=1)
        with pytest.raises(InvalidRequest):
            await bench.engine.submit(b"")
        with pytest.raises(InvalidRequest):
            await bench.engine.submit(prompt_of(1), max_tokens=0)


async def test_an_engine_that_stops_says_so_to_whoever_waits(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        tasks = [
            asyncio.create_task(bench.engine.submit(prompt_of(n), max_tokens=50)) for n in (1, 2, 3)
        ]
        await bench.clock.advance(0.006)
    for task in tasks:
        with pytest.raises(EngineStopped):
            await task


async def test_a_listing_tells_all_that_is_cached(tmp_path: Path) -> None:
    async with a_bench(tmp_path) as bench:
        await bench.serve(prompt_of(1, 2, 3), max_tokens=9)
        await bench.serve(prompt_of(1, 2, 9), cache_salt="a")
        fresh = EngineStateTracker("m", DESCRIPTOR)
        fresh.handle(list(bench.engine.store.held()))
        assert fresh.residency.digest(Tier.hbm) == bench.tracker.residency.digest(Tier.hbm)


async def test_a_random_workload_keeps_everything_equal(tmp_path: Path) -> None:
    """Shared prefixes, growth, preemption, eviction, leases, pulls and a peer that lies."""
    rng = random.Random(7)
    async with a_bench(tmp_path, num_blocks=24) as bench:
        tasks: list[asyncio.Task[Completion]] = []
        for step in range(250):
            if len(tasks) < 8:
                family = rng.randrange(4)
                prompt = prompt_of(
                    *range(family * 10, family * 10 + rng.randint(1, 5)), tail=rng.randint(0, 3)
                )
                plan = plan_of(rng.randint(0, 2), rng.randint(1, 4)) if step % 3 == 0 else None
                bench.peers.wrong = {rng.randrange(4)} if step % 5 == 0 else set()
                bench.peers.missing = {rng.randrange(4)} if step % 4 == 0 else set()
                tasks.append(
                    asyncio.create_task(
                        bench.engine.submit(prompt or prompt_of(1), rng.randint(1, 14), plan=plan)
                    )
                )
            if step % 7 == 0:
                slots = rng.sample(range(24), 3)
                held = [(s, h) for s in slots if (h := bench.pool.hash_of(s)) is not None]
                for slot, block in held:
                    bench.pool.lease([slot], [block], 2**63 - 1)
            if step % 11 == 0:
                bench.pool.set_leases(dict.fromkeys(range(24), 0))
            if step % 40 == 0 and rng.random() < 0.5:
                bench.engine.reset()
            if step % 29 == 0 and tasks:
                tasks.pop(rng.randrange(len(tasks))).cancel()
            await bench.clock.advance(rng.random() * 0.1)
            bench.check()
            tasks = [task for task in tasks if not task.done()]
        bench.pool.set_leases(dict.fromkeys(range(24), 0))
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.001)
            await bench.clock.advance(0.2)
        assert bench.engine.store.pool.num_in_use == 0
        stale = bench.engine.store.pool._stale
        states = {bench.pool.state_of(slot) for slot in bench.engine.store.pool._blank}
        assert states <= {SlotState.empty}
        assert len(stale) < 24
