"""The fold: stimuli in, effects out, and what the fleet holds in between.

    stimulus --handle--> order within the instance --> one event at a time --> residency, trust
                         (epoch before sequence)       of the instance         [effects]

No I/O, no clock, no logger: the live service and a replay run exactly this, so equal histories give
equal `state_digest`. What changes with time alone (silence, lag) is laid over it in live.py.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast

import msgspec
import xxhash
from msgspec import Struct

from kvatlas.events.codec import DecodedBatch
from kvatlas.events.ordering import SequenceTracker, Tracked, Verdict
from kvatlas.indexer.index import PrefixIndex
from kvatlas.indexer.instances import Damage, Instance
from kvatlas.indexer.naming import Place
from kvatlas.indexer.reader import (
    IndexReader,
    IndexStats,
    InstanceMatch,
    InstanceView,
    RejectedCount,
    TreeRun,
    serving_views,
)
from kvatlas.indexer.residency import Residency, ResidencyTables
from kvatlas.indexer.snapshot import Export, InvalidSnapshot, Parts, Room, bytes_of
from kvatlas.indexer.stimuli import (
    AuditFailed,
    BatchArrived,
    ControlArrived,
    Effect,
    HoleSeen,
    LeaseExpired,
    PayloadRejected,
    Proposed,
    PublishControl,
    ReportDivergence,
    ReportGap,
    ReportRejected,
    ReportTrust,
    RequestInventory,
    Stimulus,
)
from kvatlas.schemas.digest import TierDigest
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import NUM_TIERS, InstanceId, Tier
from kvatlas.schemas.kv_events import (
    WIRE_VERSION,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ControlRecord,
    Digest,
    Doubted,
    EventBatch,
    Inventory,
    KvEvent,
    NamespaceSeen,
    RejectedEvent,
    Resync,
    WorkerDown,
    WorkerUp,
)

__all__ = ["IndexReader", "IndexState", "IndexStats", "InstanceMatch", "InstanceView", "TreeRun"]

#: (worker, kind) pairs of rejected events that are told apart; the rest counts together
MAX_REJECTED_KINDS = 1024
#: records about one epoch that are told apart; more are ignored
MAX_CONTROLS = 64
#: records that may come again in an epoch, numbered in their reason
PROPOSED_KINDS = ("forgotten", "throttled", "released")
_NEXT, _GONE = Verdict.next, Trust.gone
#: kinds of events whose loss can leave the index wrong
_STATEFUL = frozenset(
    ["stored", "removed", "cleared", "inventory", "resync", "doubted", "malformed"]
)


class _Counters(Struct):
    """See IndexStats."""

    batches: int = 0
    events: int = 0
    gaps: int = 0
    missing_batches: int = 0
    duplicates: int = 0
    old_epochs: int = 0
    ended_epochs: int = 0
    resyncs: int = 0
    digest_matches: int = 0
    digest_mismatches: int = 0
    controls: int = 0
    ignored_controls: int = 0
    ignored_expiries: int = 0
    stream_holes: int = 0
    forgotten: int = 0
    throttles: int = 0
    throttled_batches: int = 0
    audit_failures: int = 0
    index_full: int = 0


class _Tables(Struct):
    """All that a fold knows beside the index."""

    stream_sequence: int
    instances: list[Instance]
    gone: list[InstanceId]
    order: list[Tracked]
    residency: ResidencyTables
    counters: _Counters
    rejected: list[tuple[str, str, int]]


class IndexState:
    """Folds the log into an index, and says of each instance how far to believe it.

    A batch is judged by its epoch, then by its sequence. A new epoch forgets the old one at once.
    After a loss the instance goes on as `degraded` and is asked for an inventory, once per loss;
    it is `exact` again when each tier in doubt has had a digest equal to ours, which takes an
    inventory where something was lost.

    `max_gone` instances that are gone are remembered, so that stragglers of theirs stay without
    effect; too few, and a very late batch brings a dead instance back, degraded, until its
    lease is missed again.
    """

    def __init__(self, index: PrefixIndex, *, max_gone: int = 4096) -> None:
        self._residency = Residency(index)
        self._max_gone = max_gone
        self._stream_sequence = 0
        self._fleet_version = 0
        self._order = SequenceTracker()
        self._instances: dict[InstanceId, Instance] = {}
        #: the gone ones, the longest gone first
        self._gone: dict[InstanceId, None] = {}
        self._counters = _Counters()
        self._rejected: dict[tuple[str, str], int] = {}
        #: model -> answer of `serving`, made at _serving_version
        self._serving: dict[str, list[InstanceView]] = {}
        self._serving_version = -1

    # --- the fold -----------------------------------------------------------------------------

    def handle(self, stimulus: Stimulus) -> list[Effect]:
        """Take one stimulus in and return what is to be done about it.

        Stimuli of the stream come in stream order; one that is not newer than `stream_sequence` is
        ignored. No content of a message makes this raise.
        """
        effects: list[Effect] = []
        match stimulus:
            case BatchArrived():
                if self._advance(stimulus.stream_sequence):
                    self._take_batch(stimulus.decoded, stimulus.broker_ns, effects)
            case ControlArrived():
                if self._advance(stimulus.stream_sequence):
                    self._take_control(stimulus.record, stimulus.broker_ns, effects)
            case PayloadRejected():
                if self._advance(stimulus.stream_sequence):
                    self._reject(stimulus.worker, stimulus.kind, stimulus.reason, effects)
            case HoleSeen():
                self._take_hole(stimulus, effects)
            case LeaseExpired():
                self._take_expiry(stimulus, effects)
            case Proposed():
                self._take_proposal(stimulus, effects)
            case AuditFailed():
                self._take_audit(stimulus, effects)
        return effects

    def _advance(self, stream_sequence: int) -> bool:
        if stream_sequence <= self._stream_sequence:
            return False
        self._stream_sequence = stream_sequence
        return True

    def _take_batch(self, decoded: DecodedBatch, broker_ns: int, effects: list[Effect]) -> None:
        batch, rejected = decoded
        # a plain tuple finds the same entry, and every batch passes here
        known = self._instances.get((batch.worker, batch.rank))  # type: ignore[call-overload]
        instance: Instance = known or self._instance(batch.instance)
        trust = instance.trust if instance.epoch else None
        verdict = self._order.judge(instance.id, batch.epoch, batch.seq)
        if verdict is not _NEXT and not self._settle_order(instance, batch, verdict, effects):
            return
        if instance.damages and Damage.stream_hole in instance.damages:
            instance.clear_doubt(Damage.stream_hole)
        instance.seq = batch.seq
        instance.last_event_ns = broker_ns
        self._counters.batches += 1
        said = batch.events
        if instance.throttled_ns:
            self._counters.throttled_batches += 1
            said = tuple(event for event in said if isinstance(event, WorkerUp | WorkerDown))
        for events in alike(said):
            self._take_events(instance, events, effects)
            if instance.trust is _GONE:
                break
        for skipped in rejected:
            self._take_rejected(instance, skipped, effects)
        if instance.damages:
            instance.heal()
        if instance.trust is not trust:
            self._report_trust(instance, effects)

    def _settle_order(
        self, instance: Instance, batch: EventBatch, verdict: Verdict, effects: list[Effect]
    ) -> bool:
        """Deal with a batch that is not simply the next one; return whether it counts."""
        match verdict:
            case Verdict.duplicate:
                self._counters.duplicates += 1
                return False
            case Verdict.old_epoch:
                self._counters.old_epochs += 1
                return False
            case Verdict.ended_epoch:
                self._counters.ended_epochs += 1
                return False
            case Verdict.new_epoch:
                self._begin(instance, batch.epoch)
        if batch.seq != instance.seq + 1:
            self._take_gap(instance, batch.seq, effects)
        return True

    def _take_events(
        self, instance: Instance, events: Sequence[KvEvent], effects: list[Effect]
    ) -> None:
        """Take in events that are alike: one, or several about blocks of one tier."""
        self._counters.events += len(events)
        try:
            match events[0]:
                case BlockStored():
                    self._residency.store(instance, *cast("Sequence[BlockStored]", events))
                case BlockRemoved():
                    self._residency.remove(instance, *cast("Sequence[BlockRemoved]", events))
                case Digest() as event:
                    self._take_digest(instance, event, effects)
                case Inventory() as event:
                    self._residency.take_inventory(instance, event)
                case AllBlocksCleared() as event:
                    self._residency.clear(instance, event)
                case WorkerUp(info):
                    self._residency.introduce(instance, info)
                    self._fleet_version += 1
                case WorkerDown(reason):
                    self._end(instance, instance.epoch, f"down: {reason}")
                case Resync():
                    self._counters.resyncs += 1
                    self._damage(instance, Damage.resync, "", effects)
                case Doubted(reason):
                    self._take_doubt(instance, reason)
                case NamespaceSeen():
                    pass
        except IndexFull as error:
            self._take_index_full(instance, error)

    # --- epochs and order ---------------------------------------------------------------------

    def _instance(self, name: InstanceId) -> Instance:
        instance = self._instances.get(name)
        if instance is None:
            instance = self._instances[name] = Instance(name)
        return instance

    def _begin(self, instance: Instance, epoch: int) -> None:
        """Forget all of the instance's earlier epoch and give it an empty place."""
        self._residency.release(instance)
        self._gone.pop(instance.id, None)
        instance.begin(epoch)
        self._fleet_version += 1
        try:
            self._residency.admit(instance)
        except IndexFull as error:
            self._take_index_full(instance, error)

    def _end(self, instance: Instance, epoch: int, reason: str) -> None:
        """Let the instance be gone, and nothing up to this epoch count any more."""
        self._residency.release(instance)
        if epoch > instance.epoch:
            instance.begin(epoch)
        instance.end(reason)
        self._order.end(instance.id, epoch)
        self._fleet_version += 1
        self._gone.pop(instance.id, None)
        self._gone[instance.id] = None
        while len(self._gone) > self._max_gone:
            oldest = next(iter(self._gone))
            del self._gone[oldest], self._instances[oldest]
            self._order.forget(oldest)

    def _take_gap(self, instance: Instance, found: int, effects: list[Effect]) -> None:
        expected = instance.seq + 1
        self._counters.gaps += 1
        self._counters.missing_batches += found - expected
        effects.append(ReportGap(instance.id, instance.epoch, expected, found))
        damage = Damage.gap if instance.seq else Damage.unknown_history
        self._damage(instance, damage, f"expected {expected}, got {found}", effects)
        instance.changed_at = [found - 1] * NUM_TIERS

    # --- doubt --------------------------------------------------------------------------------

    def _damage(
        self, instance: Instance, damage: Damage, detail: str, effects: list[Effect]
    ) -> None:
        """Doubt all of an instance because of a new loss, and ask for its inventory."""
        self._doubt(instance, damage, detail)
        if not instance.throttled_ns:  # an inventory would have no effect
            instance.wants_inventory = True
            effects.append(RequestInventory(instance.id, instance.epoch))

    def _doubt(self, instance: Instance, damage: Damage, detail: str) -> None:
        for tier in list(instance.open_inventories):
            self._residency.interrupt(instance, tier)
        instance.doubt(damage, detail)

    def _take_digest(self, instance: Instance, told: Digest, effects: list[Effect]) -> None:
        self._residency.interrupt(instance, told.tier)
        found = self._residency.digest(instance, told.tier)
        if found == (told.count, told.xor):
            self._counters.digest_matches += 1
            instance.unsettled.discard(told.tier)
            return
        self._counters.digest_mismatches += 1
        detail = f"{told.tier.name} holds {told.count} blocks, the index {found.count}"
        is_news = instance.doubt_tier(told.tier, Damage.digest_mismatch, detail)
        if is_news or not instance.wants_inventory:
            instance.wants_inventory = True
            claim = TierDigest(told.count, told.xor)
            effects.append(ReportDivergence(instance.id, told.tier, claim, found))
            effects.append(RequestInventory(instance.id, instance.epoch))

    def _take_rejected(
        self, instance: Instance, skipped: RejectedEvent, effects: list[Effect]
    ) -> None:
        self._reject(instance.id.worker, skipped.kind, skipped.reason, effects)
        if skipped.kind not in _STATEFUL or instance.is_gone:
            return
        if instance.wants_inventory:
            self._doubt(instance, Damage.rejected_event, skipped.kind)
        else:
            self._damage(instance, Damage.rejected_event, skipped.kind, effects)

    def _take_index_full(self, instance: Instance, error: IndexFull) -> None:
        self._counters.index_full += 1
        self._doubt(instance, Damage.index_full, str(error))

    def _take_doubt(self, instance: Instance, reason: str) -> None:
        if reason:
            instance.damages[Damage.doubted] = reason
            instance.trust = Trust.degraded
        else:
            instance.clear_doubt(Damage.doubted)

    # --- what is not a batch ------------------------------------------------------------------

    def _take_control(self, record: ControlRecord, broker_ns: int, effects: list[Effect]) -> None:
        known = self._instances.get(record.instance)
        # who proposes an end has seen the epoch in the log: a record about one to come is nobody's
        # honest word, and could end a living worker for good
        if record.epoch < 1 or (
            known and (record.epoch != known.epoch or _says_nothing_new(record, known))
        ):
            self._counters.ignored_controls += 1
            return
        self._counters.controls += 1
        instance = known or self._instance(record.instance)
        trust = instance.trust if instance.epoch else None
        if record.kind != "expired" and record.epoch > instance.epoch:
            self._order.begin(instance.id, record.epoch)
            self._begin(instance, record.epoch)
            # who is known by what others say of it has said something that this reader has not seen
            self._damage(instance, Damage.unknown_history, "known by a record only", effects)
        match record.kind:
            case "expired":
                self._end(instance, record.epoch, f"expired: {record.reason}")
            case "quarantined":
                self._doubt(instance, Damage.quarantined, record.reason)
                self._residency.exclude(instance)
            case "forgotten":
                self._forget(instance)
            case "throttled":
                self._throttle(instance, broker_ns)
            case "released":
                self._release(instance, effects)
        if record.kind in PROPOSED_KINDS:
            instance.num_records[record.kind] = instance.num_records.get(record.kind, 0) + 1
        else:
            instance.controls.add((record.kind, record.reason))
        if instance.trust is not trust:
            self._report_trust(instance, effects)

    def _forget(self, instance: Instance) -> None:
        """Drop what it was believed to hold; what it says from now on counts, in doubt as ever."""
        self._counters.forgotten += 1
        self._empty(instance)

    def _throttle(self, instance: Instance, broker_ns: int) -> None:
        """Let nothing that it says have an effect, and drop what will be out of date."""
        self._counters.throttles += 1
        instance.throttled_ns = max(broker_ns, 1)
        instance.wants_inventory = False
        self._doubt(instance, Damage.throttled, "more than its budget")
        self._empty(instance)

    def _release(self, instance: Instance, effects: list[Effect]) -> None:
        instance.throttled_ns = 0
        instance.changed_at = [instance.seq] * NUM_TIERS
        self._damage(instance, Damage.throttled, "", effects)

    def _empty(self, instance: Instance) -> None:
        """Give the instance a new, empty place for the rest of its epoch."""
        for tier in list(instance.open_inventories):
            self._residency.interrupt(instance, tier)
        instance.inventoried.clear()
        instance.unsettled = set(Tier)
        instance.changed_at = [instance.seq] * NUM_TIERS
        self._residency.release(instance)
        try:
            self._residency.admit(instance)
        except IndexFull as error:
            self._take_index_full(instance, error)
        if instance.info is not None:
            self._residency.introduce(instance, instance.info)
        if Damage.quarantined in instance.damages:
            self._residency.exclude(instance)
        self._fleet_version += 1

    def _take_audit(self, audit: AuditFailed, effects: list[Effect]) -> None:
        """Empty the broken tiers and have them told again. Other replicas know nothing of it."""
        known = self._instances
        slots = [(known[name], tier) for name, tier in audit.slots if name in known]
        self._residency.mend(slots)
        for instance, tier in slots:
            self._counters.audit_failures += 1
            trust = instance.trust
            instance.doubt_tier(tier, Damage.broken_memory, tier.name)
            instance.wants_inventory = True
            effects.append(RequestInventory(instance.id, instance.epoch))
            if instance.trust is not trust:
                self._report_trust(instance, effects)

    def _take_hole(self, hole: HoleSeen, effects: list[Effect]) -> None:
        """Doubt every instance until its next batch shows whether it lost something."""
        self._counters.stream_holes += 1
        self._stream_sequence = hole.got - 1
        for instance in self._instances.values():
            if instance.is_gone:
                continue
            trust = instance.trust
            detail = f"{hole.expected} to {hole.got - 1}"
            self._damage(instance, Damage.stream_hole, detail, effects)
            if instance.trust is not trust:
                self._report_trust(instance, effects)

    def _take_expiry(self, expiry: LeaseExpired, effects: list[Effect]) -> None:
        """Propose the end of an epoch; it ends when the record comes back through the log."""
        instance = self._instances.get(expiry.instance)
        if (
            instance is None
            or instance.epoch != expiry.epoch
            or instance.is_gone
            or instance.is_expiring
        ):
            self._counters.ignored_expiries += 1
            return
        instance.is_expiring = True
        record = ControlRecord(
            v=WIRE_VERSION,
            worker=instance.id.worker,
            rank=instance.id.rank,
            epoch=instance.epoch,
            kind="expired",
            reason="lease",
            by=expiry.seen_by,
            ts_ns=expiry.now_ns,
        )
        effects.append(PublishControl(record))

    def _take_proposal(self, proposal: Proposed, effects: list[Effect]) -> None:
        """Propose a record, once for each time that it may be due."""
        instance = self._instances.get(proposal.instance)
        if instance is None or instance.epoch != proposal.epoch:
            return
        number = instance.num_records.get(proposal.kind, 0) + 1
        if not _is_due(proposal.kind, instance) or instance.proposed.get(proposal.kind) == number:
            return
        instance.proposed[proposal.kind] = number
        record = ControlRecord(
            v=WIRE_VERSION,
            worker=instance.id.worker,
            rank=instance.id.rank,
            epoch=instance.epoch,
            kind=proposal.kind,
            reason=str(number),
            by=proposal.seen_by,
            ts_ns=proposal.now_ns,
        )
        effects.append(PublishControl(record))

    def _reject(self, worker: str, kind: str, reason: str, effects: list[Effect]) -> None:
        key = (worker, kind)
        if key not in self._rejected and len(self._rejected) >= MAX_REJECTED_KINDS:
            key = ("(others)", "(any)")
        self._rejected[key] = self._rejected.get(key, 0) + 1
        effects.append(ReportRejected(worker, kind, reason))

    def _report_trust(self, instance: Instance, effects: list[Effect]) -> None:
        self._fleet_version += 1
        effects.append(
            ReportTrust(instance.id, instance.epoch, instance.trust, instance.trust_reasons)
        )

    # --- answers: see IndexReader -------------------------------------------------------------

    @property
    def stream_sequence(self) -> int:
        return self._stream_sequence

    @property
    def fleet_version(self) -> int:
        return self._fleet_version

    def match(self, chain: bytes) -> list[InstanceMatch]:
        return self._residency.match(chain)

    def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
        return self._residency.holders(block_hash)

    def instances(self) -> list[InstanceView]:
        return [self._view(self._instances[name]) for name in sorted(self._instances)]

    def instance(self, instance: InstanceId) -> InstanceView | None:
        known = self._instances.get(instance)
        return self._view(known) if known else None

    def serving(self, model: str) -> list[InstanceView]:
        if self._serving_version != self._fleet_version:
            self._serving_version = self._fleet_version
            self._serving = serving_views(self.instances())
        return self._serving.get(model, [])

    def tree(self, depth: int, width: int) -> list[TreeRun]:
        return self._residency.tree(depth, width)

    def stats(self) -> IndexStats:
        rejected = sorted(self._rejected.items())
        return IndexStats(
            stream_sequence=self._stream_sequence,
            num_instances=len(self._instances) - len(self._gone),
            num_blocks=self._residency.num_blocks(),
            memory_bytes=self._residency.memory_bytes(),
            inventories=self._residency.num_inventories,
            dropped_inventories=self._residency.num_dropped_inventories,
            rejected=tuple(RejectedCount(*key, count) for key, count in rejected),
            **msgspec.structs.asdict(self._counters),
        )

    def state_digest(self) -> str:
        content = [
            (*each.id, each.epoch, each.seq, each.is_gone, *self._residency.digests(each).items())
            for each in sorted(self._instances.values(), key=lambda each: each.id)
        ]
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(content))

    # --- snapshots ----------------------------------------------------------------------------

    def export(self, room: Room | None = None) -> Export:
        """Copy everything, as of exactly `stream_sequence`.

        O(index), in one go: nothing is folded in meanwhile. Parts are made of the copy later.
        `room` is memory for it, see Exportable.
        """
        residency, index = self._residency.export(room)
        tables = _Tables(
            stream_sequence=self._stream_sequence,
            instances=list(self._instances.values()),
            gone=list(self._gone),
            order=self._order.export(),
            residency=residency,
            counters=self._counters,
            rejected=[(*key, count) for key, count in self._rejected.items()],
        )
        encoded = msgspec.msgpack.encode(tables)
        return lambda: {"tables": memoryview(encoded), **index()}

    def restore(self, parts: Parts) -> None:
        """Become what was exported; what is folded in next has the same effect as there.

        Raises InvalidSnapshot or IndexFull, and then has changed nothing.
        """
        try:
            tables = msgspec.msgpack.decode(bytes_of(parts, "tables"), type=_Tables)
        except msgspec.DecodeError as error:
            raise InvalidSnapshot(f"part tables: {error}") from error
        for instance in tables.instances:
            # whoever noticed has proposed the record; if it got lost, we have to propose it again
            instance.is_expiring = False
            instance.proposed.clear()
        self._residency.restore(tables.residency, parts, tables.instances)
        self._stream_sequence = tables.stream_sequence
        self._fleet_version += 1
        self._order.restore(tables.order)
        self._instances = {each.id: each for each in tables.instances}
        self._gone = dict.fromkeys(tables.gone)
        self._counters = tables.counters
        self._rejected = {(worker, kind): count for worker, kind, count in tables.rejected}

    # --- what a live service asks; see service.py ----------------------------------------------

    def places(self) -> list[Place]:
        """Return who has which number in the index."""
        return self._residency.places()

    def wants_inventory(self, instance: InstanceId) -> bool:
        """Say whether the instance still waits for an inventory."""
        known = self._instances.get(instance)
        return known is not None and known.wants_inventory

    def wanted_inventories(self) -> list[RequestInventory]:
        """Return what a reader that has just caught up has to ask for."""
        return [
            RequestInventory(each.id, each.epoch)
            for each in self._instances.values()
            if each.wants_inventory
        ]

    def audit(self) -> tuple[tuple[InstanceId, Tier], ...]:
        """Return tiers that broken memory has changed. O(index), for a thread beside this one.

        Questions may be asked meanwhile; stimuli may not come in.
        """
        return tuple(self._residency.audit())

    def throttled(self) -> list[tuple[InstanceId, int, int, int]]:
        """Return (instance, epoch, since when by the broker's clock, how often in this epoch)."""
        return [
            (each.id, each.epoch, each.throttled_ns, each.num_records.get("throttled", 0))
            for each in self._instances.values()
            if each.throttled_ns and not each.is_gone
        ]

    def alive(self) -> list[tuple[InstanceId, int]]:
        """Return instances and epochs that may lose their lease: not gone, nor about to be."""
        return [
            (each.id, each.epoch)
            for each in self._instances.values()
            if not each.is_gone and not each.is_expiring
        ]

    def silent_since(self, broker_ns: int) -> frozenset[InstanceId]:
        """Return who holds something and whose newest message is older than a broker's time.

        Whoever holds nothing has no digest to tell, so its silence says nothing.
        """
        return frozenset(
            each.id
            for each in self._instances.values()
            if each.last_event_ns < broker_ns and self._residency.digests(each)
        )

    def _view(self, instance: Instance) -> InstanceView:
        digests = self._residency.digests(instance)
        return InstanceView(
            instance=instance.id,
            epoch=instance.epoch,
            seq=instance.seq,
            info=instance.info,
            trust=instance.trust,
            trust_reasons=instance.trust_reasons,
            digests=digests,
            num_blocks=sum(digest.count for digest in digests.values()),
            last_event_ns=instance.last_event_ns,
        )


def alike(events: Sequence[KvEvent]) -> Iterator[Sequence[KvEvent]]:
    """Split events into runs that the index can take at once: same kind, same tier."""
    if len(events) == 1:
        yield events
        return
    for about, run in groupby(events, key=_what_it_is_about):
        if about is None:
            for event in run:
                yield (event,)
        else:
            yield tuple(run)


def _what_it_is_about(event: KvEvent) -> tuple[type[KvEvent], Tier] | None:
    if isinstance(event, BlockStored | BlockRemoved):
        return type(event), event.tier
    return None


def _says_nothing_new(record: ControlRecord, instance: Instance) -> bool:
    if record.kind in PROPOSED_KINDS:
        # the number tells a second replica's record from the next time
        is_next = record.reason == str(instance.num_records.get(record.kind, 0) + 1)
        return not is_next or not _is_due(record.kind, instance)
    if instance.is_gone or (record.kind, record.reason) in instance.controls:
        return True
    return record.kind != "expired" and len(instance.controls) >= MAX_CONTROLS


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
