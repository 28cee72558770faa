"""What goes into IndexState and what comes out: stimuli in the past tense, effects as orders.

`stimulus_of` is the one way from a message of the log to a stimulus, live and in a replay.
"""

from functools import lru_cache

from msgspec import Struct

from kvatlas.events.bus import Message
from kvatlas.events.codec import DecodedBatch, decode, decode_control
from kvatlas.events.subjects import parse_events_subject, parse_instance_subject
from kvatlas.indexer.reader import Replaced
from kvatlas.schemas.digest import TierDigest
from kvatlas.schemas.errors import (
    BatchTooLarge,
    InvalidSubject,
    MalformedBatch,
    UnsupportedVersion,
)
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import ControlRecord


class BatchArrived(Struct, frozen=True, gc=False):
    """A batch stands in the log; `broker_ns` is when the broker stored it."""

    stream_sequence: int
    broker_ns: int
    decoded: DecodedBatch


class ControlArrived(Struct, frozen=True, gc=False):
    """A record about an instance stands in the log."""

    stream_sequence: int
    broker_ns: int
    record: ControlRecord


class PayloadRejected(Struct, frozen=True):
    """A message of the log that says nothing: unreadable, or somebody speaks for somebody else.

    `worker` is whose subject it came on, empty where the subject tells none. `kind` is one of
    subject, payload, too_large, version, spoofed.
    """

    stream_sequence: int
    broker_ns: int
    worker: str
    kind: str
    reason: str


class HoleSeen(Struct, frozen=True):
    """The stream sequences `expected` to `got` - 1 are lost to this reader for good."""

    expected: int
    got: int


class LeaseExpired(Struct, frozen=True):
    """An instance let its lease run out; `seen_by` is the replica that noticed."""

    instance: InstanceId
    epoch: int
    now_ns: int
    seen_by: str = ""


class Proposed(Struct, frozen=True):
    """A replica finds that something has to be done about an instance, for all replicas alike.

    `kind` is forgotten, throttled or released: see ControlRecord.
    """

    instance: InstanceId
    epoch: int
    kind: str
    now_ns: int
    seen_by: str = ""


class AuditFailed(Struct, frozen=True):
    """What this replica's index holds for some tiers is not what was folded in: broken memory."""

    slots: tuple[tuple[InstanceId, Tier], ...]


Stimulus = (
    BatchArrived
    | ControlArrived
    | PayloadRejected
    | HoleSeen
    | LeaseExpired
    | Proposed
    | AuditFailed
)


class PublishControl(Struct, frozen=True):
    """Publish a record; it takes effect when it comes back through the log."""

    record: ControlRecord


class RequestInventory(Struct, frozen=True):
    """Ask an instance for all that it holds, unless its epoch has changed meanwhile."""

    instance: InstanceId
    epoch: int


class RequestIntroduction(Struct, frozen=True):
    """Ask an instance that is not known, and has said something, to say what it is."""

    instance: InstanceId


class ReportOldEpoch(Struct, frozen=True):
    """Notice that an epoch goes on that a newer one has replaced."""

    instance: InstanceId
    epoch: int
    newer: int


class ReportPassed(Struct, frozen=True):
    """Notice a batch whose sequence `seq` the fold has passed: it is at `at_seq` of the epoch."""

    instance: InstanceId
    epoch: int
    seq: int
    at_seq: int


class ReportRefused(Struct, frozen=True):
    """Tell people that an instance, or an epoch of one, is not taken in.

    `kind` is `instances` (there are as many as may be) or `epoch` (far ahead of the clock).
    """

    instance: InstanceId
    epoch: int
    kind: str
    reason: str


class ReportRejected(Struct, frozen=True):
    """Tell people that something of a worker was skipped."""

    worker: str
    kind: str
    reason: str


class ReportGap(Struct, frozen=True):
    """Tell people that batches of an instance are missing."""

    instance: InstanceId
    epoch: int
    expected: int
    found: int


class ReportTakeover(Struct, frozen=True):
    """Tell people that an epoch took its name from one that had not gone."""

    instance: InstanceId
    epoch: int
    replaced: Replaced


class ReportDivergence(Struct, frozen=True):
    """Tell people that an instance holds something else than the index believes."""

    instance: InstanceId
    tier: Tier
    told: TierDigest
    found: TierDigest


class ReportTrust(Struct, frozen=True):
    """Tell people how far an instance may be believed from here on."""

    instance: InstanceId
    epoch: int
    trust: Trust
    reasons: tuple[str, ...]


Effect = (
    PublishControl
    | RequestInventory
    | RequestIntroduction
    | ReportOldEpoch
    | ReportPassed
    | ReportRefused
    | ReportRejected
    | ReportGap
    | ReportTakeover
    | ReportDivergence
    | ReportTrust
)


def stimulus_of(message: Message) -> Stimulus:
    """Return what a message of the log says. Never raises: what it cannot read is rejected."""
    worker = ""
    try:
        is_control, instance = _speaker(message.subject)
        worker = instance.worker
        if is_control:
            record = decode_control(message.payload)
            if record.instance == instance:
                return ControlArrived(message.stream_sequence, message.broker_ns, record)
            kind, reason = "spoofed", f"a record about {record.instance} on {message.subject}"
        else:
            decoded = decode(message.payload)
            batch = decoded.batch
            if batch.worker == worker and batch.rank == instance.rank:
                return BatchArrived(message.stream_sequence, message.broker_ns, decoded)
            kind, reason = "spoofed", f"a batch of {batch.instance} on {message.subject}"
    except InvalidSubject as error:
        kind, reason = "subject", str(error)
    except UnsupportedVersion as error:
        kind, reason = "version", str(error)
    except BatchTooLarge as error:
        kind, reason = "too_large", str(error)
    except MalformedBatch as error:
        kind, reason = "payload", str(error)
    return PayloadRejected(message.stream_sequence, message.broker_ns, worker, kind, reason)


@lru_cache(maxsize=16_384)
def _speaker(subject: str) -> tuple[bool, InstanceId]:
    """Return whether the subject is for records by others, and the instance that it names."""
    if subject.startswith("kv.control."):
        return True, parse_instance_subject(subject)
    return False, parse_events_subject(subject)[1]
