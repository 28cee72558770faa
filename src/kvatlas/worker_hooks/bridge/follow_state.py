"""Decides what an engine's stream says: which batch is next, what is missing, who speaks.

             Connected, quiet, a gap, a suspicion              replay ends
    joining ------------------------------------> asking --------------------> following
       ^                                             |  ^                          |
       |            another incarnation              |  |   gap, reconnect, quiet  |
       +---------------------------------------------+  +--------------------------+

    joining     nothing of this incarnation was delivered, no question is open: the engine was not
                there, or has no replay
    asking      a replay is under way; live batches wait in `_waiting`
    following   `next_sequence` is what comes next; live batches are delivered as they come

Every question begins with the batch delivered last: an engine that knows it with the same content
is the same incarnation, one that knows it otherwise, or knows only what was before it, is another.
A batch that came before a question and that its answer does not reach is of an incarnation that is
gone. What an engine no longer knows becomes a doubt, and the stream goes on behind it.

Engines number their batches from 0 in each incarnation. Pure; `run` feeds it and does what it says.
"""

from collections.abc import Callable

from kvatlas.worker_hooks.bridge.delivery import Delivery
from kvatlas.worker_hooks.bridge.follow_options import FollowCounters, FollowOptions, FollowPhase
from kvatlas.worker_hooks.bridge.observed import Observed
from kvatlas.worker_hooks.bridge.payload_marks import mark_of
from kvatlas.worker_hooks.bridge.presence import Presence
from kvatlas.worker_hooks.bridge.question import ReplayRequest
from kvatlas.worker_hooks.bridge.stimuli import (
    Connected,
    DeliveryFailed,
    Disconnected,
    Effect,
    EngineAnswered,
    EngineSilent,
    FrameArrived,
    FrameReplayed,
    ReplayEnded,
    ReplayFailed,
    RequestReplay,
    Stimulus,
    Ticked,
)
from kvatlas.worker_hooks.bridge.waiting import WaitingBatch, WaitingBatches

#: an engine that sends and never knows what it sent is not asked again until it reconnects
MAX_EMPTY_ANSWERS = 3


class FollowState:
    """One rank's stream. `read` says what is in a batch; it may not fail."""

    def __init__(self, read: Callable[[bytes], Observed], options: FollowOptions) -> None:
        self._options = options
        self.counters = FollowCounters()
        self._delivery = Delivery(read, options.num_blocks, self.counters)
        self._has_replay = options.has_replay
        self._presence = Presence(options)
        #: live batches that came during a replay, none below the next once it has ended
        self._waiting = WaitingBatches(options.max_waiting_bytes)
        self._open: ReplayRequest | None = None
        self._num_asks = 0
        #: whether the engine has ever answered with a batch
        self._has_replayed = False
        #: answers without a batch though the engine has sent some
        self._num_empty = 0
        #: what came next when the connection went; later batches may be another incarnation's
        self._left_at: int | None = None
        self._identity = ""
        #: why the incarnation may be another one, while the engine is asked
        self._suspicion = ""
        self._is_silent = False

    @property
    def phase(self) -> FollowPhase:
        """Where the stream stands."""
        if self._open is not None:
            return FollowPhase.asking
        return FollowPhase.joining if self._delivery.next is None else FollowPhase.following

    @property
    def next_sequence(self) -> int | None:
        """The sequence that comes next, None while that is not known."""
        return self._delivery.next

    @property
    def degraded_reason(self) -> str:
        """Why what was told is not all believed, "" while it is."""
        return self._delivery.belief.doubted

    @property
    def _expected(self) -> int:
        return self._delivery.next or 0

    def learn_num_blocks(self, num_blocks: int) -> None:
        """Know how many blocks the engine has."""
        self._delivery.belief.learn_num_blocks(num_blocks)

    def start(self, now: float) -> list[Effect]:
        """Begin; live batches are being received already."""
        self._presence.note_message(now)
        if self._has_replay:
            self._request_replay()
        else:
            self._delivery.degrade("no replay endpoint: what the engine told before is not known")
        return self._delivery.drain_effects()

    def handle(self, stimulus: Stimulus, now: float) -> list[Effect]:
        """Return what to do, in order."""
        match stimulus:
            case FrameArrived(sequence, payload):
                self._presence.note_live_message(now)
                self.counters.received += 1
                self._handle_frame(sequence, payload)
            case FrameReplayed(ask, sequence, payload):
                if self._open is not None and ask == self._open.number:
                    self._presence.note_message(now)
                    self._handle_replayed(self._open, sequence, payload)
            case ReplayEnded(ask):
                if self._open is not None and ask == self._open.number:
                    self._presence.note_message(now)
                    self._end_replay(self._open)
            case ReplayFailed(ask, reason):
                if self._open is not None and ask == self._open.number:
                    self._presence.note_message(now)
                    self._fail_replay(self._open, reason)
            case Connected():
                self._handle_connection()
            case Disconnected():
                self._handle_absence(now)
            case EngineAnswered(identity):
                self._handle_identity(identity)
            case EngineSilent():
                self._is_silent = True
            case DeliveryFailed(reason):
                self.counters.lost += 1
                self._delivery.degrade(reason)
            case Ticked():
                self._handle_time(now)
        return self._delivery.drain_effects()

    # --- live ---------------------------------------------------------------------------------

    def _handle_frame(self, sequence: int, payload: bytes) -> None:
        mark = mark_of(payload)
        if self._delivery.is_of_earlier(sequence, mark):
            self.counters.stale += 1
        elif self._open is not None:
            self._handle_frame_during_replay(sequence, payload, mark)
        elif self._delivery.next is None:
            self._join_at(sequence, payload, mark)
        elif sequence < self._delivery.next:
            self._handle_repeated(sequence, payload, mark)
        elif sequence > self._delivery.next:
            self.counters.gaps += 1
            self._wait_and_request_replay(sequence, payload, mark)
        else:
            self._handle_next(sequence, payload, mark)

    def _handle_frame_during_replay(self, sequence: int, payload: bytes, mark: int) -> None:
        delivered = None if self._delivery.next is None else self._delivery.mark_at(sequence)
        if delivered == mark:
            self.counters.duplicates += 1
        elif delivered is not None:
            self._restart(f"the sequence went back to {sequence}")
            if not self._has_replay:
                self._handle_frame(sequence, payload)
        else:
            self._wait(sequence, payload, mark)

    def _join_at(self, sequence: int, payload: bytes, mark: int) -> None:
        """Begin with this batch, if it is the first or nothing else can be had."""
        if sequence and self._has_replay:
            self._wait_and_request_replay(sequence, payload, mark)
            return
        if sequence:
            self._delivery.lose(0, sequence, "came before the bridge, and there is no replay")
        self._delivery.deliver(sequence, payload, mark)

    def _handle_repeated(self, sequence: int, payload: bytes, mark: int) -> None:
        """A sequence that we have had: late, or another incarnation's."""
        known = self._delivery.mark_at(sequence)
        if known == mark:
            self.counters.duplicates += 1
        elif known is None and self._has_replay:
            self._request_replay()  # too long ago to tell; the engine knows whether it is the same
        else:
            self._restart(f"the sequence went back to {sequence}")
            self._handle_frame(sequence, payload)

    def _handle_next(self, sequence: int, payload: bytes, mark: int) -> None:
        """The batch that comes next, unless its prompts begin with other hashes than before."""
        observed, is_contradiction = self._delivery.observe(payload)
        if self._has_replay and is_contradiction:
            self._wait_and_request_replay(sequence, payload, mark)
            return
        self._delivery.deliver(sequence, payload, mark, observed)
        self._return()

    def _wait_and_request_replay(self, sequence: int, payload: bytes, mark: int) -> None:
        if self._has_replay:
            self._wait(sequence, payload, mark)
            self._request_replay()
        elif self._delivery.next is not None:
            self._delivery.lose(self._delivery.next, sequence, "were lost, and there is no replay")
            self._delivery.deliver(sequence, payload, mark)

    def _wait(self, sequence: int, payload: bytes, mark: int) -> None:
        if not self._waiting.put(sequence, WaitingBatch(payload, mark, self._num_asks)):
            self.counters.dropped += 1

    # --- replay -------------------------------------------------------------------------------

    def _request_replay(self, since: int | None = None, must_prove: str = "") -> None:
        """Ask for all from the batch delivered last on, or last before `since` came next.

        With `must_prove`, the reason of a restart, an engine that no longer knows that batch counts
        as another one.
        """
        self._num_asks += 1
        self.counters.asks += 1
        expected = self._delivery.next if since is None else since
        witness = expected - 1 if expected else None
        self._open = ReplayRequest(self._num_asks, witness, must_prove, is_proven=witness is None)
        self._delivery.add_effect(RequestReplay(self._num_asks, witness or 0))

    def _handle_replayed(self, open_: ReplayRequest, sequence: int, payload: bytes) -> None:
        self.counters.replayed += 1
        is_first, open_.has_answer, self._has_replayed = not open_.has_answer, True, True
        mark, expected = mark_of(payload), self._expected
        if sequence < expected:
            if self._delivery.mark_at(sequence) not in (None, mark):
                self._restart(f"batch {sequence} is another one than it was")
            open_.is_proven = True
            return
        if is_first and open_.must_prove and open_.witness is not None:
            self._restart(open_.must_prove)
            return
        if sequence > expected and open_.num_delivered:
            # dropped by a full socket on the way: asked for again when this answer has ended
            open_.has_holes = True
            self._wait(sequence, payload, mark)
            return
        if sequence > expected or not open_.is_proven:
            self._close_gap(open_, sequence, mark)
            if self._open is not open_:
                return
        self._delivery.deliver(sequence, payload, mark)
        open_.num_delivered += 1

    def _close_gap(self, open_: ReplayRequest, sequence: int, mark: int) -> None:
        """The answer begins late: take what came live before it."""
        waiting = self._waiting.get(sequence)
        is_same = waiting is not None and waiting.mark == mark
        self._deliver_waiting(open_, below=sequence)
        if self._open is not open_:
            return
        open_.is_proven = True
        if self._expected < sequence:
            self._delivery.lose(self._expected, sequence, "have left the engine's replay buffer")
        elif not is_same:
            self._delivery.degrade(
                f"the engine no longer knows what it said before batch {sequence}"
            )

    def _end_replay(self, open_: ReplayRequest) -> None:
        self._open = None
        if open_.witness is not None and not open_.has_answer:
            self._restart(f"the engine knows no batch {open_.witness} any more")
            return
        has_sent = bool(self._waiting.came_before(open_.number))
        if not self._delivery.next and not self._has_replayed and has_sent:
            self._num_empty += 1
            if self._num_empty >= MAX_EMPTY_ANSWERS:
                self._go_without("the engine's replay buffer is empty")
                return
        if self._delivery.next is None:
            self._delivery.next = 0
            self._delivery.trust(forgets=True)
        self._suspicion = ""
        if self._settle_waiting(open_):
            self._return()

    def _settle_waiting(self, open_: ReplayRequest) -> bool:
        """Deliver what has waited; ask again for what is still missing, else return True."""
        self._deliver_waiting(open_)
        if self._open is None and not open_.has_holes:
            for sequence in self._waiting.came_before(open_.number):
                self._waiting.pop(sequence)
                self.counters.stale += 1
        if open_.num_delivered == 0:
            self._waiting.dropped_to = -1
        if self._open is None and (self._waiting or self._waiting.dropped_to >= self._expected):
            self._request_replay()
        return self._open is None

    def _deliver_waiting(self, open_: ReplayRequest, below: int | None = None) -> None:
        """Deliver what has waited and is next; with `below` also across holes, up to there."""
        for sequence in self._waiting.sequences():
            if below is not None and sequence >= below:
                return
            expected = self._expected
            if sequence < expected:
                waiting = self._waiting.pop(sequence)
                known = self._delivery.mark_at(sequence)
                if known == waiting.mark:
                    self.counters.duplicates += 1
                elif waiting.ask < open_.number or known is None:
                    self.counters.stale += 1
                else:
                    self._restart(f"the sequence went back to {sequence}")
                    return
                continue
            if sequence > expected:
                if below is None:
                    return
                self._delivery.lose(expected, sequence, "have left the engine's replay buffer")
            waiting = self._waiting.pop(sequence)
            self._delivery.deliver(sequence, waiting.payload, waiting.mark)
            open_.num_delivered += 1

    def _fail_replay(self, open_: ReplayRequest, reason: str) -> None:
        self.counters.failed_asks += 1
        self._open = None
        if open_.num_delivered:
            self._request_replay()  # it went on up to here, and goes on from here
        elif self._suspicion:
            self._restart(self._suspicion)
        elif not self._presence.is_away or self._delivery.next is None:
            self._go_without_answer(open_, reason)

    def _go_without(self, reason: str) -> None:
        """Ask this engine no more."""
        self._has_replay = False
        self._go_without_answer(ReplayRequest(self._num_asks, None), reason)

    def _go_without_answer(self, open_: ReplayRequest, reason: str) -> None:
        """Take what has come live, and doubt what has not."""
        self._waiting.dropped_to = -1
        while self._waiting and self._open is None:
            first = self._waiting.sequences()[0]
            if self._delivery.next is None and first == 0:
                self._delivery.next = 0
            elif first > self._expected:
                self._delivery.lose(self._expected, first, reason)
                self._delivery.next = first
            self._deliver_waiting(open_)
        if self._delivery.next is None and not self.degraded_reason:
            self._delivery.degrade(f"what the engine told before is not known: {reason}")

    # --- who speaks -----------------------------------------------------------------------------

    def _restart(self, reason: str) -> None:
        """Begin anew with another incarnation."""
        self._delivery.restart(reason)
        self._open = None
        self._waiting.clear()
        self._identity = self._suspicion = ""
        self._left_at = None
        if self._has_replay:
            self._request_replay()

    def _handle_absence(self, now: float) -> None:
        if not self._presence.is_away:
            self._presence.leave(now)
            self._left_at = self._delivery.next

    def _handle_connection(self) -> None:
        was_away = self._presence.is_away
        self._presence.come_back()
        if was_away:
            self._has_replay, self._num_empty = self._options.has_replay, 0
        if self._has_replay and was_away:
            # the answer has all of them, if they are of the engine that is there now
            self._waiting.clear()
            self._request_replay(
                self._left_at, "the engine does not know what came before the connection went"
            )
        elif self._has_replay and self._open is None:
            self._request_replay()
        self._left_at = None

    def _handle_identity(self, identity: str) -> None:
        was_silent, self._is_silent = self._is_silent, False
        is_other = bool(identity and self._identity and identity != self._identity)
        if identity:
            self._identity = identity
        if is_other and not self._has_replay:
            self._restart("the engine's process is another one")
            self._identity = identity
        elif is_other:
            self._suspicion = "the engine's process is another one"
            self._request_replay(must_prove=self._suspicion)
        elif was_silent and self._has_replay and self._open is None:
            self._request_replay()

    def _handle_time(self, now: float) -> None:
        if self._presence.is_long_away(now) and not self.degraded_reason:
            reason = f"no connection to the engine for {self._options.away_seconds:g} s"
            self._delivery.degrade(reason, is_for_absence=True)
        if self._presence.is_quiet(now) and self._has_replay and self._open is None:
            self._presence.wait_longer(now)
            self._request_replay(must_prove="the engine was quiet and has lost what it said last")

    def _return(self) -> None:
        """The stream goes on where it was left: a doubt for being away alone is void."""
        if self._delivery.belief.is_for_absence and not self._presence.is_away:
            self._delivery.trust(forgets=False)
