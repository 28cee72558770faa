"""Processes that somebody else may have started, and that may end at any time."""

import psutil

from testkit.waiting import until


async def until_ended(process: psutil.Process) -> None:
    """Return once a process, of whomever, runs no more."""
    await until(lambda: not is_alive(process))


def is_alive(process: psutil.Process) -> bool:
    """Say whether a process runs; one that nobody has waited for yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
