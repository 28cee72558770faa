"""Readers in another process than the writer: whole changes only, its death, its return."""

import random
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.index.kernel import fences as fence_kernel
from kvatlas.indexer.index.shared import header
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.publication import IndexPublication, WriterStatus
from kvatlas.indexer.index.shared.reader import SharedIndexReader
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import Inventory
from testkit import shared_writer_main
from testkit.builders import MODEL, ROOT, a_batch, arrived, digests, hashes, stored, up
from testkit.indexes import tiny_index
from testkit.shared_writer_main import CHAIN, NUM_BLOCKS
from testkit.waiting import until

pytestmark = pytest.mark.integration

PULSE = WriterStatus(True, True, 0, 0.0, {})


def published(folder: Path) -> tuple[SharedArrays, IndexState, IndexPublication]:
    """Return the parts of a writer in this process."""
    arrays = SharedArrays(folder)
    state = IndexState(tiny_index(arrays=arrays))
    return arrays, state, IndexPublication(arrays, state, state)


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


def test_readers_know_the_time_at_the_broker_from_the_writer(tmp_path: Path) -> None:
    _, _, publication = published(tmp_path)
    publication.publish_status(PULSE._replace(clock_offset_ns=86_400 * 10**9))
    reader = SharedIndexReader(tmp_path)
    before_ns = time.monotonic_ns()
    assert before_ns <= reader.broker_ns() - 86_400 * 10**9 <= time.monotonic_ns()


def test_no_reader_ever_sees_half_of_a_change(tmp_path: Path) -> None:
    with a_writer(tmp_path) as process:
        reader = SharedIndexReader(tmp_path)
        lengths, sequences = set[int](), set[int]()
        ends_at = time.monotonic() + 2
        # on a busy machine it takes longer to see enough
        while (
            time.monotonic() < ends_at
            or reader.num_retries == 0
            or len(lengths) <= 3
            or len(sequences) <= 100
        ):
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
        while {view.trust for view in reader.instances() if view.epoch == 1} != {Trust.exact}:
            time.sleep(0.01)  # whoever stands still within a change is not believed


async def test_a_dead_writer_leaves_its_last_state_marked_with_its_age(tmp_path: Path) -> None:
    with a_writer(tmp_path, seed=2) as process:
        reader = SharedIndexReader(tmp_path)
        await until(lambda: reader.connected and bool(reader.match(CHAIN)))
        process.kill()
        process.wait()
        before = reader.match(CHAIN), reader.stream_sequence
        await until(lambda: not reader.connected)
        assert reader.is_ready
        await until(lambda: reader.lag.seconds_since_contact > 2)
        assert {view.trust for view in reader.instances()} <= {Trust.stale, Trust.gone}
        was_torn = not before[0]
        matches = reader.match(CHAIN)
        assert [match[2:] for match in matches] == [match[2:] for match in before[0]]
        assert was_torn or {match.trust for match in matches} == {Trust.stale}
        assert reader.stream_sequence == before[1]
    with a_writer(tmp_path, seed=3):
        await until(lambda: reader.connected and bool(reader.match(CHAIN)))

        def is_exact() -> bool:
            known = reader.instance(InstanceId("a", 0))
            return known is not None and known.trust is Trust.exact

        await until(is_exact)


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with a_writer(tmp_path), pytest.raises(InvalidSetting, match="another index"):
        SharedArrays(tmp_path)


def test_who_reads_nothing_says_so(tmp_path: Path) -> None:
    reader = SharedIndexReader(tmp_path)
    assert not reader.is_ready
    assert not reader.connected
    assert reader.match(CHAIN) == []
    assert reader.instances() == []
    assert str(tmp_path) in reader.why_not_ready
    assert "kvatlas indexer" in reader.why_not_ready


def test_without_room_for_the_fleet_readers_know_nobody_and_the_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays, state, publication = published(tmp_path)
    reader = SharedIndexReader(tmp_path)
    publication.publish_status(PULSE)
    with publication:
        state.handle(arrived(a_batch(up(), stored(1))))
    assert [match.num_blocks for match in reader.match(hashes(1))] == [1]

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arrays, "write_file", no_room)
    publication.publish_status(PULSE)
    with publication:
        state.handle(arrived(a_batch(stored(2), seq=2), 2))
    assert reader.match(hashes(1)) == []
    monkeypatch.undo()
    publication.publish_status(PULSE)
    assert [match.num_blocks for match in reader.match(hashes(1, 2))] == [2]
    assert reader.num_retries == 0
    arrays.close()


def test_whatever_is_wrong_with_the_files_a_reader_answers(tmp_path: Path) -> None:
    arrays, state, publication = published(tmp_path)
    publication.publish_status(PULSE)
    with publication:
        state.handle(arrived(a_batch(up(), stored(1))))
    [fleet] = tmp_path.glob("*.fleet.2")
    [cells] = tmp_path.glob("*.cells.*")
    whole = fleet.read_bytes()[: int(arrays.header[header.FLEET_BYTES])]
    for content in (b"", whole[:-1], b"\xc1", whole[:40] + b"\xff" * 20):
        fleet.write_bytes(content)
        assert SharedIndexReader(tmp_path).match(hashes(1)) == []
    fleet.write_bytes(whole)
    assert SharedIndexReader(tmp_path).match(hashes(1))
    fleet.unlink()
    assert SharedIndexReader(tmp_path).match(hashes(1)) == []
    fleet.write_bytes(whole)
    cells.write_bytes(b"")
    assert SharedIndexReader(tmp_path).match(hashes(1)) == []
    arrays.close()


def test_a_writer_that_dies_within_a_change_is_not_waited_for(tmp_path: Path) -> None:
    arrays, state, publication = published(tmp_path)
    reader = SharedIndexReader(tmp_path)
    publication.publish_status(PULSE)
    with publication:
        state.handle(arrived(a_batch(up(), stored(1))))
    assert reader.serving(MODEL)
    publication.__enter__()
    started = time.monotonic()
    assert reader.match(hashes(1)) == []
    assert [view.instance for view in reader.serving(MODEL)] == [InstanceId("w1", 0)]
    assert time.monotonic() - started < 20  # forever, if it waited
    arrays.close()


def test_what_was_listed_while_a_writer_stood_still_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still at the very end of a change, when readers see its version already."""
    arrays, state, publication = published(tmp_path)
    reader = SharedIndexReader(tmp_path)
    publication.publish_status(PULSE)
    with publication:
        state.handle(arrived(a_batch(up(), stored(1, 2)), 1))
    assert [view.trust for view in reader.serving(MODEL)] == [Trust.exact]
    close = fence_kernel.close_window

    def late(header: NDArray[np.uint64]) -> None:
        assert reader.fleet_version
        reader.serving(MODEL)
        close(header)

    with monkeypatch.context() as patched:
        patched.setattr(fence_kernel, "close_window", late)
        with publication:
            state.handle(arrived(a_batch(stored(3), seq=3), 2))
    assert [view.trust for view in reader.serving(MODEL)] == [Trust.degraded]
    arrays.close()


def test_who_heals_into_a_full_index_takes_no_answer_of_others_along(tmp_path: Path) -> None:
    """It gets a number of its own before there is no room, which readers have to know."""
    _arrays, state, publication = published(tmp_path)
    publication.publish_status(PULSE)
    too_many = hashes(1, 2) + random.Random(1).randbytes(16 * (1 << 18))
    log = (
        a_batch(up(), stored(1, 2, 3), *digests(1, 2, 3), worker="good"),
        a_batch(up(), stored(1, 2), worker="bad"),
        a_batch(stored(1, 2), worker="bad", seq=3),
        a_batch(Inventory(3, 1, 1, Tier.hbm, ROOT, too_many), worker="bad", seq=4),
    )
    for at, batch in enumerate(log, 1):
        with publication:
            state.handle(arrived(batch, at))
    assert state.stats().index_full == 1
    found = SharedIndexReader(tmp_path).match(hashes(1, 2, 3))
    assert found == state.match(hashes(1, 2, 3))
    assert ("good", 3) in [(match.instance.worker, match.num_blocks) for match in found]


def test_what_cannot_be_read_is_no_index_until_it_can(tmp_path: Path) -> None:
    _arrays, state, publication = published(tmp_path)
    with publication:
        state.handle(arrived(a_batch(up(), stored(1)), 1))
    publication.publish_status(PULSE)
    reader = SharedIndexReader(tmp_path)
    for written in tmp_path.glob("*.fleet.*"):
        written.unlink()
    assert reader.match(hashes(1)) == []
    assert not reader.connected
    publication.publish_status(PULSE)
    assert [match.num_blocks for match in reader.match(hashes(1))] == [1]
    assert reader.connected
