"""Compiling all kernels, or loading them from the on-disk cache: `kvatlas warm`, and each role."""

import time
from typing import NamedTuple

from kvatlas.indexer import prompt_kernel
from kvatlas.indexer.index import kernel

# a kernel is declared when its module is imported


class Warmed(NamedTuple):
    """How the kernels were got ready."""

    seconds: float
    #: those that no earlier process had left in the cache, or all where there is none
    num_compiled: int
    #: where compiled kernels are kept for the next process; empty where nothing can be written
    cache_folder: str


def warm_kernels() -> Warmed:
    """Have every kernel ready to be called. Any thread may do it; again costs nothing.

    With a cache it takes some tenths of a second, without one about half a minute.
    """
    started = time.perf_counter()
    kernel.warm()
    prompt_kernel.warm()
    seconds = time.perf_counter() - started
    kernels = kernel.all_kernels()
    is_kept = [bool(each.stats.cache_path) for each in kernels]
    missed = [bool(each.stats.cache_misses) or not each.stats.cache_path for each in kernels]
    folder = str(kernels[0].stats.cache_path) if any(is_kept) else ""
    return Warmed(seconds, sum(missed), folder)
