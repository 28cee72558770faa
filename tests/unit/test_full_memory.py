"""The flat index where the system gives no more memory: it refuses, and the rest stays right."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import testkit
from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.index.arrays import Number, PrivateArrays
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import Tier
from testkit.blocks import a_chain
from testkit.indexes import tiny_index
from testkit.mounts import with_tmpfs

ROOT = b"\xff" * 16


class BoundedArrays(PrivateArrays):
    """Gives memory while `is_full` is False."""

    is_full = False

    def provide(self, name: str, num_lines: int) -> bool:
        return not self.is_full

    def shortage(self, num_bytes: int) -> str:
        return f"{num_bytes} bytes are needed in a test"

    def zeros(self, name: str, shape: tuple[int, ...], kind: type[Number]) -> NDArray[Number]:
        if self.is_full:
            raise IndexFull(f"no memory for {name}: {self.shortage(0)}")
        return super().zeros(name, shape, kind)


def chain_of(num_blocks: int, start: int = 0) -> bytes:
    return a_chain(*range(start, start + num_blocks))


def test_the_first_cells_name_what_they_need_and_where() -> None:
    class NoCells(BoundedArrays):
        def provide(self, name: str, num_lines: int) -> bool:
            return False

    with pytest.raises(
        IndexFull, match=r"first cells of the index: \d+ bytes are needed in a test"
    ):
        FlatRadixIndex(arrays=NoCells())


def test_without_memory_it_refuses_and_goes_on_as_soon_as_there_is_some() -> None:
    arrays, twin = BoundedArrays(), ReferenceIndex()
    index = tiny_index(arrays=arrays)
    for each in (index, twin):
        assert [each.add_instance() for _ in range(12)] == list(range(12))
        for instance in range(12):  # sets of holders of many kinds
            each.store(instance, Tier.hbm, ROOT, chain_of(4 + instance))
    arrays.is_full = True
    with pytest.raises(IndexFull, match="needed in a test"):
        index.store(0, Tier.hbm, ROOT, chain_of(5000, 100))
    index.clear(0, Tier.hbm)
    twin.clear(0, Tier.hbm)
    for _ in range(3):
        with pytest.raises(IndexFull):
            index.add_instance()
    for each in (index, twin):
        each.forget_instance(3)
    assert index.match(chain_of(20)) == twin.match(chain_of(20))
    assert index.audit() == []
    arrays.is_full = False
    for each in (index, twin):
        each.add_instance()
        each.store(0, Tier.hbm, ROOT, chain_of(200, 100))
    assert index.match(chain_of(200, 100)) == twin.match(chain_of(200, 100))
    assert index.audit() == []


def test_a_sweep_without_memory_gives_back_what_the_forgotten_held() -> None:
    arrays = BoundedArrays()
    index = tiny_index(arrays=arrays)
    first = index.add_instance()
    index.store(first, Tier.hbm, ROOT, chain_of(64))
    second = index.add_instance()
    index.store(second, Tier.dram, ROOT, chain_of(32))
    index.forget_instance(first)
    arrays.is_full = True
    assert index.tree(4, 4)  # sweeps all
    assert [match[:2] for match in index.match(chain_of(64))] == [(second, 32)]
    assert index.remove(second, Tier.dram, chain_of(32)) == 32
    assert index.num_blocks() == 0
    assert index.audit() == []


def test_a_snapshot_without_memory_for_it_changes_nothing() -> None:
    source = tiny_index()
    instance = source.add_instance()
    source.store(instance, Tier.hbm, ROOT, chain_of(500))
    parts = source.export()()

    class OneLess(BoundedArrays):
        left = 1_000_000

        def zeros(self, name: str, shape: tuple[int, ...], kind: type[Number]) -> NDArray[Number]:
            self.is_full = self.left <= 0
            self.left -= 1
            return super().zeros(name, shape, kind)

        def provide(self, name: str, num_lines: int) -> bool:
            return True

    arrays = OneLess()
    index = tiny_index(arrays=arrays)
    mine = index.add_instance()
    index.store(mine, Tier.dram, ROOT, chain_of(8))
    for left in range(4):  # masks, directory, rows, words
        arrays.left = left
        with pytest.raises(IndexFull):
            index.restore(parts)
        assert [match[:2] for match in index.match(chain_of(500))] == [(mine, 8)]
        assert index.audit() == []
    arrays.left = 1_000_000
    index.restore(parts)
    assert [match[:2] for match in index.match(chain_of(500))] == [(instance, 500)]


def test_a_process_without_address_space_is_refused_with_what_it_needs() -> None:
    with pytest.raises(IndexFull, match=f"{1 << 60} bytes are needed in this process"):
        PrivateArrays().reserve("cells", 1 << 58, 1)
    with pytest.raises(IndexFull, match="no memory for words"):
        PrivateArrays().zeros("words", (1 << 58,), np.uint64)


FULL_SHARED = """
import os, sys
from pathlib import Path
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.schemas.errors import IndexFull
from kvatlas.schemas.ids import Tier

folder = Path(sys.argv[1])
arrays = SharedArrays(folder / "index")
index = FlatRadixIndex(arrays=arrays)
instance = index.add_instance()
chain = os.urandom(16 * 400_000)
try:
    index.store(instance, Tier.hbm, b"r" * 16, chain)
except IndexFull as error:
    print(error)
held = index.match(chain)[0].num_blocks
assert held == index.num_blocks() > 10_000, held
before = len(list(folder.rglob("*")))
for number in range(4096):  # masks and sets of holders want to grow as well
    try:
        index.store(index.add_instance(), Tier.dram, b"r" * 16, chain[: 16 * number])
    except IndexFull:
        pass
assert len(list(folder.rglob("*"))) == before
assert index.audit() == []
index.forget_instance(instance)
index.tree(1, 1)  # sweeps all
assert index.audit() == []
"""


def test_a_full_file_system_costs_blocks_and_not_the_process(tmp_path: Path) -> None:
    command = [*with_tmpfs(tmp_path, "size=8m"), sys.executable, "-P", "-c", FULL_SHARED]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"bytes are needed in {tmp_path}/index" in done.stdout
    assert "are free" in done.stdout


FULL_FLEET = """
import os, sys, time
from pathlib import Path
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.publication import IndexPublication, WriterStatus
from kvatlas.indexer.index.shared.reader import SharedIndexReader
from kvatlas.indexer.fold.state import IndexState
from kvatlas.schemas.fleet import Trust
from testkit.builders import a_batch, arrived, up
from kvatlas.schemas.kv_events import BlockStored
from kvatlas.schemas.ids import InstanceId, Tier

folder = Path(sys.argv[1])
arrays = SharedArrays(folder / "index")
state = IndexState(FlatRadixIndex(arrays=arrays))
publication = IndexPublication(arrays, state, state)

def pulse():
    status = WriterStatus(True, True, state.stream_sequence, time.monotonic(), {})
    publication.publish_status(status)

pulse()
reader = SharedIndexReader(folder / "index")
w1 = InstanceId("w1", 0)
chain = os.urandom(16 * 1000)
with publication:
    state.handle(arrived(a_batch(up()), 1))
for seq in range(2, 400):  # until the arrays are full
    with publication:
        event = BlockStored(b"r" * 16, chain if seq == 2 else os.urandom(16 * 1000), None, Tier.hbm)
        state.handle(arrived(a_batch(event, seq=seq), seq))
assert state.stats().index_full > 0
assert reader.instance(w1).trust is Trust.degraded
assert reader.match(chain)[0].num_blocks == 1000
with (folder / "ballast").open("wb", buffering=0) as ballast:  # another takes what is left
    try:
        while True:
            ballast.write(bytes(4096))
    except OSError:
        pass
for number in range(2, 50):
    with publication:
        state.handle(arrived(a_batch(up(), worker=f"w{number}"), 400 + number))
    pulse()
    assert reader.instance(InstanceId(f"w{number}", 0)) is not None, number
assert reader.match(chain)[0].num_blocks == 1000
"""


def test_a_full_index_still_says_who_the_workers_are(tmp_path: Path) -> None:
    command = [*with_tmpfs(tmp_path, "size=8m"), sys.executable, "-c", FULL_FLEET, str(tmp_path)]
    support = str(Path(testkit.__file__).parents[1])
    done = subprocess.run(
        command, env={"PYTHONPATH": support}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
