"""Decides what an engine's stream says: which batch is next, what is missing, who speaks.

             Connected, quiet, a gap, a suspicion              replay ends
    joining ------------------------------------> asking --------------------> following
       ^                                             |  ^                          |
       |            another incarnation              |  |   gap, reconnect, quiet  |
       +---------------------------------------------+  +--------------------------+

    joining     nothing of this incarnation was delivered, no question is open: the engine was not
                there, or has no replay
    asking      a replay is under way; live batches wait in `_waiting`
    following   `_next` is the sequence that comes next; live batches are delivered as they come

Every question begins with the batch delivered last: an engine that knows it with the same content
is the same incarnation, one that knows it otherwise, or knows only what was before it, is another.
A batch that came before a question and that its answer does not reach is of an incarnation that is
gone. What an engine no longer knows becomes a doubt, and the stream goes on behind it.

Engines number their batches from 0 in each incarnation. Pure; `run` feeds it and does what it says.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from kvatlas.worker_hooks.bridge.observed import FirstBlocks, Observed
from kvatlas.worker_hooks.bridge.payload_marks import PayloadMarks, mark_of
from kvatlas.worker_hooks.bridge.stimuli import (
    AskReplay,
    Connected,
    Deliver,
    DeliveryFailed,
    Disconnected,
    Doubt,
    Effect,
    EngineAnswered,
    EngineSilent,
    FrameArrived,
    FrameReplayed,
    ReplayEnded,
    ReplayFailed,
    Restarted,
    Stimulus,
    Ticked,
    Undoubt,
)
from kvatlas.worker_hooks.bridge.turnover import Turnover

#: a quiet engine is asked at least so often
MAX_QUIET_SECONDS = 60.0
#: what a waiting batch costs beside its payload: the objects around it and its place in the map
WAITING_OVERHEAD_BYTES = 384
#: an engine that sends and never knows what it sent is not asked again until it reconnects
MAX_EMPTY_ANSWERS = 3


class Phase(StrEnum):
    """Where a stream stands."""

    joining = "joining"
    asking = "asking"
    following = "following"


class FollowOptions(Struct, frozen=True, kw_only=True):
    """How patient a bridge is."""

    #: whether the engine can be asked for batches again
    has_replay: bool
    #: blocks of the engine; None: not known, and no doubt heals by turnover
    num_blocks: int | None = None
    #: of memory for live batches kept during a replay; more are dropped and asked for again
    max_waiting_bytes: int = 64 * 1024 * 1024
    #: without batches for so long, the engine is asked whether one was lost; then less and less
    quiet_seconds: float = 2.0
    #: away for so long, what it holds is doubted until it is back
    away_seconds: float = 5.0


class FollowCounters(Struct):
    """What happened so far; all rise only."""

    received: int = 0
    replayed: int = 0
    delivered: int = 0
    #: batches that came twice
    duplicates: int = 0
    #: batches of an incarnation that is gone
    stale: int = 0
    gaps: int = 0
    #: batches that the engine no longer knew
    lost: int = 0
    restarts: int = 0
    asks: int = 0
    failed_asks: int = 0
    #: live batches for which there was no room during a replay
    dropped: int = 0


class _Waiting(NamedTuple):
    payload: bytes
    mark: int
    #: last question when it came
    ask: int


class _Open(Struct):
    """The question under way."""

    number: int
    #: the batch that proves the incarnation; None asks for everything
    witness: int | None
    #: why it is another incarnation if it has lost the witness
    must_prove: str = ""
    #: whether the engine is known to be the one that said what came before
    is_proven: bool = False
    has_answer: bool = False
    num_delivered: int = 0
    #: batches are missing within the answer: the engine's socket has dropped them
    has_holes: bool = False


class FollowState:
    """One rank's stream. `read` says what is in a batch; it may not fail."""

    def __init__(self, read: Callable[[bytes], Observed], options: FollowOptions) -> None:
        self._read, self._options = read, options
        self.counters = FollowCounters()
        self._has_replay = options.has_replay
        self._turnover = Turnover(options.num_blocks)
        self._first_blocks = FirstBlocks()
        self._effects: list[Effect] = []
        #: sequence that comes next; None while joining
        self._next: int | None = None
        #: of the batches delivered in this incarnation, and in the one before it
        self._marks, self._earlier = PayloadMarks(), PayloadMarks()
        #: sequence -> live batch that came during a replay, none below _next once it has ended
        self._waiting: dict[int, _Waiting] = {}
        self._waiting_bytes = 0
        #: highest sequence for which there was no room
        self._dropped_to = -1
        self._open: _Open | None = None
        self._num_asks = 0
        #: whether the engine has ever answered with a batch
        self._has_replayed = False
        #: answers without a batch though the engine has sent some
        self._num_empty = 0
        self.doubt = ""
        self._heard_at = 0.0
        self._quiet_seconds = options.quiet_seconds
        self._away_since: float | None = None
        #: what came next when the connection went; later batches may be another incarnation's
        self._left_at: int | None = None
        self._is_away_doubted = False
        self._identity = ""
        #: why the incarnation may be another one, while the engine is asked
        self._suspicion = ""
        self._is_silent = False

    @property
    def phase(self) -> Phase:
        """Where the stream stands."""
        if self._open is not None:
            return Phase.asking
        return Phase.joining if self._next is None else Phase.following

    @property
    def next_sequence(self) -> int | None:
        """The sequence that comes next, None while that is not known."""
        return self._next

    def learn_num_blocks(self, num_blocks: int) -> None:
        """Know how many blocks the engine has."""
        self._turnover.num_blocks = num_blocks

    def start(self, now: float) -> list[Effect]:
        """Begin; live batches are being received already."""
        self._heard_at = now
        if self._has_replay:
            self._ask()
        else:
            self._doubt("no replay endpoint: what the engine told before is not known")
        return self._take_effects()

    def handle(self, stimulus: Stimulus, now: float) -> list[Effect]:
        """Return what to do, in order."""
        match stimulus:
            case FrameArrived(sequence, payload):
                self._heard_at, self._quiet_seconds = now, self._options.quiet_seconds
                self.counters.received += 1
                self._take_frame(sequence, payload)
            case FrameReplayed(ask, sequence, payload):
                if self._open is not None and ask == self._open.number:
                    self._heard_at = now
                    self._take_replayed(self._open, sequence, payload)
            case ReplayEnded(ask):
                if self._open is not None and ask == self._open.number:
                    self._heard_at = now
                    self._end_replay(self._open)
            case ReplayFailed(ask, reason):
                if self._open is not None and ask == self._open.number:
                    self._heard_at = now
                    self._fail_replay(self._open, reason)
            case Connected():
                self._take_connection()
            case Disconnected():
                if self._away_since is None:
                    self._away_since, self._left_at = now, self._next
            case EngineAnswered(identity):
                self._take_identity(identity)
            case EngineSilent():
                self._is_silent = True
            case DeliveryFailed(reason):
                self.counters.lost += 1
                self._doubt(reason)
            case Ticked():
                self._take_time(now)
        return self._take_effects()

    def _take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    # --- live ---------------------------------------------------------------------------------

    def _take_frame(self, sequence: int, payload: bytes) -> None:
        mark = mark_of(payload)
        if self._earlier.get(sequence) == mark:
            self.counters.stale += 1
        elif self._open is not None:
            self._take_while_asking(sequence, payload, mark)
        elif self._next is None:
            self._join_at(sequence, payload, mark)
        elif sequence < self._next:
            self._take_again(sequence, payload, mark)
        elif sequence > self._next:
            self.counters.gaps += 1
            self._wait_and_ask(sequence, payload, mark)
        else:
            self._take_next(sequence, payload, mark)

    def _take_while_asking(self, sequence: int, payload: bytes, mark: int) -> None:
        delivered = None if self._next is None else self._marks.get(sequence)
        if delivered == mark:
            self.counters.duplicates += 1
        elif delivered is not None:
            self._restart(f"the sequence went back to {sequence}")
            if not self._has_replay:
                self._take_frame(sequence, payload)
        else:
            self._wait(sequence, payload, mark)

    def _join_at(self, sequence: int, payload: bytes, mark: int) -> None:
        """Begin with this batch, if it is the first or nothing else can be had."""
        if sequence and self._has_replay:
            self._wait_and_ask(sequence, payload, mark)
            return
        if sequence:
            self._lose(0, sequence, "came before the bridge, and there is no replay")
        self._deliver(sequence, payload, mark)

    def _take_again(self, sequence: int, payload: bytes, mark: int) -> None:
        """A sequence that we have had: late, or another incarnation's."""
        known = self._marks.get(sequence)
        if known == mark:
            self.counters.duplicates += 1
        elif known is None and self._has_replay:
            self._ask()  # too long ago to tell; the engine knows whether it is the same
        else:
            self._restart(f"the sequence went back to {sequence}")
            self._take_frame(sequence, payload)

    def _take_next(self, sequence: int, payload: bytes, mark: int) -> None:
        """The batch that comes next, unless its prompts begin with other hashes than before."""
        observed = self._read(payload)
        if self._has_replay and self._first_blocks.contradict(observed):
            self._wait_and_ask(sequence, payload, mark)
            return
        self._deliver(sequence, payload, mark, observed)
        self._return()

    def _wait_and_ask(self, sequence: int, payload: bytes, mark: int) -> None:
        if self._has_replay:
            self._wait(sequence, payload, mark)
            self._ask()
        elif self._next is not None:
            self._lose(self._next, sequence, "were lost, and there is no replay")
            self._deliver(sequence, payload, mark)

    def _wait(self, sequence: int, payload: bytes, mark: int) -> None:
        before = self._waiting.get(sequence)
        freed = _cost(before.payload) if before else 0
        if self._waiting_bytes - freed + _cost(payload) > self._options.max_waiting_bytes:
            self.counters.dropped += 1
            self._dropped_to = max(self._dropped_to, sequence)
            return
        self._waiting_bytes += _cost(payload) - freed
        self._waiting[sequence] = _Waiting(payload, mark, self._num_asks)

    # --- replay -------------------------------------------------------------------------------

    def _ask(self, since: int | None = None, must_prove: str = "") -> None:
        """Ask for all from the batch delivered last on, or last before `since` came next.

        With `must_prove`, the reason of a restart, an engine that no longer knows that batch counts
        as another one.
        """
        self._num_asks += 1
        self.counters.asks += 1
        expected = self._next if since is None else since
        witness = expected - 1 if expected else None
        self._open = _Open(self._num_asks, witness, must_prove, is_proven=witness is None)
        self._effects.append(AskReplay(self._num_asks, witness or 0))

    def _take_replayed(self, open_: _Open, sequence: int, payload: bytes) -> None:
        self.counters.replayed += 1
        is_first, open_.has_answer, self._has_replayed = not open_.has_answer, True, True
        mark, expected = mark_of(payload), self._next or 0
        if sequence < expected:
            if self._marks.get(sequence) not in (None, mark):
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
        self._deliver(sequence, payload, mark)
        open_.num_delivered += 1

    def _close_gap(self, open_: _Open, sequence: int, mark: int) -> None:
        """The answer begins late: take what came live before it."""
        waiting = self._waiting.get(sequence)
        is_same = waiting is not None and waiting.mark == mark
        self._deliver_waiting(open_, below=sequence)
        if self._open is not open_:
            return
        open_.is_proven = True
        if (self._next or 0) < sequence:
            self._lose(self._next or 0, sequence, "have left the engine's replay buffer")
        elif not is_same:
            self._doubt(f"the engine no longer knows what it said before batch {sequence}")

    def _end_replay(self, open_: _Open) -> None:
        self._open = None
        if open_.witness is not None and not open_.has_answer:
            self._restart(f"the engine knows no batch {open_.witness} any more")
            return
        has_sent = any(waiting.ask < open_.number for waiting in self._waiting.values())
        if not self._next and not self._has_replayed and has_sent:
            self._num_empty += 1
            if self._num_empty >= MAX_EMPTY_ANSWERS:
                self._go_without("the engine's replay buffer is empty")
                return
        if self._next is None:
            self._next = 0
            self._trust(forgets=True)
        self._suspicion = ""
        if self._settle_waiting(open_):
            self._return()

    def _settle_waiting(self, open_: _Open) -> bool:
        """Deliver what has waited; ask again for what is still missing, else return True."""
        self._deliver_waiting(open_)
        if self._open is None and not open_.has_holes:
            for sequence in [s for s, w in self._waiting.items() if w.ask < open_.number]:
                self._drop_waiting(sequence)
                self.counters.stale += 1
        if open_.num_delivered == 0:
            self._dropped_to = -1
        if self._open is None and (self._waiting or self._dropped_to >= (self._next or 0)):
            self._ask()
        return self._open is None

    def _deliver_waiting(self, open_: _Open, below: int | None = None) -> None:
        """Deliver what has waited and is next; with `below` also across holes, up to there."""
        for sequence in sorted(self._waiting):
            if below is not None and sequence >= below:
                return
            waiting = self._waiting[sequence]
            expected = self._next or 0
            if sequence < expected:
                self._drop_waiting(sequence)
                known = self._marks.get(sequence)
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
                self._lose(expected, sequence, "have left the engine's replay buffer")
            self._drop_waiting(sequence)
            self._deliver(sequence, waiting.payload, waiting.mark)
            open_.num_delivered += 1

    def _drop_waiting(self, sequence: int) -> None:
        self._waiting_bytes -= _cost(self._waiting.pop(sequence).payload)

    def _drop_all_waiting(self) -> None:
        self._waiting.clear()
        self._waiting_bytes, self._dropped_to = 0, -1

    def _fail_replay(self, open_: _Open, reason: str) -> None:
        self.counters.failed_asks += 1
        self._open = None
        if open_.num_delivered:
            self._ask()  # it went on up to here, and goes on from here
        elif self._suspicion:
            self._restart(self._suspicion)
        elif self._away_since is None or self._next is None:
            self._go_without_answer(open_, reason)

    def _go_without(self, reason: str) -> None:
        """Ask this engine no more."""
        self._has_replay = False
        self._go_without_answer(_Open(self._num_asks, None), reason)

    def _go_without_answer(self, open_: _Open, reason: str) -> None:
        """Take what has come live, and doubt what has not."""
        self._dropped_to = -1
        while self._waiting and self._open is None:
            first = min(self._waiting)
            if self._next is None and first == 0:
                self._next = 0
            elif first > (self._next or 0):
                self._lose(self._next or 0, first, reason)
                self._next = first
            self._deliver_waiting(open_)
        if self._next is None and not self.doubt:
            self._doubt(f"what the engine told before is not known: {reason}")

    # --- who speaks -----------------------------------------------------------------------------

    def _restart(self, reason: str) -> None:
        """Begin anew with another incarnation."""
        self.counters.restarts += 1
        self._effects.append(Restarted(reason))
        self._earlier, self._marks = self._marks, PayloadMarks()
        self._next = self._open = None
        self._drop_all_waiting()
        self._first_blocks.clear()
        self._turnover.empty()
        self.doubt = self._identity = self._suspicion = ""
        self._is_away_doubted, self._left_at = False, None
        if self._has_replay:
            self._ask()

    def _take_connection(self) -> None:
        was_away, self._away_since = self._away_since is not None, None
        if was_away:
            self._has_replay, self._num_empty = self._options.has_replay, 0
        if self._has_replay and was_away:
            # the answer has all of them, if they are of the engine that is there now
            self._drop_all_waiting()
            self._ask(
                self._left_at, "the engine does not know what came before the connection went"
            )
        elif self._has_replay and self._open is None:
            self._ask()
        self._left_at = None

    def _take_identity(self, identity: str) -> None:
        was_silent, self._is_silent = self._is_silent, False
        is_other = bool(identity and self._identity and identity != self._identity)
        if identity:
            self._identity = identity
        if is_other and not self._has_replay:
            self._restart("the engine's process is another one")
            self._identity = identity
        elif is_other:
            self._suspicion = "the engine's process is another one"
            self._ask(must_prove=self._suspicion)
        elif was_silent and self._has_replay and self._open is None:
            self._ask()

    def _take_time(self, now: float) -> None:
        if (
            self._away_since is not None
            and now - self._away_since >= self._options.away_seconds
            and not self.doubt
        ):
            self._is_away_doubted = True
            self._doubt(f"no connection to the engine for {self._options.away_seconds:g} s")
        is_quiet = now - self._heard_at >= self._quiet_seconds
        if is_quiet and self._has_replay and self._open is None and self._away_since is None:
            self._quiet_seconds = min(self._quiet_seconds * 2, MAX_QUIET_SECONDS)
            self._heard_at = now
            self._ask(must_prove="the engine was quiet and has lost what it said last")

    def _return(self) -> None:
        """The stream goes on where it was left: a doubt for being away alone is void."""
        if self._is_away_doubted and self._away_since is None:
            self._trust(forgets=False)

    # --- what is believed -----------------------------------------------------------------------

    def _deliver(
        self, sequence: int, payload: bytes, mark: int, observed: Observed | None = None
    ) -> None:
        if sequence == 0:
            self._trust(forgets=True)
        observed = observed or self._read(payload)
        self._marks.put(sequence, mark)
        self._next = sequence + 1
        self.counters.delivered += 1
        self._effects.append(Deliver(sequence, payload))
        self._first_blocks.take(observed)
        self._turnover.take(observed)
        if observed.is_cleared or self._turnover.is_complete:
            self._trust(forgets=True)
        elif self._turnover.num_too_many:
            self._doubt(f"{self._turnover.num_too_many} blocks more than the engine has")

    def _lose(self, first: int, end: int, why: str) -> None:
        self.counters.lost += end - first
        self._doubt(f"batches {first} to {end - 1}: {why}")

    def _doubt(self, reason: str) -> None:
        if not reason.startswith("no connection"):
            self._is_away_doubted = False
        self.doubt = reason
        self._turnover.begin()
        self._effects.append(Doubt(reason))

    def _trust(self, *, forgets: bool) -> None:
        self._turnover.end()
        if self.doubt:
            self.doubt = ""
            self._is_away_doubted = False
            self._effects.append(Undoubt(forgets))


def _cost(payload: bytes) -> int:
    return len(payload) + WAITING_OVERHEAD_BYTES
