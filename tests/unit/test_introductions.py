"""Whom to ask what it is, and how often."""

from kvatlas.indexer.service.introductions import (
    FIRST_PAUSE_SECONDS,
    MAX_ASKED,
    MAX_PAUSE_SECONDS,
    MAX_WAITING,
    Introductions,
)
from kvatlas.schemas.ids import InstanceId

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)


def nobody(_: InstanceId) -> bool:
    return False


def invented(number: int) -> InstanceId:
    return InstanceId(f"invented-{number}", 0)


def test_a_lease_without_an_instance_is_asked_before_names_that_only_spoke() -> None:
    asking = Introductions()
    asking.spoke(W2)
    assert asking.due([W1], nobody, 1, 0.0) == [W1]
    assert asking.due([W1], nobody, 1, 0.0) == [W2]
    assert asking.due([W1], nobody, 1, 0.0) == []


def test_known_ones_are_not_asked() -> None:
    asking = Introductions()
    asking.spoke(W2)
    assert asking.due([W1], {W1, W2}.__contains__, 8, 0.0) == []


def test_pauses_double_up_to_the_longest() -> None:
    asking, now, pauses = Introductions(), 0.0, []
    assert asking.due([W1], nobody, 8, now) == [W1]
    for _ in range(8):
        asked_at = now
        while not asking.due([W1], nobody, 8, now):
            now += 0.5
        pauses.append(now - asked_at)
    assert pauses[:3] == [FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS, 4 * FIRST_PAUSE_SECONDS]
    assert max(pauses) == pauses[-1] == MAX_PAUSE_SECONDS


def test_a_flood_of_names_is_bounded_and_hides_no_lease() -> None:
    asking = Introductions()
    for number in range(50_000):
        asking.spoke(invented(number))
    asked: list[InstanceId] = []
    for look in range(10_000):
        asked += asking.due([W1], nobody, 8, look * 0.5)
    assert W1 in asked[:8]
    assert len([each for each in asked if each != W1]) == MAX_WAITING
    assert asked.count(W1) > 10


def test_who_was_asked_is_remembered_up_to_a_bound() -> None:
    asking = Introductions()
    for number in range(2 * MAX_ASKED):
        asking.due([invented(number)], nobody, 8, 0.0)
    assert asking.due([invented(2 * MAX_ASKED - 1)], nobody, 8, 0.0) == []
    assert asking.due([invented(0)], nobody, 8, 0.0) == [invented(0)]


def test_a_flood_of_leases_hides_no_living_instance() -> None:
    """More leases than can be asked before the first ones are due again, and names that speak."""
    asking, leases = Introductions(), [*map(invented, range(3_000)), W1]
    asked: set[InstanceId] = set()
    for look in range(2 * len(leases) // 4):
        for number in range(MAX_WAITING):
            asking.spoke(invented(10_000 + number))
        asked.update(asking.due(leases, nobody, 8, look * 0.5))
    assert W1 in asked
    assert set(leases) <= asked


def test_one_that_has_a_lease_and_has_spoken_goes_first() -> None:
    asking, leases = Introductions(), [*map(invented, range(3_000)), W1]
    asking.spoke(W2)
    asking.spoke(W1)
    assert asking.due(leases, nobody, 2, 0.0) == [W1, invented(0)]
    assert asking.due(leases, nobody, 2, 0.0) == [W2, invented(1)]
