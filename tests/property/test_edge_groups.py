"""The edge against the plainest account of what an engine with several KV groups holds."""

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.schemas.digest import split_hashes
from kvatlas.schemas.hashing import BlockHasher, reuse_point
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from kvatlas.worker_hooks.raw_events import (
    RawCleared,
    RawEvent,
    RawGroupSeen,
    RawRemoved,
    RawStored,
)
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker
from testkit.engine_words import BLOCK_TOKENS, DESCRIPTOR, MODEL, tokens_of

#: blocks are nodes of a binary tree: n follows n // 2, and 1 begins a prompt
NODES = range(1, 16)
FULL_GROUPS, WINDOW_GROUP, WINDOW_BLOCKS, STRAY_GROUP = (0, 2), 1, 2, 7
GROUPS = [
    RawGroupSeen(0, "full_attention"),
    RawGroupSeen(1, "sliding_window", window_tokens=(WINDOW_BLOCKS * BLOCK_TOKENS) + 1),
    RawGroupSeen(2, "mla_attention"),
]
TIERS = [Tier.hbm, Tier.dram]
HASHER = BlockHasher(DESCRIPTOR.namespace(MODEL, None, None))


def path_to(node: int) -> list[int]:
    return [*path_to(node // 2), node] if node > 1 else [node]


def name_of(node: int) -> bytes:
    return HASHER.chain(tokens_of(*path_to(node)))[-16:]


class Account:
    """What is held by (block, group, tier), and which blocks have been told with their tokens."""

    def __init__(self) -> None:
        self.held: set[tuple[int, int, Tier]] = set()
        self.known: set[int] = set()
        self.waiting: list[RawStored] = []

    def take(self, event: RawEvent) -> None:
        match event:
            case RawStored():
                for node in event.engine_hashes:
                    self.held.add((node, event.group, event.tier))  # type: ignore[arg-type]
                if event.tokens and event.group in FULL_GROUPS:
                    self.waiting.append(event)
            case RawRemoved():
                for node in event.engine_hashes:
                    self.held.discard((node, event.group, event.tier))
            case RawCleared(tier):
                self.held = {place for place in self.held if tier not in (None, place[2])}
                self.waiting = [each for each in self.waiting if tier not in (None, each.tier)]
        self._learn()

    def _learn(self) -> None:
        alive = {node for node, _, _ in self.held}
        self.known &= alive
        for _ in NODES:
            for event in list(self.waiting):
                if {event.parent, event.engine_hashes[0]} & {None, *self.known}:
                    self.known |= alive.intersection(event.engine_hashes)
                    self.waiting.remove(event)

    def usable(self, tier: Tier) -> set[bytes]:
        blocks = {
            name_of(node)
            for node in self.known
            if all((node, group, tier) in self.held for group in FULL_GROUPS)
        }
        if tier is Tier.hbm:
            blocks |= {reuse_point(name_of(node)) for node in self.known if self._ends(node)}
        return blocks

    def _ends(self, node: int) -> bool:
        window = path_to(node)[-WINDOW_BLOCKS:]
        return all(
            block in self.known and (block, WINDOW_GROUP, Tier.hbm) in self.held for block in window
        )


class Reader:
    """What somebody who reads the events believes."""

    def __init__(self) -> None:
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}

    def take(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self.held[event.tier] |= set(split_hashes(event.hashes))
                case BlockRemoved():
                    self.held[event.tier] -= set(split_hashes(event.hashes))
                case AllBlocksCleared(tier):
                    for each in Tier if tier is None else (tier,):
                        self.held[each].clear()
                case _:
                    pass


@st.composite
def raw_events(draw: st.DrawFn) -> RawEvent:
    tier = draw(st.sampled_from(TIERS))
    group = draw(st.sampled_from([0, 0, 1, 1, 2, 2, STRAY_GROUP]))
    node = draw(st.sampled_from(NODES))
    run = path_to(node)[-draw(st.integers(1, 3)) :]
    match draw(st.integers(0, 9)):
        case 0:
            return RawCleared(draw(st.sampled_from([tier, None])))
        case 1 | 2 | 3:
            return RawRemoved((node,), tier, group)
        case 4:
            return RawStored(tuple(run), None, b"", tier, group=group)
        case _:
            parent = run[0] // 2 or None
            # a windowed group tells hashes only, as if its chain began anywhere
            tokens, parent = (b"", None) if group == WINDOW_GROUP else (tokens_of(*run), parent)
            return RawStored(tuple(run), parent, tokens, tier, group=group)


@given(st.lists(raw_events(), max_size=40), st.booleans())
@settings(deadline=None, max_examples=300)
def test_the_tracker_tells_what_every_group_that_counts_holds(
    events: list[RawEvent], groups_come_late: bool
) -> None:
    tracker, account, reader = (
        EngineStateTracker(MODEL, DESCRIPTOR, FULL_GROUPS),
        Account(),
        Reader(),
    )
    late = len(events) // 2 if groups_come_late else 0
    for number, event in enumerate(events):
        if number == late:
            reader.take(tracker.handle(GROUPS))
        account.take(event)
        reader.take(tracker.handle([event]))
        if number < late:
            continue
        for tier in Tier:
            assert reader.held[tier] == account.usable(tier)
            assert reader.held[tier] == {block for block, _ in tracker.residency.blocks(tier)}
            assert tracker.num_pairs(tier) == sum(place[2] is tier for place in account.held)
    resident = {
        (node, group, tier)
        for group, by_tier in tracker.resident().items()
        for tier, nodes in by_tier.items()
        for node in nodes
    }
    assert resident == account.held
