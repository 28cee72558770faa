"""Compiling all kernels, or loading them from the on-disk cache: `kvatlas warm`, and each role."""

import time

from kvatlas.indexer import fence_kernel, kernel, prompt_kernel

#: their kernels are declared because they are imported
DECLARE = (fence_kernel, kernel, prompt_kernel)


def warm_kernels() -> float:
    """Have every kernel ready to be called; return the seconds it took.

    With a cache some tenths of a second, without one about half a minute. Any thread may do it.
    """
    started = time.perf_counter()
    kernel.warm()
    prompt_kernel.warm()
    return time.perf_counter() - started


def cache_folder() -> str:
    """Return where compiled kernels are kept for the next process; empty where nowhere."""
    stats = getattr(kernel.store, "stats", None)
    return str(getattr(stats, "cache_path", None) or "")
