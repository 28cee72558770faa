"""Lines for readers that are slow, gone or never come."""

import io
import os
import sys
from collections.abc import Generator
from contextlib import suppress

import pytest

from kvatlas.common.line_writing import LineWriter, write_line
from testkit.waiting import WAIT_SECONDS

#: what a pipe holds
PIPE_BYTES = 1 << 16
LINE_BYTES = 1 << 10


@pytest.fixture
def pipe() -> Generator[tuple[int, int], None, None]:
    reads, writes = os.pipe()
    yield reads, writes
    for fd in (reads, writes):
        with suppress(OSError):
            os.close(fd)


def a_line(number: int) -> str:
    return f"{number:0{LINE_BYTES - 1}}\n"


def test_lines_come_in_their_order_and_flush_waits_for_them(pipe: tuple[int, int]) -> None:
    reads, writes = pipe
    writer = LineWriter(writes)
    for number in range(32):
        writer.write(a_line(number))
    assert writer.flush(WAIT_SECONDS)
    assert os.read(reads, PIPE_BYTES).decode() == "".join(map(a_line, range(32)))
    assert writer.num_dropped == 0


def test_what_a_reader_leaves_unread_is_dropped_counted_and_said(pipe: tuple[int, int]) -> None:
    reads, writes = pipe
    waiting = 8
    writer = LineWriter(writes, waiting * LINE_BYTES)
    num_lines = 3 * PIPE_BYTES // LINE_BYTES
    for number in range(num_lines):
        writer.write(a_line(number))
    assert not writer.flush(0)
    num_dropped = writer.num_dropped
    assert num_dropped > 0
    with os.fdopen(reads) as opened:
        kept, num_said = list[int](), 0
        while len(kept) < num_lines - num_dropped:
            line = opened.readline()
            if "dropped" in line:
                num_said += int(line.partition(" ")[0])
            else:
                kept.append(int(line))
        assert kept == sorted(kept)
        assert writer.flush(WAIT_SECONDS)
        writer.write("read again\n")
        note = opened.readline()
        assert note == f"{num_dropped - num_said} lines were dropped here: nothing read them\n"
        assert opened.readline() == "read again\n"


def test_a_reader_that_is_gone_ends_nothing(pipe: tuple[int, int]) -> None:
    reads, writes = pipe
    os.close(reads)
    writer = LineWriter(writes)
    for number in range(4):
        writer.write(a_line(number))
    assert writer.flush(WAIT_SECONDS)
    assert writer.num_dropped == 4


def test_a_pipe_that_does_not_wait_gets_all(pipe: tuple[int, int]) -> None:
    reads, writes = pipe
    os.set_blocking(writes, False)
    writer, num_lines = LineWriter(writes), 3 * PIPE_BYTES // LINE_BYTES
    for number in range(num_lines):
        writer.write(a_line(number))
    with os.fdopen(reads) as opened:
        assert [int(opened.readline()) for _ in range(num_lines)] == [*range(num_lines)]
    assert writer.num_dropped == 0


def test_streams_in_memory_and_closed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    write_line(stream, "ready")
    assert stream.getvalue() == "ready\n"
    monkeypatch.setattr(sys, "stdout", None)
    write_line(sys.stdout, "for no one")
