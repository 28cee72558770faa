"""The fold: stimuli in, effects out, and what the fleet holds in between.

    stimulus --handle--> order within the instance --> one event at a time --> residency, trust
                         (epoch before sequence)       of the instance         [effects]

No I/O, no clock, no logger: the live service and a replay run exactly this, so equal histories give
equal `state_digest`. What changes with time alone (silence, lag) is in trust_overlay.py.
"""

from collections.abc import Callable, Generator

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvatlas.indexer.fold.batches import BatchFold
from kvatlas.indexer.fold.fleet import MAX_INSTANCES, Fleet, FleetTables
from kvatlas.indexer.fold.instances import DegradedReason, Instance
from kvatlas.indexer.fold.records import Records
from kvatlas.indexer.fold.residency import Residency
from kvatlas.indexer.fold.stimuli import (
    AuditFailed,
    BatchArrived,
    ControlArrived,
    Effect,
    HoleSeen,
    LeaseExpired,
    PayloadRejected,
    Proposed,
    RequestInventory,
    Stimulus,
)
from kvatlas.indexer.fold.tables import check_tables
from kvatlas.indexer.index.exporting import Export, InvalidSnapshot, Parts, Room, bytes_of
from kvatlas.indexer.index.naming import InstanceOrdinal
from kvatlas.indexer.index.port import PrefixIndex
from kvatlas.indexer.index.tree import Tree
from kvatlas.indexer.reader import (
    IndexReader,
    IndexStats,
    InstanceMatch,
    InstanceSelection,
    InstanceView,
    RejectedCount,
    TreeRun,
    finished,
)
from kvatlas.indexer.serving import WorkersByModel
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import InstanceId, Tier

__all__ = ["IndexReader", "IndexState", "IndexStats", "InstanceMatch", "InstanceView", "TreeRun"]


class IndexState:
    """Folds the log into an index, and says of each instance how far to believe it.

    A batch is judged by its epoch, then by its sequence. A new epoch forgets the old one at once.
    After a loss the instance goes on as `degraded` and is asked for an inventory, once per loss;
    it is `exact` again when each tier in doubt has had a digest equal to ours, which takes an
    inventory where something was lost.

    An instance is what has said what it is (WorkerUp); batches and records of other names are
    counted. `max_gone` instances that are gone are remembered, so that stragglers of theirs stay
    without effect; too few, and a very late batch brings a dead instance back, degraded, until its
    lease is missed again. With `max_instances` known, a new one takes the place of the longest gone
    one, and is refused where there is none. Both are constants of the fold: replicas and replays
    with other ones would differ (ADR-0020).
    """

    def __init__(
        self,
        index: PrefixIndex,
        *,
        max_gone: int = 4096,
        max_instances: int = MAX_INSTANCES,
    ) -> None:
        self._residency = Residency(index)
        #: what a live service asks of the instances beside the answers
        self.fleet = Fleet(self._residency, max_gone, max_instances)
        self._batches, self._records = BatchFold(self.fleet), Records(self.fleet)
        self._stream_sequence = 0
        self._serving, self._serving_version = WorkersByModel(), -1

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
                    self._batches.apply(stimulus.decoded, stimulus.broker_ns, effects)
            case ControlArrived():
                if self._advance(stimulus.stream_sequence):
                    self._records.apply(stimulus.record, stimulus.broker_ns, effects)
            case PayloadRejected():
                if self._advance(stimulus.stream_sequence):
                    self.fleet.reject(stimulus.worker, stimulus.kind, stimulus.reason, effects)
            case HoleSeen():
                self._apply_hole(stimulus, effects)
            case LeaseExpired():
                self._records.apply_expiry(stimulus, effects)
            case Proposed():
                self._records.apply_proposal(stimulus, effects)
            case AuditFailed():
                self._apply_audit(stimulus, effects)
        return effects

    def _advance(self, stream_sequence: int) -> bool:
        if stream_sequence <= self._stream_sequence:
            return False
        self._stream_sequence = stream_sequence
        return True

    def _apply_audit(self, audit: AuditFailed, effects: list[Effect]) -> None:
        """Empty the broken tiers and have them told again. Other replicas know nothing of it."""
        known = self.fleet.instances
        slots = [(known[name], tier) for name, tier in audit.slots if name in known]
        try:
            self._residency.mend(slots)
        except IndexFull:  # no memory for other sets of holders: all of them goes, at no cost
            for instance in {instance.id: instance for instance, _ in slots}.values():
                self.fleet.empty(instance)
        for instance, tier in slots:
            self.fleet.counters.audit_failures += 1
            trust = instance.trust
            instance.degrade_tier(tier, DegradedReason.broken_memory, tier.name)
            if not instance.throttled_ns:  # an inventory would have no effect
                instance.wants_inventory = True
                effects.append(RequestInventory(instance.id, instance.epoch))
            if instance.trust is not trust:
                self.fleet.report_trust(instance, effects)

    def _apply_hole(self, hole: HoleSeen, effects: list[Effect]) -> None:
        """Doubt every instance until its next batch shows whether it lost something."""
        self.fleet.counters.stream_holes += 1
        self._stream_sequence = hole.got - 1
        for instance in self.fleet.instances.values():
            if instance.is_gone:
                continue
            trust = instance.trust
            detail = f"{hole.expected} to {hole.got - 1}"
            self.fleet.degrade_and_request_inventory(
                instance, DegradedReason.stream_hole, detail, effects
            )
            if instance.trust is not trust:
                self.fleet.report_trust(instance, effects)

    # --- answers: see IndexReader -------------------------------------------------------------

    @property
    def stream_sequence(self) -> int:
        return self._stream_sequence

    @property
    def fleet_version(self) -> int:
        return self.fleet.version

    def match(self, chain: bytes) -> list[InstanceMatch]:
        return self._residency.match(chain)

    def held(self, chain: bytes, selection: InstanceSelection) -> NDArray[np.uint32]:
        return self._residency.held(chain, selection)

    def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
        return self._residency.holders(block_hash)

    def names(self) -> list[InstanceId]:
        return sorted(self.fleet.instances)

    def instances(self) -> list[InstanceView]:
        return [self._view(self.fleet.instances[name]) for name in self.names()]

    def instance(self, instance: InstanceId) -> InstanceView | None:
        known = self.fleet.instances.get(instance)
        return self._view(known) if known else None

    def serving(self, model: str) -> list[InstanceView]:
        if self._serving_version != self.fleet.version:
            changed = self.fleet.changed_since(self._serving_version)
            self._serving_version = self.fleet.version
            if changed is None:
                self._serving.replace(self.instances())
            else:
                self._serving.update((name, self.instance(name)) for name in changed)
        return self._serving.of(model)

    def tree(self, depth: int, width: int) -> list[TreeRun]:
        return self._residency.tree(depth, width)

    def copy_tree(self) -> Callable[[], Tree]:
        return self._residency.copy_tree(self._stream_sequence)

    def stats(self) -> IndexStats:
        rejected = sorted(self.fleet.rejected.items())
        return IndexStats(
            stream_sequence=self._stream_sequence,
            num_instances=len(self.fleet.instances) - len(self.fleet.gone),
            num_blocks=self._residency.num_blocks(),
            memory_bytes=self._residency.memory_bytes(),
            inventories=self._residency.inventories.num_taken,
            dropped_inventories=self._residency.inventories.num_dropped,
            rejected=tuple(RejectedCount(*key, count) for key, count in rejected),
            **msgspec.structs.asdict(self.fleet.counters),
        )

    def state_digest(self) -> str:
        return finished(self.digest_steps())

    def digest_steps(self) -> Generator[None, None, str]:
        known, encode = self.fleet.instances, msgspec.msgpack.Encoder().encode
        digest = xxhash.xxh3_128(_list_head(len(known)))
        for name in self.names():
            each = known[name]
            digests = self._residency.digests(each).items()
            digest.update(encode((*name, each.epoch, each.seq, each.is_gone, *digests)))
            yield
        return digest.hexdigest()

    # --- snapshots ----------------------------------------------------------------------------

    def export(self, room: Room | None = None) -> Export:
        """Copy everything, as of exactly `stream_sequence`.

        O(index), in one go: nothing is folded in meanwhile. Parts are made of the copy later.
        `room` is memory for it, see Exportable.
        """
        residency, index = self._residency.export(room)
        tables = self.fleet.tables(self._stream_sequence, residency)
        encoded = msgspec.msgpack.encode(tables)
        return lambda: {"tables": memoryview(encoded), **index()}

    def restore(self, parts: Parts) -> None:
        """Become what was exported; what is folded in next has the same effect as there.

        Raises InvalidSnapshot or IndexFull, and then has changed nothing.
        """
        try:
            tables = msgspec.msgpack.decode(bytes_of(parts, "tables"), type=FleetTables)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidSnapshot(f"part tables: {error}") from error
        check_tables(tables)
        for instance in tables.instances:
            # whoever noticed has proposed the record; if it got lost, we have to propose it again
            instance.is_expiring = False
            instance.proposed.clear()
        self._residency.restore(tables.residency, parts, tables.instances)
        self._stream_sequence = tables.stream_sequence
        self.fleet.restore(tables)

    # --- what a live service asks; see index_service.py -------------------------------------------

    def changed_since(self, fleet_version: int) -> list[InstanceId] | None:
        """Return who looks otherwise than at a version; None if that may be anybody."""
        return self.fleet.changed_since(fleet_version)

    @property
    def places_version(self) -> int:
        """Rises whenever `places` changes."""
        return self._residency.places_version

    def places(self) -> list[InstanceOrdinal]:
        """Return who has which number in the index."""
        return self._residency.places()

    def audit(self) -> tuple[tuple[InstanceId, Tier], ...]:
        """Return tiers that broken memory has changed. O(index), for a thread beside this one.

        Questions may be asked meanwhile; stimuli may not come in.
        """
        return tuple(self._residency.audit())

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
            replaced=instance.replaced,
            divergent=dict(instance.divergent),
            muted=instance.muted.copy(),
        )


def _list_head(length: int) -> bytes:
    """Return what a msgpack list of so many items begins with."""
    if length < 16:
        return bytes([0x90 | length])
    if length < 1 << 16:
        return b"\xdc" + length.to_bytes(2)
    return b"\xdd" + length.to_bytes(4)
