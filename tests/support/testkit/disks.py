"""Disks that fill up: small file systems in memory, which only root may mount."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount a small disk at a folder that it makes; skip the test where that is not allowed."""
    folder.mkdir(parents=True)
    size = ("-o", f"size={megabytes}m")
    if subprocess.run(("mount", "-t", "tmpfs", *size, "tmpfs", folder), check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(("umount", "--lazy", folder), check=True)


def fill(disk: Path) -> Path:
    """Leave no room on a disk; return the file to remove for it."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                pass
    return ballast
