"""Commands that see a file system of their own at a folder, such as a small or read-only one."""

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

_MOUNT = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'


def with_tmpfs(folder: Path, options: str) -> list[str]:
    """Return what goes before a command that is to see a tmpfs at `folder`; nothing else sees it.

    Skips the test where nothing may be mounted.
    """
    unshare = _unshare()
    if unshare is None:
        pytest.skip("mounting needs root or user namespaces (unshare -m)")
    return [*unshare, "sh", "-c", _MOUNT, "sh", options, str(folder)]


@cache
def _unshare() -> list[str] | None:
    if shutil.which("unshare") is None:
        return None
    for options in (["-m"], ["-m", "-r"]):
        command = ["unshare", *options, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return ["unshare", *options]
    return None
