"""Which epochs were replaced by one that is not there."""

import pytest

from kvatlas.events.leases import LeaseChange
from kvatlas.indexer.service.superseded import MAX_WATCHED, SupersededEpochs
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
    assert epochs.due() == [(W1, 9)]
    assert epochs.due() == []


def test_it_is_found_again_as_long_as_it_goes_on() -> None:
    epochs = SupersededEpochs()
    for _ in range(3):
        epochs.spoke(W1, 5, 9)
        epochs.take(ALIVE)
        epochs.spoke(W1, 5, 9)
        epochs.take(ALIVE)
        assert epochs.due() == [(W1, 9)]


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
    assert epochs.due() == [(W1, 10)]


def test_only_so_many_are_watched() -> None:
    epochs = SupersededEpochs()
    for number in range(MAX_WATCHED):
        epochs.spoke(InstanceId(f"w{number}", 1), 1, 2)
    epochs.spoke(W1, 5, 9)
    for _ in range(2):
        epochs.take(ALIVE)
    assert epochs.due() == []
