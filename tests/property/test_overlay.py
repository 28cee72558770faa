"""The overlay against one that compares every entry, on random histories."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvatlas.router.decision.predictions import Life, PredictedBlocks
from kvatlas.schemas.ids import InstanceId

LIFE_SECONDS = 3.0
LIVES: list[Life] = [(InstanceId("w1", 0), 1), (InstanceId("w1", 1), 1), (InstanceId("w2", 0), 1)]


def chain(path: list[tuple[int, int]]) -> bytes:
    """Return the chain of a path of (branch, length) runs."""
    hashes, parent = [], 0
    for branch, length in path:
        for n in range(length):
            parent = hash((parent, branch, n)) & (2**64 - 1)
            hashes.append(parent.to_bytes(16, "big"))
    return b"".join(hashes)


CHAINS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([1, 3, 8, 17, 40])), min_size=1, max_size=4
).map(chain)


class OverlayMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.overlay, self.now, self.count = PredictedBlocks(LIFE_SECONDS), 0.0, 0
        self.entries: dict[str, tuple[Life, bytes, float]] = {}

    @rule(life=st.sampled_from(LIVES), chain=CHAINS)
    def expect(self, life: Life, chain: bytes) -> None:
        self.count += 1
        self.overlay.expect(f"d{self.count}", life, chain, self.now)
        self.entries[f"d{self.count}"] = (life, chain, self.now + LIFE_SECONDS)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.entries = {d: entry for d, entry in self.entries.items() if entry[2] > self.now}

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.entries:
            decision_id = data.draw(st.sampled_from(sorted(self.entries)))
            self.overlay.withdraw(decision_id)
            del self.entries[decision_id]

    @rule(chain=CHAINS)
    def ask(self, chain: bytes) -> None:
        expected: dict[Life, int] = {}
        for life, other, _ in self.entries.values():
            shared = 0
            while (
                shared < min(len(chain), len(other))
                and chain[: shared + 16] == other[: shared + 16]
            ):
                shared += 16
            expected[life] = max(expected.get(life, 0), shared // 16)
        found = self.overlay.predicted_beyond(chain, {}, self.now)
        for life, blocks in expected.items():
            # of entries that share the deepest mark any may be taken: a fifth may be missed
            assert found.get(life, 0) <= blocks
            assert found.get(life, 0) >= max(min(blocks, 8), 0.8 * blocks)
        assert set(found) <= set(expected)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        kept = self.overlay._entries
        assert self.overlay.num_bytes == sum(len(entry.chain) for entry in kept.values())
        if not kept:
            assert not self.overlay._marks


TestOverlay = OverlayMachine.TestCase
TestOverlay.settings = settings(max_examples=40, deadline=None)
