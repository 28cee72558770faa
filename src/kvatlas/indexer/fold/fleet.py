"""All instances as the fold knows them: how their epochs begin and end, how they get into doubt."""

from itertools import takewhile

from msgspec import Struct

from kvatlas.events.epochs import is_plausible
from kvatlas.events.ordering import SequenceTracker, Tracked
from kvatlas.indexer.fold.instances import Count, DegradedReason, Instance
from kvatlas.indexer.fold.residency import Residency, ResidencyTables
from kvatlas.indexer.fold.stimuli import (
    Effect,
    ReportRefused,
    ReportRejected,
    ReportTrust,
    RequestIntroduction,
    RequestInventory,
)
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import NUM_TIERS, InstanceId, Tier
from kvatlas.schemas.kv_events import EventBatch, WorkerUp

#: (worker, kind) pairs of rejected events that are told apart; the rest counts together
MAX_REJECTED_KINDS = 1024
#: that are known, gone ones included: far more than the ranks of any fleet that one log carries.
#: A constant of the fold: with another one, replicas would hold different instances
MAX_INSTANCES = 8_192


class Counters(Struct):
    """See IndexStats."""

    batches: Count = 0
    events: Count = 0
    gaps: Count = 0
    missing_batches: Count = 0
    duplicates: Count = 0
    old_epochs: Count = 0
    takeovers: Count = 0
    ended_epochs: Count = 0
    resyncs: Count = 0
    digest_matches: Count = 0
    digest_mismatches: Count = 0
    controls: Count = 0
    ignored_controls: Count = 0
    ignored_expiries: Count = 0
    stream_holes: Count = 0
    forgotten: Count = 0
    throttles: Count = 0
    throttled_batches: Count = 0
    namespace_mutes: Count = 0
    audit_failures: Count = 0
    index_full: Count = 0
    #: batches and records about instances that have not said what they are
    unknown_batches: Count = 0
    unknown_controls: Count = 0
    #: batches that would have made one instance too many, and those of epochs far ahead
    refused_instances: Count = 0
    refused_epochs: Count = 0


class FleetTables(Struct):
    """All that a fold knows beside the index."""

    stream_sequence: Count
    instances: list[Instance]
    gone: list[InstanceId]
    order: list[Tracked]
    residency: ResidencyTables
    counters: Counters
    rejected: list[tuple[str, str, Count]]


class Fleet:
    """The instances, their order, what they hold, and what was counted.

    `max_instances` are known, of which up to `max_gone` are gone; the longest gone one is forgotten
    for the next. `version` moves with everything that `instances` would show but blocks and times.
    """

    def __init__(self, residency: Residency, max_gone: int, max_instances: int) -> None:
        self.residency = residency
        self._max_gone, self._max_instances = max_gone, max_instances
        self.order = SequenceTracker()
        self.instances: dict[InstanceId, Instance] = {}
        #: the gone ones, the longest gone first
        self.gone: dict[InstanceId, None] = {}
        self.counters = Counters()
        self.rejected: dict[tuple[str, str], int] = {}
        self.version = 0
        #: known instances -> the version of their last change, the oldest first
        self._changed_at: dict[InstanceId, int] = {}
        #: before this version nobody can be told what has changed since
        self._told_from = 0

    def note_change(self, name: InstanceId) -> None:
        """Note that an instance looks otherwise from now on."""
        self.version += 1
        self._changed_at.pop(name, None)
        self._changed_at[name] = self.version

    def changed_since(self, version: int) -> list[InstanceId] | None:
        """Return who looks otherwise than at a version; None if that may be anybody."""
        if version < self._told_from:
            return None
        newest_first = reversed(self._changed_at.items())
        return [name for name, _ in takewhile(lambda each: each[1] > version, newest_first)]

    def admit(self, batch: EventBatch, broker_ns: int, effects: list[Effect]) -> Instance | None:
        """Return a new instance for a batch that says what it is; None, counted, for any other.

        What anybody can say in another's name, and what is said of a name, makes no instance.
        """
        name = batch.instance
        if not any(isinstance(event, WorkerUp) for event in batch.events):
            self.counters.unknown_batches += 1
            effects.append(RequestIntroduction(name))
            return None
        if self.refuses_epoch(name, batch.epoch, 0, broker_ns, effects):
            return None
        if len(self.instances) >= self._max_instances:
            if not self.gone:
                self.counters.refused_instances += 1
                reason = f"{len(self.instances)} instances are known, the most that may be"
                effects.append(ReportRefused(name, batch.epoch, "instances", reason))
                return None
            self._forget_longest_gone()
        instance = self.instances[name] = Instance(name)
        return instance

    def refuses_epoch(
        self,
        name: InstanceId,
        epoch: int,
        previous: int,
        broker_ns: int,
        effects: list[Effect],
    ) -> bool:
        """Say whether an epoch is too far ahead to be one that follows; then it is counted."""
        broker_ms = broker_ns // 1_000_000
        if is_plausible(epoch, previous, broker_ms):
            return False
        self.counters.refused_epochs += 1
        days = (epoch - broker_ms) / 86_400_000
        reason = f"epoch {epoch} is {days:.1f} days ahead of the broker's clock"
        effects.append(ReportRefused(name, epoch, "epoch", reason))
        return True

    def begin(self, instance: Instance, epoch: int) -> None:
        """Forget all of the instance's earlier epoch and give it an empty place."""
        self.residency.release(instance)
        self.gone.pop(instance.id, None)
        instance.begin(epoch)
        self.note_change(instance.id)
        try:
            self.residency.admit(instance)
        except IndexFull as error:
            self.note_index_full(instance, error)

    def end(self, instance: Instance, reason: str) -> None:
        """Let the instance be gone, and nothing of its epoch count any more."""
        self.residency.release(instance)
        instance.end(reason)
        self.order.end(instance.id, instance.epoch)
        self.note_change(instance.id)
        self.gone.pop(instance.id, None)
        self.gone[instance.id] = None
        while len(self.gone) > self._max_gone:
            self._forget_longest_gone()

    def _forget_longest_gone(self) -> None:
        oldest = next(iter(self.gone))
        del self.gone[oldest], self.instances[oldest]
        self._changed_at.pop(oldest, None)
        self._told_from = self.version
        self.order.forget(oldest)

    def empty(self, instance: Instance) -> None:
        """Give the instance a new, empty place for the rest of its epoch."""
        instance.inventoried.clear()
        instance.unsettled = set(Tier)
        instance.changed_at = [instance.seq] * NUM_TIERS
        self.residency.release(instance)
        try:
            self.residency.admit(instance)
        except IndexFull as error:
            self.note_index_full(instance, error)
        if instance.info is not None:
            self.residency.introduce(instance, instance.info)
        if DegradedReason.quarantined in instance.damages:
            self.residency.exclude(instance)
        self.note_change(instance.id)

    def degrade_and_request_inventory(
        self, instance: Instance, damage: DegradedReason, detail: str, effects: list[Effect]
    ) -> None:
        """Doubt all of an instance because of a new loss, and ask for its inventory."""
        self.degrade(instance, damage, detail)
        if not instance.throttled_ns:  # an inventory would have no effect
            instance.wants_inventory = True
            effects.append(RequestInventory(instance.id, instance.epoch))

    def degrade(self, instance: Instance, damage: DegradedReason, detail: str) -> None:
        """Take all of an instance as unknown, and drop inventories that were not complete."""
        self.residency.inventories.drop(instance)
        instance.degrade(damage, detail)

    def note_index_full(self, instance: Instance, error: IndexFull) -> None:
        """Doubt an instance that the index has no room for."""
        self.counters.index_full += 1
        self.degrade(instance, DegradedReason.index_full, str(error))

    def reject(self, worker: str, kind: str, reason: str, effects: list[Effect]) -> None:
        """Count something that was skipped."""
        key = (worker, kind)
        if key not in self.rejected and len(self.rejected) >= MAX_REJECTED_KINDS:
            key = ("(others)", "(any)")
        self.rejected[key] = self.rejected.get(key, 0) + 1
        effects.append(ReportRejected(worker, kind, reason))

    def report_trust(self, instance: Instance, effects: list[Effect]) -> None:
        """Tell how far an instance may be believed from here on."""
        self.note_change(instance.id)
        effects.append(
            ReportTrust(instance.id, instance.epoch, instance.trust, instance.trust_reasons)
        )

    # --- what a live service asks; see index_service.py -------------------------------------------

    def wants_inventory(self, instance: InstanceId) -> bool:
        """Say whether the instance still waits for an inventory."""
        known = self.instances.get(instance)
        return known is not None and known.wants_inventory

    def wanted_inventories(self) -> list[RequestInventory]:
        """Return what a reader that has just caught up has to ask for."""
        return [
            RequestInventory(each.id, each.epoch)
            for each in self.instances.values()
            if each.wants_inventory
        ]

    def throttled(self) -> list[tuple[InstanceId, int, int, int]]:
        """Return (instance, epoch, since when by the broker's clock, how often in this epoch)."""
        return [
            (each.id, each.epoch, each.throttled_ns, each.num_records.get("throttled", 0))
            for each in self.instances.values()
            if each.throttled_ns and not each.is_gone
        ]

    def alive(self) -> list[tuple[InstanceId, int]]:
        """Return instances and epochs that may lose their lease: not gone, nor about to be."""
        return [
            (each.id, each.epoch)
            for each in self.instances.values()
            if not each.is_gone and not each.is_expiring
        ]

    def silent_since(self, broker_ns: int) -> frozenset[InstanceId]:
        """Return who holds something and whose newest message is older than a broker's time.

        Whoever holds nothing has no digest to tell, so its silence says nothing.
        """
        return frozenset(
            each.id
            for each in self.instances.values()
            if each.last_event_ns < broker_ns and self.residency.digests(each)
        )

    # --- snapshots ----------------------------------------------------------------------------

    def tables(self, stream_sequence: int, residency: ResidencyTables) -> FleetTables:
        """Return everything, to be encoded before anything changes."""
        return FleetTables(
            stream_sequence=stream_sequence,
            instances=list(self.instances.values()),
            gone=list(self.gone),
            order=self.order.export(),
            residency=residency,
            counters=self.counters,
            rejected=[(*key, count) for key, count in self.rejected.items()],
        )

    def restore(self, tables: FleetTables) -> None:
        """Know what `tables` tells and nothing else; residency is restored by the caller."""
        self.version += 1
        self._changed_at.clear()
        self._told_from = self.version
        self.order.restore(tables.order)
        self.instances.clear()
        self.instances.update((each.id, each) for each in tables.instances)
        self.gone = dict.fromkeys(tables.gone)
        for name in tables.counters.__struct_fields__:
            setattr(self.counters, name, getattr(tables.counters, name))
        self.rejected = {(worker, kind): count for worker, kind, count in tables.rejected}
