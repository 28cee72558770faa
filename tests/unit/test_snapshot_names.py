import pytest

from kvatlas.events.objects import ObjectEntry
from kvatlas.indexer.snapshots.schedule import (
    headroom,
    is_due,
    is_near,
    name_for,
    sequence_of,
    surplus,
)


def entries(*sequences: int, apart_seconds: float = 300.0) -> list[ObjectEntry]:
    """Return snapshots, newest first, taken so far apart."""
    newest = int(1e18)
    return [
        ObjectEntry(name_for(sequence), 1, newest - int(place * apart_seconds * 1e9))
        for place, sequence in enumerate(sequences)
    ]


def test_a_name_tells_the_sequence_and_orders_like_it() -> None:
    assert sequence_of(name_for(1234)) == 1234
    assert name_for(9) < name_for(10) < name_for(2**63)
    assert name_for(9) != name_for(9)
    assert sequence_of("backup") is None


@pytest.mark.parametrize(
    ("newest", "present", "due"),
    [
        (None, 0, False),
        (None, 1, True),
        (100, 100, False),
        (100, 199, False),
        (100, 200, True),
        (100, 50, True),
        (100, 0, False),
    ],
)
def test_the_next_is_due_after_so_many_messages(
    newest: int | None, present: int, due: bool
) -> None:
    """A newest one of more than there is was taken of a log that is lost."""
    found = [] if newest is None else entries(newest, 1)
    assert is_due(found, present, 100) is due


def test_what_is_beyond_the_count_or_too_old_goes() -> None:
    found = entries(50, 40, 30, 20, 10)
    assert surplus(found, 3, 1e9) == found[3:]
    assert surplus(found, 9, 700.0) == found[3:]
    assert surplus(found, 9, 1.0) == found[1:]
    assert surplus(found[:1], 1, 0.0) == []
    assert surplus([], 3, 1.0) == []


def test_headroom_is_of_the_oldest() -> None:
    assert headroom([], 5) is None
    assert headroom(entries(900, 500), 1) == 500
    assert headroom(entries(900, 500), 501) == 0
    assert headroom(entries(900, 500), 502) == -1


def test_a_log_that_discards_nothing_is_near_nothing() -> None:
    assert not is_near(10, 1, 1000)
    assert is_near(10, 100, 1000)
    assert not is_near(300, 100, 1000)
