"""A bit of the index that flips is found by an audit, and healed by what instances tell again."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import AuditFailed, RequestInventory
from kvatlas.indexer.index import kernel
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from testkit.builders import a_batch, arrived, digest, hashes, inventory, stored, up
from testkit.indexes import tiny_index

NAMES = [InstanceId(f"w{n}", 0) for n in range(1, 6)]
BLOCKS = range(1, 60)


def a_fleet(
    seed: int,
) -> tuple[IndexState, FlatRadixIndex, dict[InstanceId, dict[Tier, list[int]]]]:
    """Return a fold, its index, and what each instance holds."""
    index = tiny_index()
    state, chance = IndexState(index), random.Random(seed)
    truth: dict[InstanceId, dict[Tier, list[int]]] = {}
    for at, name in enumerate(NAMES, 1):
        held = {
            tier: sorted(chance.sample(BLOCKS, chance.randrange(1, 40)))
            for tier in (Tier.hbm, Tier.dram)
        }
        truth[name] = held
        events = [stored(*blocks, tier=tier) for tier, blocks in held.items()]
        state.handle(arrived(a_batch(up(), *events, worker=name.worker), at))
    return state, index, truth


def is_true(state: IndexState, truth: dict[InstanceId, dict[Tier, list[int]]]) -> bool:
    found = {(block, *slot) for block in BLOCKS for slot in state.holders(hashes(block))}
    held = {
        (block, name, tier)
        for name, tiers in truth.items()
        for tier, blocks in tiers.items()
        for block in blocks
    }
    return found == held and not state.audit()


@settings(max_examples=400)
@given(st.integers(0, 9), st.integers(0, 10**9), st.integers(0, 4), st.integers(0, 31))
def test_a_bit_that_flips_is_found_and_healed(seed: int, cell: int, half: int, bit: int) -> None:
    state, index, truth = a_fleet(seed)
    assert is_true(state, truth)
    used = np.flatnonzero(index._cells[:, kernel.ROW])
    index._cells[used[cell % len(used)], half] ^= np.uint32(1 << bit)
    broken = state.audit()
    is_parent = half in (kernel.PARENT_LOW, kernel.PARENT_HIGH)
    assert bool(broken) != is_parent  # which no match looks at
    if not broken:
        return
    asked = state.handle(AuditFailed(broken))
    names = {name for name, _ in broken}
    assert {each.instance for each in asked if isinstance(each, RequestInventory)} == names
    assert state.audit() == ()
    for at, name in enumerate(NAMES, 100):
        held = truth[name]
        events = [inventory(*blocks, as_of=1, tier=tier) for tier, blocks in held.items()]
        digests = [digest(*held.get(tier, []), tier=tier) for tier in Tier]
        state.handle(arrived(a_batch(*events, *digests, worker=name.worker, seq=2), at))
    assert is_true(state, truth)
    for name in NAMES:
        view = state.instance(name)
        assert view is not None
        assert view.trust is Trust.exact
