"""What the router puts into a request so that an engine's own transfer tier pulls."""

import msgspec
import pytest

from kvatlas.router.answers import RouteAnswer
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import NamespaceDescriptor, host_and_port
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from testkit.fleet import Fleet, a_prompt, a_request

PROMPT = a_prompt(1_600)
P2P = {"w1": "10.0.0.1:5710", "w2": "10.0.0.2:5711"}


def a_pulling_answer(addresses: dict[str, str]) -> RouteAnswer:
    """w1 holds the prompt and is busy, so that w2 pulls from it."""
    fleet = Fleet()
    for worker in ("w1", "w2"):
        fleet.up(worker, p2p_address=addresses.get(worker, ""))
    fleet.holds("w1", PROMPT, num_blocks=50)
    router = fleet.router(load_window_ms=0.0, predicted_seconds=0.0)
    for _ in range(40):
        answer = router.route(a_request(PROMPT))
        if answer.plan.pulls:
            assert (answer.worker, answer.plan.pulls[0].worker) == ("w2", "w1")
            return answer
    raise AssertionError("nothing was pulled")


def test_a_pull_between_p2p_tiers_names_the_owner_as_remote_kv_source() -> None:
    answer = a_pulling_answer(P2P)
    sent = msgspec.json.decode(msgspec.json.encode(answer))["kv_transfer_params"]
    assert sent["remote_kv_source"] == {
        "kv_request_id": answer.decision_id,
        "remote_host": "10.0.0.1",
        "remote_port": 5710,
    }
    assert sent["kvatlas"]["plan"]["pulls"][0]["worker"] == "w1"


@pytest.mark.parametrize("addresses", [{}, {"w1": P2P["w1"]}, {"w2": P2P["w2"]}])
def test_no_source_is_named_unless_both_ends_have_the_tier(addresses: dict[str, str]) -> None:
    answer = a_pulling_answer(addresses)
    sent = msgspec.json.decode(msgspec.json.encode(answer))["kv_transfer_params"]
    assert set(sent) == {"kvatlas"}


def test_no_source_is_named_where_nothing_is_pulled() -> None:
    fleet = Fleet()
    for worker, address in P2P.items():
        fleet.up(worker, p2p_address=address)
    fleet.holds("w1", PROMPT)
    answer = fleet.router().route(a_request(PROMPT))
    assert (answer.worker, answer.plan.pulls) == ("w1", ())
    assert answer.kv_transfer_params.remote_kv_source is None


def test_what_is_no_address_of_the_fleet_is_not_passed_on() -> None:
    answer = a_pulling_answer({"w1": "somewhere", "w2": P2P["w2"]})
    assert answer.kv_transfer_params.remote_kv_source is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("h:1", ("h", 1)),
        ("[::1]:5710", ("[::1]", 5710)),
        ("", None),
        ("h", None),
        (":1", None),
        ("h:", None),
        ("h:0", None),
        ("h:65536", None),
        ("h:-1", None),
        ("h:\u0661", None),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, parts: tuple[str, int] | None) -> None:
    assert host_and_port(text) == parts


def test_a_sidecar_refuses_a_wrong_address_by_name() -> None:
    options = SidecarOptions(
        nats_url="",
        worker="w",
        model="m",
        descriptor=NamespaceDescriptor(16),
        ring_path="r",
        socket_path="s",
        p2p_address="h",
    )
    with pytest.raises(InvalidSetting, match="p2p_address"):
        options.validate()
