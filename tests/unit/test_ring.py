"""The ring between engine and sidecar."""

import select
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.schemas.errors import RingUnusable
from kvatlas.worker_hooks.reporting.ring import Lost, RingReader, RingWriter

CAPACITY = 4096


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RingWriter]:
    ring = RingWriter.create(tmp_path / "ring", CAPACITY)
    yield ring
    ring.close()


@pytest.fixture
def reader(writer: RingWriter) -> Iterator[RingReader]:
    ring = RingReader(writer.path)
    yield ring
    ring.close()


def fill(writer: RingWriter, size: int = 100) -> int:
    """Append until the ring is full; return how many records fitted."""
    num = 0
    while writer.append(bytes([num % 256]) * size):
        num += 1
    return num


def test_records_come_out_as_they_went_in(writer: RingWriter, reader: RingReader) -> None:
    records = [b"", b"1", b"12345678", b"x" * 1000]
    for record in records:
        assert writer.append(record)
    assert reader.read() == records
    assert reader.read() == []
    assert writer.waiting_bytes == 0


def test_it_goes_round_many_times(writer: RingWriter, reader: RingReader) -> None:
    for i in range(2000):
        record = bytes([i % 256]) * (i * 7 % 900)
        assert writer.append(record)
        assert reader.read() == [record]


def test_a_full_ring_drops_counts_and_marks_the_loss_once(
    writer: RingWriter, reader: RingReader
) -> None:
    num = fill(writer)
    for _ in range(4):
        assert not writer.append(b"y" * 100)
    assert writer.num_dropped == 5
    # one at a time, so that the writer finds room in the middle of what waits
    taken = reader.read(max_bytes=1000)
    assert writer.append(b"after")
    taken += reader.read()
    assert taken[num:] == [Lost(5), b"after"]
    assert not any(isinstance(record, Lost) for record in taken[:num])


def test_a_loss_that_no_record_follows_is_told_when_the_ring_is_empty(
    writer: RingWriter, reader: RingReader
) -> None:
    num = fill(writer)
    taken = reader.read()
    assert taken[num:] == [Lost(1)]
    assert reader.read() == []
    writer.append(b"after")
    assert reader.read() == [b"after"]  # the marker before it says nothing new


def test_two_losses_are_two(writer: RingWriter, reader: RingReader) -> None:
    fill(writer)
    reader.read()
    fill(writer)
    assert reader.read()[-1] == Lost(1)


def test_a_record_larger_than_a_quarter_is_dropped(writer: RingWriter, reader: RingReader) -> None:
    assert not writer.append(bytes(CAPACITY // 4 + 1))
    assert writer.append(bytes(CAPACITY // 4))
    assert reader.read() == [Lost(1), bytes(CAPACITY // 4)]


def test_a_restarted_reader_goes_on_where_the_last_one_stopped(writer: RingWriter) -> None:
    first = RingReader(writer.path)
    writer.append(b"1")
    assert first.read() == [b"1"]
    writer.append(b"2")
    first.close()
    second = RingReader(writer.path)
    writer.append(b"3")
    assert second.read() == [b"2", b"3"]
    second.close()


def test_a_told_loss_is_not_told_again_after_a_restart(writer: RingWriter) -> None:
    fill(writer)
    first = RingReader(writer.path)
    assert first.read()[-1] == Lost(1)
    first.close()
    second = RingReader(writer.path)
    assert second.read() == []
    second.close()


def test_the_reader_asks_for_listings_through_the_ring(
    writer: RingWriter, reader: RingReader
) -> None:
    assert writer.listings_wanted == 0
    reader.want_listing()
    assert writer.listings_wanted == 1
    assert not reader.writer_lists


def test_what_is_no_ring_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"x", bytes(8192), b"kvring01" + bytes(8192)):
        (tmp_path / "ring").write_bytes(content)
        with pytest.raises(RingUnusable):
            RingReader(tmp_path / "ring")
    with pytest.raises(RingUnusable):
        RingReader(tmp_path / "missing")
    with pytest.raises(RingUnusable):
        RingWriter.create(tmp_path / "ring", 5000)


def test_a_record_that_is_not_readable_yet_is_left_for_later(
    writer: RingWriter, reader: RingReader
) -> None:
    """On ARM the cursor may become visible before the record."""
    writer.append(b"1")
    writer.append(b"22")
    second = 4096 + 16  # of the file: the header of the second record
    header = bytes(writer._bytes[second : second + 8])
    writer._bytes[second : second + 8] = struct.pack("<Q", 7)
    assert reader.read() == [b"1"]
    assert reader.read() == []
    writer._bytes[second : second + 8] = header
    assert reader.read() == [b"22"]


def test_a_corrupt_record_costs_what_waits_and_not_more(
    writer: RingWriter, reader: RingReader
) -> None:
    writer.append(b"1")
    writer.append(b"2")
    writer._bytes[4096 + 8] ^= 0xFF
    looks = 0
    while not (taken := reader.read()):
        looks += 1
    assert looks == 999
    assert taken == [Lost(1)]
    writer.append(b"3")
    assert reader.read() == [b"3"]


@pytest.mark.parametrize("word", [2, 8, 9, 10, 16, 17, 18])
def test_any_number_in_the_header_costs_what_waits_and_not_more(tmp_path: Path, word: int) -> None:
    """Head, tail and counts may be anything; what comes later is read, and the loss is told."""
    for number in (0, 1, 7, 8, CAPACITY, CAPACITY + 8, 2**31, 2**62, 2**63 + 1, 2**64 - 1):
        writer = RingWriter.create(tmp_path / "ring", CAPACITY)
        reader = RingReader(writer.path)
        assert writer.append(b"before")
        assert reader.read() == [b"before"]
        reader.close()
        with writer.path.open("r+b") as file:
            file.seek(8 * word)
            file.write(struct.pack("=Q", number))
        reader = RingReader(writer.path)
        seen: list[bytes | Lost] = []
        for _ in range(2_200):  # a record that is not readable yet is looked at again
            seen += reader.read()
        for _ in range(3):
            writer.append(b"after")
            for _ in range(1_100):
                seen += reader.read()
        assert seen[-1] == b"after", (number, seen)
        assert len(seen) < 20
        reader.close()
        writer.close()


@pytest.mark.parametrize("capacity", [0, 8, 4_095, 6_000, 12_288])
def test_a_capacity_that_no_writer_makes_is_refused(tmp_path: Path, capacity: int) -> None:
    writer = RingWriter.create(tmp_path / "ring", CAPACITY)
    data_bytes = writer.path.stat().st_size - CAPACITY
    writer.close()
    with writer.path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("=Q", capacity))
        file.truncate(data_bytes + capacity)
    with pytest.raises(RingUnusable):
        RingReader(writer.path)


def test_a_reader_that_sleeps_is_woken_by_a_record(writer: RingWriter, reader: RingReader) -> None:
    writer.append(b"1")
    assert not reader.fall_asleep()
    assert reader.read() == [b"1"]
    assert reader.fall_asleep()
    assert select.select([reader.pipe], [], [], 0)[0] == []
    writer.append(b"2")
    assert select.select([reader.pipe], [], [], 0)[0] == [reader.pipe]
    reader.wake_up()
    assert select.select([reader.pipe], [], [], 0)[0] == []
    writer.append(b"3")
    assert select.select([reader.pipe], [], [], 0)[0] == []


def test_a_writer_does_not_mind_readers_that_are_gone(writer: RingWriter) -> None:
    for _ in range(2):
        reader = RingReader(writer.path)
        reader.read()
        assert reader.fall_asleep()
        writer.append(b"1")
        reader.read()
        assert reader.fall_asleep()
        reader.close()
        writer.append(b"2")
        writer.append(b"3")
    reader = RingReader(writer.path)
    assert reader.read() == [b"2", b"3"]
    reader.close()
