"""The words of the fleet: tiers and instances."""

from enum import IntEnum
from typing import Annotated, NamedTuple

from msgspec import Meta


class Tier(IntEnum):
    """Where a block lies, best first; the numbers are wire values."""

    hbm = 0
    dram = 1
    ssd = 2
    remote = 3
    other = 4


NUM_TIERS = len(Tier)

#: of workers, models and adapters; longer ones would not fit into a subject
MAX_NAME_CHARACTERS = 256
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
MAX_RANK = 2**32 - 1
Rank = Annotated[int, Meta(ge=0, le=MAX_RANK)]


class InstanceId(NamedTuple):
    """One rank of one worker: the unit that has an epoch, a sequence, a lease and a digest."""

    worker: str
    rank: int

    def __str__(self) -> str:
        return f"{self.worker}/{self.rank}"
