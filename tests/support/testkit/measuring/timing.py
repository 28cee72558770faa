"""Clocks, percentiles and resident memory, for whoever measures; standard library only."""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

_Item = TypeVar("_Item")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Collect no garbage while this is entered."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def mean_us(call: Callable[[], object], calls: int) -> float:
    """Return the mean time of a call in microseconds, after one that does not count."""
    call()
    with without_gc():
        began = time.perf_counter_ns()
        for _ in range(calls):
            call()
        spent = time.perf_counter_ns() - began
    return spent / calls / 1e3


def mean_us_over(call: Callable[[_Item], object], items: Sequence[_Item]) -> float:
    """Return the mean time of a call in microseconds, over all the items."""
    with without_gc():
        began = time.perf_counter_ns()
        for item in items:
            call(item)
        spent = time.perf_counter_ns() - began
    return spent / len(items) / 1e3


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and the largest."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return {
        "p50": ordered[last // 2],
        "p99": ordered[int(last * 0.99)],
        "max": ordered[last],
    }


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes; Linux only."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def cpu_seconds_of(pid: int) -> float:
    """Return what a process has used on all CPUs so far, in steps of 10 ms; 0 without /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
