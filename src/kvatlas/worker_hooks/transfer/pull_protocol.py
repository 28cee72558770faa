"""The words of pulls: states, reasons, settings, what can happen and what is to be done.

`PullState` speaks them: stimuli are past tense, effects imperative.
"""

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import NamedTuple, TypeAlias

from msgspec import Struct

from kvatlas.schemas.errors import InvalidSetting


class BlockState(StrEnum):
    """Where a block of a pull is on its way."""

    wanted = "wanted"
    leased = "leased"
    in_flight = "in_flight"
    held = "held"
    missing = "missing"


class Priority(IntEnum):
    """Who goes first."""

    critical = 0
    high = 1
    low = 2


class PullReason(StrEnum):
    """Why a block is missing, beside the owners' own MissingReason."""

    #: the bytes that came were not those of the checksum
    corrupt = "corrupt"
    #: the owner or its source did not answer in time
    timed_out = "timed_out"
    #: nobody listens where the owner should
    no_responder = "no_responder"
    #: the bus is away
    bus_unavailable = "bus_unavailable"
    #: the owner's answer makes no sense
    malformed_answer = "malformed_answer"
    disconnected = "disconnected"
    refused = "refused"
    failed = "failed"
    no_room = "no_room"
    #: the lease ended before its read could begin
    lease_expired = "lease_expired"
    #: no owner is named for the block, or all failed a moment ago
    no_owner = "no_owner"
    owner_resting = "owner_resting"
    #: the engine took the slot back
    revoked = "revoked"
    deadline = "deadline"
    cancelled = "cancelled"


_AT_LEAST_ONE = (
    "batch_blocks",
    "max_reads",
    "max_batches",
    "max_batches_per_owner",
    "backoff_ms",
    "try_ms",
)


class PullSettings(Struct, frozen=True):
    """Bounds and patience of pulls."""

    #: blocks of one lease and read; large ones read faster, small ones start sooner
    batch_blocks: int = 64
    #: reads at a time, at most the lanes of the bounce area
    max_reads: int = 4
    #: batches from lease request to verification; more than reads hides the requests' delay
    max_batches: int = 8
    #: of these, at one owner; all of them lets one slow owner hold up everybody
    max_batches_per_owner: int = 4
    #: tries at one owner after busy, corrupt and the like; each costs a round trip
    max_retries: int = 3
    #: before the first retry, doubled each time; too short hammers a busy owner
    backoff_ms: int = 5
    #: how long one request or read may take before the next owner is asked; half of the pull's
    #: time if that is less and there is a next one
    try_ms: int = 1000
    #: how long an owner that timed out or died is not asked
    rest_ms: int = 1000
    #: an owner that had less time than this, because of a pull's deadline, is not blamed
    fair_ms: int = 100
    #: asked of an owner beyond a try, so that a lease outlives its read
    lease_slack_ms: int = 1000

    def validate(self) -> None:
        """Raise InvalidSetting for the first value that makes no sense."""
        for key in _AT_LEAST_ONE:
            if getattr(self, key) < 1:
                raise InvalidSetting(key, "pull", f"{getattr(self, key)} is below 1")
        for key in ("max_retries", "rest_ms", "fair_ms", "lease_slack_ms"):
            if getattr(self, key) < 0:
                raise InvalidSetting(key, "pull", f"{getattr(self, key)} is negative")


class Owner(Struct, frozen=True):
    """Somebody who is thought to hold the first `num_blocks` of a pull, 0 for all of them."""

    name: str
    #: where it is asked for leases
    subject: str
    epoch: int = 0
    num_blocks: int = 0

    def holds(self, index: int) -> bool:
        return not self.num_blocks or index < self.num_blocks


class BatchId(NamedTuple):
    """Sorts batches by urgency, then age."""

    priority: int
    number: int


# --- stimuli: what happened ------------------------------------------------------------------


class PullAsked(Struct, frozen=True):
    """The engine wants blocks in slots. Owners are tried in their order."""

    pull: int
    hashes: bytes
    slots: Sequence[int]
    owners: Sequence[Owner]
    deadline_ns: int
    priority: Priority = Priority.high


class PullCancelled(Struct, frozen=True):
    """Nobody waits for a pull any more."""

    pull: int


class LeaseGiven(Struct, frozen=True):
    """The owner keeps the first `num_blocks` (at least 1) of a batch until then."""

    batch: BatchId
    num_blocks: int
    expires_ns: int
    #: why the rest is not granted
    rest_reason: str = ""


class LeaseDenied(Struct, frozen=True):
    """The owner gives nothing, or cannot be asked."""

    batch: BatchId
    reason: str


class BlocksArrived(Struct, frozen=True):
    """The blocks of a batch are in bounce slots, unverified."""

    batch: BatchId


class ReadFailed(Struct, frozen=True):
    """The read of a batch came to nothing."""

    batch: BatchId
    reason: str


class BlocksChecked(Struct, frozen=True):
    """All but these positions of a batch are verified and in their slots."""

    batch: BatchId
    corrupt: Sequence[int] = ()
    revoked: Sequence[int] = ()


class TimePassed(Struct, frozen=True):
    """The time of a WakeAt has come."""


Stimulus: TypeAlias = (
    PullAsked
    | PullCancelled
    | LeaseGiven
    | LeaseDenied
    | BlocksArrived
    | ReadFailed
    | BlocksChecked
    | TimePassed
)


# --- effects: what to do ---------------------------------------------------------------------


class RequestLease(Struct, frozen=True):
    """Ask the owner; answer LeaseGiven or LeaseDenied."""

    batch: BatchId
    pull: int
    owner: Owner
    hashes: bytes
    ttl_ms: int
    deadline_ns: int


class ReadBlocks(Struct, frozen=True):
    """Read what the batch has leased; answer BlocksArrived or ReadFailed."""

    batch: BatchId
    deadline_ns: int


class CheckAndFill(Struct, frozen=True):
    """Verify what arrived and move it to these slots; answer BlocksChecked."""

    batch: BatchId
    hashes: bytes
    slots: Sequence[int]


class CloseBatch(Struct, frozen=True):
    """Let go of what the batch has: its bounce slots, its lease. Comes once for each batch."""

    batch: BatchId


class EndPull(Struct, frozen=True):
    """Tell the engine. Comes once for each pull; `held` and `missing` are all its indexes."""

    pull: int
    held: Sequence[int]
    missing: Sequence[tuple[int, str]]
    num_corrupt: int = 0


class WakeAt(Struct, frozen=True):
    """Send TimePassed then; replaces the last one."""

    time_ns: int


Effect: TypeAlias = RequestLease | ReadBlocks | CheckAndFill | CloseBatch | EndPull | WakeAt
