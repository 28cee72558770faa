"""Compiled kernels are kept for the next process, and none outlives a change of what is in it.

A kernel has in it the kernels and constants of other files, which numba does not look at.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvatlas.indexer.index import kernel

#: six instances hold a block in tier 0; says how many `count_holders` finds, and how it was got
SCRIPT = """
import json
import numba, numpy as np
from kvatlas.indexer.index import kernel

rows = np.zeros((2, kernel.NUM_COLUMNS), np.uint64)
rows[1, kernel.LENGTH] = 1
words, live = np.array([0x0101_0101_0101], np.uint64), np.full(1, kernel.FULL)
num_holders, state = np.zeros(2, np.uint32), np.zeros(kernel.NUM_STATES, np.uint64)
state[kernel.NUM_ROWS] = 2
kernel.count_holders(rows, words, live, num_holders, state)
stats = kernel.count_holders.stats
print(json.dumps({
    "holders": int(num_holders[1]),
    "loaded": sum(stats.cache_hits.values()),
    "folder": stats.cache_path,
    "numba's own": numba.config.CACHE_LOCATOR_CLASSES,
}))
"""


class Copy:
    """The kernels alone, as a package below a scratch folder, that processes import."""

    def __init__(self, folder: Path) -> None:
        self.kernels = folder / "kvatlas" / "indexer" / "index" / "kernel"
        source = Path(kernel.__file__).parent
        shutil.copytree(source, self.kernels, ignore=shutil.ignore_patterns("__pycache__"))
        for package in list(self.kernels.parents)[:3]:
            (package / "__init__.py").touch()
        self.environment = {
            **{name: value for name, value in os.environ.items() if "NUMBA" not in name},
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self) -> dict[str, Any]:
        """Return what a new process says."""
        command = [sys.executable, "-W", "error", "-c", SCRIPT]
        ended = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        said: dict[str, Any] = json.loads(ended.stdout)
        assert said["numba's own"] == ""
        return said

    def change(self, file: str, old: str, new: str) -> None:
        """Change the source of a file, but not its size."""
        text = (self.kernels / file).read_text()
        assert text.count(old) == 1
        assert len(new) == len(old)
        (self.kernels / file).write_text(text.replace(old, new))


def in_tree(copy: Copy, folder: Path) -> Path:
    return copy.kernels / "__pycache__"


def where_told(copy: Copy, folder: Path) -> Path:
    copy.environment["NUMBA_CACHE_DIR"] = str(folder)
    return folder


def in_the_users_folder(copy: Copy, folder: Path) -> Path:
    (copy.kernels / "__pycache__").touch()  # no folder can be made, whoever asks
    copy.environment["XDG_CACHE_HOME"] = str(folder)
    return folder


@pytest.mark.parametrize("place", [in_tree, where_told, in_the_users_folder])
def test_a_kernel_is_kept_until_a_file_that_it_draws_on_changes(place: Any, tmp_path: Path) -> None:
    copy = Copy(tmp_path / "source")
    folder = place(copy, tmp_path / "cache")
    said = copy.run()
    assert (said["holders"], said["loaded"]) == (6, 0)
    assert Path(said["folder"]).is_relative_to(folder)
    said = copy.run()
    assert (said["holders"], said["loaded"]) == (6, 1)
    # in a kernel that it calls
    copy.change(
        "arithmetic.py",
        "EACH_BYTE = np.uint64(0x0101_0101_0101)",
        "EACH_BYTE = np.uint64(0x0101_0101_0001)",
    )
    said = copy.run()
    assert (said["holders"], said["loaded"]) == (5, 0)
    if place is not in_tree:
        return  # where they are kept is one thing, what they draw on another
    # a constant of its own from elsewhere
    copy.change(
        "layout.py",
        "BYTE, BYTE_MASK = np.uint64(GROUP), np.uint64(8)",
        "BYTE, BYTE_MASK = np.uint64(GROUP), np.uint64(1)",
    )
    said = copy.run()
    assert (said["holders"], said["loaded"]) == (40, 0)
    assert copy.run()["loaded"] == 1


def open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


def of_another_user(folder: Path) -> None:
    os.chown(folder, 12345, -1)


def a_link(folder: Path) -> None:
    folder.rename(folder.with_name("planted"))
    folder.symlink_to(folder.with_name("planted"))


@pytest.mark.parametrize("place", [where_told, in_the_users_folder])
@pytest.mark.parametrize("spoil", [open_to_all, of_another_user, a_link])
def test_code_that_others_may_have_written_is_not_run(
    place: Any, spoil: Any, tmp_path: Path
) -> None:
    if spoil is of_another_user and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    copy = Copy(tmp_path / "source")
    place(copy, tmp_path / "cache")
    (copy.kernels / "__pycache__").touch()
    folder = Path(copy.run()["folder"])
    copy.environment.setdefault("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    spoil(folder)
    said = copy.run()
    assert (said["holders"], said["loaded"], said["folder"]) == (6, 0, None)


def test_where_nothing_can_be_kept_each_process_compiles(tmp_path: Path) -> None:
    copy = Copy(tmp_path / "source")
    (tmp_path / "file").touch()
    in_the_users_folder(copy, tmp_path / "file")
    for _ in range(2):
        said = copy.run()
        assert (said["holders"], said["loaded"], said["folder"]) == (6, 0, None)


def test_a_file_with_kernels_draws_on_nothing_that_the_stamp_leaves_out() -> None:
    source = Path(kernel.__file__).parents[2]
    files = [file for file in source.rglob("*.py") if "@compiled(" in file.read_text()]
    assert len(files) > 8
    for file in files:
        imported = [
            n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)
        ]
        ours = [n.module for n in imported if n.module and n.module.startswith("kvatlas")]
        assert all(module.startswith("kvatlas.indexer.index.kernel") for module in ours), file
