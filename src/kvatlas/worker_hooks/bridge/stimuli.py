"""What happens around an engine's stream, and what a bridge does about it."""

from typing import NamedTuple


class FrameArrived(NamedTuple):
    """A batch came live."""

    sequence: int
    payload: bytes


class FrameReplayed(NamedTuple):
    """A batch came as an answer to the question number `ask`."""

    ask: int
    sequence: int
    payload: bytes


class ReplayEnded(NamedTuple):
    """The engine has said everything that it still knows."""

    ask: int


class ReplayFailed(NamedTuple):
    """The rest of an answer will not come."""

    ask: int
    reason: str


class Connected(NamedTuple):
    """The connection that live batches come by is there, perhaps again."""


class Disconnected(NamedTuple):
    """It is gone."""


class EngineAnswered(NamedTuple):
    """The engine's HTTP server answers; equal identities mean one incarnation, "" says nothing."""

    identity: str


class EngineSilent(NamedTuple):
    """The engine's HTTP server does not answer."""


class DeliveryFailed(NamedTuple):
    """A batch that was to be delivered could not be."""

    reason: str


class Ticked(NamedTuple):
    """Time has passed."""


Stimulus = (
    FrameArrived
    | FrameReplayed
    | ReplayEnded
    | ReplayFailed
    | Connected
    | Disconnected
    | EngineAnswered
    | EngineSilent
    | DeliveryFailed
    | Ticked
)


class Deliver(NamedTuple):
    """Hand on the next batch of this incarnation."""

    sequence: int
    payload: bytes


class RequestReplay(NamedTuple):
    """Ask for everything from `first_sequence` on; answers to earlier questions count no more."""

    ask: int
    first_sequence: int


class Restarted(NamedTuple):
    """All that was held is gone: another incarnation of the engine speaks from here on."""

    reason: str


class Degrade(NamedTuple):
    """Something was missed for good; what was believed so far is doubtful from here on."""

    reason: str


class Recover(NamedTuple):
    """Trust again; `forgets` what was believed before the doubt and not told since."""

    forgets: bool


Effect = Deliver | RequestReplay | Restarted | Degrade | Recover
