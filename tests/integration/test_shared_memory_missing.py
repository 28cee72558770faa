"""Roles where /dev/shm is full or cannot be written to: one line each, and no role half up."""

import subprocess
import sys
from pathlib import Path

import pytest

from testkit.mounts import with_tmpfs

SHM = Path("/dev/shm")
#: how /dev/shm is mounted, what is started, what it says
CASES = {
    "read-only": (
        "ro",
        ["--routers", "1"],
        "folder /dev/shm: no folder can be made in it (Read-on",
    ),
    "no index": ("size=2m", ["--routers", "1"], "3670016 bytes are needed in /dev/shm/kvatlas-"),
    "no ring": ("size=8m", ["--workers", "1"], "16781312 bytes are needed in /dev/shm/kvatlas-"),
}


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm here")
@pytest.mark.parametrize("case", CASES)
def test_serve_names_the_folder_and_the_bytes(case: str) -> None:
    options, arguments, line = CASES[case]
    command = [*with_tmpfs(SHM, options), sys.executable, "-P", "-m", "kvatlas", "serve"]
    command += ["--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 1
    assert line in done.stderr
    assert "Traceback" not in done.stderr
    assert "make /dev/shm larger" in done.stderr or case == "read-only"
