"""One instance as the fold knows it: its epoch, what it said of itself, and how far it is believed.

damage (gap, resync, ...)  -->  degraded  -->  inventories of what is wrong,
                                              a matching digest of every tier  -->  exact
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvatlas.indexer.index.packed_digest import digest_of_packed
from kvatlas.indexer.reader import Replaced
from kvatlas.schemas.fleet import Trust, WorkerInfo
from kvatlas.schemas.ids import NUM_TIERS, InstanceId, Tier
from kvatlas.schemas.kv_events import Inventory

#: bytes of hashes in an inventory that is not complete yet, per tier; more drops the set
MAX_OPEN_INVENTORY_BYTES = 256 * 1024 * 1024
#: and each part counts for so much, hashes or none
PART_BYTES = 64
#: characters kept of a reason that others give; it stands in every answer about the instance
MAX_REASON = 500
#: what a fold counts up from, read from a snapshot: far enough from the end of 64 bits
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
#: of an instance in the index
Number = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class DegradedReason(StrEnum):
    """Why an instance is not believed exactly."""

    #: the first batch seen of the epoch was not its first
    unknown_history = "unknown_history"
    #: batches of the epoch are missing
    gap = "gap"
    #: the instance lost events before they got a sequence
    resync = "resync"
    #: its own digest is not ours
    digest_mismatch = "digest_mismatch"
    #: one of its events could not be read
    rejected_event = "rejected_event"
    #: this reader lost a part of the stream; the instance's next batch tells whether it matters
    stream_hole = "stream_hole"
    #: it gave no inventory, so what it was believed to hold was dropped
    forgotten = "forgotten"
    #: the index had no room for what it holds
    index_full = "index_full"
    #: whoever speaks for it has missed something of the engine for good
    doubted = "doubted"
    #: the memory of this reader's index had changed by itself
    broken_memory = "broken_memory"
    #: it said more than its budget: for a while nothing that it said had an effect
    throttled = "throttled"
    #: others found its KV wrong: it serves, but nothing of it counts as a match
    quarantined = "quarantined"


#: what no inventory heals
_LASTING = (DegradedReason.quarantined, DegradedReason.doubted)


class OpenInventory(Struct):
    """Parts of a tier's inventory so far; all came in order, the last as number `num_seen`."""

    as_of_seq: Count
    parts: Count
    num_seen: Count = 0
    num_bytes: Count = 0
    #: count and XOR of all so far, see TierDigest
    digest: tuple[int, int] = (0, 0)
    runs: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)

    def add_part(self, part: Inventory) -> bool:
        """Add the part if it is the one that follows; return whether it was."""
        self.num_bytes += len(part.hashes) + PART_BYTES
        if (part.as_of_seq, part.parts, part.part) != (
            self.as_of_seq,
            self.parts,
            self.num_seen + 1,
        ) or self.num_bytes > MAX_OPEN_INVENTORY_BYTES:
            return False
        self.num_seen = part.part
        if part.hashes:
            self.runs.append((part.root, part.hashes))
            (count, xor), more = self.digest, digest_of_packed(part.hashes)
            self.digest = count + more.count, xor ^ more.xor
        return True

    @property
    def is_complete(self) -> bool:
        """Whether no part is missing."""
        return self.num_seen == self.parts


class Staging(Struct):
    """What is told of an instance in doubt, on its way into the index; see InventoryFold."""

    #: in the index; no answer shows it
    number: Number
    #: tiers that have something under it, or may
    begun: set[Tier] = msgspec.field(default_factory=set)
    #: those of them that are told to the end
    whole: dict[Tier, OpenInventory] = msgspec.field(default_factory=dict)


class Instance(Struct):
    """What the fold keeps of an instance; one object for all its epochs."""

    id: InstanceId
    epoch: Count = 0
    seq: Count = 0
    #: the worker's clock in the batch of that sequence, which another batch of it does not have;
    #: None where it is unknown
    ts_ns: int | None = None
    #: number in the index; None when it is gone or there was no room
    number: Number | None = None
    info: WorkerInfo | None = None
    trust: Trust = Trust.exact
    #: why it is gone; empty while it is not
    ended: str = ""
    #: Damage -> detail, in order of appearance; empty exactly when trust is `exact`, or it is gone
    damages: dict[DegradedReason, str] = msgspec.field(default_factory=dict)
    #: tiers replaced by a complete inventory since they were last in doubt
    inventoried: set[Tier] = msgspec.field(default_factory=set)
    #: tiers in doubt that no digest of the instance has equalled since; void without damage
    unsettled: set[Tier] = msgspec.field(default_factory=set)
    open_inventories: dict[Tier, OpenInventory] = msgspec.field(default_factory=dict)
    #: per tier: the newest sequence that did change it, or may have
    changed_at: list[Count] = msgspec.field(default_factory=lambda: [0] * NUM_TIERS)
    #: somebody else may have spoken for it: until it says again what it is, nothing heals it
    is_contradicted: bool = False
    #: an inventory has been asked for and has not healed it yet
    wants_inventory: bool = False
    #: (kind, reason) of the control records of this epoch
    controls: set[tuple[str, str]] = msgspec.field(default_factory=set)
    #: the expiry of this epoch has been noticed here
    is_expiring: bool = False
    #: since when nothing that it says has an effect, by the broker's clock; 0 for not
    throttled_ns: Count = 0
    #: per kind of record that comes again and again: how many there were in this epoch
    num_records: dict[str, Count] = msgspec.field(default_factory=dict)
    #: per such kind: the number of the record that was proposed here last
    proposed: dict[str, Count] = msgspec.field(default_factory=dict)
    last_event_ns: Count = 0
    #: roots of which it holds more than it says -> why
    muted: dict[bytes, str] = msgspec.field(default_factory=dict)
    #: whom this epoch took the name from
    replaced: Replaced | None = None
    #: per tier whose last digest was not ours: (blocks that the instance told, blocks found here)
    divergent: dict[Tier, tuple[int, int]] = msgspec.field(default_factory=dict)
    #: tiers of an inventory that wait to be shown together
    staging: Staging | None = None

    @property
    def is_gone(self) -> bool:
        """Whether it is known to be dead."""
        return self.trust is Trust.gone

    @property
    def trust_reasons(self) -> tuple[str, ...]:
        """Why it is not exact."""
        if self.is_gone:
            return (self.ended,)
        return tuple(f"{why}: {detail}" if detail else why for why, detail in self.damages.items())

    def begin(self, epoch: int) -> None:
        """Start an epoch: nothing of an earlier one is left but its name, if it had not gone."""
        fresh = Instance(self.id, epoch=epoch)
        if self.epoch and not self.is_gone:
            base_url = self.info.base_url if self.info else ""
            fresh.replaced = Replaced(self.epoch, base_url, self.last_event_ns)
        for name in self.__struct_fields__:
            setattr(self, name, getattr(fresh, name))

    def end(self, reason: str) -> None:
        """Become gone until the next epoch."""
        self.trust, self.ended, self.info = Trust.gone, reason[:MAX_REASON], None
        self.damages.clear()
        self.divergent.clear()
        self.muted.clear()
        self.wants_inventory = False

    def degrade(self, damage: DegradedReason, detail: str) -> None:
        """Take all tiers as unknown."""
        self.damages.setdefault(damage, detail[:MAX_REASON])
        self.trust = Trust.degraded
        self.inventoried.clear()
        self.unsettled = set(Tier)

    def degrade_tier(self, tier: Tier, damage: DegradedReason, detail: str) -> bool:
        """Take one tier as unknown; return whether an inventory of it was what turned out wrong."""
        had_inventory = tier in self.inventoried
        self.damages.setdefault(damage, detail[:MAX_REASON])
        self.trust = Trust.degraded
        self.inventoried.discard(tier)
        self.unsettled.add(tier)
        return had_inventory

    def clear_degraded_reason(self, damage: DegradedReason) -> None:
        """Take back one damage that turned out to be none."""
        self.damages.pop(damage, None)
        self._settle()

    def heal(self) -> None:
        """Become exact if each tier in doubt has since had a digest equal to ours.

        Equal digests after the same sequence are what exact means, whether an inventory had to
        bring that about or nothing had been lost in the tier. One tier less, such as one that
        nobody has told of yet, and a worker that holds something is believed to hold nothing.
        """
        if not self.unsettled and not self.is_contradicted:
            self.damages = {why: d for why, d in self.damages.items() if why in _LASTING}
            self._settle()

    def _settle(self) -> None:
        if not self.damages:
            self.trust = Trust.exact
        if not set(self.damages) - {*_LASTING, DegradedReason.index_full}:
            self.wants_inventory = False


def numbers_of(instances: Sequence[Instance]) -> list[int]:
    """Return the numbers in the index that instances have."""
    own = [each.number for each in instances if each.number is not None]
    return own + [each.staging.number for each in instances if each.staging is not None]
