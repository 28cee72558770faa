"""What a sidecar says about its engine: from records of the ring to batches in the outbox.

Pure; the sidecar reads the ring, tells the time (in seconds of one monotonic clock) and publishes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from kvatlas.common.backoff import Backoff
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidSetting, MalformedBatch, MalformedEvent
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import (
    ENGINE_STALLED,
    BlockRemoved,
    BlockStored,
    KvEvent,
    WorkerUp,
)
from kvatlas.worker_hooks.engines.adapter import UNKNOWN_FIELD, EngineAdapter
from kvatlas.worker_hooks.engines.registry import adapter_of
from kvatlas.worker_hooks.raw_events import (
    RawEngineBatch,
    RawEvent,
    RawListed,
    RawLost,
    RawRestarted,
    RawStored,
    decode_raw,
)
from kvatlas.worker_hooks.reporting.engine_state.namespace_budgets import (
    NamespaceBudgets,
    NamespaceBudgetSettings,
)
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.reporting.outbox import Outbox
from kvatlas.worker_hooks.reporting.ring import Lost

#: an engine that changes under its own listing is asked again so often
MAX_LISTING_RETRIES = 3
#: an engine that counts otherwise than it tells is asked to list again after so long at first, then
#: after twice as long each time; as long as the longest without asking, and it begins anew
FIRST_AUDIT_SECONDS, MAX_AUDIT_SECONDS = 1.0, 300.0
#: adapters that are told of; what their blocks hold is told in any case
MAX_ADAPTERS = 1024
#: of a name, in characters
MAX_NAME = 256
#: between two ends of mutes, each of which an inventory follows
MUTES_END_SECONDS = 1.0


class ReportEffects(Struct, frozen=True):
    """What the sidecar has to do after a report."""

    #: ask the engine to list what it holds
    wants_listing: bool = False
    #: the engine is another incarnation now: a new epoch has to begin
    is_restarted: bool = False


class Reporter:
    """Puts what changed into the outbox, and what is held whenever that is in doubt."""

    def __init__(
        self,
        tracker: EngineStateTracker,
        outbox: Outbox,
        budgets: NamespaceBudgetSettings | None = None,
    ) -> None:
        self._tracker, self._outbox = tracker, outbox
        self._budgets = NamespaceBudgets(budgets or NamespaceBudgetSettings())
        #: root -> blocks told since its budget was looked at
        self._told: Counter[bytes] = Counter()
        #: the ring lost something that the engine cannot list
        self._owes_inventory = False
        #: mutes end no sooner
        self._next_end_at = float("-inf")
        #: engine -> the adapter that reads its batches
        self._adapters: dict[str, EngineAdapter] = {}
        #: first sequence of the last inventory
        self._inventory_seq = 0
        self._num_malformed = 0
        #: kind -> parts of engines' batches that became nothing
        self._rejected: Counter[str] = Counter()
        #: listings in a row that the engine could not finish
        self._num_failed_listings = 0
        self._audits = Backoff(FIRST_AUDIT_SECONDS, MAX_AUDIT_SECONDS, MAX_AUDIT_SECONDS)

    def report(
        self, records: Iterable[bytes | Lost], writer_lists: bool, now: float
    ) -> ReportEffects:
        """Report what the ring gave; return what that asks of the sidecar.

        A record that is no event is counted and costs nothing else. After a loss, an engine that
        cannot list leaves us with what we know: that becomes the inventory. One whose own count
        differs is asked to list, again and again less often if that does not help.
        """
        events = [event for record in records for event in self._read(record, writer_lists)]
        num_mismatches = self._tracker.counters.audit_mismatches
        changes = self._tracker.handle(events)
        self._introduce(events)
        self._put_changes(changes)
        differs = self._tracker.counters.audit_mismatches > num_mismatches
        wants_listing = is_restarted = False
        for event in events:
            match event:
                case RawLost():
                    wants_listing |= writer_lists
                    if not writer_lists:
                        self._owes_inventory = True
                case RawListed(complete):
                    self.put_digests()
                    self._num_failed_listings = 0 if complete else self._num_failed_listings + 1
                    if writer_lists and 0 < self._num_failed_listings <= MAX_LISTING_RETRIES:
                        wants_listing = True
                case RawRestarted():
                    is_restarted = True
                    self._audits.reset()
                case _:
                    pass
        self._send_owed_inventory()
        if writer_lists and differs and not self._audits.seconds_left(now):
            self._audits.next(now)
            wants_listing = True
        return ReportEffects(wants_listing, is_restarted)

    def put_inventory(self) -> None:
        """Put the inventory, and digests to check it by, behind all that has happened.

        Who speaks is said again with it: a reader may begin after WorkerUp has left the stream.
        A doubt or a mute that is over is over for readers when they have the inventory.
        """
        self._owes_inventory = False
        as_of_seq = self._outbox.seal()
        self._outbox.add_inventory([self._outbox.up, *self._tracker.inventory(as_of_seq)])
        self._put_digests(self._tracker.degradation_notices(even_none=True))
        self._inventory_seq = as_of_seq + 1

    def promise_inventory(self) -> int:
        """Put the inventory unless one still waits; return the sequence that it begins with."""
        if not self._is_inventory_waiting:
            self.put_inventory()
        return self._inventory_seq

    @property
    def _is_inventory_waiting(self) -> bool:
        # what an inventory has of the outbox is not counted, so there is one at a time
        return self._outbox.last_taken_seq < self._inventory_seq

    def _send_owed_inventory(self) -> None:
        if self._owes_inventory and not self._is_inventory_waiting:
            self.put_inventory()

    def put_digests(self) -> None:
        """Put the digest of every tier, with what equal ones must not hide."""
        self._send_owed_inventory()
        self._put_digests(self._tracker.degradation_notices())

    def _put_digests(self, notices: list[KvEvent]) -> None:
        # in one batch: a notice that got lost alone would leave digests that make us exact
        self._outbox.add_whole([*notices, *self._tracker.digests()])

    def stall(self, seconds: float | None) -> None:
        """Report that the engine has given no sign of life for so long; None: it does again."""
        reason = "" if seconds is None else f"{ENGINE_STALLED}: no sign of life for {seconds:.0f} s"
        self._outbox.add(self._tracker.stall(reason))

    def retract(self, hashes: bytes) -> None:
        """Report that blocks are not held which somebody believed in."""
        self._outbox.add(self._tracker.retract(hashes))

    def move_pooled(self, came: Iterable[bytes], left: Iterable[bytes]) -> None:
        """Report blocks, by our hash, that came into the serve pool and that left it."""
        self._put_changes(self._tracker.move_pooled(came, left))

    def keep_budgets(self, now: float) -> list[str]:
        """Mute namespaces that have told too much, and let others speak again.

        To be called often. Returns what happened, for people; nothing was put where that is empty.
        """
        if not self._told and not self._budgets.num_over_budget:
            return []
        told, self._told = self._told, Counter()
        may_end = now >= self._next_end_at and not self._is_inventory_waiting
        over = [root for root, blocks in told.items() if not self._budgets.spend(root, blocks, now)]
        ended = self._budgets.due(now) if may_end else []
        if over:
            settings = self._budgets.settings
            reason = f"more than {settings.blocks_per_second:.0f} blocks/s"
            self._outbox.add(self._tracker.mark_over_budget(over, reason))
        if ended:
            self._next_end_at = now + MUTES_END_SECONDS
            self._tracker.clear_over_budget(ended)
            if not self._outbox.is_lost:  # else one has to follow anyway
                self.put_inventory()
        return [
            *(f"namespace {root.hex()} is over its budget and muted" for root in over),
            *(f"namespace {root.hex()} is muted no longer" for root in ended),
        ]

    def begin_epoch(self, epoch: int) -> None:
        """Speak in this epoch from now on; what an earlier one said counts no more."""
        if self._outbox.epoch is not None:
            self._tracker.begin_epoch()
            self._inventory_seq = 0
        self._outbox.begin_epoch(epoch)

    @property
    def num_blocks(self) -> int:
        """Blocks held in the engine's own memory, of muted namespaces too."""
        return self._tracker.num_named(Tier.hbm)

    def counters(self) -> dict[str, int]:
        """Return what was counted here and below."""
        counters: dict[str, int] = msgspec.structs.asdict(self._tracker.counters)
        counters["unnamed_blocks"] = self._tracker.num_unnamed
        counters["muted_namespaces"] = self._budgets.num_over_budget
        counters["malformed_events"] = self._num_malformed
        counters |= {f"rejected_{kind}": count for kind, count in self._rejected.items()}
        counters["outbox_overflows"] = self._outbox.num_overflows
        return counters

    def _put_changes(self, changes: list[KvEvent]) -> None:
        self._outbox.add(changes)
        for event in changes:
            if isinstance(event, BlockStored | BlockRemoved):
                self._told[event.root] += len(event.hashes) // BLOCK_HASH_BYTES

    def _introduce(self, events: Iterable[RawEvent]) -> None:
        """Say ahead of the blocks what they show of the engine: its adapters, its windows."""
        info = self._outbox.up.info
        adapters = dict(info.adapters)
        for event in events:
            if isinstance(event, RawStored) and event.lora and len(adapters) < MAX_ADAPTERS:
                adapters.setdefault(event.lora[:MAX_NAME], info.model)
        known = msgspec.structs.replace(
            info, adapters=adapters, ends_at_reuse_points=self._tracker.ends_at_reuse_points
        )
        if known != info:
            self._outbox.introduce(WorkerUp(known))

    def _read(self, record: bytes | Lost, writer_lists: bool) -> Sequence[RawEvent]:
        if isinstance(record, Lost):
            return [RawLost(record.num_records, writer_lists)]
        try:
            event = decode_raw(record)
            if isinstance(event, RawEngineBatch):
                return self._read_batch(event)
        except (MalformedEvent, MalformedBatch, InvalidSetting, RecursionError):
            self._num_malformed += 1
            return []
        if isinstance(event, RawRestarted):
            self._adapters.clear()  # the next one tells its groups anew
        return [event]

    def _read_batch(self, batch: RawEngineBatch) -> list[RawEvent]:
        adapter = self._adapters.get(batch.engine)
        if adapter is None:
            adapter = self._adapters[batch.engine] = adapter_of(
                batch.engine, self._tracker.block_tokens
            )
        decoded = adapter.decode(batch.payload)
        self._rejected.update(rejected.kind for rejected in decoded.rejected)
        if unread := [each.reason for each in decoded.rejected if each.kind == UNKNOWN_FIELD]:
            self._tracker.doubt_fields(unread)
        return decoded.events
