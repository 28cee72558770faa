"""The ladder of pulls, told as stimuli and the effects that answer them."""

from collections.abc import Sequence

import pytest

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.worker_hooks.transfer.pull_protocol import (
    BatchId,
    BlocksArrived,
    BlocksChecked,
    CheckAndFill,
    CloseBatch,
    Effect,
    EndPull,
    LeaseDenied,
    LeaseGiven,
    Owner,
    Priority,
    PullAsked,
    PullCancelled,
    PullSettings,
    ReadBlocks,
    ReadFailed,
    RequestLease,
    Stimulus,
    TimePassed,
    WakeAt,
)
from kvatlas.worker_hooks.transfer.pull_state import PullState
from testkit.blocks import a_chain, a_hash

MS = 1_000_000
DEADLINE = 10_000 * MS
W1, W2 = Owner("w1/0", "kv.lease.w1.0"), Owner("w2/0", "kv.lease.w2.0")
HIGH = Priority.high


def a_state(
    batch_blocks: int = 4,
    max_reads: int = 2,
    max_batches: int = 4,
    max_batches_per_owner: int = 4,
    max_retries: int = 1,
) -> PullState:
    settings = PullSettings(
        batch_blocks,
        max_reads,
        max_batches,
        max_batches_per_owner,
        max_retries,
        backoff_ms=5,
        try_ms=1000,
        rest_ms=1000,
        fair_ms=100,
        lease_slack_ms=500,
    )
    return PullState(settings)


class Story:
    """A state, the time, and the last effects beside wake-ups."""

    def __init__(self, state: PullState) -> None:
        self.state, self.now_ns = state, 0
        self.wake_ns = 0

    def tell(self, stimulus: Stimulus, after_ms: int = 0) -> list[Effect]:
        self.now_ns += after_ms * MS
        effects = self.state.handle(stimulus, self.now_ns)
        self.state.validate()
        for effect in effects:
            if isinstance(effect, WakeAt):
                self.wake_ns = effect.time_ns
        return [effect for effect in effects if not isinstance(effect, WakeAt)]

    def ask(
        self,
        *numbers: int,
        owners: Sequence[Owner] = (W1,),
        pull: int = 1,
        priority: Priority = HIGH,
        deadline_ns: int = DEADLINE,
    ) -> list[Effect]:
        slots = range(10 * pull, 10 * pull + len(numbers))
        return self.tell(PullAsked(pull, a_chain(*numbers), slots, owners, deadline_ns, priority))


def batch(number: int, priority: Priority = HIGH) -> BatchId:
    return BatchId(priority, number)


def lease(
    number: int,
    *numbers: int,
    owner: Owner = W1,
    pull: int = 1,
    at_ms: int = 0,
    try_ms: int = 1000,
) -> RequestLease:
    deadline_ns = (at_ms + try_ms) * MS
    return RequestLease(batch(number), pull, owner, a_chain(*numbers), try_ms + 500, deadline_ns)


def given(number: int, num_blocks: int, rest: str = "", until_ms: int = 5000) -> LeaseGiven:
    return LeaseGiven(batch(number), num_blocks, until_ms * MS, rest)


# --- the way of a block ----------------------------------------------------------------------


def test_a_block_is_leased_read_verified_and_held() -> None:
    story = Story(a_state())
    assert story.ask(1, 2) == [lease(1, 1, 2)]
    assert story.tell(given(1, 2)) == [ReadBlocks(batch(1), 1000 * MS)]
    assert story.tell(BlocksArrived(batch(1))) == [CheckAndFill(batch(1), a_chain(1, 2), [10, 11])]
    assert story.tell(BlocksChecked(batch(1))) == [
        CloseBatch(batch(1)),
        EndPull(1, held=[0, 1], missing=[]),
    ]


def test_a_pull_of_nothing_ends_at_once() -> None:
    assert Story(a_state()).ask() == [EndPull(1, held=[], missing=[])]


def test_without_an_owner_all_is_missing_at_once() -> None:
    story = Story(a_state())
    assert story.ask(1, owners=()) == [EndPull(1, [], [(0, "no_owner")])]


def test_neighbours_travel_in_batches_lowest_first() -> None:
    story = Story(a_state(batch_blocks=2))
    assert story.ask(1, 2, 3, 4, 5) == [lease(1, 1, 2), lease(2, 3, 4), lease(3, 5)]


def test_each_owner_is_asked_for_what_it_is_thought_to_hold() -> None:
    story = Story(a_state())
    first, second = (Owner(w.name, w.subject, num_blocks=n) for w, n in ((W1, 1), (W2, 3)))
    effects = story.ask(1, 2, 3, 4, owners=(first, second))
    assert effects == [
        lease(1, 1, owner=first),
        lease(2, 2, 3, owner=second),
    ]


# --- windows ---------------------------------------------------------------------------------


def test_reads_wait_for_a_place_and_leases_go_ahead_of_them() -> None:
    story = Story(a_state(batch_blocks=1, max_reads=1, max_batches=2))
    assert story.ask(1, 2, 3) == [lease(1, 1), lease(2, 2)]
    assert story.tell(given(1, 1)) == [ReadBlocks(batch(1), 1000 * MS)]
    assert story.tell(given(2, 1)) == []
    story.tell(BlocksArrived(batch(1)))
    assert story.tell(BlocksChecked(batch(1))) == [
        CloseBatch(batch(1)),
        ReadBlocks(batch(2), 1000 * MS),
        lease(3, 3),
    ]


def test_one_owner_does_not_take_the_whole_window() -> None:
    story = Story(a_state(batch_blocks=1, max_batches_per_owner=1))
    assert story.ask(1, 2) == [lease(1, 1)]
    assert story.ask(3, owners=(W2,), pull=2) == [lease(2, 3, owner=W2, pull=2)]


def test_a_more_urgent_pull_goes_first() -> None:
    story = Story(a_state(batch_blocks=1, max_batches=1))
    assert story.ask(1, 2, priority=Priority.low) != []
    assert story.ask(3, pull=2, priority=Priority.critical) == []
    effects = story.tell(LeaseDenied(batch(1, Priority.low), "not_held"))
    request = effects[-1]
    assert isinstance(request, RequestLease)
    assert request.batch == batch(2, Priority.critical)


def test_a_lease_that_ended_while_it_waited_is_asked_for_again() -> None:
    story = Story(a_state(batch_blocks=1, max_reads=1))
    story.ask(1, 2)
    story.tell(given(1, 1))
    story.tell(given(2, 1, until_ms=50))
    story.tell(BlocksArrived(batch(1)))
    assert story.tell(BlocksChecked(batch(1)), after_ms=50) == [
        CloseBatch(batch(1)),
        CloseBatch(batch(2)),
    ]
    assert story.wake_ns == 55 * MS
    assert story.tell(TimePassed(), after_ms=5) == [lease(3, 2, at_ms=55)]


# --- the ladder ------------------------------------------------------------------------------


def test_a_corrupt_block_is_asked_for_again_and_then_of_the_next_owner() -> None:
    story = Story(a_state(max_retries=1))
    story.ask(1, 2, owners=(W1, W2))
    story.tell(given(1, 2))
    story.tell(BlocksArrived(batch(1)))
    assert story.tell(BlocksChecked(batch(1), corrupt=[1])) == [CloseBatch(batch(1))]
    assert story.wake_ns == 5 * MS
    assert story.tell(TimePassed(), after_ms=5) == [lease(2, 2, at_ms=5)]
    story.tell(given(2, 1))
    story.tell(BlocksArrived(batch(2)))
    assert story.tell(BlocksChecked(batch(2), corrupt=[0])) == [
        CloseBatch(batch(2)),
        lease(3, 2, owner=W2, at_ms=5),
    ]
    story.tell(given(3, 1))
    story.tell(BlocksArrived(batch(3)))
    ended = story.tell(BlocksChecked(batch(3)))[-1]
    assert ended == EndPull(1, held=[0, 1], missing=[], num_corrupt=2)


def test_a_block_that_is_corrupt_everywhere_is_recomputed() -> None:
    story = Story(a_state(max_retries=0))
    story.ask(1)
    story.tell(given(1, 1))
    story.tell(BlocksArrived(batch(1)))
    ended = story.tell(BlocksChecked(batch(1), corrupt=[0]))[-1]
    assert ended == EndPull(1, [], [(0, "corrupt")], num_corrupt=1)


@pytest.mark.parametrize("reason", ["busy", "not_ready"])
def test_an_owner_that_cannot_yet_is_asked_again_later_each_time(reason: str) -> None:
    story = Story(a_state(max_retries=2))
    story.ask(1)
    assert story.tell(LeaseDenied(batch(1), reason)) == [CloseBatch(batch(1))]
    assert story.wake_ns == 5 * MS
    story.tell(TimePassed(), after_ms=5)
    story.tell(LeaseDenied(batch(2), reason))
    assert story.wake_ns == 15 * MS
    story.tell(TimePassed(), after_ms=10)
    ended = story.tell(LeaseDenied(batch(3), reason))[-1]
    assert ended == EndPull(1, [], [(0, reason)])


@pytest.mark.parametrize(
    "reason", ["not_held", "incompatible", "wrong_epoch", "no_transport", "a newer word"]
)
def test_an_owner_that_cannot_help_is_passed_over(reason: str) -> None:
    story = Story(a_state())
    story.ask(1, owners=(W1, W2), deadline_ns=1000 * MS)
    assert story.tell(LeaseDenied(batch(1), reason)) == [
        CloseBatch(batch(1)),
        lease(2, 1, owner=W2),
    ]
    assert story.tell(LeaseDenied(batch(2), reason))[-1] == EndPull(1, [], [(0, reason)])


def test_what_an_owner_lacks_is_asked_of_the_next() -> None:
    story = Story(a_state())
    story.ask(1, 2, 3, owners=(W1, W2))
    assert story.tell(given(1, 1, rest="not_held")) == [
        ReadBlocks(batch(1), 1000 * MS),
        lease(2, 2, 3, owner=W2),
    ]


def test_what_is_too_much_for_one_lease_is_asked_of_the_same_owner() -> None:
    story = Story(a_state())
    story.ask(1, 2, 3, owners=(W1, W2))
    assert story.tell(given(1, 2, rest="too_large"))[-1] == lease(2, 3)


def test_a_dead_owner_is_left_alone_by_all_pulls_for_a_while() -> None:
    story = Story(a_state(batch_blocks=1, max_batches_per_owner=1))
    story.ask(1, 2, owners=(W1, W2), deadline_ns=9000 * MS)
    story.tell(given(1, 1))
    assert story.tell(ReadFailed(batch(1), "disconnected")) == [
        CloseBatch(batch(1)),
        lease(2, 1, owner=W2),
    ]
    assert story.ask(3, pull=2) == [EndPull(2, [], [(0, "owner_resting")])]
    story.now_ns += 1000 * MS
    assert story.ask(4, pull=3) == [lease(3, 4, pull=3, at_ms=1000)]


def test_a_new_incarnation_of_a_dead_owner_is_asked_at_once() -> None:
    story = Story(a_state())
    story.ask(1)
    story.tell(LeaseDenied(batch(1), "no_responder"))
    again = Owner(W1.name, W1.subject, epoch=2)
    assert story.ask(2, pull=2, owners=(again,)) == [lease(2, 2, owner=again, pull=2)]


def test_an_owner_that_had_too_little_time_is_not_blamed() -> None:
    story = Story(a_state())
    story.ask(1, deadline_ns=50 * MS)
    story.tell(LeaseDenied(batch(1), "timed_out"), after_ms=50)
    assert story.ask(2, pull=2) == [lease(2, 2, pull=2, at_ms=50)]


def test_a_try_leaves_time_for_the_next_owner() -> None:
    story = Story(a_state())
    assert story.ask(1, owners=(W1, W2), deadline_ns=400 * MS) == [lease(1, 1, try_ms=200)]


def test_a_full_bounce_area_is_no_fault_of_the_owner() -> None:
    story = Story(a_state(max_retries=0))
    story.ask(1)
    for number in range(1, 4):
        story.tell(given(number, 1))
        assert story.tell(ReadFailed(batch(number), "no_room")) == [CloseBatch(batch(number))]
        effects = story.tell(TimePassed(), after_ms=5)
        assert effects == [lease(number + 1, 1, at_ms=5 * number)]


def test_a_slot_that_the_engine_took_back_ends_the_block() -> None:
    story = Story(a_state())
    story.ask(1, owners=(W1, W2))
    story.tell(given(1, 1))
    story.tell(BlocksArrived(batch(1)))
    assert story.tell(BlocksChecked(batch(1), revoked=[0])) == [
        CloseBatch(batch(1)),
        EndPull(1, [], [(0, "revoked")]),
    ]


# --- ends ------------------------------------------------------------------------------------


def test_at_the_deadline_the_rest_is_missing_and_late_answers_only_close() -> None:
    story = Story(a_state(batch_blocks=1))
    story.ask(1, 2, 3, deadline_ns=300 * MS)
    story.tell(given(1, 1))
    story.tell(BlocksArrived(batch(1)))
    story.tell(BlocksChecked(batch(1)))
    story.tell(given(2, 1))
    assert story.wake_ns == 300 * MS
    assert story.tell(TimePassed(), after_ms=300) == [
        EndPull(1, held=[0], missing=[(1, "deadline"), (2, "deadline")])
    ]
    assert story.tell(BlocksArrived(batch(2))) == [CloseBatch(batch(2))]
    assert story.tell(given(3, 1)) == [CloseBatch(batch(3))]


def test_a_wake_up_that_comes_early_is_asked_for_again() -> None:
    story = Story(a_state())
    story.ask(1, deadline_ns=300 * MS)
    story.wake_ns = 0
    story.tell(TimePassed(), after_ms=299)
    assert story.wake_ns == 300 * MS


def test_a_cancelled_pull_gives_back_the_leases_it_has_not_used() -> None:
    story = Story(a_state(batch_blocks=1, max_reads=1))
    story.ask(1, 2)
    story.tell(given(1, 1))
    story.tell(given(2, 1))
    assert story.tell(PullCancelled(1)) == [
        CloseBatch(batch(2)),
        EndPull(1, [], [(0, "cancelled"), (1, "cancelled")]),
    ]
    assert story.tell(ReadFailed(batch(1), "failed")) == [CloseBatch(batch(1))]


def test_what_is_over_is_not_touched_by_what_comes_late() -> None:
    story = Story(a_state())
    story.ask(1)
    story.tell(LeaseDenied(batch(1), "not_held"))
    late: list[Stimulus] = [
        given(1, 1),
        BlocksArrived(batch(1)),
        BlocksChecked(batch(1)),
        ReadFailed(batch(1), "failed"),
        LeaseDenied(batch(1), "busy"),
        PullCancelled(1),
    ]
    for stimulus in late:
        assert story.tell(stimulus) == []


def test_the_story_of_a_block_is_told_in_order() -> None:
    story = Story(a_state(max_retries=0))
    story.ask(1, 2, owners=(W1, W2))
    story.tell(given(1, 1, rest="not_held"))
    story.tell(LeaseDenied(batch(2), "busy"))
    assert [line.what for line in story.state.story(a_hash(2))] == [
        "asked for",
        "busy at w2/0",
    ]
    story.tell(BlocksArrived(batch(1)))
    story.tell(BlocksChecked(batch(1)))
    assert [line.what for line in story.state.story(a_hash(1))] == [
        "asked for",
        "leased from w1/0",
        "held from w1/0",
    ]
    assert [line.what for line in story.state.story(a_hash(2))][-1] == "missing: busy"


@pytest.mark.parametrize("key", ["batch_blocks", "max_reads", "backoff_ms", "try_ms"])
def test_settings_that_make_no_sense_are_refused(key: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        PullState(PullSettings(**{key: 0}))
    assert caught.value.key == key
