import subprocess
import sys
from pathlib import Path

from kvatlas.runtime_folder import runtime_folder, sweep

OWNER = """
import signal, sys
from pathlib import Path
from kvatlas.runtime_folder import runtime_folder
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
