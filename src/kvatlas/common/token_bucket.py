"""How much may be taken at once and over time: of the log, of a namespace, of the dead letters.

    tokens_per_second --fill--> tokens_left, at most burst_tokens --take-->

Pure. Times are arguments, in ns of one clock, which may stand still and step back.
"""

from typing import Self

from msgspec import Struct


class TokenBucket(Struct, gc=False):
    """Gives, in any span of t seconds, no more than burst_tokens + t * tokens_per_second.

    Only time beyond `filled_at_ns` fills it, so a clock that steps back gives nothing until it has
    caught up.
    """

    tokens_per_second: float
    burst_tokens: float
    #: from 0 to burst_tokens, as of filled_at_ns
    tokens_left: float
    #: the latest time that it was told; never falls
    filled_at_ns: int

    @classmethod
    def full(cls, tokens_per_second: float, burst_tokens: float, now_ns: int) -> Self:
        """Return a bucket of which nothing has been taken."""
        return cls(tokens_per_second, burst_tokens, burst_tokens, now_ns)

    def fill(self, now_ns: int) -> float:
        """Add what has come by now; return how many tokens there are, which may be a fraction."""
        waited_ns = now_ns - self.filled_at_ns
        if waited_ns > 0:
            come = waited_ns * self.tokens_per_second / 1e9
            self.tokens_left = min(self.burst_tokens, self.tokens_left + come)
            self.filled_at_ns = now_ns
        return self.tokens_left

    def spend(self, num_tokens: float, now_ns: int) -> bool:
        """Take tokens, 0 or more; return whether there were as many. If not, none is left."""
        left = self.fill(now_ns) - num_tokens
        self.tokens_left = max(left, 0.0)
        return left >= 0
