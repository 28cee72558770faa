"""How long to wait between tries of something that fails: a restart, a connection, a publication.

    failure --next--> first, 2 x first, 4 x first, ... longest, longest     calm --> first again

Pure: callers pass the time, in seconds of one monotonic clock, and do the waiting.
"""

from math import inf

from msgspec import Struct


class Backoff(Struct, gc=False):
    """Pauses between tries, doubled from `first_seconds` up to `longest_seconds`.

    They begin anew after `calm_seconds` without a failure: then what failed has run for so long
    that the next failure is another one. Without it only `reset` lets them begin anew.
    """

    first_seconds: float
    longest_seconds: float
    calm_seconds: float = inf
    #: failures in a row so far
    num_failures: int = 0
    #: when the pause of the last failure is over
    _over_at: float = -inf

    def next(self, now: float) -> float:
        """Note a failure; return the seconds to wait before the next try."""
        if now - self._over_at >= self.calm_seconds:
            self.num_failures = 0
        # the exponent is bounded, so that no number of failures overflows
        pause = min(self.first_seconds * 2.0 ** min(self.num_failures, 64), self.longest_seconds)
        self.num_failures += 1
        self._over_at = now + pause
        return pause

    def seconds_left(self, now: float) -> float:
        """Return how long the pause of the last failure still lasts; 0 when it is over."""
        return max(self._over_at - now, 0.0)

    def reset(self) -> None:
        """Begin anew: what was tried has worked."""
        self.num_failures, self._over_at = 0, -inf
