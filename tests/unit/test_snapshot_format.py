"""Whatever is cut off, turned over or written by somebody else is told from a snapshot."""

import msgspec
import pytest

from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index.exporting import InvalidSnapshot, Parts
from kvatlas.indexer.snapshots.format import (
    ALIGNMENT,
    MAGIC,
    Anchor,
    SnapshotInfo,
    SnapshotReader,
    framed,
)
from testkit.builders import a_batch, a_message, stored

PARTS = {"one": memoryview(b"1" * 100), "none": memoryview(b""), "two": memoryview(b"2" * 64)}
ABOUT = SnapshotInfo(7, Anchor.of(a_message(a_batch(), 7)), "digest", 2, 1, "me")
WHOLE = b"".join(framed(ABOUT, PARTS))


def read(content: bytes, chunk_bytes: int = 1 << 20) -> tuple[SnapshotInfo, Parts]:
    reader = SnapshotReader(len(content))
    for start in range(0, len(content), chunk_bytes):
        if not reader.feed(content[start : start + chunk_bytes]):
            break
    return reader.finish()


@pytest.mark.parametrize("chunk_bytes", [1, 7, 28, 64, 1000, 1 << 20])
def test_what_is_written_is_what_is_read(chunk_bytes: int) -> None:
    assert read(WHOLE, chunk_bytes) == (ABOUT, PARTS)


def test_parts_lie_aligned() -> None:
    for content in PARTS.values():
        assert WHOLE.find(bytes(content)) % ALIGNMENT == 0 or not content


def test_any_byte_that_is_missing_is_missed() -> None:
    for length in range(len(WHOLE)):
        reader = SnapshotReader(len(WHOLE))
        reader.feed(WHOLE[:length])
        with pytest.raises(InvalidSnapshot, match=f"ends after {length} of {len(WHOLE)} bytes"):
            reader.finish()
        with pytest.raises(InvalidSnapshot):
            read(WHOLE[:length])


def test_any_byte_that_is_another_one_is_noticed() -> None:
    """Padding apart, which stands for nothing."""
    padding = set(range(WHOLE.rindex(b"1") + 1, WHOLE.index(b"2" * 64)))
    for place in set(range(len(WHOLE))) - padding:
        damaged = bytearray(WHOLE)
        damaged[place] ^= 0x40
        with pytest.raises(InvalidSnapshot):
            read(bytes(damaged))


def test_more_than_there_should_be_is_noticed() -> None:
    with pytest.raises(InvalidSnapshot, match=f"expected {len(WHOLE)}"):
        read(WHOLE + bytes(64))
    reader = SnapshotReader(len(WHOLE))
    reader.feed(WHOLE)
    assert not reader.feed(b"x")
    with pytest.raises(InvalidSnapshot, match="behind its end"):
        reader.finish()


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"version":2', b'"version":3', "version 3, this reader knows 2"),
        (b'"byte_order":"little"', b'"byte_order":"mixed!"', "mixed!-endian"),
        (b'"stream_sequence":7', b'"stream_sequence":x', "header"),
    ],
)
def test_what_this_reader_does_not_know_is_named(old: bytes, new: bytes, says: str) -> None:
    import xxhash

    end = int.from_bytes(WHOLE[8:12], "little") + 28
    header = WHOLE[28:end].replace(old, new)
    assert len(header) == end - 28
    with pytest.raises(InvalidSnapshot, match=says):
        read(WHOLE[:12] + xxhash.xxh3_128_digest(header) + header + WHOLE[end:])


def test_a_header_without_end_is_not_waited_for() -> None:
    reader = SnapshotReader(1 << 40)
    assert not reader.feed(MAGIC + b"\xff" * 100)
    with pytest.raises(InvalidSnapshot, match="a header of"):
        reader.finish()


def test_something_else_is_no_snapshot() -> None:
    reader = SnapshotReader(1 << 30)
    assert not reader.feed(b"\x28\xb5\x2f\xfd")
    with pytest.raises(InvalidSnapshot, match="no snapshot"):
        reader.finish()


def test_what_is_not_wanted_is_not_read_on() -> None:
    def accepts(about: SnapshotInfo) -> None:
        raise InvalidSnapshot(f"not {about.stream_sequence}")

    reader = SnapshotReader(len(WHOLE), accepts)
    assert not reader.feed(WHOLE)
    with pytest.raises(InvalidSnapshot, match="not 7"):
        reader.finish()


def test_an_anchor_is_one_message_of_one_log() -> None:
    message = a_message(a_batch(stored(1)), 5)
    assert Anchor.of(message) == Anchor.of(msgspec.structs.replace(message))
    for changed in ({"payload": b"other"}, {"subject": "other"}, {"broker_ns": 1}):
        assert Anchor.of(msgspec.structs.replace(message, **changed)) != Anchor.of(message)


def test_tables_that_are_none_change_nothing() -> None:
    state = IndexState(ReferenceIndex())
    digest, parts = state.state_digest(), state.export()()
    for wrong in (b"", b"\xc1", msgspec.msgpack.encode({"stream_sequence": 9})):
        with pytest.raises(InvalidSnapshot, match="tables"):
            state.restore({**parts, "tables": memoryview(wrong)})
    assert (state.state_digest(), state.stream_sequence) == (digest, 0)
