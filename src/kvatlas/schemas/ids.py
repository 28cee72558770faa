"""The words of the fleet: tiers and instances."""

from enum import IntEnum
from typing import NamedTuple


class Tier(IntEnum):
    """Where a block lies, best first; the numbers are wire values."""

    hbm = 0
    dram = 1
    ssd = 2
    remote = 3
    other = 4


NUM_TIERS = len(Tier)


class InstanceId(NamedTuple):
    """One rank of one worker: the unit that has an epoch, a sequence, a lease and a digest."""

    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"
