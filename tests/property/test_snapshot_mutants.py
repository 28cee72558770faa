"""Snapshots that are not what was written: each loads to what it stood for, or is of no use."""

import re
import sys
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
import xxhash

from kvatlas.indexer import FlatRadixIndex, PrefixIndex, ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index.exporting import InvalidSnapshot
from kvatlas.indexer.snapshots.format import (
    ALIGNMENT,
    MAGIC,
    Anchor,
    SnapshotInfo,
    SnapshotReader,
    framed,
)
from kvatlas.indexer.snapshots.loading import restore
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    ControlRecord,
    EventBatch,
    NamespacesOverBudget,
    WorkerDown,
)
from testkit.builders import (
    ROOT,
    a_batch,
    a_control,
    arrived,
    digests,
    hashes,
    inventory,
    removed,
    stored,
    up,
)
from testkit.histories import validate
from testkit.indexes import tiny_index

EXTREMES = [-1, 0, 1, 2, 7, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63, 2**64 - 1]
OTHERS: list[Any] = [None, True, "", "w1", b"", b"\0" * 16, 1.5, [], {}, [[]], "expired", "gone"]
#: what a check has to find before it is raised
UNFORESEEN = re.compile(r"\w*(Error|Exception): ")
PREFIX_BYTES = len(MAGIC) + 4 + 16


def a_world(make_index: Callable[[], PrefixIndex]) -> IndexState:
    """Return a fold with something in each of its tables."""
    state = IndexState(make_index(), max_gone=3)
    log: list[EventBatch | ControlRecord] = [
        *(a_batch(up(), stored(*range(1, 9)), worker=f"w{n}") for n in range(1, 9)),
        a_batch(stored(20, 21, parent=3, tier=Tier.dram), worker="w2", seq=2),
        a_batch(removed(4, 5), worker="w3", seq=2),
        a_batch(stored(30, 31), worker="w4", seq=5),
        a_batch(up(), inventory(1, 2, as_of=5, parts=2), worker="w4", seq=6),
        a_batch(inventory(9, as_of=2, parts=3), worker="w3", seq=3),
        a_control(worker="w5", kind="quarantined", reason="wrong"),
        a_control(worker="w6"),
        a_batch(WorkerDown("end"), worker="w7", seq=2),
        a_batch(NamespacesOverBudget(ROOT, "much"), *digests(*range(1, 9)), worker="w8", seq=2),
        a_batch(up(ends_at_reuse_points=True), AllBlocksCleared(Tier.ssd), worker="w1", seq=2),
        a_batch(*digests(7), worker="w2", seq=3),
        a_control(worker="w2", kind="throttled", reason="1"),
    ]
    for at, each in enumerate(log, 1):
        state.handle(arrived(each, at))
    validate(state)
    return state


def about_of(state: IndexState) -> SnapshotInfo:
    anchor = Anchor(state.stream_sequence, 1, "0" * 32) if state.stream_sequence else None
    return SnapshotInfo(state.stream_sequence, anchor, state.state_digest(), 1, 1, "me")


def bytes_of(state: IndexState) -> bytes:
    return b"".join(framed(about_of(state), state.export()()))


def why_not(state: IndexState, content: bytes) -> str:
    """Load a snapshot as a start does; return why it is of no use, empty where it was loaded."""
    reader = SnapshotReader(len(content))
    for at in range(0, len(content), 4_000):
        if not reader.feed(content[at : at + 4_000]):
            break
    try:
        about, parts = reader.finish()
        restore(state, about, parts)
    except (InvalidSnapshot, IndexFull) as error:
        return str(error)
    return ""


class Mutants:
    """Makes snapshots that differ from one in a few bytes, a field, or an element."""

    def __init__(self, state: IndexState, seed: int) -> None:
        self._content = bytes_of(state)
        self._about, self._parts = about_of(state), state.export()()
        self._random = Random(seed)

    def bytes_changed(self) -> bytes:
        content, random = bytearray(self._content), self._random
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(content))
            match random.randrange(4):
                case 0:
                    content[at] ^= 1 << random.randrange(8)
                case 1:
                    del content[at:]
                case 2:
                    content[at:at] = random.randbytes(random.choice([1, 64, 4_096]))
                case _:
                    content[at : at + 8] = random.randbytes(8)
            if not content:
                break
        return bytes(content)

    def field_changed(self) -> bytes:
        """Return one of which a field of the header or of a table is another, checksums right."""
        parts = dict(self._parts)
        tables = [name for name in parts if name in ("tables", "flat.numbers", "reference.held")]
        if self._random.random() < 0.2:
            header = msgspec.json.decode(self._header(parts))
            return self._framed(self._changed(header), parts)
        name = self._random.choice(tables)
        tree = self._changed(msgspec.msgpack.decode(parts[name], strict=False))
        try:
            parts[name] = memoryview(msgspec.msgpack.encode(tree))
        except OverflowError:
            return self._content
        return self._framed(msgspec.json.decode(self._header(parts)), parts)

    def array_changed(self) -> bytes:
        """Return one of which an array has another element, or more or fewer, checksums right."""
        parts, random = dict(self._parts), self._random
        name = random.choice([each for each in parts if each.startswith("flat.")])
        part = bytearray(parts[name])
        width = 4 if name in ("flat.directory", "flat.segments", "flat.blocks") else 8
        match random.randrange(5):
            case 0 | 1 if len(part) >= width:
                at = width * random.randrange(len(part) // width)
                value = random.choice([*EXTREMES, random.getrandbits(64)])
                part[at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(
                    width, sys.byteorder
                )
            case 2 if part:
                part[random.randrange(len(part))] ^= 1 << random.randrange(8)
            case 3:
                del part[len(part) - min(len(part), width * random.randint(1, 8)) :]
            case _:
                part += random.randbytes(width * random.randint(1, 8))
        parts[name] = memoryview(bytes(part))
        return self._framed(msgspec.json.decode(self._header(parts)), parts)

    def _header(self, parts: Any) -> bytes:
        (first, *_) = framed(self._about, parts)
        return bytes(first)[PREFIX_BYTES:]

    @staticmethod
    def _framed(header: Any, parts: Any) -> bytes:
        encoded = msgspec.json.encode(header)
        encoded += b" " * (-(PREFIX_BYTES + len(encoded)) % ALIGNMENT)
        length = len(encoded).to_bytes(4, "little")
        padded = (bytes(part) + bytes(-len(part) % ALIGNMENT) for part in parts.values())
        return b"".join([MAGIC, length, xxhash.xxh3_128_digest(encoded), encoded, *padded])

    def _changed(self, tree: Any) -> Any:
        """Return a tree with another value somewhere: deep down, or what holds that."""
        random = self._random
        if isinstance(tree, dict) and tree and random.random() < 0.95:
            key = random.choice(list(tree))
            if random.random() < 0.1:
                return {name: value for name, value in tree.items() if name != key}
            return {**tree, key: self._changed(tree[key])}
        if isinstance(tree, list) and tree and random.random() < 0.95:
            at = random.randrange(len(tree))
            match random.randrange(12):
                case 0:
                    return tree[:at] + tree[at + 1 :]
                case 1:
                    return [*tree, tree[at]]
            return [*tree[:at], self._changed(tree[at]), *tree[at + 1 :]]
        if isinstance(tree, int) and random.random() < 0.8:
            return random.choice([*EXTREMES, max(tree + 1, 0), tree - 1])
        return random.choice(OTHERS)


def goes_on(state: IndexState) -> None:
    """Have a fold answer and go on with whatever may come next."""
    chain, at = hashes(*range(1, 9)), state.stream_sequence
    for ask in (state.instances, state.stats, state.places):
        ask()
    state.match(chain)
    state.tree(4, 4)
    for n in range(1, 10):
        known = state.fleet.instances.get(InstanceId(f"w{n}", 0))
        seq = known.seq + 1 if known is not None else 1
        for batch in (
            a_batch(stored(n, 50 + n), removed(2), worker=f"w{n}", seq=seq),
            a_batch(up(), *digests(1), worker=f"w{n}", epoch=2, seq=1),
            a_batch(stored(*range(70, 90)), worker=f"w{n}", epoch=2, seq=2),
            a_batch(WorkerDown("end"), worker=f"w{n}", epoch=2, seq=3),
        ):
            at += 1
            state.handle(arrived(batch, at))
    state.tree(4, 4)
    assert bytes_of(state)


@pytest.mark.parametrize("make_index", [FlatRadixIndex, tiny_index, ReferenceIndex])
@pytest.mark.parametrize("how", ["bytes_changed", "field_changed", "array_changed"])
def test_a_mutant_is_the_same_or_of_no_use(how: str, make_index: Callable[[], PrefixIndex]) -> None:
    if make_index is ReferenceIndex and how == "array_changed":
        pytest.skip("it has no arrays")
    world = a_world(make_index)
    mutants, digest, num_loaded = Mutants(world, seed=1), world.state_digest(), 0
    state = IndexState(make_index(), max_gone=3)
    empty, nothing = bytes_of(state), state.state_digest()
    for _ in range(700):
        reason = why_not(state, getattr(mutants, how)())
        assert not UNFORESEEN.match(reason)
        if not reason:
            num_loaded += 1
            assert state.state_digest() == digest
            validate(state)
            goes_on(state)
            assert why_not(state, empty) == ""
        assert state.state_digest() == nothing
        assert state.stream_sequence == 0
    assert why_not(state, bytes_of(world)) == ""
    assert num_loaded < 700


def test_the_snapshot_itself_loads_and_goes_on() -> None:
    for make_index in (FlatRadixIndex, tiny_index, ReferenceIndex):
        state = IndexState(make_index(), max_gone=3)
        assert why_not(state, bytes_of(a_world(make_index))) == ""
        goes_on(state)


@pytest.mark.parametrize("claimed", [2**31, 2**40, 2**62, 2**64 - 1])
def test_a_number_of_numbers_takes_no_memory(claimed: int) -> None:
    world, state = a_world(tiny_index), IndexState(tiny_index())
    parts = world.export()()
    numbers = msgspec.msgpack.decode(parts["flat.numbers"])
    parts["flat.numbers"] = memoryview(msgspec.msgpack.encode({**numbers, "num_numbers": claimed}))
    tracemalloc.start()
    try:
        reason = why_not(state, b"".join(framed(about_of(world), parts)))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "flat.numbers" in reason
    assert peak_bytes < 1 << 20
    assert why_not(state, bytes_of(world)) == ""


@pytest.mark.parametrize("claimed", [2**31, 2**40, 2**62])
def test_a_size_that_is_only_claimed_takes_no_memory(claimed: int) -> None:
    """By the header and by the store's entry alike: the bytes that come are what counts."""
    world = a_world(tiny_index)
    (first, *_) = framed(about_of(world), world.export()())
    header = msgspec.json.decode(bytes(first)[PREFIX_BYTES:])
    header["parts"] = [{"name": "tables", "num_bytes": claimed, "checksum": "0" * 32}]
    content = Mutants._framed(header, {})
    reader = SnapshotReader(len(content) + claimed)
    tracemalloc.start()
    try:
        assert reader.feed(content + bytes(1_000))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20
    with pytest.raises(InvalidSnapshot, match="it ends after"):
        reader.finish()


def test_one_whose_tables_do_not_fit_together_is_named() -> None:
    world, state = a_world(tiny_index), IndexState(tiny_index())
    parts = world.export()()
    tables = msgspec.msgpack.decode(parts["tables"])
    tables["gone"].append(["w1", 0])
    parts["tables"] = memoryview(msgspec.msgpack.encode(tables))
    reason = why_not(state, b"".join(framed(about_of(world), parts)))
    assert "the list is of the gone" in reason


def test_one_with_other_blocks_than_its_digests_is_found_by_counting() -> None:
    world, state = a_world(tiny_index), IndexState(tiny_index())
    parts = world.export()()
    blocks = bytearray(parts["flat.blocks"])
    blocks[0] ^= 2  # the low half of a key
    parts["flat.blocks"] = memoryview(bytes(blocks))
    reason = why_not(state, b"".join(framed(about_of(world), parts)))
    assert "are not those of its digest" in reason


def test_lack_of_memory_is_a_reason_and_leaves_the_index_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, state = a_world(tiny_index), IndexState(tiny_index())
    assert why_not(state, bytes_of(world)) == ""

    def lacks(_: IndexState) -> str:
        raise MemoryError

    with monkeypatch.context() as patched:
        about, parts = about_of(world), IndexState(tiny_index()).export()()
        patched.setattr(IndexState, "state_digest", lacks)
        about = msgspec.structs.replace(about, stream_sequence=0)
        with pytest.raises(InvalidSnapshot, match="MemoryError"):
            restore(state, about, parts)
    assert state.state_digest() == world.state_digest()
    goes_on(state)
