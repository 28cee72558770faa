"""Namespaces muted at random: what is told is true, and what is called exact is all there is.

    engine's words --> edge with tiny budgets --> outbox --batches, some lost--> fold
                  `--> the same edge, which nobody mutes: the truth

The truth is recorded at each batch that ends a step. Wherever the fold calls an instance exact,
and a namespace not muted, it holds of the namespace what the truth held then.
"""

from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvatlas.events.codec import DecodedBatch, encode
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import BatchArrived, HoleSeen
from kvatlas.schemas.digest import digest_of
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import EventBatch
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawDoubted,
    RawEvent,
    RawGroupSeen,
    RawRemoved,
    RawRestarted,
    RawStored,
    encode_raw,
)
from kvatlas.worker_hooks.reporting.engine_state.namespace_budgets import NamespaceBudgetSettings
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from kvatlas.worker_hooks.reporting.outbox import Outbox
from kvatlas.worker_hooks.reporting.reporter import Reporter
from testkit.builders import up
from testkit.engine_words import BLOCK_TOKENS, DESCRIPTOR, MODEL, tokens_of
from wire_100 import codec as codec_100

INSTANCE = InstanceId("w", 0)
SALTS = (None, "tenant")
ROOTS = [BlockHasher(DESCRIPTOR.namespace(MODEL, None, salt)).root for salt in SALTS]
BUDGETS = NamespaceBudgetSettings(
    blocks_per_second=0.25, burst_blocks=2.0, mute_seconds=4.0, max_mute_seconds=16.0
)
WINDOW_GROUP = 1
GROUPS = [
    RawGroupSeen(0, "full_attention"),
    RawGroupSeen(WINDOW_GROUP, "sliding_window", window_tokens=2 * BLOCK_TOKENS + 1),
]

#: blocks are nodes of a binary tree: n follows n // 2, and 1 begins a prompt
nodes, whose = st.integers(1, 20), st.integers(0, len(SALTS) - 1)
tiers = st.sampled_from([Tier.hbm, Tier.dram])

#: what becomes of the batches of a step
fates = st.sampled_from([*["sent"] * 5, "first lost", "a hole", "waits"])

Place = tuple[Tier, bytes, bytes]


def path_to(node: int) -> list[int]:
    return [*path_to(node // 2), node] if node > 1 else [node]


def engine_hash(salt: int, node: int) -> int:
    return 100 * salt + node


def places(tracker: EngineStateTracker) -> set[Place]:
    """Return (tier, block, root) of all that an edge has told."""
    return {(tier, *pair) for tier in Tier for pair in tracker.residency.blocks(tier)}


class Muting(RuleBasedStateMachine):
    """An engine with two tenants, its sidecar's pure parts, and a reader."""

    #: whether readers know NamespacesMuted
    tells_mutes = True

    @initialize(at_once=st.sampled_from([1, 300]))
    def begin(self, at_once: int) -> None:
        self.tracker = EngineStateTracker(
            MODEL, DESCRIPTOR, has_pool=True, tells_mutes=self.tells_mutes
        )
        self.truth = EngineStateTracker(MODEL, DESCRIPTOR, has_pool=True)
        self.outbox = Outbox(INSTANCE, up(MODEL), coalesce_bytes=at_once)
        self.reporter = Reporter(self.tracker, self.outbox, BUDGETS)
        self.state = IndexState(ReferenceIndex())
        self.now, self.sent_at = 0.0, 0.0
        self.epoch = self.stream_sequence = 0
        #: (epoch, sequence) -> what was held after it, where that is known
        self.held_at: dict[tuple[int, int], set[Place]] = {}
        self.pool: set[bytes] = set()
        self.begin_epoch()

    # --- the engine -----------------------------------------------------------------------------

    def engine(self, fate: str, *events: RawEvent) -> None:
        before = self.outbox.seal()
        self.reporter.report(map(encode_raw, events), False, self.now)
        self.truth.handle(events)
        self.note(before, fate, is_truth_still=False)

    @rule(fate=fates, salt=whose, node=nodes, length=st.integers(1, 4), tier=tiers)
    def store(self, fate: str, salt: int, node: int, length: int, tier: Tier) -> None:
        run = path_to(node)[-length:]
        parent = engine_hash(salt, run[0] // 2) if run[0] > 1 else None
        hashes = tuple(engine_hash(salt, each) for each in run)
        event = RawStored(hashes, parent, tokens_of(*run), tier, cache_salt=SALTS[salt])
        self.engine(fate, event)

    @rule(fate=fates, salt=whose, node=nodes)
    def store_a_prompt(self, fate: str, salt: int, node: int) -> None:
        self.store(fate, salt, node, 4, Tier.hbm)

    @rule(fate=fates, salt=whose, node=nodes)
    def store_in_the_window(self, fate: str, salt: int, node: int) -> None:
        hashes = tuple(engine_hash(salt, each) for each in path_to(node))
        self.engine(fate, RawStored(hashes, None, b"", group=WINDOW_GROUP))

    @rule(fate=fates, salt=whose, node=nodes, tier=tiers, group=st.sampled_from([0, 0, 1]))
    def remove(self, fate: str, salt: int, node: int, tier: Tier, group: int) -> None:
        self.engine(fate, RawRemoved((engine_hash(salt, node),), tier, group))

    @rule(fate=fates, salt=whose, node=nodes, other=nodes)
    def take_a_handle_for_another_block(self, fate: str, salt: int, node: int, other: int) -> None:
        handle, tokens = (engine_hash(salt, node),), tokens_of(20 + other % 3)
        self.engine(fate, RawStored(handle, None, tokens, cache_salt=SALTS[salt]))

    @rule(fate=fates, what=st.integers(0, 5), tier=st.sampled_from([None, Tier.hbm, Tier.dram]))
    def do_something_rare(self, fate: str, what: int, tier: Tier | None) -> None:
        match what:
            case 0:
                self.engine(fate, RawCleared(tier))
            case 1:
                self.engine(fate, *GROUPS)
            case 2:
                self.engine(fate, RawDoubted("lost 3 to 9"))
            case 3:
                self.engine(fate, RawDoubted(""))
            case 4:
                self.engine(fate, RawRestarted("sequence 0 again"))
                self.begin_epoch()
            case _:
                self.begin_epoch()

    @rule(fate=fates, salt=whose, node=nodes, comes=st.booleans())
    def move_in_the_pool(self, fate: str, salt: int, node: int, comes: bool) -> None:
        hasher = BlockHasher(DESCRIPTOR.namespace(MODEL, None, SALTS[salt]))
        block = hasher.chain(tokens_of(*path_to(node)))[-16:]
        if comes == (block in self.pool):
            return
        self.pool ^= {block}
        came, left = ([block], []) if comes else ([], [block])
        before = self.outbox.seal()
        self.reporter.move_pooled(came, left)
        self.truth.move_pooled(came, left)
        self.note(before, fate, is_truth_still=False)

    # --- the sidecar ----------------------------------------------------------------------------

    @rule(
        fate=st.sampled_from(["sent", "sent", "first lost", "waits"]),
        seconds=st.sampled_from([0.0, 0.0, 1.0, 4.0, 20.0]),
    )
    def keep_budgets(self, fate: str, seconds: float) -> None:
        self.now += seconds
        self.say(fate, lambda: self.reporter.keep_budgets(self.now))

    @rule(fate=fates)
    def tell_digests(self, fate: str) -> None:
        self.say(fate, self.reporter.put_digests)

    @rule(fate=fates)
    def give_inventory(self, fate: str) -> None:
        self.say(fate, self.reporter.put_inventory)

    def begin_epoch(self) -> None:
        self.epoch += 1
        self.reporter.begin_epoch(self.epoch)
        if self.outbox.is_lost:
            self.say("sent", self.reporter.put_inventory)

    def say(self, fate: str, step: Callable[[], object]) -> None:
        """Do something during which the engine stands still: the truth holds at every batch."""
        before = self.outbox.seal()
        step()
        self.note(before, fate, is_truth_still=True)

    def note(self, before: int, fate: str, *, is_truth_still: bool) -> None:
        """Note what is held at the batches of a step, and let what waits meet its fate."""
        last = self.outbox.seal()
        for seq in range(before + 1 if is_truth_still else max(before + 1, last), last + 1):
            self.held_at[self.epoch, seq] = places(self.truth)
        match fate:
            case "first lost":
                self.next_batch()
            case "a hole" if self.next_batch():
                self.stream_sequence += 1
                self.state.handle(HoleSeen(self.stream_sequence, self.stream_sequence + 1))
            case "waits":
                return
        while batch := self.next_batch():
            self.fold(batch)

    def next_batch(self) -> EventBatch | None:
        self.sent_at += 1.0
        return self.outbox.next_batch(self.sent_at, 0)

    def fold(self, batch: EventBatch) -> None:
        self.stream_sequence += 1
        if not self.tells_mutes:
            assert codec_100.decode(encode(batch)).rejected == ()  # a reader of 100 knows it all
        at = self.stream_sequence
        self.state.handle(BatchArrived(at, at, DecodedBatch(batch)))
        self.check_fold()

    # --- what has to hold -------------------------------------------------------------------------

    @invariant()
    def told_is_true_and_all_but_what_is_muted(self) -> None:
        if not hasattr(self, "edge"):
            return
        told, truth = places(self.tracker), places(self.truth)
        assert told <= truth
        muted = self.tracker._publication.muted
        assert {root for _, _, root in truth - told} <= muted
        withheld = self.tracker._publication.withheld
        assert truth - told == {(tier, *pair) for tier in Tier for pair in withheld.blocks(tier)}

    def check_fold(self) -> None:
        view = self.state.instance(INSTANCE)
        if view is None:  # what said what it is was lost
            return
        if view.trust is not Trust.exact or (view.epoch, view.seq) not in self.held_at:
            return
        held = self.held_at[view.epoch, view.seq]
        for root in ROOTS:
            if root in view.muted:
                continue
            for tier in Tier:
                for block in self.blocks_of(root):
                    is_held = (tier, block, root) in held
                    assert ((INSTANCE, tier) in self.state.holders(block)) == is_held, root.hex()

    def blocks_of(self, root: bytes) -> Iterable[bytes]:
        """Return all blocks of a namespace that were ever held."""
        return {b for held in self.held_at.values() for _, b, of in held if of == root}

    def teardown(self) -> None:
        if not hasattr(self, "edge"):
            return
        self.engine("sent", RawDoubted(""))
        for _ in range(3):
            self.keep_budgets("sent", BUDGETS.max_mute_seconds)
        self.give_inventory("sent")
        view = self.state.instance(INSTANCE)
        assert view is not None
        assert (view.trust, view.muted) == (Trust.exact, {}), view.trust_reasons
        assert places(self.tracker) == places(self.truth)
        for tier in Tier:
            truth = digest_of(block for where, block, _ in places(self.truth) if where is tier)
            assert view.digests.get(tier, (0, 0)) == truth

    def lose_what_tells_of_a_mute(self) -> None:
        """Mute a tenant so that no reader hears of it, and withhold a block."""
        self.begin(1)
        for node in (20, 10, 1):
            self.store("sent", 1, node, 4, Tier.hbm)
        self.keep_budgets("first lost", 0.0)
        self.store("sent", 1, 3, 4, Tier.hbm)
        assert self.tracker.counters.withheld_blocks > 0


class MutingFor100(Muting):
    """The same for readers that know no NamespacesMuted."""

    tells_mutes = False


@pytest.mark.parametrize("machine", [Muting, MutingFor100])
def test_a_mute_that_nobody_heard_of_is_known_before_digests_end_the_gap(
    machine: type[Muting],
) -> None:
    muting = machine()
    muting.lose_what_tells_of_a_mute()
    # each compares what is called exact with the truth
    muting.tell_digests("first lost")
    muting.store("sent", 0, 1, 1, Tier.hbm)
    muting.tell_digests("sent")
    view = muting.state.instance(INSTANCE)
    assert view is not None
    assert view.muted or view.trust is Trust.degraded
    muting.teardown()


TestMuting = Muting.TestCase
TestMuting.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestMutingFor100 = MutingFor100.TestCase
TestMutingFor100.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
