"""What a publisher has accepted and not seen stored, and the order of each subject in trouble.

A subject without trouble is in no table here, and its messages go at once. A stalled one sends
nothing newer until it is free again:

    free ----- its oldest has had no answer for QUIET_SECONDS ----> quiet
    quiet ---- the oldest is answered ----------------------------> released, the unsent only
    quiet ---- a newer one is answered, so the oldest was lost ---> failed
    any ------ an error, no answer for `late_looks`, or a new
               connection -----------------------------------------> failed
    failed --- its oldest is sent again, and nothing else --------> probing
    probing -- an error, or no answer for PROBE_SECONDS ----------> failed
    probing -- the oldest is answered ----------------------------> released, all that is left
    released - sent in order, with what was accepted meanwhile ----> free
    any ------ nothing is left ------------------------------------> free

The leader of a cluster that is cut off swallows messages without an answer, for longer than its
successor takes to come. Quiet bounds what it can swallow, and while only the oldest is repeated,
nothing newer can reach the successor before what was swallowed. Pure: `NatsPublisher` sends.
"""

from collections.abc import Iterable
from enum import Enum

from msgspec import Struct

#: a healthy broker answers sooner, and no cluster elects a leader in less than 4 s
QUIET_SECONDS = 1.0
#: one message a subject costs little, and soon finds out that there is a leader again
PROBE_SECONDS = 2.0
#: looks within QUIET_SECONDS: an age is known to within a look
QUIET_LOOKS = 2


class Unacked(Struct):
    """A message that was accepted and is not known to be stored."""

    subject: str
    payload: bytes
    #: the look at the window before which it was sent last; None before it was sent at all
    look: int | None = None


class Step(Enum):
    """Where a stalled subject stands; what leads where is drawn above."""

    quiet = 1
    failed = 2
    probing = 3
    released = 4


class _Stall(Struct):
    step: Step
    #: the number that was sent last to find out; 0 unless probing
    probe: int = 0
    #: when released: what was sent before goes again
    repeats: bool = True


class Window:
    """The messages under way or waiting, and the subjects that are stalled.

    The publisher puts messages in and takes those out that were answered, for whose subject
    `note_answer` is called if any is stalled. Who sends a message sets its `look` to the window's.
    `look_around` is called every `look_seconds`.
    """

    def __init__(self, ack_seconds: float) -> None:
        self.look_seconds = min(ack_seconds / 5, QUIET_SECONDS) / QUIET_LOOKS
        self._late_looks = round(ack_seconds / self.look_seconds)
        self._probe_looks = round(min(PROBE_SECONDS, ack_seconds) / self.look_seconds)
        #: number -> message, in the order of numbers, which is the order of acceptance
        self.messages: dict[int, Unacked] = {}
        self.num_bytes = 0
        self.last_number = 0
        #: looks at the window so far
        self.look = 0
        #: subjects of which nothing newer is sent
        self.stalled: dict[str, _Stall] = {}

    def note_answer(self, subject: str, answered: int) -> None:
        """Let a stalled subject go on, of which a message has been answered."""
        if (stall := self.stalled.get(subject)) is None:
            return
        oldest, unacked = self._oldest(subject)
        if unacked is None:
            del self.stalled[subject]
        elif stall.step is Step.quiet:
            if unacked.look is not None and oldest < answered:
                stall.step = Step.failed
            else:
                stall.step, stall.repeats = Step.released, False
        elif stall.step is Step.probing and stall.probe == answered:
            stall.step, stall.repeats = Step.released, True

    def _oldest(self, subject: str) -> tuple[int, Unacked | None]:
        for number, unacked in self.messages.items():
            if unacked.subject == subject:
                return number, unacked
        return 0, None

    # --- what goes wrong --------------------------------------------------------------------

    def look_around(self) -> list[str]:
        """Let subjects without an answer be quiet; return those that have to fail by now."""
        self.look += 1
        met: set[str] = set()
        late: list[str] = []
        for number, unacked in self.messages.items():
            subject = unacked.subject
            if subject in met:
                continue
            met.add(subject)
            if unacked.look is not None:
                age, stall = self.look - unacked.look, self.stalled.get(subject)
                if self._has_to_fail(stall, number, age):
                    late.append(subject)
                elif stall is None and age >= QUIET_LOOKS:
                    self.stalled[subject] = _Stall(Step.quiet)
        return late

    def _has_to_fail(self, stall: _Stall | None, oldest: int, age: int) -> bool:
        if stall is None or stall.step is Step.quiet:
            return age >= self._late_looks
        return stall.step is Step.probing and stall.probe == oldest and age >= self._probe_looks

    def is_late(self, look: int | None) -> bool:
        """Say whether what was sent before a look should have been answered by now."""
        return look is not None and self.look - look >= self._late_looks

    @property
    def oldest_look(self) -> int | None:
        """The look before which the oldest message was sent last, if it was sent."""
        oldest = next(iter(self.messages.values()), None)
        return None if oldest is None else oldest.look

    def fails(self, number: int) -> bool:
        """Say whether an error means anything that is not known yet."""
        unacked = self.messages.get(number)
        if unacked is None:
            return False
        stall = self.stalled.get(unacked.subject)
        if stall is None or stall.step in (Step.quiet, Step.released):
            return True
        return stall.step is Step.probing and stall.probe == number

    def fail(self, subject: str) -> None:
        """Let a subject's oldest message be sent again before anything else of it."""
        self.stalled[subject] = _Stall(Step.failed)

    def fail_all(self) -> None:
        """Do so for all subjects that have messages here."""
        subjects = (unacked.subject for unacked in self.messages.values())
        self.stalled = {subject: _Stall(Step.failed) for subject in subjects}

    # --- what to send -----------------------------------------------------------------------

    def in_step(self, step: Step) -> frozenset[str]:
        """Return the subjects that are in a step."""
        return frozenset(name for name, stall in self.stalled.items() if stall.step is step)

    def probes(self) -> list[int]:
        """Return the oldest number of each subject that failed, which has to be sent now."""
        failed = {name: stall for name, stall in self.stalled.items() if stall.step is Step.failed}
        probes: list[int] = []
        for number, unacked in self.messages.items():
            if (stall := failed.pop(unacked.subject, None)) is not None:
                stall.step, stall.probe = Step.probing, number
                probes.append(number)
        return probes

    def to_send(self, subjects: frozenset[str], after: int) -> list[int]:
        """Return what released subjects have to send beyond a number, in order."""
        return [
            number
            for number, unacked in self.messages.items()
            if number > after and unacked.subject in subjects and self.is_released(unacked)
        ]

    def is_released(self, unacked: Unacked) -> bool:
        """Say whether a message of a released subject has to be sent."""
        stall = self.stalled.get(unacked.subject)
        return (
            stall is not None
            and stall.step is Step.released
            and (stall.repeats or unacked.look is None)
        )

    def free(self, subjects: Iterable[str]) -> None:
        """Let subjects go on that have sent all; those that failed meanwhile do not."""
        for subject in subjects:
            if (stall := self.stalled.get(subject)) is not None and stall.step is Step.released:
                del self.stalled[subject]
