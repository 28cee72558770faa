"""What announcements must not do: repeat, lie, come late or come from too many."""

import msgspec
import pytest

from kvatlas.router.decision.requests import Report
from kvatlas.router.replicas.replicas import (
    MAX_REPLICAS,
    MAX_RETOLD_CHAIN_BYTES,
    SILENCE_SECONDS,
    ReplicaState,
)
from kvatlas.router.replicas.signals import (
    Alive,
    Done,
    Joined,
    Prefilled,
    Routed,
    StateRequested,
    decode_signal,
    encode_signal,
)
from kvatlas.schemas.errors import MalformedSignal
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Plan
from testkit.builders import hashes
from testkit.fleet import MODEL, Fleet, RouterUnderTest, a_prompt, a_request

CHAIN = hashes(*range(1, 21))


def a_router() -> tuple[RouterUnderTest, ReplicaState]:
    fleet = Fleet()
    fleet.up("w1")
    router = fleet.router(counts_ids=False)
    return router, ReplicaState("me", router.loads, router.overlay, router.failures)


def routed(name: str, compute_tokens: int = 320) -> Routed:
    plan = Plan(16, 0, (), compute_tokens)
    return Routed(name, MODEL, "w1", 0, 1, plan, 0.0, CHAIN)


def in_flight(router: RouterUnderTest) -> int:
    load = router.load_of(InstanceId("w1", 0))
    return load.in_flight if load else 0


def test_a_decision_that_is_told_again_after_its_end_leaves_nothing_behind() -> None:
    router, state = a_router()
    for signal in (routed("d"), Done("d", Report()), routed("d"), Done("d", Report())):
        state.apply("other", signal, 0.0)
    assert len(router.overlay) == 1
    router.clock.advance(60.0)
    router.route(a_request(a_prompt(320)))
    assert router.overlay.num_bytes == 16 * 20  # of this request's own chain
    assert in_flight(router) == 1


def test_expired_requests_are_not_told_to_who_joins() -> None:
    router, state = a_router()
    state.published(routed("lost"))
    router.route(a_request(a_prompt(320)))
    assert state.apply("new", Joined(), 0.0) == []


def test_how_far_a_request_is_is_told_with_it() -> None:
    router, state = a_router()
    router.publish = state.published
    answer = router.route(a_request(a_prompt(320)))
    router.prefilled(answer.decision_id, Report())
    told = state.apply("new", Joined(), 0.0)
    assert [type(each) for each in told] == [Routed, Prefilled]


def test_a_router_that_was_silent_is_asked_what_it_gave() -> None:
    router, state = a_router()
    assert state.apply("other", routed("d"), 0.0) == [StateRequested("other")]
    assert state.apply("other", Alive(), 1.0) == []
    state.sweep(2.0 + SILENCE_SECONDS)
    assert in_flight(router) == 0
    assert state.apply("other", Alive(), 60.0) == [StateRequested("other")]
    state.apply("other", routed("d"), 60.0)
    assert in_flight(router) == 1


def test_who_is_asked_tells_and_others_do_not() -> None:
    router, state = a_router()
    router.publish = state.published
    router.route(a_request(a_prompt(320)))
    state.apply("other", Alive(), 0.0)
    assert len(state.apply("other", StateRequested("me"), 0.0)) == 1
    assert state.apply("other", StateRequested("somebody"), 0.0) == []


def test_only_so_many_routers_are_heard() -> None:
    router, state = a_router()
    for n in range(MAX_REPLICAS + 50):
        state.apply(f"r{n}", routed(f"d{n}"), 0.0)
    assert state.num_replicas == MAX_REPLICAS
    assert in_flight(router) == MAX_REPLICAS
    state.sweep(1.0 + SILENCE_SECONDS)
    assert (state.num_replicas, in_flight(router)) == (0, 0)


@pytest.mark.parametrize("compute_tokens", [-1, 10**12])
def test_impossible_plans_are_refused(compute_tokens: int) -> None:
    payload = encode_signal("other", routed("d", compute_tokens))
    with pytest.raises(MalformedSignal, match="impossible"):
        decode_signal(payload)


def test_what_is_told_again_has_a_short_chain() -> None:
    router, state = a_router()
    state.published(msgspec.structs.replace(routed("r"), chain=bytes(16 * 1024)))
    router.loads.of(InstanceId("w1", 0), 1, MODEL, 0.0)
    router.loads.routed("r", InstanceId("w1", 0), routed("r").plan, 0.0, 0.0)
    [again] = state.apply("other", Joined(), 1.0)
    assert isinstance(again, Routed)
    assert len(again.chain) == MAX_RETOLD_CHAIN_BYTES
