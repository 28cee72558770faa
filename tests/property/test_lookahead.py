"""Names with a lookahead: compiled against plain, an engine's events against a router's prompt."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.indexer import prompt_kernel
from kvatlas.schemas.digest import split_hashes
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, HashAlgorithm, Namespace, pack_tokens
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.raw_events import RawRemoved, RawStored, RawStoredAhead
from kvatlas.worker_hooks.reporting.engine_state.tracker import EngineStateTracker

block_sizes = st.integers(1, 80)
lookaheads = st.integers(0, 40)


@pytest.fixture(autouse=True, scope="module")
def compiled_kernels() -> None:
    prompt_kernel.warm()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=400), block_sizes, lookaheads)
def test_the_compiled_chain_is_the_plain_one(tokens: list[int], size: int, ahead: int) -> None:
    packed = array("I", tokens).tobytes()
    hasher = BlockHasher(Namespace("m", size, lookahead_tokens=ahead))
    chain = prompt_kernel.hash_chain(hasher.root, packed, size, ahead)
    assert chain == hasher.chain(packed)
    assert len(chain) == 16 * (max(len(tokens) - ahead, 0) // size)


prompts = st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=16), min_size=1, max_size=6)


@given(prompts, st.integers(1, 4), st.integers(0, 5), st.sampled_from(HashAlgorithm), st.data())
def test_an_engine_and_a_router_name_the_same_blocks(
    prompts: list[list[int]], size: int, ahead: int, algorithm: HashAlgorithm, data: st.DataObject
) -> None:
    """The engine stores each distinct window once, and removes some, by hashes of its own."""
    descriptor = NamespaceDescriptor(size, algorithm, ahead)
    tracker = EngineStateTracker("m", descriptor)
    hasher = BlockHasher(descriptor.namespace("m", None, None))
    #: what an engine's own hash stands for, and ours of the same
    engine: dict[tuple[int, ...], int] = {}
    names: dict[int, bytes] = {}
    for prompt in prompts:
        blocks = list(split_hashes(hasher.chain(prompt)))
        for number, name in enumerate(blocks):
            end = (number + 1) * size
            # all before a block and all that its hash covers
            handle = engine.setdefault(tuple(prompt[: end + ahead]), len(engine) + 1)
            if handle in names:
                continue
            names[handle] = name
            parent = engine[tuple(prompt[: end - size + ahead])] if number else None
            tokens = pack_tokens(prompt[end - size : end])
            window = pack_tokens(prompt[end : end + ahead])
            stored = RawStored((handle,), parent, tokens)
            if ahead:
                stored = RawStoredAhead((handle,), parent, tokens, ahead=window)
            tracker.handle([stored])
    assert {block for block, _ in tracker.residency.blocks(Tier.hbm)} == set(names.values())
    gone = data.draw(st.sets(st.sampled_from(sorted(names)))) if names else set()
    tracker.handle([RawRemoved((handle,)) for handle in sorted(gone)])
    left = {name for handle, name in names.items() if handle not in gone}
    assert {block for block, _ in tracker.residency.blocks(Tier.hbm)} == left
    assert len(set(names.values())) == len(names)
