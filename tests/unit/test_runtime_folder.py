"""Runtime folders: gone with their owner or with the next one, and no others with them."""

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvatlas.common.runtime_folder import MARK, runtime_folder, sweep, temporary_folder
from kvatlas.schemas.errors import FolderUnusable
from testkit.mounts import with_tmpfs

OWNER = """
import signal, sys
from pathlib import Path
from kvatlas.common.runtime_folder import runtime_folder
with runtime_folder(Path(sys.argv[1])) as folder:
    (folder / "ring").write_bytes(b"x")
    print(folder, flush=True)
    signal.pause()
"""


def test_it_is_gone_afterwards(tmp_path: Path) -> None:
    with runtime_folder(tmp_path) as folder:
        (folder / "ring").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_owner_left_is_swept_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert sweep(tmp_path) == []
        owner.kill()
        owner.wait()
    assert (folder / "ring").exists()
    with runtime_folder(tmp_path) as fresh:
        assert list(tmp_path.iterdir()) == [fresh]


def test_folders_without_a_lock_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kvatlas-other").mkdir()
    assert sweep(tmp_path) == []
    assert (tmp_path / "kvatlas-other").is_dir()


def a_left_folder(parent: Path, name: str = "kvatlas-0123abcd", lock: bytes = MARK) -> Path:
    """Make what a killed owner leaves."""
    folder = parent / name
    folder.mkdir(mode=0o700)
    (folder / "owner.lock").write_bytes(lock)
    (folder / "ring").write_bytes(b"x")
    return folder


def test_what_an_owner_left_is_known_by_name_and_lock(tmp_path: Path) -> None:
    left = [a_left_folder(tmp_path), a_left_folder(tmp_path, "kvatlas-nats-0123abcd")]
    assert sweep(tmp_path) == left
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["kvatlas-backup", "kvatlas-index", "kvatlas-notes-of-2026"])
def test_folders_of_other_names_stay(tmp_path: Path, name: str) -> None:
    folder = a_left_folder(tmp_path, name)
    assert sweep(tmp_path) == []
    assert (folder / "ring").exists()


@pytest.mark.parametrize("lock", [b"", b"mine", MARK[:-1], MARK + b"more"])
def test_folders_with_another_lock_stay(tmp_path: Path, lock: bytes) -> None:
    folder = a_left_folder(tmp_path, lock=lock)
    assert sweep(tmp_path) == []
    assert (folder / "ring").exists()


def test_links_lead_to_nothing_that_is_swept(tmp_path: Path) -> None:
    parent, elsewhere = tmp_path / "shm", tmp_path / "elsewhere"
    parent.mkdir()
    elsewhere.mkdir()
    folder = a_left_folder(elsewhere)
    (parent / "kvatlas-0123abcd").symlink_to(folder)
    other = a_left_folder(parent, "kvatlas-abcd0123")
    (other / "owner.lock").unlink()
    (other / "owner.lock").symlink_to(folder / "owner.lock")
    assert sweep(parent) == []
    assert (folder / "ring").exists()
    assert (other / "ring").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folders_of_other_users_stay(tmp_path: Path) -> None:
    of_another, with_anothers_lock = (
        a_left_folder(tmp_path),
        a_left_folder(tmp_path, "kvatlas-abcd0123"),
    )
    os.chown(of_another, 12345, -1)
    os.chown(with_anothers_lock / "owner.lock", 12345, -1)
    assert sweep(tmp_path) == []


def test_a_store_whose_broker_lives_on_stays_until_it_has_ended(tmp_path: Path) -> None:
    folder = a_left_folder(tmp_path, "kvatlas-nats-0123abcd")
    with (folder / "lock").open("w") as server:
        fcntl.flock(server, fcntl.LOCK_EX)
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [folder]


def test_it_is_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with runtime_folder(tmp_path) as folder:
            modes = [path.stat().st_mode & 0o777 for path in (folder, folder / "owner.lock")]
    finally:
        os.umask(before)
    assert modes == [0o700, 0o600]


def test_a_parent_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(FolderUnusable, match=str(tmp_path / "shm")),
        runtime_folder(tmp_path / "shm"),
    ):
        pass


def test_without_a_temporary_folder_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(FolderUnusable, match=r"found in \['/tmp'\]: name one .* with TMPDIR"):
        temporary_folder()


@pytest.mark.parametrize(
    ("options", "reason"),
    [("ro", "Read-only file system"), ("size=4k,nr_inodes=2", "No space left on device")],
)
def test_no_room_or_no_right_is_one_line_with_the_folder(
    tmp_path: Path, options: str, reason: str
) -> None:
    command = [*with_tmpfs(tmp_path, options), sys.executable, "-P", "-c", OWNER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    error = done.stderr.splitlines()[-1]
    assert error.startswith("kvatlas.schemas.errors.FolderUnusable: ")
    assert reason in error
    assert f"4096 bytes are needed in {tmp_path}" in error
