"""Whatever is lost on the way from an engine to the bus, readers end up with what it holds."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvatlas.schemas.fleet import WorkerInfo
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import WorkerUp
from kvatlas.worker_hooks.raw_events import RawStored
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.outbox import Outbox
from kvatlas.worker_hooks.reporting.reporter import Reporter
from kvatlas.worker_hooks.reporting.ring import RingReader, RingWriter
from testkit.engine_words import DESCRIPTOR, MODEL, tokens_of
from testkit.fold import Fold

INSTANCE = InstanceId("w", 0)
TIERS = st.sampled_from([Tier.hbm, Tier.dram])
ROOT = BlockHasher(DESCRIPTOR.namespace(MODEL, None, None)).root


class Reporting(RuleBasedStateMachine):
    """An engine that holds a tree of blocks, a tiny ring, a tiny outbox and a broker that goes.

    A block is named by a number above that of its parent; 0 is the root.
    """

    @initialize(lists=st.booleans())
    def begin(self, lists: bool) -> None:
        self.folder = TemporaryDirectory()
        path = Path(self.folder.name) / "ring"
        ring = RingWriter.create(path, 4096, lists=lists)
        self.hook = WorkerHook(ring)
        self.lists = lists
        if lists:
            self.hook.answer_listings(self.listing)
        self.parents: dict[int, int] = {}
        self.hashes: dict[int, bytes] = {}
        self.tiers: dict[Tier, set[int]] = {Tier.hbm: set(), Tier.dram: set()}
        self.reader = RingReader(path)
        self.fold = Fold(INSTANCE)
        self.epoch = 0
        self.now = 0.0
        self.start_sidecar()

    def teardown(self) -> None:
        if hasattr(self, "hook"):
            self.hook.close()
            self.reader.close()
            self.folder.cleanup()

    def start_sidecar(self) -> None:
        up = WorkerUp(WorkerInfo("", (MODEL,), DESCRIPTOR))
        self.tracker = EngineStateTracker(MODEL, DESCRIPTOR)
        self.outbox = Outbox(INSTANCE, up, max_bytes=2000, coalesce_bytes=300)
        self.reporter = Reporter(self.tracker, self.outbox)
        self.reader.want_listing()

    def listing(self) -> Iterator[RawStored]:
        for block in sorted(self.parents):
            for tier, held in self.tiers.items():
                if block in held:
                    parent = self.parents[block]
                    yield RawStored((block,), parent or None, tokens_of(block), tier)

    # --- the engine -------------------------------------------------------------------------

    def is_held(self, block: int) -> bool:
        return block == 0 or any(block in held for held in self.tiers.values())

    @rule(below=st.integers(0, 30), length=st.integers(1, 5), tier=TIERS)
    def store(self, below: int, length: int, tier: Tier) -> None:
        held = [block for block in [0, *self.parents] if self.is_held(block)]
        parent = held[below % len(held)]
        first = max(self.parents, default=0) + 1
        blocks = list(range(first, first + length))
        for block, above in zip(blocks, [parent, *blocks], strict=False):
            self.parents[block] = above
            hasher = BlockHasher(DESCRIPTOR.namespace(MODEL, None, None))
            above_hash = self.hashes.get(above, ROOT)
            self.hashes[block] = hasher.chain(tokens_of(block), parent=above_hash)
        self.tiers[tier] |= set(blocks)
        self.hook.stored(blocks, parent or None, tokens_of(*blocks), tier=tier)

    @rule(which=st.integers(0, 30), tier=TIERS)
    def copy_or_store_again(self, which: int, tier: Tier) -> None:
        held = [block for block in self.parents if self.is_held(block)]
        if held:
            block = held[which % len(held)]
            if self.is_held(self.parents[block]):
                self.tiers[tier].add(block)
                parent = self.parents[block] or None
                self.hook.stored([block], parent, tokens_of(block), tier=tier)

    @rule(which=st.integers(0, 30), tier=TIERS)
    def remove_leaf(self, which: int, tier: Tier) -> None:
        held = self.tiers[tier]
        leaves = [
            block
            for block in sorted(held)
            if not any(self.parents[b] == block and self.is_held(b) for b in self.parents)
        ]
        if leaves:
            held.remove(leaf := leaves[which % len(leaves)])
            self.hook.removed([leaf], tier=tier)

    @rule()
    def clear(self) -> None:
        for held in self.tiers.values():
            held.clear()
        self.hook.cleared()

    # --- the sidecar ------------------------------------------------------------------------

    @rule()
    def drain(self) -> None:
        self.hook.pump()
        records = self.reader.read(1500)
        if self.reporter.report(records, self.reader.writer_lists, self.now).wants_listing:
            self.reader.want_listing()

    @rule()
    def digest(self) -> None:
        self.reporter.put_digests()

    @rule()
    def ask_for_inventory(self) -> None:
        self.reporter.promise_inventory()

    @rule()
    def publish_one(self) -> None:
        self.now += 1
        batch = self.outbox.next_batch(self.now, 0)
        if batch is not None:
            self.fold.take(batch)
        elif self.outbox.is_lost and self.outbox.is_empty:
            self.reporter.put_inventory()

    @rule()
    def refuse_one(self) -> None:
        self.now += 1
        batch = self.outbox.next_batch(self.now, 0)
        if batch is not None and batch.seq > 1:
            self.outbox.lose(batch.seq)
        elif batch is not None:
            self.fold.take(batch)

    @rule()
    def begin_epoch(self) -> None:
        self.epoch += 1
        self.reporter.begin_epoch(self.epoch)

    @precondition(lambda self: self.lists)
    @rule()
    def restart_sidecar(self) -> None:
        self.reader.close()
        self.reader = RingReader(self.hook._ring.path)
        self.start_sidecar()
        self.begin_epoch()

    # --- what has to be true ------------------------------------------------------------------

    def settle(self) -> None:
        if self.outbox.epoch is None:
            self.begin_epoch()
        for _ in range(300):
            self.drain()
            self.publish_one()

    @rule()
    def end_up_equal(self) -> None:
        self.settle()
        self.reporter.put_digests()
        self.settle()
        assert self.fold.is_whole
        assert self.fold.num_digests > 0
        for tier in Tier:
            held = {block for block, _ in self.tracker.residency.blocks(tier)}
            assert self.fold.held[tier] == held
            if self.lists:
                truth = {self.hashes[block] for block in self.tiers.get(tier, ())}
                assert held == truth

    @invariant()
    def nothing_grows_without_bound(self) -> None:
        if hasattr(self, "hook"):
            assert self.outbox.waiting_bytes <= 2000 + 400
            assert self.tracker.num_blocks <= len(self.parents)


TestReporting = Reporting.TestCase
TestReporting.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
