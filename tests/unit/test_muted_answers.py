"""A muted namespace in answers: degraded for who asks about it, exact for everybody else."""

from typing import Any

import httpx
import msgspec
import pytest

from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.reader import InstanceView
from kvatlas.indexer.trust_overlay import TrustOverlay
from kvatlas.router.decision.requests import HashedPrompt, ScoreRequest
from kvatlas.router.http.app import create_app
from kvatlas.schemas.errors import NoCandidate
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import NamespacesOverBudget
from kvatlas.schemas.routing import CandidateScore
from testkit.fleet import MODEL, Fleet, a_prompt, a_request

PROMPT = a_prompt(64)
WHY = "more than 50000 blocks/s"
SAID = f"namespace_muted: {WHY}"
W1 = InstanceId("w1", 0)


def hasher_of(
    fleet: Fleet, salt: str | None = None, worker: str = "w1", fleet_key: bytes = b""
) -> BlockHasher:
    view = fleet.state.instance(InstanceId(worker, 0))
    assert view is not None
    assert view.info is not None
    return BlockHasher(view.info.descriptor.namespace(MODEL, None, salt), fleet_key)


def root_of(fleet: Fleet, salt: str | None = None, **more: Any) -> bytes:
    return hasher_of(fleet, salt, **more).root


@pytest.fixture
def fleet() -> Fleet:
    """Two workers that hold the prompt for everybody and for a tenant, who is muted at w1."""
    fleet = Fleet()
    for worker in ("w1", "w2"):
        fleet.up(worker)
        fleet.holds(worker, PROMPT)
        fleet.holds(worker, PROMPT, cache_salt="tenant")
    fleet.tell("w1", NamespacesOverBudget(root_of(fleet, "tenant"), WHY))
    return fleet


def score(fleet: Fleet, request: ScoreRequest) -> dict[str, CandidateScore]:
    return {each.worker: each for each in fleet.router().score(request).candidates}


def trusts(scores: dict[str, CandidateScore]) -> dict[str, tuple[Trust, str]]:
    return {name: (each.trust, each.trust_reason) for name, each in scores.items()}


EXACT = (Trust.exact, "")
MUTED = (Trust.degraded, SAID)


def test_only_an_answer_about_the_muted_namespace_is_degraded(fleet: Fleet) -> None:
    asked = score(fleet, a_request(PROMPT, cache_salt="tenant"))
    assert trusts(asked) == {"w1": MUTED, "w2": EXACT}
    assert {each.match_tokens for each in asked.values()} == {64}
    for request in (a_request(PROMPT), a_request(PROMPT, cache_salt="another")):
        assert trusts(score(fleet, request)) == {"w1": EXACT, "w2": EXACT}


def test_an_end_of_the_mute_is_an_end_of_the_doubt(fleet: Fleet) -> None:
    router = fleet.router()
    request = a_request(PROMPT, cache_salt="tenant")
    assert (
        MUTED in trusts({each.worker: each for each in router.score(request).candidates}).values()
    )
    fleet.tell("w1", NamespacesOverBudget(b""))
    after = {each.worker: each for each in router.score(request).candidates}
    assert trusts(after) == {"w1": EXACT, "w2": EXACT}


def test_hashes_name_no_namespace_so_any_muted_one_counts(fleet: Fleet) -> None:
    chain = hasher_of(fleet).chain(PROMPT)
    hashed = HashedPrompt(chain, None, None, None)
    asked = score(fleet, ScoreRequest(MODEL, b"", hashed=hashed))
    assert trusts(asked) == {"w1": MUTED, "w2": EXACT}


def test_the_fleet_key_is_part_of_the_root_that_is_asked_about() -> None:
    fleet = Fleet()
    fleet.up("w1")
    keyed = root_of(fleet, "tenant", fleet_key=b"key")
    fleet.tell("w1", NamespacesOverBudget(keyed, WHY))
    request = a_request(PROMPT, cache_salt="tenant")
    (with_key,) = fleet.router(fleet_key=b"key").score(request).candidates
    (without,) = fleet.router().score(request).candidates
    assert (with_key.trust, without.trust) == (Trust.degraded, Trust.exact)


def test_each_group_of_workers_has_a_root_of_its_own() -> None:
    fleet = Fleet()
    fleet.up("w1", block_tokens=16)
    fleet.up("w2", block_tokens=32)
    for worker in ("w1", "w2"):
        fleet.tell(worker, NamespacesOverBudget(root_of(fleet, worker="w2"), WHY))
    assert trusts(score(fleet, a_request(PROMPT))) == {"w1": EXACT, "w2": MUTED}


def test_who_asks_for_exact_ones_is_not_sent_to_a_muted_one(fleet: Fleet) -> None:
    exact_only = a_request(PROMPT, cache_salt="tenant", requires_exact=True)
    assert trusts(score(fleet, exact_only)) == {"w2": EXACT}
    fleet.tell("w2", NamespacesOverBudget(root_of(fleet, "tenant"), WHY))
    with pytest.raises(NoCandidate, match="exact"):
        fleet.router().score(exact_only)


def test_a_decision_says_why_its_worker_is_not_exact() -> None:
    fleet = Fleet()
    fleet.up("w1")
    fleet.tell("w1", NamespacesOverBudget(root_of(fleet), WHY))
    router = fleet.router()
    answer = router.route(a_request(PROMPT))
    assert answer.trust is Trust.degraded
    assert f"the chosen worker's index is degraded ({SAID})" in answer.reasons
    decision = router.decision(answer.decision_id)
    assert (decision.chosen.trust, decision.chosen.trust_reason) == (Trust.degraded, SAID)
    assert decision.question.candidates[0].trust is Trust.degraded


@pytest.mark.parametrize(
    ("is_catching_up", "is_silent", "trust"),
    [
        (True, False, Trust.degraded),
        (False, True, Trust.stale),
        (False, False, Trust.degraded),
    ],
)
def test_the_worse_of_muted_and_what_time_says_counts(
    fleet: Fleet, is_catching_up: bool, is_silent: bool, trust: Trust
) -> None:
    router = fleet.router()
    live = TrustOverlay(fleet.state)
    live.update_trust(is_catching_up, frozenset([W1] if is_silent else []))
    router._candidates._index = live
    request = a_request(PROMPT, cache_salt="tenant")
    found = {each.worker: each.trust for each in router.score(request).candidates}
    assert found["w1"] is trust


async def test_workers_lists_muted_roots_and_no_salt(fleet: Fleet) -> None:
    transport = httpx.ASGITransport(app=create_app(fleet.router()))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
        answer = await client.get("/v1/workers")
        metrics = (await client.get("/metrics")).text
    one, two = answer.json()["workers"]
    assert one["muted_namespaces"] == {root_of(fleet, "tenant").hex(): WHY}
    assert (one["trust"], two["muted_namespaces"]) == ("exact", {})
    assert "tenant" not in answer.text
    assert 'kv_namespaces_muted{rank="0",worker="w1"} 1.0' in metrics
    assert 'kv_namespaces_muted{rank="0",worker="w2"} 0.0' in metrics
    assert "kv_namespace_mutes_total 1.0" in metrics


# --- the fold -------------------------------------------------------------------------------------


def test_what_is_said_again_is_no_news(fleet: Fleet) -> None:
    version, mutes = fleet.state.fleet_version, fleet.state.stats().namespace_mutes
    again = NamespacesOverBudget(root_of(fleet, "tenant"), WHY)
    fleet.tell("w1", again)
    assert (fleet.state.fleet_version, fleet.state.stats().namespace_mutes) == (version, mutes)
    fleet.tell("w1", NamespacesOverBudget(root_of(fleet) + again.roots, WHY))
    assert fleet.state.fleet_version > version
    assert fleet.state.stats().namespace_mutes == mutes + 1


def test_a_snapshot_keeps_what_is_muted() -> None:
    fleet = Fleet(FlatRadixIndex())
    fleet.up("w1")
    fleet.tell("w1", NamespacesOverBudget(root_of(fleet), WHY))
    restored = IndexState(FlatRadixIndex())
    restored.restore(fleet.state.export()())
    view = restored.instance(W1)
    assert view is not None
    assert view.muted == {root_of(fleet): WHY}


def test_a_view_travels_between_processes_with_what_is_muted(fleet: Fleet) -> None:
    view = fleet.state.instance(W1)
    payload = msgspec.msgpack.encode(view)
    assert msgspec.msgpack.decode(payload, type=InstanceView) == view
