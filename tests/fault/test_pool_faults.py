"""The serve pool between two processes, one of which misbehaves."""

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pool_file import default_folder
from testkit import peer as testkit_peer
from testkit.blocks import a_block, a_hash

SUPPORT = Path(testkit_peer.__file__).parent


@pytest.fixture
def pool() -> Iterator[ServePool]:
    with (
        tempfile.TemporaryDirectory(dir=default_folder()) as folder,
        ServePool.create("w1", 8, 4096, 1, folder=Path(folder)) as pool,
    ):
        yield pool


def start(program: str, pool: ServePool) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / program), str(pool.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(SUPPORT.parent)},
    )


def test_a_leased_block_is_never_overwritten_while_an_engine_evicts(pool: ServePool) -> None:
    rng, num_leased = random.Random(3), 0
    with start("evictor_main.py", pool) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        end = time.monotonic() + 2.0
        while time.monotonic() < end or num_leased <= 50:
            slot = rng.randrange(pool.num_slots)
            block_hash = pool.hash_of(slot)
            if block_hash is None:
                continue
            until_ns = time.monotonic_ns() + 2_000_000
            leased = pool.lease([slot], [block_hash], until_ns)
            if not leased:
                continue
            number = next(n for n in range(64) if a_hash(n) == block_hash)
            expected = a_block(number, pool.block_bytes)
            looks = 0
            while True:
                seen, seen_hash = bytes(pool.block(slot)), pool.hash_of(slot)
                if time.monotonic_ns() >= until_ns:
                    break
                looks += 1
                assert (seen_hash, seen) == (block_hash, expected)
            num_leased += looks > 0
            pool.set_leases({slot: 0})
        engine.stdin.close()
        num_evicted = int(engine.stdout.readline())
    assert num_leased > 50
    assert num_evicted > 1000


def test_an_engine_does_not_wait_for_a_sidecar_that_keeps_the_lock(pool: ServePool) -> None:
    pool.commit(0, a_hash(0), a_block(0, pool.block_bytes))
    with start("holder_main.py", pool) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        testkit_peer.stop(holder.pid)
        started = time.monotonic()
        assert pool.try_evict([0]) == []
        assert not pool.offer([1], a_hash(1))
        assert time.monotonic() - started < 20  # forever, if it waited
        pool.commit(1, a_hash(1), a_block(1, pool.block_bytes))
        assert pool.lease([0], [a_hash(0)], 1) is None
        holder.kill()
        holder.wait()
        assert pool.try_evict([0]) == [0]


def test_a_pool_whose_owner_was_killed_can_be_made_again(pool: ServePool) -> None:
    folder = pool.path.parent
    code = (
        "import sys; from pathlib import Path; "
        "from kvatlas.worker_hooks.transfer.pool import ServePool;"
        f"pool = ServePool.create('w2', 2, 64, folder=Path({str(folder)!r}));"
        "print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        owner.kill()
    with ServePool.create("w2", 4, 64, folder=folder) as again:
        assert again.num_slots == 4
