"""The fast index answers like the plain one, whatever happens to both."""

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvatlas.indexer import Match, ReferenceIndex, TreeNode
from kvatlas.indexer.index.tree import radix_view
from kvatlas.schemas.ids import Tier
from testkit.indexes import tiny_index

NUM_PATHS, PATH_BLOCKS, MAX_INSTANCES = 8, 10, 30
ROOT = b"\xff" * 16


def planted() -> list[list[bytes]]:
    """Return paths that branch off one another; keys 0 to 60 and large ones."""
    chance, paths = random.Random(1), list[list[bytes]]()
    keys = iter(random.Random(2).sample(range(61), 61))
    for _ in range(NUM_PATHS):
        path = list(chance.choice(paths)[: chance.randrange(PATH_BLOCKS)]) if paths else []
        while len(path) < PATH_BLOCKS:
            path.append(chance.randbytes(8) + next(keys).to_bytes(8, "big"))
            if chance.random() < 0.5:
                path[-1] = chance.randbytes(16)
        paths.append(path)
    return paths


PATHS = planted()
positions = st.integers(0, PATH_BLOCKS - 1)
paths = st.sampled_from(PATHS)
tiers = st.sampled_from(Tier)
picks = st.integers(0, MAX_INSTANCES - 1)


class TwoIndexes(RuleBasedStateMachine):
    """Both take the same steps; the numbers that they give to an instance differ."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.plain = tiny_index(MAX_INSTANCES), ReferenceIndex()
        #: numbers in the flat and in the plain index
        self.instances: list[tuple[int, int]] = []
        self.touched: tuple[int, int] | None = None

    def pick(self, number: int) -> tuple[int, int]:
        self.touched = self.instances[number % len(self.instances)]
        return self.touched

    @precondition(lambda self: len(self.instances) < MAX_INSTANCES)
    @rule(count=st.integers(1, 6))
    def add(self, count: int) -> None:
        for _ in range(min(count, MAX_INSTANCES - len(self.instances))):
            self.touched = (self.flat.add_instance(), self.plain.add_instance())
            self.instances.append(self.touched)

    @precondition(lambda self: self.instances)
    @rule(number=picks)
    def forget(self, number: int) -> None:
        flat, plain = self.instances.pop(number % len(self.instances))
        self.flat.forget_instance(flat)
        self.plain.forget_instance(plain)
        self.touched = None

    @precondition(lambda self: self.instances)
    @rule(number=picks, tier=tiers, path=paths, first=positions, end=positions, times=st.just(1))
    def store(
        self, number: int, tier: Tier, path: list[bytes], first: int, end: int, times: int
    ) -> None:
        flat, plain = self.pick(number)
        parent = path[first - 1] if first else ROOT
        hashes = b"".join(path[first : end + 1])
        for _ in range(times):
            stored = self.flat.store(flat, tier, parent, hashes)
            assert stored == self.plain.store(plain, tier, parent, hashes)

    @precondition(lambda self: self.instances)
    @rule(number=picks, tier=tiers, spans=st.lists(st.tuples(paths, positions, positions)))
    def store_runs(
        self, number: int, tier: Tier, spans: list[tuple[list[bytes], int, int]]
    ) -> None:
        flat, plain = self.pick(number)
        runs = [
            (path[first - 1] if first else ROOT, b"".join(path[first : end + 1]))
            for path, first, end in spans
        ]
        stored = self.flat.store_runs(flat, tier, runs)
        assert stored == self.plain.store_runs(plain, tier, runs)

    @precondition(lambda self: self.instances)
    @rule(number=picks, tier=tiers, path=paths)
    def store_a_whole_path_twice(self, number: int, tier: Tier, path: list[bytes]) -> None:
        self.store(number, tier, path, 0, PATH_BLOCKS, 2)

    @precondition(lambda self: self.instances)
    @rule(path=paths, tier=tiers, end=positions)
    def store_with_all(self, path: list[bytes], tier: Tier, end: int) -> None:
        for number in range(len(self.instances)):
            self.store(number, tier, path, 0, end, 1)

    @precondition(lambda self: self.instances)
    @rule(number=picks, tier=tiers, path=paths, at=positions)
    def punch_a_hole_and_refill_it(
        self, number: int, tier: Tier, path: list[bytes], at: int
    ) -> None:
        self.remove(number, tier, [path[at]])
        self.check_matches()
        self.store(number, tier, path, at, at, 1)

    @precondition(lambda self: self.instances)
    @rule(
        number=picks,
        tier=tiers,
        hashes=paths.flatmap(lambda path: st.lists(st.sampled_from(path), max_size=12)),
    )
    def remove(self, number: int, tier: Tier, hashes: list[bytes]) -> None:
        flat, plain = self.pick(number)
        removed = self.flat.remove(flat, tier, b"".join(hashes))
        assert removed == self.plain.remove(plain, tier, b"".join(hashes))

    @precondition(lambda self: self.instances)
    @rule(number=picks, tier=st.none() | tiers)
    def clear(self, number: int, tier: Tier | None) -> None:
        flat, plain = self.pick(number)
        assert self.flat.clear(flat, tier) == self.plain.clear(plain, tier)

    @rule(depth=st.integers(0, 5), width=st.integers(0, 4))
    def look_at_the_tree(self, depth: int, width: int) -> None:
        found = radix_view(self.flat.copy_runs()(), depth, width)  # before anything is swept
        expected = self.translated(self.plain.tree(depth, width), 1)
        assert self.translated(found, 0) == expected
        assert self.translated(self.flat.tree(depth, width), 0) == expected

    def translated(self, nodes: list[TreeNode] | tuple[TreeNode, ...], side: int) -> list[object]:
        position = {pair[side]: at for at, pair in enumerate(self.instances)}
        return [
            (
                node.hash_key,
                (node.depth, node.num_blocks, node.num_pairs, node.num_children),
                sorted(position[holder] for holder in node.holders),
                self.translated(node.children, side),
            )
            for node in nodes
        ]

    @rule()
    def go_on_from_a_snapshot(self) -> None:
        restored = tiny_index(MAX_INSTANCES)
        restored.restore(self.flat.export()())
        self.flat, self.touched = restored, None

    @invariant()
    def check_matches(self) -> None:
        to_flat = {plain: flat for flat, plain in self.instances}
        for path in PATHS:
            chain = b"".join(path)
            expected = sorted(
                Match(to_flat[match.instance], match.num_blocks, match.by_tier)
                for match in self.plain.match(chain)
            )
            assert self.flat.match(chain) == expected
        holders = sorted((to_flat[who], tier) for who, tier in self.plain.holders(PATHS[0][0]))
        assert self.flat.holders(PATHS[0][0]) == holders

    @invariant()
    def check_counts(self) -> None:
        assert self.flat.num_blocks() == self.plain.num_blocks()
        for flat, plain in [self.touched] if self.touched else self.instances:
            for tier in Tier:
                assert self.flat.digest(flat, tier) == self.plain.digest(plain, tier)

    def teardown(self) -> None:
        for number in range(len(self.instances)):
            for tier in Tier:
                for path in PATHS:
                    self.remove(number, tier, path)
        self.touched = None
        self.check_counts()
        assert self.flat.num_blocks() == 0
        self.flat.tree(1, 1)  # sweeps out what forgotten instances left
        assert not np.any(self.flat._cells)
        assert not np.any(self.flat._segments[:, 0])


def test_the_fast_index_agrees_with_the_plain_one() -> None:
    run_state_machine_as_test(
        TwoIndexes, settings=settings(max_examples=200, stateful_step_count=50, deadline=None)
    )
