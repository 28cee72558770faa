"""Routers that hear one another see one load, find one another's decisions, and forget the dead."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from typing import NamedTuple

import pytest

from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.subjects import ROUTERS
from kvatlas.router.decision.requests import Report
from kvatlas.router.recorder import without_chains
from kvatlas.router.replicas.replicas import (
    MAX_WAITING_WITH_CHAIN,
    SILENCE_SECONDS,
    ReplicaState,
    RouterReplicas,
)
from kvatlas.router.replicas.signals import Alive, Routed, decode_signal, encode_signal
from kvatlas.schemas.errors import MalformedSignal, UnknownDecision
from kvatlas.schemas.ids import InstanceId
from testkit.fleet import Fleet, RouterUnderTest, a_prompt, a_request
from testkit.waiting import until

PROMPT = a_prompt(1_600)
FAILED = Report(failed=True)


class Sibling(NamedTuple):
    router: RouterUnderTest
    state: ReplicaState
    replicas: RouterReplicas
    bus: MemoryBus


class Group:
    """Routers over one index and one broker, each with its own clock."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.fleet, self._broker, self._stack = Fleet(), MemoryBroker(), stack
        for n in range(1, 4):
            self.fleet.up(f"w{n}")

    async def join(self) -> Sibling:
        router = self.fleet.router(counts_ids=False)
        state = ReplicaState(
            router.router_id, router.loads, router.overlay, router.failures, router.overdue
        )
        bus = await self._stack.enter_async_context(self._broker.connect())
        replicas = RouterReplicas(bus, state, router.log.find, router.clock)
        await self._stack.enter_async_context(replicas)
        router.publish = replicas.publish
        return Sibling(router, state, replicas, bus)


@pytest.fixture
async def group() -> AsyncGenerator[Group, None]:
    async with AsyncExitStack() as stack:
        yield Group(stack)


def in_flight(one: Sibling) -> int:
    loads = [one.router.load_of(InstanceId(f"w{n}", 0)) for n in range(1, 4)]
    return sum(load.in_flight for load in loads if load)


async def test_each_sees_what_all_gave(group: Group) -> None:
    one, other = await group.join(), await group.join()
    ours = [one.router.route(a_request(a_prompt(160, start=1_000 * n))) for n in range(4)]
    await until(lambda: in_flight(other) == 4)
    # so the other one spreads around it
    answer = other.router.route(a_request(a_prompt(160, start=9_000)))
    await until(lambda: in_flight(one) == 5)
    assert one.router.done(answer.decision_id, Report()).applied
    await until(lambda: in_flight(other) == 4)
    for each in ours:
        assert other.router.done(each.decision_id, Report()).applied
    await until(lambda: in_flight(one) == 0)
    assert not one.router.done(ours[0].decision_id, Report()).applied


async def test_a_request_by_another_name_of_the_model_counts_too(group: Group) -> None:
    group.fleet.up("w4", models=("many", "names"))
    one, other = await group.join(), await group.join()
    for name in ("names", "many", "names"):
        one.router.route(a_request(PROMPT, name))
        other.router.route(a_request(PROMPT, name))

    def counted(at: Sibling) -> int:
        load = at.router.load_of(InstanceId("w4", 0))
        return load.in_flight if load else 0

    await until(lambda: counted(one) == counted(other) == 6)


async def test_a_replica_of_a_prompt_goes_where_another_router_sent_it(group: Group) -> None:
    one, other = await group.join(), await group.join()
    first = one.router.route(a_request(PROMPT))
    await until(lambda: len(other.router.overlay) == 1)
    second = other.router.route(a_request([*PROMPT, 1, 2, 3]))
    assert second.worker == first.worker
    assert second.predicted_tokens == 1_600


async def test_a_failure_that_one_is_told_counts_for_all(group: Group) -> None:
    one, other = await group.join(), await group.join()
    failed = one.router.route(a_request(PROMPT))
    await until(lambda: len(other.router.overlay) == 1)
    one.router.done(failed.decision_id, FAILED)
    await until(lambda: len(other.router.overlay) == 0)
    assert other.router.route(a_request(PROMPT)).worker != failed.worker


async def test_who_joins_is_told_what_is_under_way(group: Group) -> None:
    one = await group.join()
    for n in range(5):
        one.router.route(a_request(a_prompt(160, start=1_000 * n)))
    ended = one.router.route(a_request(PROMPT))
    one.router.done(ended.decision_id, Report())
    late = await group.join()
    await until(lambda: in_flight(late) == 5)
    third = await group.join()
    await until(lambda: in_flight(third) == 5)
    assert in_flight(late) == in_flight(one) == 5


async def test_a_dead_router_takes_its_requests_along(group: Group) -> None:
    one, other = await group.join(), await group.join()
    one.router.route(a_request(PROMPT))
    await until(lambda: in_flight(other) == 1)
    one.bus.cut()
    for _ in range(3):  # a sign of life that was on its way may come after the clock was turned
        other.router.clock.advance(SILENCE_SECONDS + 1)
        with suppress(TimeoutError):
            await until(lambda: in_flight(other) == 0, 5.0)
            break
    assert in_flight(other) == 0
    assert other.replicas.num_replicas == 0
    assert other.router.route(a_request(PROMPT)).num_candidates == 3


async def test_a_decision_that_no_broker_takes_whole_comes_without_its_chains(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas.router.replicas.replicas.MAX_ANSWER_BYTES", 16)
    one, other = await group.join(), await group.join()
    answer = one.router.route(a_request(PROMPT))
    found = await other.replicas.decision(answer.decision_id)
    assert found == without_chains(one.router.decision(answer.decision_id))
    assert found.left_out == ("groups.chain",)


async def test_a_decision_is_found_from_any_router(group: Group) -> None:
    one, other = await group.join(), await group.join()
    answer = one.router.route(a_request(PROMPT))
    found = await other.replicas.decision(answer.decision_id)
    assert found == one.router.decision(answer.decision_id)
    for unknown in ("", "0" * 28, answer.decision_id[:-1] + "x", "nonsense"):
        with pytest.raises(UnknownDecision):
            await other.replicas.decision(unknown)


async def test_a_router_asks_nobody_for_a_decision_of_its_own(group: Group) -> None:
    one = await group.join()
    answer = one.router.route(a_request(PROMPT))
    with pytest.raises(UnknownDecision):  # what it has is found before router replicas are asked
        await one.replicas.decision(answer.decision_id)


async def test_what_others_are_told_of_a_worker_clears_it_here_too(group: Group) -> None:
    one, other = await group.join(), await group.join()
    told = [one.router.route(a_request(a_prompt(160, start=1_000 * n))) for n in range(12)]
    for each in told:
        one.router.done(each.decision_id, Report())
    hung = told[0].worker
    for _ in range(40):  # a client that never reports what it asked one router
        for n in range(12):
            answer = one.router.route(a_request(a_prompt(160, start=1_000 * n)))
            if answer.worker != hung:
                one.router.done(answer.decision_id, Report())
        one.router.clock.advance(1.0)
    assert one.router.overdue_at(InstanceId(hung, 0)).startswith("overdue: ")
    theirs = [other.router.route(a_request(a_prompt(160, start=50_000 + n))) for n in range(6)]
    served = next(each for each in theirs if each.worker == hung)
    await until(lambda: one.router.loads.instance_of(served.decision_id) is not None)
    other.router.done(served.decision_id, Report())
    await until(lambda: not one.router.overdue_at(InstanceId(hung, 0)))


async def test_nonsense_on_the_subject_is_counted_and_changes_nothing(group: Group) -> None:
    one, other = await group.join(), await group.join()
    one.router.route(a_request(PROMPT))
    await until(lambda: in_flight(other) == 1)
    good = encode_signal("somebody", Alive())
    for payload in (b"", b"\xc1", good[:-1], b"x" * 100_000, good.replace(b"\x01", b"\x02", 1)):
        await one.bus.announce(ROUTERS, payload)
    await until(lambda: other.replicas.num_rejected == 5)
    assert in_flight(other) == 1


async def test_without_a_broker_it_routes_on_and_tells_later(group: Group) -> None:
    one, other = await group.join(), await group.join()
    one.bus.cut()
    one.router.route(a_request(PROMPT))
    one.bus.restore()
    await until(lambda: in_flight(other) == 1)


async def test_without_a_broker_few_chains_wait_and_every_load(group: Group) -> None:
    one, other = await group.join(), await group.join()
    await until(lambda: one.replicas.num_replicas == other.replicas.num_replicas == 1)
    one.bus.cut()
    num_routed = MAX_WAITING_WITH_CHAIN + 88
    for n in range(num_routed):
        one.router.route(a_request(a_prompt(160, start=1_000 * n)))
    one.bus.restore()
    await until(lambda: in_flight(other) == num_routed)
    assert len(other.router.overlay) <= MAX_WAITING_WITH_CHAIN < len(one.router.overlay)


def test_a_signal_says_what_it_said() -> None:
    router = Fleet()
    router.up("w1")
    under_test = router.router()
    said: list[object] = []
    under_test.publish = said.append
    under_test.route(a_request(PROMPT))
    assert isinstance(said[0], Routed)
    assert decode_signal(encode_signal("r", said[0])).signal == said[0]
    with pytest.raises(MalformedSignal, match="version 9"):
        decode_signal(encode_signal("r", Alive()).replace(b"\x01", b"\x09", 1))
