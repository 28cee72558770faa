"""The real bridge process between an engine's sockets and a real broker, read through an index.

Names end with the faults of other systems that they guard against.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from kvatlas.schemas.errors import EndpointUnusable
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.worker_hooks.bridge.follow_options import FollowOptions
from kvatlas.worker_hooks.bridge.follow_state import FollowState
from kvatlas.worker_hooks.bridge.observed import Observed
from kvatlas.worker_hooks.bridge.stimuli import (
    Deliver,
    FrameReplayed,
    ReplayEnded,
    ReplayFailed,
    RequestReplay,
    Stimulus,
    Ticked,
)
from kvatlas.worker_hooks.bridge.zmq_source import ZmqSource
from testkit.bridging import Bridged, W, a_fleet
from testkit.commands import run_command
from testkit.engine_words import chain_of
from testkit.ports import kept_ports
from testkit.sidecars import folded
from testkit.waiting import WAIT_SECONDS, until
from testkit.zmq_engine import ZmqEngine


class Beside(Bridged):
    """The index, asked about the blocks of a test's engine."""

    def beside(
        self, engine: ZmqEngine, *more: str, replays: bool = True
    ) -> AbstractAsyncContextManager[None]:
        """Run `kvatlas bridge` beside the engine."""
        replay_endpoint = engine.replay_endpoint if replays else ""
        return self.bridge(engine.endpoint, replay_endpoint, *more)

    def matched(self, *prompt: int, instance: InstanceId = W) -> int:
        """Return how many blocks of a prompt the index believes in."""
        return self.match(b"".join(chain_of(*prompt)), instance)

    async def is_true(self, engine: ZmqEngine) -> None:
        """Return once the index believes in what the engine holds, and is sure of it."""
        await self.agrees(engine.blocks.hashes)


@pytest.fixture
async def bridged(tmp_path: Path) -> AsyncIterator[Beside]:
    async with a_fleet(tmp_path) as fleet:
        yield Beside(fleet.url, fleet.bus, fleet.service)


async def play(engine: ZmqEngine, first: int = 0, num: int = 20) -> None:
    """Publish chains, some of which are given up again."""
    for n in range(first, first + num):
        await engine.publish(engine.blocks.store(n, n + 1000, n + 2000))
        if n % 3 == 0:
            await engine.publish(engine.blocks.remove(n, n + 1000, n + 2000))


# --- joining late, and both framings ------------------------------------------------------------


@pytest.mark.parametrize("has_topic", [True, False])
async def test_a_bridge_that_comes_late_misses_nothing_f12_f13(
    bridged: Beside, has_topic: bool
) -> None:
    async with ZmqEngine(has_topic=has_topic) as engine:
        await play(engine)
        async with bridged.beside(engine):
            await bridged.is_true(engine)
            await play(engine, 100)
            await bridged.is_true(engine)
            assert bridged.matched(1, 1001, 2001) == 3
            assert bridged.matched(0, 1000, 2000) == 2


async def test_batches_published_while_the_replay_runs_are_spliced_in(bridged: Beside) -> None:
    async with ZmqEngine() as engine:
        await engine.publish_all([engine.blocks.store(n)] for n in range(3000))
        async with bridged.beside(engine, "--block-tokens", "4"):
            for n in range(3000, 4000):
                await engine.publish(engine.blocks.store(n), comes_through=n % 7 != 0)
                await asyncio.sleep(0)
            await bridged.is_true(engine)


async def test_an_engine_that_starts_after_its_bridge_is_exact_f12(bridged: Beside) -> None:
    engine = ZmqEngine()
    async with bridged.beside(engine, "--block-tokens", "4"):
        await until(lambda: bridged.view is not None)
        async with engine:
            await play(engine)
            await bridged.is_true(engine)


async def test_an_engine_that_connects_is_bound_for(bridged: Beside) -> None:
    async with ZmqEngine(binds=False) as engine, bridged.beside(engine, "--bind"):
        await play(engine)
        await bridged.is_true(engine)


# --- gaps ---------------------------------------------------------------------------------------


async def test_a_gap_is_replayed_and_nothing_is_doubted_f3_f4(bridged: Beside) -> None:
    async with ZmqEngine() as engine, bridged.beside(engine):
        await play(engine)
        await bridged.is_true(engine)
        epoch = bridged.epoch
        for n in range(50, 53):
            await engine.publish(engine.blocks.store(n), comes_through=False)
        await engine.publish(engine.blocks.store(60))
        await bridged.is_true(engine)
        assert bridged.epoch == epoch


async def test_a_gap_without_replay_is_a_doubt_and_live_batches_go_on_f3_f6(
    bridged: Beside,
) -> None:
    async with ZmqEngine() as engine, bridged.beside(engine, "--num-blocks", "64", replays=False):
        await engine.heard()
        await play(engine, 1, 5)
        await bridged.is_true(engine)
        await engine.publish(engine.blocks.remove(1, 1001, 2001), comes_through=False)
        await engine.publish(engine.blocks.store(70))
        await until(lambda: bridged.matched(70) == 1)
        assert bridged.is_doubted
        assert bridged.view is not None
        assert "no replay" in str(bridged.view.trust_reasons)
        assert bridged.matched(2, 1002, 2002) == 3  # what it provably held is not given up


async def test_what_has_left_the_replay_buffer_heals_as_blocks_turn_over_f5(
    bridged: Beside,
) -> None:
    engine = ZmqEngine(buffer_steps=5)
    async with engine, bridged.beside(engine, "--num-blocks", "30"):
        await engine.heard()
        await until(lambda: engine.num_replays > 0)
        for n in range(1, 11):
            await engine.publish(engine.blocks.store(n))
        await bridged.is_true(engine)
        for n in range(1, 11):  # among them what nobody will ever hear of
            await engine.publish(engine.blocks.remove(n), comes_through=False)
        await engine.publish(engine.blocks.store(100))
        await until(lambda: bridged.matched(100) == 1)
        assert bridged.is_doubted
        assert bridged.matched(1) == 1  # false, and said to be doubtful
        for n in range(101, 130):
            await engine.publish(engine.blocks.store(n))
        await bridged.is_true(engine)
        assert bridged.matched(1) == 0


async def test_a_bridge_that_begins_behind_a_full_buffer_is_doubted_at_once_f5(
    bridged: Beside,
) -> None:
    async with ZmqEngine(buffer_steps=10) as engine:
        await play(engine, 1, 40)
        async with bridged.beside(engine, "--num-blocks", "1000"):
            await until(lambda: bridged.is_doubted)
            await engine.publish(engine.blocks.store(500))
            await until(lambda: bridged.matched(500) == 1)
            assert bridged.is_doubted
            await engine.publish(engine.blocks.clear())
            await engine.publish(engine.blocks.store(501))
            await bridged.is_true(engine)


async def test_drops_at_the_high_water_mark_are_replayed_f14(bridged: Beside) -> None:
    async with ZmqEngine() as engine, bridged.beside(engine):
        await engine.heard()
        for n in range(1, 4000):  # nine of ten are dropped, as with a bridge that is far too slow
            await engine.publish(engine.blocks.store(n), comes_through=n % 10 == 0)
            if n % 100 == 0:
                await asyncio.sleep(0)
        await bridged.is_true(engine)


async def test_a_lost_tail_is_found_without_a_further_batch_f12(bridged: Beside) -> None:
    async with ZmqEngine() as engine, bridged.beside(engine):
        await play(engine)
        await bridged.is_true(engine)
        await engine.publish(engine.blocks.store(77), comes_through=False)
        await bridged.is_true(engine)


async def test_ranks_have_cursors_of_their_own_f7(bridged: Beside) -> None:
    port = kept_ports(4)
    async with ZmqEngine(port=port) as engine:
        other = ZmqEngine(port=port + 1, rank=1)
        other.replay_endpoint = f"tcp://127.0.0.1:{port + 3}"
        engine_replay = f"tcp://127.0.0.1:{port + 2}"
        await engine._close()
        engine.replay_endpoint = engine_replay
        await engine._open()
        async with other, bridged.beside(engine, "--ranks", "2"):
            for n in range(10):
                await engine.publish(engine.blocks.store(n))
                await other.publish(other.blocks.store(n + 50))
                await other.publish(other.blocks.store(n + 70))
            await until(lambda: bridged.matched(9) == 1)
            second = InstanceId("w", 1)
            await until(lambda: bridged.matched(79, instance=second) == 1)
            assert bridged.matched(79) == 0
            await engine.publish(engine.blocks.remove(3))
            await bridged.is_true(engine)
            await other.publish(other.blocks.store(99))
            await until(lambda: bridged.matched(99, instance=second) == 1)
            view = bridged.service.index.instance(second)
            assert view is not None
            assert view.trust is Trust.exact


# --- restarts -----------------------------------------------------------------------------------


async def test_an_engine_that_restarts_loses_what_it_held_f1(bridged: Beside) -> None:
    async with ZmqEngine() as engine, bridged.beside(engine):
        await play(engine)
        await bridged.is_true(engine)
        epoch = bridged.epoch
        await engine.restart(seed=1)
        await engine.publish(engine.blocks.store(1))
        await until(lambda: bridged.epoch > epoch)
        await bridged.is_true(engine)
        assert bridged.matched(1, 1001, 2001) == 1
        assert bridged.matched(2, 1002, 2002) == 0


async def test_a_restart_is_noticed_though_the_sequence_has_come_further_f2(
    bridged: Beside,
) -> None:
    async with ZmqEngine() as engine, bridged.beside(engine):
        await play(engine, 1, 5)
        await bridged.is_true(engine)
        epoch = bridged.epoch
        await engine.restart()
        for n in range(300, 340):  # more than before, all before the bridge is back
            await engine.publish(engine.blocks.store(n), comes_through=False)
        await until(lambda: bridged.epoch > epoch)
        await bridged.is_true(engine)
        assert bridged.matched(1, 1001) == 0


async def test_a_restart_without_replay_is_doubted_f2(bridged: Beside) -> None:
    async with ZmqEngine() as engine, bridged.beside(engine, replays=False):
        await engine.heard()
        await play(engine, 1, 10)
        await bridged.is_true(engine)
        await engine.restart(seed=1)
        for n in range(200, 203):
            await engine.publish(engine.blocks.store(n), comes_through=False)
        await engine.heard()
        await engine.publish(engine.blocks.store(300))
        await until(lambda: bridged.matched(300) == 1)
        assert bridged.is_doubted
        assert bridged.matched(1, 1001) == 0


async def test_a_bridge_that_restarts_ends_with_the_same_residency_f12(bridged: Beside) -> None:
    async with ZmqEngine() as engine, folded(bridged.bus, W) as folds:
        async with bridged.beside(engine):
            await play(engine)
            await bridged.is_true(engine)
        before = set(folds[W].held[Tier.hbm])
        await play(engine, 200, 5)
        async with bridged.beside(engine):
            await bridged.is_true(engine)
            assert before < folds[W].held[Tier.hbm] | before
            assert folds[W].held[Tier.hbm] == engine.blocks.hashes()


async def test_a_silent_replay_endpoint_leaves_a_doubt_that_names_it(bridged: Beside) -> None:
    async with ZmqEngine() as engine:
        await play(engine, 1, 3)
        engine.answers.clear()
        async with bridged.beside(engine, "--block-tokens", "4"):
            await until(lambda: bridged.is_doubted)
            assert bridged.view is not None
            assert f"{engine.replay_endpoint}: silent" in str(bridged.view.trust_reasons)
            engine.answers.set()
            await bridged.is_true(engine)


# --- copies and clears --------------------------------------------------------------------------


async def test_a_block_is_held_until_its_last_copy_is_gone_f20(bridged: Beside) -> None:
    async with ZmqEngine() as engine, bridged.beside(engine):
        for _ in range(3):
            await engine.publish(engine.blocks.store(5))
        for _ in range(2):
            await engine.publish(engine.blocks.remove(5))
        await engine.publish(engine.blocks.store(6))
        await bridged.is_true(engine)
        assert bridged.matched(5) == 1
        await engine.publish(engine.blocks.remove(5))
        await bridged.is_true(engine)
        assert bridged.matched(5) == 0


async def test_reannouncements_end_in_a_doubt_and_are_forgotten_f21(bridged: Beside) -> None:
    async with ZmqEngine() as engine, bridged.beside(engine, "--num-blocks", "8"):
        await engine.publish(engine.blocks.store(5))
        for _ in range(4):  # no copies: the engine repeats itself on request
            await engine.publish(engine.blocks.told(5))
        await engine.publish(engine.blocks.remove(5))
        await engine.publish(engine.blocks.store(6))
        await until(lambda: bridged.matched(6) == 1)
        assert bridged.matched(5) == 1  # false, and nobody outside the engine can know yet
        for n in range(7, 12):
            await engine.publish(engine.blocks.store(n))
        await until(lambda: bridged.is_doubted)
        for n in range(6, 12):
            await engine.publish(engine.blocks.remove(n))
        for n in range(20, 28):
            await engine.publish(engine.blocks.store(n))
        await bridged.is_true(engine)
        assert bridged.matched(5) == 0


async def test_a_clear_that_an_idle_engine_holds_back_counts_before_its_batch_f15(
    bridged: Beside,
) -> None:
    async with ZmqEngine() as engine, bridged.beside(engine):
        await play(engine)
        await bridged.is_true(engine)
        # reset while idle: nothing is told before the next step, with which the clear comes
        cleared = engine.blocks.clear()
        await engine.publish(cleared, engine.blocks.store(1))
        await bridged.is_true(engine)
        assert bridged.matched(1, 1001) == 1


# --- sockets and errors -------------------------------------------------------------------------


async def test_an_endpoint_that_cannot_be_used_is_named() -> None:
    arguments = ["bridge", "--engine", "vllm", "--worker", "w", "--model", "m"]
    arguments += ["--nats", "nats://127.0.0.1:1", "--endpoint"]
    ended = await run_command(*arguments, "tcp://no-such-host.invalid:5557")
    assert ended.status == 1
    assert "endpoint tcp://no-such-host.invalid:5557: " in ended.err
    ended = await run_command(*arguments, "5557")
    assert "endpoint 5557: expected tcp://HOST:PORT" in ended.err
    async with ZmqEngine() as engine:
        ended = await run_command(*arguments, engine.endpoint, "--bind")
        assert f"endpoint {engine.endpoint}: Address already in use" in ended.err


async def test_both_framings_and_their_end_markers_are_read_f13() -> None:
    for has_topic in (True, False):
        async with ZmqEngine(has_topic=has_topic) as engine:
            await play(engine, 1, 3)
            async with ZmqSource(engine.endpoint, engine.replay_endpoint) as source:
                source.request_replay(RequestReplay(7, 1))
                replayed = [
                    s for s in await _heard_until_end(source) if isinstance(s, FrameReplayed)
                ]
                assert [s.sequence for s in replayed] == [1, 2, 3]
                assert {s.ask for s in replayed} == {7}
                source.request_replay(RequestReplay(8, 99))
                heard = await _heard_until_end(source)
                assert heard[-1] == ReplayEnded(8)


async def test_a_replay_of_more_than_a_socket_takes_comes_whole_f14() -> None:
    """The engine's socket drops what finds no room without a word, also the end of an answer."""
    async with ZmqEngine(max_unsent=50) as engine:
        for n in range(300):
            await engine.publish(engine.blocks.told(n))
        # an engine that is slow to begin, as on a busy machine, has not dropped its answer
        source = ZmqSource(engine.endpoint, engine.replay_endpoint, silent_seconds=1.0)
        state = FollowState(lambda _: Observed(), FollowOptions(has_replay=True, quiet_seconds=1.0))
        async with source, asyncio.timeout(60):
            delivered = await _follow(source, state, until_sequence=299)
        assert delivered == list(range(300))
        assert engine.num_replays > 1
        assert (state.counters.lost, state.degraded_reason) == (0, "")


async def test_a_source_bounds_what_it_keeps_f14() -> None:
    async with ZmqEngine() as engine, ZmqSource(engine.endpoint, max_queued=4) as source:
        await engine.heard()
        for n in range(1000):
            await engine.publish(engine.blocks.told(n))
        for _ in range(200):
            assert source._queue.qsize() <= 4
            await source.next()


async def test_a_silent_replay_is_an_error_that_names_the_endpoint() -> None:
    async with ZmqEngine() as engine:
        engine.answers.clear()
        source = ZmqSource(engine.endpoint, engine.replay_endpoint, silent_seconds=0.1)
        async with source:
            source.request_replay(RequestReplay(1, 0))
            heard = await _heard_until_end(source)
            assert heard[-1] == ReplayFailed(
                1, f"replay endpoint {engine.replay_endpoint}: silent for 0.1 s"
            )


def test_the_error_of_an_endpoint_carries_its_facts() -> None:
    error = EndpointUnusable("tcp://x:1", "in use")
    assert (error.endpoint, error.problem) == ("tcp://x:1", "in use")


async def _follow(source: ZmqSource, state: FollowState, until_sequence: int) -> list[int]:
    """Do what the state says, and return what it delivered up to a sequence."""
    now = asyncio.get_running_loop().time
    delivered: list[int] = []
    effects = state.start(now())
    while until_sequence not in delivered[-1:]:
        for effect in effects:
            if isinstance(effect, RequestReplay):
                source.request_replay(effect)
            elif isinstance(effect, Deliver):
                delivered.append(effect.sequence)
        try:
            stimulus = await asyncio.wait_for(source.next(), 0.1)
        except TimeoutError:
            stimulus = Ticked()
        effects = state.handle(stimulus, now())
    return delivered


async def _heard_until_end(source: ZmqSource) -> list[Stimulus]:
    heard: list[Stimulus] = []
    async with asyncio.timeout(WAIT_SECONDS):
        while not heard or not isinstance(heard[-1], ReplayEnded | ReplayFailed):
            heard.append(await source.next())
    return heard
