"""What a bridge makes of an engine's stream: order, gaps, other incarnations, doubts."""

from kvatlas.worker_hooks.bridge.follow_options import FollowOptions, FollowPhase
from kvatlas.worker_hooks.bridge.follow_state import FollowState
from kvatlas.worker_hooks.bridge.observed import Observed
from kvatlas.worker_hooks.bridge.stimuli import (
    Connected,
    Degrade,
    Deliver,
    DeliveryFailed,
    Disconnected,
    Effect,
    EngineAnswered,
    EngineSilent,
    FrameArrived,
    FrameReplayed,
    Recover,
    ReplayEnded,
    ReplayFailed,
    RequestReplay,
    Restarted,
    Stimulus,
    Ticked,
)
from kvatlas.worker_hooks.bridge.waiting import WAITING_OVERHEAD_BYTES


def batch(sequence: int, run: str = "a") -> bytes:
    return f"{run}{sequence}".encode()


def live(sequence: int, run: str = "a") -> FrameArrived:
    return FrameArrived(sequence, batch(sequence, run))


def again(ask: int, sequence: int, run: str = "a") -> FrameReplayed:
    return FrameReplayed(ask, sequence, batch(sequence, run))


def deliver(*sequences: int, run: str = "a") -> list[Effect]:
    return [Deliver(sequence, batch(sequence, run)) for sequence in sequences]


class Bridge:
    """A FollowState and a clock that stands still unless told."""

    def __init__(
        self,
        said: dict[bytes, Observed] | None = None,
        *,
        has_replay: bool = True,
        num_blocks: int | None = None,
        max_waiting_bytes: int = 100_000,
    ) -> None:
        said = said or {}
        options = FollowOptions(
            has_replay=has_replay, num_blocks=num_blocks, max_waiting_bytes=max_waiting_bytes
        )
        self.state = FollowState(lambda payload: said.get(payload, Observed()), options)
        self.now = 0.0
        self.started = self.state.start(self.now)

    def take(self, *stimuli: Stimulus) -> list[Effect]:
        return [effect for s in stimuli for effect in self.state.handle(s, self.now)]

    def pass_time(self, seconds: float) -> list[Effect]:
        self.now += seconds
        return self.take(Ticked())


def following(num: int = 3, **options: int | bool | dict[bytes, Observed]) -> Bridge:
    """Return a bridge that has taken the batches 0..num-1."""
    bridge = Bridge(**options)  # type: ignore[arg-type]
    if bridge.started == [RequestReplay(1, 0)]:
        bridge.take(ReplayEnded(1))
    bridge.take(*(live(sequence) for sequence in range(num)))
    return bridge


# --- joining ------------------------------------------------------------------------------------


def test_replay_and_live_batches_are_spliced_without_loss_or_repetition() -> None:
    bridge = Bridge()
    assert bridge.started == [RequestReplay(1, 0)]
    taken = bridge.take(live(3), again(1, 0), live(4), *(again(1, i) for i in (1, 2, 3)))
    assert taken == deliver(0, 1, 2, 3)
    assert bridge.take(ReplayEnded(1), live(5)) == deliver(4, 5)
    assert bridge.state.phase is FollowPhase.following
    assert bridge.state.counters.duplicates == 1
    assert bridge.state.degraded_reason == ""


def test_an_engine_that_has_said_nothing_yet_is_followed_from_its_first_batch() -> None:
    bridge = Bridge()
    assert bridge.take(ReplayEnded(1), live(0)) == deliver(0)


def test_a_first_sequence_above_0_is_a_gap_from_0_f7() -> None:
    bridge = Bridge(has_replay=False)
    (doubt,) = bridge.started
    assert isinstance(doubt, Degrade)
    lost = Degrade("batches 0 to 4: came before the bridge, and there is no replay")
    assert bridge.take(live(5)) == [lost, *deliver(5)]
    assert bridge.state.counters.lost == 5


def test_without_replay_an_engine_that_begins_takes_the_doubt_back() -> None:
    bridge = Bridge(has_replay=False)
    assert bridge.take(live(0)) == [Recover(True), *deliver(0)]


def test_history_that_is_gone_is_doubted_once_and_not_asked_for_again_f5() -> None:
    bridge = Bridge()
    taken = bridge.take(again(1, 40), again(1, 41), ReplayEnded(1), live(42))
    lost = Degrade("batches 0 to 39: have left the engine's replay buffer")
    assert taken == [lost, *deliver(40, 41, 42)]
    assert bridge.state.counters.asks == 1


def test_a_silent_replay_lets_the_live_batches_go_on() -> None:
    bridge = Bridge()
    taken = bridge.take(live(7), live(8), ReplayFailed(1, "silent"))
    assert taken == [Degrade("batches 0 to 6: silent"), *deliver(7, 8)]


def test_an_engine_that_comes_up_after_the_bridge_is_known_from_its_beginning_f12() -> None:
    bridge = Bridge()
    (doubt,) = bridge.take(ReplayFailed(1, "silent"))
    assert isinstance(doubt, Degrade)
    assert bridge.take(Connected()) == [RequestReplay(2, 0)]
    taken = bridge.take(live(2), again(2, 0), again(2, 1), again(2, 2), ReplayEnded(2))
    assert taken == [Recover(True), *deliver(0, 1, 2)]


# --- gaps ---------------------------------------------------------------------------------------


def test_a_gap_is_replayed_and_live_batches_wait_in_order_f3_f4_f6() -> None:
    bridge = following(3)
    assert bridge.take(live(6)) == [RequestReplay(2, 2)]
    taken = bridge.take(live(7), again(2, 2), again(2, 3), live(8), again(2, 4), again(2, 5))
    assert taken == deliver(3, 4, 5)
    assert bridge.take(ReplayEnded(2)) == deliver(6, 7, 8)
    assert (bridge.state.counters.gaps, bridge.state.counters.lost) == (1, 0)
    assert bridge.state.degraded_reason == ""


def test_what_the_buffer_no_longer_has_is_doubted_and_live_batches_go_on() -> None:
    bridge = following(3)
    bridge.take(live(9))
    taken = bridge.take(again(2, 7), again(2, 8), again(2, 9), ReplayEnded(2), live(10))
    assert taken == [
        Degrade("batches 3 to 6: have left the engine's replay buffer"),
        *deliver(7, 8, 9, 10),
    ]
    assert bridge.state.counters.lost == 4


def test_live_batches_fill_what_has_left_the_buffer_meanwhile() -> None:
    bridge = following(3)
    bridge.take(live(4), live(5), live(6))
    taken = bridge.take(again(2, 6), ReplayEnded(2))
    assert taken == [
        Degrade("batches 3 to 3: have left the engine's replay buffer"),
        *deliver(4, 5, 6),
    ]


def test_a_replay_with_holes_of_a_full_socket_is_asked_for_again() -> None:
    bridge = Bridge()
    taken = bridge.take(again(1, 0), again(1, 1), again(1, 5), ReplayEnded(1))
    assert taken == [*deliver(0, 1), RequestReplay(2, 1)]
    taken = bridge.take(*(again(2, i) for i in range(1, 7)), ReplayEnded(2))
    assert taken == deliver(2, 3, 4, 5, 6)


def test_a_hole_in_the_engines_own_numbers_ends_in_a_doubt() -> None:
    bridge = Bridge()
    bridge.take(again(1, 0), again(1, 5), ReplayEnded(1))
    taken = bridge.take(again(2, 0), again(2, 5), ReplayEnded(2))
    assert taken == [Degrade("batches 1 to 4: have left the engine's replay buffer"), *deliver(5)]


def test_a_replay_that_breaks_off_goes_on_where_it_was() -> None:
    bridge = Bridge()
    assert bridge.take(again(1, 0), ReplayFailed(1, "silent"))[-1] == RequestReplay(2, 0)
    assert bridge.take(again(1, 1)) == []
    assert bridge.take(again(2, 0), again(2, 1), ReplayEnded(2)) == deliver(1)


def test_what_finds_no_room_while_asking_is_asked_for_again_f14() -> None:
    bridge = following(3, max_waiting_bytes=2 * (len(batch(4)) + WAITING_OVERHEAD_BYTES))
    bridge.take(live(4), live(5), live(6))
    assert bridge.state.counters.dropped == 1
    taken = bridge.take(again(2, 2), again(2, 3), ReplayEnded(2))
    assert taken == [*deliver(3, 4, 5), RequestReplay(3, 5)]
    assert bridge.take(again(3, 5), again(3, 6), ReplayEnded(3)) == deliver(6)
    assert bridge.state.degraded_reason == ""


def test_what_waits_costs_more_than_its_bytes() -> None:
    bridge = following(3, max_waiting_bytes=10 * WAITING_OVERHEAD_BYTES)
    for sequence in range(4, 1004):
        bridge.take(FrameArrived(sequence, b""))
    assert bridge.state.counters.dropped == 990
    bridge.take(live(4))  # in place of the empty one
    assert bridge.state.counters.dropped == 991


def test_a_lost_tail_is_found_when_it_stays_quiet() -> None:
    bridge = following(3)
    assert bridge.pass_time(1.0) == []
    assert bridge.pass_time(1.0) == [RequestReplay(2, 2)]
    assert bridge.take(again(2, 2), again(2, 3), ReplayEnded(2)) == deliver(3)
    assert bridge.pass_time(2.0) == []
    assert bridge.pass_time(2.0) == [RequestReplay(3, 3)]


# --- other incarnations -------------------------------------------------------------------------


def test_a_sequence_that_goes_back_is_another_incarnation_f1_f2() -> None:
    bridge = following(5)
    assert bridge.take(live(0, "b")) == [
        Restarted("the sequence went back to 0"),
        RequestReplay(2, 0),
    ]
    taken = bridge.take(live(1, "b"), again(2, 0, "b"), again(2, 1, "b"), ReplayEnded(2))
    assert taken == deliver(0, 1, run="b")
    assert bridge.state.degraded_reason == ""


def test_a_late_repetition_is_no_restart() -> None:
    bridge = following(5)
    assert bridge.take(live(2), live(4)) == []
    assert bridge.state.counters.duplicates == 2


def test_late_batches_of_the_incarnation_before_have_no_effect_f2() -> None:
    bridge = following(5)
    bridge.take(live(0, "b"), again(2, 0, "b"), ReplayEnded(2))
    assert bridge.take(live(4)) == []
    assert bridge.state.counters.stale == 1
    assert bridge.take(live(7)) == [RequestReplay(3, 0)]  # never heard before: looks like a gap
    assert bridge.take(again(3, 0, "b"), ReplayEnded(3)) == []
    assert bridge.state.counters.stale == 2
    assert bridge.take(live(1, "b")) == deliver(1, run="b")


def test_an_incarnation_that_has_come_further_is_found_by_the_last_batch_f2() -> None:
    bridge = following(5)
    assert bridge.take(Disconnected(), Connected()) == [RequestReplay(2, 4)]
    assert bridge.take(again(2, 4, "b")) == [
        Restarted("batch 4 is another one than it was"),
        RequestReplay(3, 0),
    ]
    taken = bridge.take(*(again(3, i, "b") for i in range(7)), ReplayEnded(3))
    assert taken == deliver(*range(7), run="b")


def test_a_batch_of_the_next_incarnation_that_fits_by_chance_is_found_out() -> None:
    bridge = following(5)
    assert bridge.take(Disconnected(), live(5, "b")) == deliver(5, run="b")
    assert bridge.take(Connected()) == [RequestReplay(2, 4)]
    assert isinstance(bridge.take(again(2, 4, "b"))[0], Restarted)


def test_an_engine_that_does_not_know_the_last_batch_any_more_is_another_one() -> None:
    bridge = following(5)
    bridge.take(Disconnected(), Connected())
    restarted, asked = bridge.take(ReplayEnded(2))
    assert restarted == Restarted("the engine knows no batch 4 any more")
    assert asked == RequestReplay(3, 0)


def test_a_connection_that_came_back_to_the_same_engine_changes_nothing() -> None:
    bridge = following(5)
    bridge.take(Disconnected(), Connected())
    assert bridge.take(again(2, 4), again(2, 5), ReplayEnded(2)) == deliver(5)
    assert bridge.state.counters.restarts == 0


def test_another_seed_of_the_engines_hashes_is_a_restart() -> None:
    said = {
        batch(1): Observed(1, first_blocks=((b"prompt", 111),)),
        batch(3, "b"): Observed(1, first_blocks=((b"prompt", 222),)),
    }
    bridge = following(3, said=said)
    assert bridge.take(live(3, "b")) == [RequestReplay(2, 2)]
    assert isinstance(bridge.take(again(2, 2, "b"))[0], Restarted)


def test_a_process_that_began_anew_is_asked_and_a_silent_one_is_taken_at_its_word() -> None:
    bridge = following(3)
    assert bridge.take(EngineAnswered("1"), EngineAnswered("1"), EngineAnswered("")) == []
    assert bridge.take(EngineAnswered("2")) == [RequestReplay(2, 2)]
    assert bridge.take(again(2, 2), ReplayEnded(2)) == []  # only its HTTP server is another one
    assert bridge.take(EngineAnswered("3")) == [RequestReplay(3, 2)]
    restarted, asked = bridge.take(ReplayFailed(3, "silent"))
    assert (type(restarted), asked) == (Restarted, RequestReplay(4, 0))
    assert bridge.take(EngineAnswered("3")) == []


def test_without_replay_another_process_is_a_restart() -> None:
    bridge = following(3, has_replay=False)
    bridge.take(EngineAnswered("1"))
    (restarted,) = bridge.take(EngineAnswered("2"))
    assert isinstance(restarted, Restarted)
    assert bridge.take(live(0, "b")) == deliver(0, run="b")


def test_a_server_that_was_silent_is_asked_what_it_knows() -> None:
    bridge = following(3)
    assert bridge.take(EngineSilent(), EngineAnswered("")) == [RequestReplay(2, 2)]


# --- doubts -------------------------------------------------------------------------------------


def doubtful(**said: Observed) -> Bridge:
    """Return a bridge without replay that has lost batch 3 of an engine of 10 blocks."""
    payloads = {key.encode(): observed for key, observed in said.items()}
    bridge = following(3, has_replay=False, num_blocks=10, said=payloads)
    lost = Degrade("batches 3 to 3: were lost, and there is no replay")
    assert bridge.take(live(4)) == [lost, *deliver(4)]
    return bridge


def test_a_doubt_heals_when_as_many_blocks_were_stored_as_the_engine_has() -> None:
    bridge = doubtful(a5=Observed(9, 9), a6=Observed(1, 1))
    assert bridge.take(live(5)) == deliver(5)
    assert bridge.take(live(6)) == [*deliver(6), Recover(True)]
    assert bridge.state.degraded_reason == ""


def test_a_further_loss_begins_the_turnover_again() -> None:
    bridge = doubtful(a5=Observed(9, 9), a7=Observed(9, 9))
    bridge.take(live(5))
    assert isinstance(bridge.take(live(7))[0], Degrade)
    assert bridge.state.degraded_reason


def test_a_clear_takes_a_doubt_back() -> None:
    bridge = doubtful(a5=Observed(is_cleared=True))
    assert bridge.take(live(5)) == [*deliver(5), Recover(True)]


def test_a_restart_takes_a_doubt_back() -> None:
    bridge = doubtful()
    bridge.take(live(0, "b"))
    assert bridge.state.degraded_reason == ""


def test_more_blocks_than_the_engine_has_are_a_doubt_f21() -> None:
    said = {batch(i): Observed(4, 1) for i in range(8)}
    bridge = following(3, num_blocks=10, said=said)
    assert bridge.take(live(3)) == [*deliver(3), Degrade("2 blocks more than the engine has")]


def test_a_batch_that_could_not_be_delivered_is_a_doubt() -> None:
    bridge = following(3)
    assert bridge.take(DeliveryFailed("too large")) == [Degrade("too large")]


def test_an_engine_that_is_away_is_doubted_until_it_is_back_unchanged() -> None:
    bridge = following(3)
    assert bridge.take(Disconnected()) == []
    assert bridge.pass_time(5.0) == [Degrade("no connection to the engine for 5 s")]
    assert bridge.pass_time(5.0) == []
    assert bridge.take(Connected()) == [RequestReplay(2, 2)]
    assert bridge.take(again(2, 2), ReplayEnded(2)) == [Recover(False)]


def test_an_engine_that_was_away_for_longer_than_it_remembers_counts_as_another_one() -> None:
    bridge = following(3)
    bridge.take(Disconnected())
    bridge.pass_time(5.0)
    restarted, asked = bridge.take(Connected(), again(2, 5))[1:]
    assert (type(restarted), asked) == (Restarted, RequestReplay(3, 0))
    bridge.take(again(3, 5))
    assert bridge.state.degraded_reason == "batches 0 to 4: have left the engine's replay buffer"
