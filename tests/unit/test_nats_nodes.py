"""When a node of a cluster is given up, and which one is tried next."""

import pytest

from kvatlas.events.nats.nodes import (
    FIRST_PATIENCE_SECONDS,
    LAST_PATIENCE_SECONDS,
    PAUSE_SECONDS,
    Patience,
    Servers,
    Silences,
    is_address,
)

A, B, C = "nats://a:4222", "nats://b:4222", "nats://c:4222"


def test_silence_lasts_from_the_first_question_without_an_answer() -> None:
    silences = Silences()
    assert silences.unanswered("look", 100.0, 105.0) == 5.0
    assert silences.unanswered("look", 106.0, 111.0) == 11.0
    silences.answered("look")
    assert silences.unanswered("look", 112.0, 113.0) == 1.0


def test_who_asks_seldom_does_not_wait_in_between() -> None:
    silences = Silences()
    silences.unanswered("look", 100.0, 105.0)
    asked_at = 105.0 + PAUSE_SECONDS + 0.1
    assert silences.unanswered("look", asked_at, asked_at + 1.0) == 1.0


def test_an_answer_to_one_question_says_nothing_about_another() -> None:
    silences = Silences()
    silences.unanswered("look", 100.0, 104.0)
    silences.answered("read")
    silences.unanswered("read", 104.0, 105.0)
    assert silences.unanswered("look", 104.0, 108.0) == 8.0


def test_what_is_not_asked_any_more_is_not_kept() -> None:
    silences = Silences()
    for number in range(100):
        asked_at = number * (PAUSE_SECONDS + 2.0)
        silences.unanswered(f"get {number}", asked_at, asked_at + 1.0)
    assert len(silences._open) == 1


def test_another_node_begins_anew() -> None:
    silences = Silences()
    silences.unanswered("look", 100.0, 109.0)
    silences.forget()
    assert silences.unanswered("look", 109.0, 110.0) == 1.0


def test_patience_doubles_while_moving_helps_nobody() -> None:
    patience, now, borne = Patience(), 0.0, []
    for _ in range(6):
        seconds = 0.0
        while not patience.is_over(seconds, now):
            seconds, now = seconds + 5.0, now + 5.0
        borne.append(seconds)
    assert borne == [10.0, 20.0, 40.0, 80.0, 160.0, 160.0]


def test_patience_is_short_again_after_a_while_without_trouble() -> None:
    patience = Patience()
    assert patience.is_over(FIRST_PATIENCE_SECONDS, 100.0)
    assert not patience.is_over(FIRST_PATIENCE_SECONDS, 100.0 + LAST_PATIENCE_SECONDS)
    assert patience.is_over(FIRST_PATIENCE_SECONDS, 101.0 + 2 * LAST_PATIENCE_SECONDS)


def test_one_address_is_no_choice() -> None:
    servers = Servers(["a"])
    assert not servers.has_another(A)
    servers.add([A, "nats://a:4222"])
    assert servers.urls == ["a"]
    servers.add([B, B])
    assert servers.urls == ["a", B]
    assert servers.has_another(A)


def test_the_node_that_was_given_up_is_tried_last() -> None:
    servers = Servers([A, B, C])
    servers.give_up(B, "node b")
    orders = [servers.in_order() for _ in range(30)]
    assert {order[-1] for order in orders} == {B}
    assert {order[0] for order in orders} == {A, C}
    assert servers.is_taken(A, "node a")


def test_the_same_node_by_another_name_is_left_at_once() -> None:
    servers = Servers([A, B, C])
    servers.give_up(A, "node a")
    assert not servers.is_taken(B, "node a")
    assert servers.in_order()[0] == C
    assert servers.is_taken(C, "node c")


def test_where_nothing_else_is_reached_the_node_is_taken_again() -> None:
    servers = Servers([A, B, C])
    servers.give_up(A, "node a")
    assert servers.is_taken(A, "node a")  # B and C were tried before it
    assert not servers.is_taken(B, "node a")
    assert servers.is_taken(C, "node a")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("nats://a:4222", True),
        ("TLS://user:pass@a", True),
        ("wss://a:443/path", True),
        (" nats://a:4222", True),
        ("a:4222", True),
        ("user@a:4222", True),
        ("[::1]:4222", True),
        ("nats", True),  # the name of a service
        ("nats.example.org", True),
        ("http://a:4222", False),
        ("nats:/a:4222", False),
        ("nats://", False),
        ("a:port", False),
        ("a b", False),
        ("", False),
    ],
)
def test_what_is_no_address_of_a_broker_is_known_by_its_form(text: str, is_one: bool) -> None:
    assert is_address(text) is is_one
