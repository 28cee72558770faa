"""What a bridge is told before it follows a stream, and what it counts and shows meanwhile."""

from enum import StrEnum

from msgspec import Struct


class FollowPhase(StrEnum):
    """Where a stream stands."""

    joining = "joining"
    asking = "asking"
    following = "following"


class FollowOptions(Struct, frozen=True, kw_only=True):
    """How patient a bridge is."""

    #: whether the engine can be asked for batches again
    has_replay: bool
    #: blocks of the engine; None: not known, and no doubt heals by turnover
    num_blocks: int | None = None
    #: of memory for live batches kept during a replay; more are dropped and asked for again
    max_waiting_bytes: int = 64 * 1024 * 1024
    #: without batches for so long, the engine is asked whether one was lost; then less and less
    quiet_seconds: float = 2.0
    #: away for so long, what it holds is doubted until it is back
    away_seconds: float = 5.0


class FollowCounters(Struct):
    """What happened so far; all rise only."""

    received: int = 0
    replayed: int = 0
    delivered: int = 0
    #: batches that came twice
    duplicates: int = 0
    #: batches of an incarnation that is gone
    stale: int = 0
    gaps: int = 0
    #: batches that the engine no longer knew
    lost: int = 0
    restarts: int = 0
    asks: int = 0
    failed_asks: int = 0
    #: live batches for which there was no room during a replay
    dropped: int = 0
