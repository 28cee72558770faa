from hypothesis import given
from hypothesis import strategies as st

from kvatlas.events.ordering import Position, SequenceTracker, Verdict
from kvatlas.schemas.ids import InstanceId

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)


def judged(tracker: SequenceTracker, *batches: tuple[int, int]) -> list[Verdict]:
    return [tracker.judge(W1, *batch) for batch in batches]


def test_batches_in_order_are_next() -> None:
    assert judged(SequenceTracker(), (5, 1), (5, 2), (5, 3)) == ["new_epoch", "next", "next"]


def test_a_missing_batch_is_one_gap() -> None:
    assert judged(SequenceTracker(), (1, 1), (1, 4), (1, 5)) == ["new_epoch", "gap", "next"]


def test_a_batch_that_turns_up_late_is_a_duplicate() -> None:
    assert judged(SequenceTracker(), (1, 1), (1, 3), (1, 2))[-1] == "duplicate"


def test_a_repeated_batch_is_a_duplicate_and_moves_nothing() -> None:
    tracker = SequenceTracker()
    assert judged(tracker, (1, 1), (1, 1)) == ["new_epoch", "duplicate"]
    assert tracker.position(W1) == Position(1, 1)


def test_a_higher_epoch_restarts_the_count_wherever_it_begins() -> None:
    tracker = SequenceTracker()
    assert judged(tracker, (1, 7), (2, 1), (3, 50)) == ["new_epoch"] * 3
    assert tracker.position(W1) == Position(3, 50)


def test_a_lower_epoch_is_old_whatever_its_sequence() -> None:
    assert judged(SequenceTracker(), (2, 1), (1, 99))[-1] == "old_epoch"


def test_instances_do_not_touch_each_other() -> None:
    tracker = SequenceTracker()
    tracker.judge(W1, 9, 9)
    assert tracker.judge(W2, 1, 1) == "new_epoch"
    assert tracker.judge(InstanceId("w1", 1), 1, 1) == "new_epoch"


def test_nothing_of_an_ended_epoch_counts_and_the_next_one_does() -> None:
    tracker = SequenceTracker()
    judged(tracker, (3, 1))
    tracker.end(W1, 3)
    assert judged(tracker, (3, 2), (2, 9), (4, 1)) == ["ended_epoch", "old_epoch", "new_epoch"]


def test_an_epoch_can_end_before_its_first_batch() -> None:
    tracker = SequenceTracker()
    judged(tracker, (3, 1))
    tracker.end(W1, 4)
    assert judged(tracker, (3, 2), (4, 1), (5, 1)) == ["old_epoch", "ended_epoch", "new_epoch"]


def test_the_end_of_an_older_epoch_changes_nothing() -> None:
    tracker = SequenceTracker()
    judged(tracker, (3, 1))
    tracker.end(W1, 2)
    assert judged(tracker, (3, 2)) == ["next"]


def test_an_epoch_can_be_opened_before_its_first_batch() -> None:
    tracker = SequenceTracker()
    tracker.begin(W1, 4)
    tracker.begin(W1, 3)
    assert judged(tracker, (3, 1), (4, 1), (4, 2)) == ["old_epoch", "next", "next"]


def test_a_forgotten_instance_begins_anew() -> None:
    tracker = SequenceTracker()
    judged(tracker, (3, 1))
    tracker.end(W1, 3)
    tracker.forget(W1)
    assert tracker.position(W1) == Position(0, 0)
    assert judged(tracker, (3, 2)) == ["new_epoch"]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=20))
def test_what_counts_only_rises(batches: list[tuple[int, int]]) -> None:
    tracker, last = SequenceTracker(), Position(0, 0)
    for epoch, seq in batches:
        counts = tracker.judge(W1, epoch, seq) in ("next", "new_epoch", "gap")
        assert counts == ((epoch, seq) > last)
        last = max(last, Position(epoch, seq))
        assert tracker.position(W1) == last
