"""What a batch does: its order first, then one event after the other.

judged by epoch, then by sequence --> alike events at once --> residency, trust of the instance
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast

from kvatlas.events.codec import DecodedBatch
from kvatlas.events.ordering import Verdict
from kvatlas.indexer.fold.fleet import Fleet
from kvatlas.indexer.fold.instances import MAX_REASON, DegradedReason, Instance
from kvatlas.indexer.fold.stimuli import (
    Effect,
    ReportDivergence,
    ReportGap,
    ReportOldEpoch,
    ReportPassed,
    ReportTakeover,
    RequestInventory,
)
from kvatlas.schemas.digest import TierDigest, split_hashes
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.fleet import Trust, WorkerInfo
from kvatlas.schemas.ids import NUM_TIERS, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Digest,
    EventBatch,
    Inventory,
    KvEvent,
    NamespaceSeen,
    NamespacesOverBudget,
    RejectedEvent,
    Resync,
    SourceDegraded,
    WorkerDown,
    WorkerUp,
)

#: a counter stays there: what is encoded has 64 bits, and an instance says by how much it rises
MAX_COUNT = 2**63 - 1
#: a WorkerUp that differs within an epoch: no sidecar says one, so somebody else may have
REDESCRIBED = "it describes itself otherwise than before in this epoch"
_NEXT, _GONE = Verdict.next, Trust.gone
#: kinds of events whose loss can leave the index wrong
_STATEFUL = frozenset(
    ["stored", "removed", "cleared", "inventory", "resync", "doubted", "muted", "malformed"]
)


class BatchFold:
    """Takes the batches of all instances in."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # every batch asks for these
        self._residency, self._order = fleet.residency, fleet.order
        self._instances, self._counters = fleet.instances, fleet.counters

    def apply(self, decoded: DecodedBatch, broker_ns: int, effects: list[Effect]) -> None:
        """Let a batch of the log have its effect, if it is in order; `effects` get what follows."""
        batch, rejected = decoded
        # a plain tuple finds the same entry, and every batch passes here
        known = self._instances.get((batch.worker, batch.rank))  # type: ignore[call-overload]
        instance: Instance | None = known or self._fleet.admit(batch, broker_ns, effects)
        if instance is None or (
            batch.epoch > instance.epoch > 0
            and self._fleet.refuses_epoch(
                instance.id, batch.epoch, instance.epoch, broker_ns, effects
            )
        ):
            return
        trust = instance.trust if instance.epoch else None
        verdict = self._order.judge(instance.id, batch.epoch, batch.seq)
        if verdict is not _NEXT and not self._settle_order(instance, batch, verdict, effects):
            return
        if instance.damages and DegradedReason.stream_hole in instance.damages:
            instance.clear_degraded_reason(DegradedReason.stream_hole)
        instance.seq, instance.ts_ns = batch.seq, batch.ts_ns
        instance.last_event_ns = broker_ns
        self._counters.batches += 1
        said = batch.events
        if instance.throttled_ns:
            self._counters.throttled_batches += 1
            said = tuple(event for event in said if isinstance(event, WorkerUp | WorkerDown))
        for events in runs_of_one_kind(said):
            self._apply_events(instance, events, effects)
            if instance.trust is _GONE:
                break
        for skipped in rejected:
            self._apply_rejected(instance, skipped, effects)
        if instance.damages:
            instance.heal()
        if instance.trust is not trust:
            self._fleet.report_trust(instance, effects)

    def _settle_order(
        self, instance: Instance, batch: EventBatch, verdict: Verdict, effects: list[Effect]
    ) -> bool:
        """Deal with a batch that is not simply the next one; return whether it counts."""
        match verdict:
            case Verdict.duplicate:
                self._counters.duplicates += 1
                self._apply_duplicate(instance, batch, effects)
                return False
            case Verdict.old_epoch:
                self._counters.old_epochs += 1
                effects.append(ReportOldEpoch(instance.id, batch.epoch, instance.epoch))
                return False
            case Verdict.ended_epoch:
                self._counters.ended_epochs += 1
                return False
            case Verdict.new_epoch:
                self._fleet.begin(instance, batch.epoch)
        if batch.seq != instance.seq + 1:
            self._apply_gap(instance, batch.seq, effects)
        return True

    def _apply_events(
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
                    self._compare_digest(instance, event, effects)
                case Inventory() as event:
                    self._residency.inventories.apply(instance, event)
                case AllBlocksCleared() as event:
                    self._residency.clear(instance, event)
                case WorkerUp(info):
                    self._judge_takeover(instance, info, effects)
                    is_news = instance.info not in (None, info)
                    instance.is_contradicted = is_news
                    if is_news:
                        self._fleet.degrade_and_request_inventory(
                            instance, DegradedReason.gap, REDESCRIBED, effects
                        )
                    if info != instance.info:
                        self._residency.introduce(instance, info)
                        self._fleet.note_change(instance.id)
                case WorkerDown(reason):
                    self._fleet.end(instance, f"down: {reason}")
                case Resync():
                    self._counters.resyncs += 1
                    self._fleet.degrade_and_request_inventory(
                        instance, DegradedReason.resync, "", effects
                    )
                case SourceDegraded(reason):
                    self._apply_source_degraded(instance, reason)
                case NamespacesOverBudget(roots, reason):
                    self._apply_over_budget(instance, roots, reason)
                case NamespaceSeen():
                    pass
        except IndexFull as error:
            self._fleet.note_index_full(instance, error)

    def _judge_takeover(self, instance: Instance, info: WorkerInfo, effects: list[Effect]) -> None:
        """Tell an engine that began anew where it was from a process elsewhere of its name."""
        was = instance.replaced
        if was is None or instance.info is not None:
            return
        if was.base_url == info.base_url:
            instance.replaced = None
            return
        self._counters.takeovers += 1
        effects.append(ReportTakeover(instance.id, instance.epoch, was))

    def _apply_gap(self, instance: Instance, found: int, effects: list[Effect]) -> None:
        expected = instance.seq + 1
        self._counters.gaps += 1
        missing = self._counters.missing_batches + found - expected
        self._counters.missing_batches = min(missing, MAX_COUNT)
        effects.append(ReportGap(instance.id, instance.epoch, expected, found))
        damage = DegradedReason.gap if instance.seq else DegradedReason.unknown_history
        self._fleet.degrade_and_request_inventory(
            instance, damage, f"expected {expected}, got {found}", effects
        )
        instance.changed_at = [found - 1] * NUM_TIERS

    def _apply_duplicate(
        self, instance: Instance, batch: EventBatch, effects: list[Effect]
    ) -> None:
        """Tell a batch that came twice from two that claim one sequence: one of them is forged.

        Which one is unknown, and the other had no effect, so its inventory has to say what is true.
        """
        if batch.seq != instance.seq or instance.ts_ns in (None, batch.ts_ns):
            effects.append(ReportPassed(instance.id, batch.epoch, batch.seq, instance.seq))
            return
        trust = instance.trust
        detail = f"two batches say that they are number {batch.seq}"
        self._fleet.degrade_and_request_inventory(instance, DegradedReason.gap, detail, effects)
        instance.is_contradicted = True
        instance.changed_at = [batch.seq] * NUM_TIERS
        if instance.trust is not trust:
            self._fleet.report_trust(instance, effects)

    def _compare_digest(self, instance: Instance, told: Digest, effects: list[Effect]) -> None:
        self._residency.inventories.interrupt(instance, told.tier)
        self._residency.inventories.settle(instance)
        found = self._residency.digest(instance, told.tier)
        if found == (told.count, told.xor):
            self._counters.digest_matches += 1
            instance.unsettled.discard(told.tier)
            instance.divergent.pop(told.tier, None)
            return
        self._counters.digest_mismatches += 1
        instance.divergent[told.tier] = told.count, found.count
        detail = f"{told.tier.name} holds {told.count} blocks, the index {found.count}"
        is_news = instance.degrade_tier(told.tier, DegradedReason.digest_mismatch, detail)
        if is_news or not instance.wants_inventory:
            instance.wants_inventory = True
            claim = TierDigest(told.count, told.xor)
            effects.append(ReportDivergence(instance.id, told.tier, claim, found))
            effects.append(RequestInventory(instance.id, instance.epoch))

    def _apply_rejected(
        self, instance: Instance, skipped: RejectedEvent, effects: list[Effect]
    ) -> None:
        self._fleet.reject(instance.id.worker, skipped.kind, skipped.reason, effects)
        if skipped.kind not in _STATEFUL or instance.is_gone:
            return
        if instance.wants_inventory:
            self._fleet.degrade(instance, DegradedReason.rejected_event, skipped.kind)
        else:
            self._fleet.degrade_and_request_inventory(
                instance, DegradedReason.rejected_event, skipped.kind, effects
            )

    def _apply_source_degraded(self, instance: Instance, reason: str) -> None:
        if reason:
            instance.damages[DegradedReason.doubted] = reason[:MAX_REASON]
            instance.trust = Trust.degraded
        else:
            instance.clear_degraded_reason(DegradedReason.doubted)

    def _apply_over_budget(self, instance: Instance, roots: bytes, reason: str) -> None:
        """Note of which namespaces it holds more than it says; said again, that is no news."""
        muted = dict.fromkeys(split_hashes(roots), reason[:MAX_REASON])
        if muted != instance.muted:
            self._counters.namespace_mutes += len(muted.keys() - instance.muted.keys())
            instance.muted = muted
            self._fleet.note_change(instance.id)


def runs_of_one_kind(events: Sequence[KvEvent]) -> Iterator[Sequence[KvEvent]]:
    """Split events into runs that the index can take at once: same kind, same tier."""
    if len(events) == 1:
        yield events
        return
    for about, run in groupby(events, key=_kind_and_tier):
        if about is None:
            for event in run:
                yield (event,)
        else:
            yield tuple(run)


def _kind_and_tier(event: KvEvent) -> tuple[type[KvEvent], Tier] | None:
    if isinstance(event, BlockStored | BlockRemoved):
        return type(event), event.tier
    return None
