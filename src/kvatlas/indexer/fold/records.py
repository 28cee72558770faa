"""What others say about an instance: records in the log, and what a replica would have recorded.

    noticed here --take_expiry, take_proposal--> PublishControl --log--> take, on every replica

Nothing that a replica notices has an effect before it has come back through the log.
"""

from kvatlas.indexer.fold.fleet import Fleet
from kvatlas.indexer.fold.instances import MAX_REASON, DegradedReason, Instance
from kvatlas.indexer.fold.stimuli import Effect, LeaseExpired, Proposed, PublishControl
from kvatlas.schemas.ids import NUM_TIERS
from kvatlas.schemas.kv_events import WIRE_VERSION, ControlRecord, lifts_quarantine

#: records about one epoch that are told apart; more are ignored
MAX_CONTROLS = 64
#: records that may come again in an epoch, numbered in their reason
PROPOSED_KINDS = ("forgotten", "throttled", "released")


class Records:
    """Takes records in, and proposes those that are due."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def apply(self, record: ControlRecord, broker_ns: int, effects: list[Effect]) -> None:
        """Let a record of the log have its effect, once."""
        instance = self._fleet.instances.get(record.instance)
        if instance is None:
            # anybody can say something of any name; an instance is what has said what it is
            self._fleet.counters.unknown_controls += 1
            return
        # who proposes an end has seen the epoch in the log: a record about one to come is nobody's
        # honest word, and could end a living worker for good
        if record.epoch != instance.epoch or _says_nothing_new(record, instance):
            self._fleet.counters.ignored_controls += 1
            return
        self._fleet.counters.controls += 1
        trust = instance.trust
        match record.kind:
            case "expired":
                self._fleet.end(instance, f"expired: {record.reason}")
            case "quarantined":
                self._fleet.degrade(instance, DegradedReason.quarantined, record.reason)
                self._fleet.residency.exclude(instance)
                # a degraded one keeps its trust, but matches no more
                self._fleet.note_change(instance.id)
            case "forgotten":
                self._forget(instance)
            case "throttled":
                self._throttle(instance, broker_ns)
            case "released" if lifts_quarantine(record):
                self._lift_quarantine(instance)
            case "released":
                self._release(instance, effects)
        if record.kind not in PROPOSED_KINDS:
            instance.controls.add(_key(record))
        elif not lifts_quarantine(record):  # which has an effect only where it is due
            instance.num_records[record.kind] = instance.num_records.get(record.kind, 0) + 1
        if instance.trust is not trust:
            self._fleet.report_trust(instance, effects)

    def _forget(self, instance: Instance) -> None:
        """Drop what it was believed to hold; what it says from now on counts, in doubt as ever.

        The doubt has to be one that its next batch cannot take back: it held something.
        """
        self._fleet.counters.forgotten += 1
        self._fleet.degrade(instance, DegradedReason.forgotten, "")
        self._fleet.empty(instance)

    def _throttle(self, instance: Instance, broker_ns: int) -> None:
        """Let nothing that it says have an effect, and drop what will be out of date."""
        self._fleet.counters.throttles += 1
        instance.throttled_ns = max(broker_ns, 1)
        instance.wants_inventory = False
        self._fleet.degrade(instance, DegradedReason.throttled, "more than its budget")
        self._fleet.empty(instance)

    def _release(self, instance: Instance, effects: list[Effect]) -> None:
        instance.throttled_ns = 0
        instance.changed_at = [instance.seq] * NUM_TIERS
        self._fleet.degrade_and_request_inventory(instance, DegradedReason.throttled, "", effects)

    def _lift_quarantine(self, instance: Instance) -> None:
        """Let its blocks count again. What it said meanwhile had its effect, so nothing is lost."""
        # a quarantine for the same reason may follow
        kept = {each for each in instance.controls if each[0] != "quarantined"}
        instance.controls = kept
        self._fleet.residency.include(instance)
        instance.clear_degraded_reason(DegradedReason.quarantined)
        self._fleet.note_change(instance.id)

    def apply_expiry(self, expiry: LeaseExpired, effects: list[Effect]) -> None:
        """Propose the end of an epoch; it ends when the record comes back through the log."""
        instance = self._fleet.instances.get(expiry.instance)
        if (
            instance is None
            or instance.epoch != expiry.epoch
            or instance.is_gone
            or instance.is_expiring
        ):
            self._fleet.counters.ignored_expiries += 1
            return
        instance.is_expiring = True
        record = _record(instance, "expired", "lease", expiry.seen_by, expiry.now_ns)
        effects.append(PublishControl(record))

    def apply_proposal(self, proposal: Proposed, effects: list[Effect]) -> None:
        """Propose a record, once for each time that it may be due."""
        instance = self._fleet.instances.get(proposal.instance)
        if instance is None or instance.epoch != proposal.epoch:
            return
        number = instance.num_records.get(proposal.kind, 0) + 1
        if not _is_due(proposal.kind, instance) or instance.proposed.get(proposal.kind) == number:
            return
        instance.proposed[proposal.kind] = number
        record = _record(instance, proposal.kind, str(number), proposal.seen_by, proposal.now_ns)
        effects.append(PublishControl(record))


def _record(instance: Instance, kind: str, reason: str, by: str, now_ns: int) -> ControlRecord:
    worker, rank = instance.id
    return ControlRecord(WIRE_VERSION, worker, rank, instance.epoch, kind, reason, by, now_ns)


def _says_nothing_new(record: ControlRecord, instance: Instance) -> bool:
    if lifts_quarantine(record):
        return DegradedReason.quarantined not in instance.damages
    if record.kind in PROPOSED_KINDS:
        # the number tells a second replica's record from the next time
        is_next = record.reason == str(instance.num_records.get(record.kind, 0) + 1)
        return not is_next or not _is_due(record.kind, instance)
    if instance.is_gone or _key(record) in instance.controls:
        return True
    return record.kind != "expired" and len(instance.controls) >= MAX_CONTROLS


def _key(record: ControlRecord) -> tuple[str, str]:
    return record.kind, record.reason[:MAX_REASON]


def _is_due(kind: str, instance: Instance) -> bool:
    if instance.is_gone:
        return False
    match kind:
        case "forgotten":
            return instance.wants_inventory
        case "throttled":
            return not instance.throttled_ns
        case _:
            return bool(instance.throttled_ns)
