"""The serve pool against a model: no leased slot changes, nothing unverified is ever held."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvatlas.worker_hooks.transfer.lease_server import SlotDirectory
from kvatlas.worker_hooks.transfer.pool import ServePool, SlotState
from kvatlas.worker_hooks.transfer.pool_file import default_folder
from testkit.blocks import a_block, a_hash

SIZE, NUM_SLOTS, NUM_BOUNCE = 64, 4, 2
STEPS = st.tuples(
    st.sampled_from(["commit", "evict", "lease", "offer", "fill", "corrupt", "pass"]),
    st.integers(0, NUM_SLOTS - 1),
    st.integers(0, 5),
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=default_folder()) as name:
        yield Path(name)


@given(st.lists(STEPS, max_size=60))
def test_slots_keep_what_they_promised(folder: Path, steps: list[tuple[str, int, int]]) -> None:
    with ServePool.create("w1", NUM_SLOTS, SIZE, NUM_BOUNCE, folder) as engine:
        sidecar = ServePool.attach(engine.path)
        directory = SlotDirectory(sidecar)
        held: dict[int, int] = {}
        offered: dict[int, int] = {}
        leased_until = dict.fromkeys(range(NUM_SLOTS), 0)
        now = 1
        for what, slot, number in steps:
            match what:
                case "commit" if slot not in held and slot not in offered:
                    engine.commit(slot, a_hash(number), a_block(number, SIZE))
                    held[slot] = number
                case "offer" if slot not in held and slot not in offered:
                    assert engine.offer([slot], a_hash(number))
                    offered[slot] = number
                case "evict":
                    is_free = leased_until[slot] <= now
                    assert engine.try_evict([slot], now_ns=now) == [slot] * is_free
                    if is_free:
                        held.pop(slot, None)
                        offered.pop(slot, None)
                        leased_until[slot] = 0
                case "lease":
                    leased = sidecar.lease([slot], [a_hash(number)], now + 5)
                    assert leased is not None
                    assert len(leased) == (held.get(slot) == number)
                    if leased:
                        leased_until[slot] = now + 5
                case "fill" | "corrupt":
                    place, block = sidecar.bounce_places()[0], a_block(number, SIZE)
                    sidecar.bytes_at(place)[:] = block
                    sidecar.bytes_at(place)[0] ^= what == "corrupt"
                    sidecar.fill([place], [slot], [a_hash(number)], [xxh3_64_intdigest(block)])
                    if what == "fill" and offered.get(slot) == number:
                        held[slot] = offered.pop(slot)
                case "pass":
                    now += number
            for at in range(NUM_SLOTS):
                expected = a_hash(held[at]) if at in held else None
                assert engine.hash_of(at) == expected
                assert (engine.state_of(at) is SlotState.offered) == (at in offered)
                if at in held:
                    assert bytes(sidecar.block(at)) == a_block(held[at], SIZE)
            assert len(set(sidecar.bounce_places())) == NUM_BOUNCE
            for number in held.values():
                (found,) = directory.find([a_hash(number)])
                assert held[found] == number
