"""What lies where a file of ours is to be: only what is known to be ours goes."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvatlas.common.own_files import open_output
from kvatlas.schemas.errors import FolderUnusable, ForeignFile, PoolTooLarge, RingUnusable
from kvatlas.worker_hooks.recordings.captures import CaptureFile, Frame, is_recording, read_capture
from kvatlas.worker_hooks.reporting.ring import RingReader, RingWriter, wake_path
from kvatlas.worker_hooks.sidecar.channel import Answer, ChannelServer, Question
from kvatlas.worker_hooks.transfer.pool_file import PoolLayout, create_pool_file
from testkit.mounts import with_tmpfs

MINE = b"\\documentclass{article} % years of work"
LAYOUT = PoolLayout(2, 64, 0)


def a_ring(path: Path) -> None:
    RingWriter.create(path, 4096).close()


def a_pool(path: Path) -> None:
    create_pool_file(path, LAYOUT).close()


def a_recording(path: Path) -> None:
    with CaptureFile(path) as out:
        out.put_frame(Frame(b"\x92\x01\x02", "kv"))


def an_output(path: Path) -> None:
    os.close(open_output(path, lambda _: False, "nothing", "name another --out"))


async def _answer(question: Question) -> Answer:
    raise AssertionError(question)


def a_socket(path: Path) -> None:
    async def serve() -> None:
        async with ChannelServer(path, _answer, patience_seconds=0):
            pass

    asyncio.run(serve())


def a_reader(path: Path) -> None:
    """Make a pipe where `path` is, beside a ring."""
    ring = path.with_name("r")
    a_ring(ring)
    if os.path.lexists(path):
        path.rename(wake_path(ring))
    try:
        RingReader(ring).close()
    finally:
        if os.path.lexists(wake_path(ring)):
            wake_path(ring).rename(path)


MAKERS = [a_ring, a_pool, a_recording, an_output, a_socket, a_reader]


@pytest.mark.parametrize("make", MAKERS)
def test_a_file_of_somebody_elses_stays(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "x").write_bytes(MINE)
    with pytest.raises(ForeignFile) as raised:
        make(tmp_path / "x")
    assert "name another" in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert (tmp_path / "x").read_bytes() == MINE


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("content", [MINE, None])
def test_a_link_is_not_followed(
    tmp_path: Path, make: Callable[[Path], None], content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "mine").write_bytes(content)
    (tmp_path / "x").symlink_to(tmp_path / "mine")
    with pytest.raises(ForeignFile, match="a symbolic link"):
        make(tmp_path / "x")
    assert (tmp_path / "x").is_symlink()
    assert (tmp_path / "mine").exists() == (content is not None)
    assert content is None or (tmp_path / "mine").read_bytes() == content


@pytest.mark.parametrize("make", MAKERS)
def test_a_folder_stays(tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/mine").write_bytes(MINE)
    with pytest.raises(ForeignFile, match="a folder"):
        make(tmp_path / "x")
    assert (tmp_path / "x/mine").read_bytes() == MINE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("make", [a_ring, a_recording])
def test_one_of_ours_that_is_another_users_stays(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    os.chown(tmp_path / "x", 12345, -1)
    with pytest.raises(ForeignFile):
        make(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == before
    assert (tmp_path / "x").stat().st_uid == 12345


@pytest.mark.parametrize("make", [a_ring, a_recording])
def test_one_of_an_earlier_run_is_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    make(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("left", [b"", b"KVATMAKE" + bytes(100)])
def test_a_pool_that_was_never_finished_is_replaced(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "x").write_bytes(left)
    a_pool(tmp_path / "x")


def test_a_pool_takes_away_its_own_name_only(tmp_path: Path) -> None:
    path = tmp_path / "x"
    pool = create_pool_file(path, LAYOUT)
    path.unlink()
    path.write_bytes(MINE)
    pool.close()
    assert path.read_bytes() == MINE


def test_all_are_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        ring = RingWriter.create(tmp_path / "ring", 4096)
        reader = RingReader(tmp_path / "ring")
        pool = create_pool_file(tmp_path / "pool", LAYOUT)
        a_recording(tmp_path / "recording")

        async def mode_of_socket() -> None:
            async with ChannelServer(tmp_path / "socket", _answer):
                modes["socket"] = (tmp_path / "socket").stat().st_mode & 0o777

        modes: dict[str, int] = {}
        asyncio.run(mode_of_socket())
    finally:
        os.umask(before)
    modes |= {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("ring", "ring.wake", "pool", "recording", "socket"), 0o600)
    for each in (reader, ring, pool):
        each.close()


def test_an_older_recording_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    a_recording(tmp_path / "x")
    (tmp_path / "x").chmod(0o644)
    a_recording(tmp_path / "x")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


# --- recordings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.kvcap", "x.jsonl"])
def test_a_recording_replaces_one_of_any_format(tmp_path: Path, name: str) -> None:
    with CaptureFile(tmp_path / name) as out:
        out.put_frame(Frame(b"\xdc\x00\x01\xc0" + bytes(100_000), "kv@pod", 7))
    a_recording(tmp_path / name)
    assert [frame.payload for frame in read_capture(tmp_path / name).frames] == [b"\x92\x01\x02"]
    with CaptureFile(tmp_path / name) as out:
        out.put_row({"stream_sequence": 1, "worker": "w", "events": []})
    a_recording(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [b"\0\0\0", bytes(64), b"{}", b'{"name": "x"}', b"[1]", b"\0\0\0\x01\xff\xff", b"\x7fELF" * 8],
)
def test_other_content_is_no_recording(content: bytes) -> None:
    assert not is_recording(content)


def test_a_device_and_a_pipe_are_written_to_as_they_are(tmp_path: Path) -> None:
    a_recording(Path("/dev/null"))
    (tmp_path / "out").symlink_to("/dev/null")
    a_recording(tmp_path / "out")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    a_recording(tmp_path / "pipe")
    assert os.read(reader, 1000).endswith(b"\x92\x01\x02")
    os.close(reader)


# --- sockets ------------------------------------------------------------------------------------


def test_a_socket_that_was_left_is_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "x"))
    a_socket(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_socket_in_use_is_not_taken(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(tmp_path / "x"))
        living.listen()
        with pytest.raises(ForeignFile, match="a socket in use"):
            a_socket(tmp_path / "x")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "x"))


async def test_a_sidecar_waits_for_its_predecessor_to_end(tmp_path: Path) -> None:
    async with ChannelServer(tmp_path / "x", _answer):
        waiting = asyncio.create_task(ChannelServer(tmp_path / "x", _answer).__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
    second = await waiting
    assert os.listdir(tmp_path) == ["x"]
    await second.__aexit__(None, None, None)
    assert os.listdir(tmp_path) == []


async def test_a_sidecar_takes_away_its_own_socket_only(tmp_path: Path) -> None:
    async with ChannelServer(tmp_path / "x", _answer):
        os.unlink(tmp_path / "x")
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(tmp_path / "x"))
    assert os.listdir(tmp_path) == ["x"]


# --- reading --------------------------------------------------------------------------------------


def test_a_writer_wakes_a_pipe_and_no_file(tmp_path: Path) -> None:
    ring = RingWriter.create(tmp_path / "ring", 4096)
    reader = RingReader(tmp_path / "ring")
    assert reader.fall_asleep()
    wake_path(ring.path).unlink()
    wake_path(ring.path).write_bytes(MINE)
    assert ring.append(b"x")
    assert wake_path(ring.path).read_bytes() == MINE
    wake_path(ring.path).unlink()
    (tmp_path / "mine").write_bytes(MINE)
    wake_path(ring.path).symlink_to(tmp_path / "mine")
    assert ring.append(b"x")
    assert (tmp_path / "mine").read_bytes() == MINE
    reader.close()
    ring.close()


AS_ANOTHER_USER = """
import os, sys
from pathlib import Path
from kvatlas.schemas.errors import KvatlasError
from kvatlas.worker_hooks.transfer.pool_file import attach_pool_file
from kvatlas.worker_hooks.reporting.ring import RingReader
os.setuid(12345)
for take in (RingReader, attach_pool_file):
    try:
        take(Path(sys.argv[1]))
    except KvatlasError as error:
        print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_another_user_made_is_not_mapped(tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents[:3]):  # one more where tests run side by side
        path.chmod(0o755)
    made = tmp_path / "x"
    a_ring(made)
    os.chown(made, 23456, -1)
    made.chmod(0o666)
    command = [sys.executable, "-P", "-c", AS_ANOTHER_USER, str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("it is of another user") == 2


# --- no room --------------------------------------------------------------------------------------

NO_ROOM = """
import os, sys
from pathlib import Path
from kvatlas.schemas.errors import KvatlasError
from kvatlas.worker_hooks.transfer.pool_file import PoolLayout, create_pool_file
from kvatlas.worker_hooks.reporting.ring import RingWriter
folder = Path(sys.argv[1])
for make in (
    lambda: RingWriter.create(folder / "ring"),
    lambda: create_pool_file(folder / "pool", PoolLayout(1000, 16384, 0)),
):
    try:
        make()
    except KvatlasError as error:
        print(type(error).__name__, error)
print(os.listdir(folder))
"""


@pytest.mark.parametrize(
    ("options", "kinds", "reason"),
    [
        ("size=8m", (RingUnusable, PoolTooLarge), ""),
        ("ro", (RingUnusable, FolderUnusable), "Read-only file system"),
    ],
)
def test_no_room_and_no_right_are_named_with_the_bytes(
    tmp_path: Path, options: str, kinds: tuple[type[Exception], ...], reason: str
) -> None:
    command = [*with_tmpfs(tmp_path, options), sys.executable, "-P", "-c", NO_ROOM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ring, pool, left = done.stdout.splitlines()
    assert [ring.split()[0], pool.split()[0]] == [kind.__name__ for kind in kinds]
    assert f"16781312 bytes are needed in {tmp_path}" in ring
    assert f"16437248 bytes are needed in {tmp_path}" in pool
    assert "are free" in ring
    assert "are free" in pool
    assert reason in ring
    assert reason in pool
    assert left == "[]"
