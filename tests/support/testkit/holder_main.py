"""A process that takes the lock of a pool and keeps it. Run as `python holder_main.py POOL`."""

import sys
from pathlib import Path

from kvatlas.worker_hooks.transfer.pool_file import attach_pool_file

if __name__ == "__main__":
    with attach_pool_file(Path(sys.argv[1])).locked(1.0) as has_lock:
        print(has_lock, flush=True)
        sys.stdin.read()
