"""Readers in another process than the writer: whole changes only, its death, its return."""

import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvatlas.indexer.shared.arrays import SharedArrays
from kvatlas.indexer.shared.reader import SharedIndexReader
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from testkit import shared_writer_main
from testkit.shared_writer_main import CHAIN, NUM_BLOCKS
from testkit.waiting import until

pytestmark = pytest.mark.integration


@contextmanager
def a_writer(folder: Path, seed: int = 1) -> Generator[subprocess.Popen[str], None, None]:
    command = [sys.executable, str(shared_writer_main.__file__), str(folder), str(seed)]
    support = str(Path(shared_writer_main.__file__).parents[1])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={"PYTHONPATH": support},
    ) as process:  # fmt: skip
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_no_reader_ever_sees_half_of_a_change(tmp_path: Path) -> None:
    with a_writer(tmp_path) as process:
        reader = SharedIndexReader(tmp_path)
        lengths, sequences = set(), set()
        ends_at = time.monotonic() + 4
        while time.monotonic() < ends_at:
            found = {match.instance.worker: match for match in reader.match(CHAIN)}
            a, b = found.get("a"), found.get("b")
            assert (a and a[2:]) == (b and b[2:])
            assert a is None or a.num_blocks == sum(a.by_tier) <= NUM_BLOCKS
            lengths.add(a.num_blocks if a else 0)
            sequences.add(reader.stream_sequence)
            held = reader.holders(CHAIN[:16])
            assert [t for who, t in held if who.worker == "a"] == [
                t for who, t in held if who.worker == "b"
            ]
        assert process.poll() is None
        assert reader.num_retries > 0
        assert len(lengths) > 3
        assert len(sequences) > 100
        assert {view.trust for view in reader.instances() if view.epoch == 1} == {Trust.exact}


async def test_a_dead_writer_leaves_its_last_state_marked_with_its_age(tmp_path: Path) -> None:
    with a_writer(tmp_path, seed=2) as process:
        reader = SharedIndexReader(tmp_path)
        await until(lambda: bool(reader.match(CHAIN)))
        assert reader.connected
        process.kill()
        process.wait()
        before = reader.match(CHAIN), reader.stream_sequence
        await until(lambda: not reader.connected)
        assert reader.is_ready
        assert reader.lag.seconds_since_contact > 2
        assert {view.trust for view in reader.instances()} <= {Trust.stale, Trust.gone}
        was_torn = not before[0]
        matches = reader.match(CHAIN)
        assert [match[2:] for match in matches] == [match[2:] for match in before[0]]
        assert was_torn or {match.trust for match in matches} == {Trust.stale}
        assert reader.stream_sequence == before[1]
    with a_writer(tmp_path, seed=3):
        await until(lambda: reader.connected and bool(reader.match(CHAIN)))
        known = reader.instance(InstanceId("a", 0))
        assert known
        assert known.trust is Trust.exact


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with a_writer(tmp_path), pytest.raises(InvalidSetting, match="another index"):
        SharedArrays(tmp_path)


def test_who_reads_nothing_says_so(tmp_path: Path) -> None:
    reader = SharedIndexReader(tmp_path)
    assert not reader.is_ready
    assert not reader.connected
    assert reader.match(CHAIN) == []
    assert reader.instances() == []
