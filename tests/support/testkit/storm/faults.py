"""The schedule of a storm: which process meets what, all from one seed."""

from collections.abc import Iterator
from random import Random

from msgspec import Struct

#: every kind comes once before any comes again
KINDS = (
    "kill_broker",
    "kill_indexer",
    "kill_router",
    "kill_archive",
    "kill_worker",
    "pause_broker",
    "pause_indexer",
    "pause_router",
    "pause_archive",
    "pause_worker",
)
#: a worker that is paused for this long has lost its lease (see fleet.py) when it goes on
OUTLIVES_LEASE_SECONDS = 8.0


class Fault(Struct, frozen=True):
    """One process is killed or paused for a while, then started again or continued."""

    kind: str
    target: str
    seconds: float
    #: the next fault does not wait until everybody has recovered from this one
    overlaps: bool
    #: until the next one
    pause_seconds: float


def schedule(seed: int, workers: list[str], indexers: list[str]) -> Iterator[Fault]:
    """Yield faults without end, equal for equal seeds."""
    random = Random(f"faults {seed}")
    targets = {"indexer": indexers, "worker": workers}
    while True:
        kinds = list(KINDS)
        random.shuffle(kinds)
        for kind in kinds:
            action, _, role = kind.partition("_")
            seconds = random.uniform(0.1, 1.0) if action == "kill" else random.uniform(0.5, 2.5)
            if kind == "pause_worker" and random.random() < 0.5:
                seconds = OUTLIVES_LEASE_SECONDS
            target = random.choice(targets.get(role, [role]))
            yield Fault(kind, target, seconds, random.random() < 0.25, random.uniform(0.2, 1.0))
