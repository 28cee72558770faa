"""Which epochs were replaced by one that is not there."""

import pytest

from kvatlas.events.leases import LeaseChange
from kvatlas.indexer.service.superseded import (
    MAX_RENEWALS,
    MAX_WATCHED,
    Superseded,
    SupersededEpochs,
)
from kvatlas.schemas.ids import InstanceId

W1 = InstanceId("w1", 0)
ALIVE = LeaseChange(W1, 5, "alive")


def test_a_lower_epoch_that_renews_its_lease_again_is_the_living_one() -> None:
    epochs = SupersededEpochs()
    epochs.spoke(W1, 5, 9)
    assert epochs.due() == []
    epochs.take(ALIVE)
    assert epochs.due() == [], "it may have been on its way"
    epochs.take(ALIVE)
    assert epochs.due() == [Superseded(W1, 9)]
    assert epochs.due() == []


def test_it_is_found_again_as_long_as_it_goes_on() -> None:
    epochs = SupersededEpochs()
    for _ in range(3):
        epochs.spoke(W1, 5, 9)
        epochs.take(ALIVE)
        epochs.spoke(W1, 5, 9)
        epochs.take(ALIVE)
        assert epochs.due() == [Superseded(W1, 9)]


@pytest.mark.parametrize(
    "change",
    [
        LeaseChange(W1, 9, "alive"),
        LeaseChange(W1, 12, "alive"),
        LeaseChange(W1, 5, "expired"),
        LeaseChange(W1, 5, "released"),
    ],
    ids=str,
)
def test_one_whose_lease_ends_or_is_anothers_is_not(change: LeaseChange) -> None:
    """A straggler of a process that died, or that has lost its name to a living one."""
    epochs = SupersededEpochs()
    epochs.spoke(W1, 5, 9)
    epochs.take(ALIVE)
    epochs.take(change)
    epochs.take(ALIVE)
    assert epochs.due() == []


def test_a_higher_claim_begins_anew() -> None:
    epochs = SupersededEpochs()
    epochs.spoke(W1, 5, 9)
    epochs.take(ALIVE)
    epochs.spoke(W1, 5, 10)
    epochs.take(ALIVE)
    assert epochs.due() == []
    epochs.take(ALIVE)
    assert epochs.due() == [Superseded(W1, 10)]


def test_only_so_many_are_watched() -> None:
    epochs = SupersededEpochs()
    for number in range(MAX_WATCHED):
        epochs.spoke(InstanceId(f"w{number}", 1), 1, 2)
    epochs.spoke(W1, 5, 9)
    for _ in range(2):
        epochs.take(ALIVE)
    assert epochs.due() == []


def test_sequences_that_were_passed_and_go_on_are_of_one_that_was_forged() -> None:
    epochs = SupersededEpochs()
    epochs.passed(W1, 5, 11, 2**53)
    epochs.take(ALIVE)
    epochs.passed(W1, 5, 12, 2**53)
    assert epochs.due() == []
    epochs.take(ALIVE)
    assert epochs.due() == [Superseded(W1, 5, 2**53)]


@pytest.mark.parametrize("again", [(5, 11, 20), (5, 10, 20), (5, 21, 21)], ids=str)
def test_a_batch_that_comes_twice_is_none(again: tuple[int, int, int]) -> None:
    """Nor are more of them, as long as none is new or the fold goes on."""
    epochs = SupersededEpochs()
    epochs.passed(W1, 5, 11, 20)
    epochs.take(ALIVE)
    epochs.passed(W1, *again)
    epochs.take(ALIVE)
    assert epochs.due() == []


def test_what_came_twice_once_is_not_watched_for_ever() -> None:
    epochs = SupersededEpochs()
    for number in range(MAX_WATCHED):
        name = InstanceId(f"w{number}", 1)
        epochs.passed(name, 5, 1, 2)
        for _ in range(MAX_RENEWALS + 1):
            epochs.take(LeaseChange(name, 5, "alive"))
    epochs.spoke(W1, 5, 9)
    for _ in range(2):
        epochs.take(ALIVE)
    assert epochs.due() == [Superseded(W1, 9)]


def test_an_end_in_the_log_that_the_lease_outlives_is_nobodys_word() -> None:
    epochs = SupersededEpochs()
    for _ in range(2):
        epochs.ended(W1, 5)
        epochs.take(ALIVE)
    assert epochs.due() == [Superseded(W1, 5)]
    epochs.ended(W1, 5)
    epochs.take(LeaseChange(W1, 5, "released"))
    assert epochs.due() == []
