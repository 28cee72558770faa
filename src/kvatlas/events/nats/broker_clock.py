"""What time it is at the broker, by exchanges with it: no two hosts' clocks are compared. Pure.

An answer of the broker names its time. It was written between our question and its arrival, so
half of that time bounds the error (Cristian 1989); of the latest exchanges the shortest counts.
"""

from collections import deque
from typing import NamedTuple

#: exchanges that are remembered, one a second: clocks drift apart by some 50 us in a second
MAX_SAMPLES = 32
#: drift within the samples; a larger difference is a clock that was set
_SLACK_NS = 5_000_000


class _Sample(NamedTuple):
    error_ns: int
    #: the broker's time less our monotonic clock
    offset_ns: int


class BrokerClock:
    """Estimates the broker's time from exchanges; ours is monotonic, and may begin anywhere."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=MAX_SAMPLES)
        #: the broker's time less our monotonic clock, in ns; None before the first exchange
        self.offset_ns: int | None = None

    def take(self, sent_ns: int, received_ns: int, broker_ns: int) -> None:
        """Learn from an answer that names the broker's time; ours are monotonic, in ns."""
        error = (received_ns - sent_ns) // 2
        sample = _Sample(error, broker_ns - (sent_ns + error))
        if self.offset_ns is not None:
            best = min(self._samples)
            apart = abs(sample.offset_ns - best.offset_ns)
            if apart > sample.error_ns + best.error_ns + _SLACK_NS:
                self._samples.clear()  # one of the clocks was set, or another node answers
        self._samples.append(sample)
        self.offset_ns = min(self._samples).offset_ns
