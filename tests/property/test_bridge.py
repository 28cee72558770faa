"""Random loss, delay, reordering of replay against live batches, and restarts.

What a bridge delivers is the engine's own order, or it says that something is missing.
"""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.worker_hooks.bridge.follow_options import FollowOptions, FollowPhase
from kvatlas.worker_hooks.bridge.follow_state import FollowState
from kvatlas.worker_hooks.bridge.observed import Observed
from kvatlas.worker_hooks.bridge.stimuli import (
    Connected,
    Degrade,
    Deliver,
    Disconnected,
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

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.booleans()),  # whether it comes through
        st.tuples(st.just("live"), st.just(0)),
        st.tuples(st.just("replay"), st.integers(0, 9)),
        st.tuples(st.just("repeat"), st.integers(0, 5)),
        st.tuples(st.just("blip"), st.just(0)),
        st.tuples(st.just("restart"), st.integers(0, 6)),
        st.tuples(st.just("tick"), st.integers(1, 9)),
    ),
    max_size=60,
)


class Engine:
    """Incarnations one after the other, with the network between them and the bridge."""

    def __init__(self, buffer: int, *, has_replay: bool, max_waiting_bytes: int) -> None:
        self.buffer = buffer
        self.runs: list[list[bytes]] = [[]]
        self.wire: deque[Stimulus] = deque()
        self.answer: deque[Stimulus] = deque()
        self.now = 0.0
        options = FollowOptions(has_replay=has_replay, max_waiting_bytes=max_waiting_bytes)
        self.state = FollowState(lambda payload: Observed(), options)
        #: of each incarnation that the bridge saw, what was delivered
        self.delivered: list[list[tuple[int, bytes]]] = [[]]
        self.doubted = [False]
        self._carry_out(self.state.start(self.now))

    def publish(self, comes_through: bool) -> None:
        run = self.runs[-1]
        payload = b"%d:%d" % (len(self.runs), len(run))
        run.append(payload)
        if comes_through:
            self.wire.append(FrameArrived(len(run) - 1, payload))

    def restart(self, num_missed: int) -> None:
        """Begin anew; some batches are out before the bridge is connected again."""
        self.wire.append(Disconnected())
        self.runs.append([])
        self.answer.clear()
        for _ in range(num_missed):
            self.publish(False)
        self.wire.append(Connected())

    def step(self, what: str, number: int) -> None:
        match what:
            case "publish":
                self.publish(bool(number))
            case "live" if self.wire:
                self.take(self.wire.popleft())
            case "replay" if self.answer:
                reply = self.answer.popleft()
                if number == 0 and isinstance(reply, FrameReplayed):
                    self.answer.clear()
                    reply = ReplayFailed(reply.ask, "silent")
                elif number == 1 and isinstance(reply, FrameReplayed) and len(self.answer) > 1:
                    open_ = self.state._open
                    if open_ is not None and open_.num_delivered > 1:
                        reply = self.answer.popleft()  # dropped by a full socket
                self.take(reply)
            case "repeat" if number < len(self.runs[-1]):
                frame = FrameArrived(number, self.runs[-1][number])
                if frame in self.wire or self.state.next_sequence is None:
                    return
                if not self.wire and number < self.state.next_sequence:
                    self.take(frame)
            case "blip":
                self.wire += [Disconnected(), Connected()]
            case "restart":
                self.restart(number)
            case "tick":
                self.now += number
                self.take(Ticked())

    def take(self, stimulus: Stimulus) -> None:
        self._carry_out(self.state.handle(stimulus, self.now))

    def _carry_out(self, effects: list) -> None:  # type: ignore[type-arg]
        for effect in effects:
            match effect:
                case Deliver(sequence, payload):
                    self.delivered[-1].append((sequence, payload))
                case RequestReplay(ask, first):
                    run = self.runs[-1]
                    kept = range(max(first, len(run) - self.buffer), len(run))
                    self.answer = deque(FrameReplayed(ask, s, run[s]) for s in kept)
                    self.answer.append(ReplayEnded(ask))
                case Restarted():
                    self.delivered.append([])
                    self.doubted.append(False)
                case Degrade():
                    self.doubted[-1] = True
                case Recover():
                    self.doubted[-1] = False

    def settle(self) -> None:
        """Let all arrive that is under way, and be quiet for long."""
        for _ in range(3):
            self._drain()
            self.now += 100
            self.take(Ticked())
        self._drain()

    def _drain(self) -> None:
        for _ in range(10_000):
            if not self.wire and not self.answer:
                return
            self.take((self.wire or self.answer).popleft())
        raise AssertionError("asks for ever")


@settings(max_examples=400)
@given(STEPS, st.integers(1, 8), st.sampled_from([10, 10_000]))
def test_the_engines_own_order_is_delivered_or_a_doubt_raised(
    steps: list[tuple[str, int]], buffer: int, max_waiting_bytes: int
) -> None:
    engine = Engine(buffer, has_replay=True, max_waiting_bytes=max_waiting_bytes)
    for what, number in steps:
        engine.step(what, number)
    engine.settle()
    assert engine.state.phase is FollowPhase.following
    current = engine.runs[-1]
    whole = list(enumerate(current))
    if engine.delivered[-1] != whole:
        assert engine.doubted[-1]
        assert engine.state.degraded_reason
        assert engine.delivered[-1][-1:] == whole[-1:]
    if buffer > max(map(len, engine.runs)) and not engine.state.counters.failed_asks:
        assert engine.delivered[-1] == whole
    for run in engine.delivered:
        assert [sequence for sequence, _ in run] == sorted({sequence for sequence, _ in run})
    assert engine.state._waiting.sequences() == []
    assert engine.state._waiting.num_bytes == 0


@given(st.lists(st.booleans(), max_size=30))
def test_without_replay_each_loss_is_a_doubt(comes_through: list[bool]) -> None:
    engine = Engine(5, has_replay=False, max_waiting_bytes=1000)
    for comes in comes_through:
        engine.publish(comes)
    engine.settle()
    delivered = [sequence for sequence, _ in engine.delivered[-1]]
    assert delivered == [sequence for sequence, comes in enumerate(comes_through) if comes]
    if delivered:
        assert engine.doubted[-1] == (delivered != list(range(delivered[-1] + 1)))
