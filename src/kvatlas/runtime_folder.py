"""A folder in shared memory for rings, sockets and pools, gone with its owner, however that ends.

The owner holds a lock on a file in it. What a killed owner left is taken away by the next one that
starts: a folder whose lock nobody holds is nobody's.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

PREFIX = "kvatlas-"
LOCK = "owner.lock"


@contextlib.contextmanager
def runtime_folder(parent: Path | None = None) -> Generator[Path, None, None]:
    """Yield a fresh folder below `parent`, by default in shared memory where there is some."""
    parent = parent or shared_memory()
    sweep(parent)
    folder, owner_pid = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)), os.getpid()
    try:
        with (folder / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder
    finally:
        if os.getpid() == owner_pid:  # a forked child that ends takes nothing of its parent along
            shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path) -> list[Path]:
    """Remove folders of owners that are gone; return them.

    One without a lock file is being made, or is none of ours.
    """
    swept = []
    for lock_path in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            with lock_path.open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_path.parent, ignore_errors=True)
                swept.append(lock_path.parent)
        except OSError:  # held, removed meanwhile, or somebody else's
            continue
    return swept


def shared_memory() -> Path:
    """Return the folder of shared memory, or of temporary files where the system has none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())
