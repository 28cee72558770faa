"""How much an instance may say: token buckets by the broker's clock, and when silence is lifted.

    bytes said  --take-->  within its budget?   no: propose `throttled`
    throttled for 1 s, 2 s, 4 s, ...            then: propose `released`, ask for its inventory

Pure. Decides nothing by itself: the records in the log do, alike for all replicas.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from kvatlas.common.token_bucket import TokenBucket
from kvatlas.schemas.ids import InstanceId

#: buckets kept; whoever is left out has a full one
MAX_BUCKETS = 65_536


class BudgetSettings(Struct, frozen=True):
    """An engine at 20,000 tokens/s says about 50 KB/s, its whole inventory is some 10 MB.

    A rate below what engines say throttles honest ones: they are degraded, and what they report
    meanwhile is not in the index.
    """

    #: 0 limits nobody
    bytes_per_second: float = 16_000_000.0
    #: what may be said at once, such as inventories after a restart
    burst_bytes: float = 256_000_000.0
    #: how long the first silence of an epoch lasts
    throttle_seconds: float = 1.0
    #: doubled each time within an epoch up to this
    max_throttle_seconds: float = 300.0


class EventBudgets:
    """A bucket for each instance; it fills with time and empties by what the instance says."""

    def __init__(self, settings: BudgetSettings) -> None:
        self._settings = settings
        #: instance -> bytes that it may say, by the broker's clock
        self._buckets: dict[InstanceId, TokenBucket] = {}

    def spend(self, instance: InstanceId, num_bytes: int, broker_ns: int) -> bool:
        """Take bytes out of the bucket; return whether it had as many."""
        settings = self._settings
        if not settings.bytes_per_second:
            return True
        bucket = self._buckets.get(instance)
        if bucket is None:
            rate, burst = settings.bytes_per_second, settings.burst_bytes
            bucket = self._buckets[instance] = TokenBucket.full(rate, burst, broker_ns)
            if len(self._buckets) > MAX_BUCKETS:
                del self._buckets[next(iter(self._buckets))]
        return bucket.spend(num_bytes, broker_ns)

    def due(
        self, throttled: Iterable[tuple[InstanceId, int, int, int]], broker_ns: int
    ) -> Iterator[tuple[InstanceId, int]]:
        """Yield (instance, epoch) of who has been throttled for long enough.

        `throttled` are (instance, epoch, since when, how often).
        """
        settings = self._settings
        for instance, epoch, since_ns, times in throttled:
            seconds = settings.throttle_seconds * 2.0 ** min(times - 1, 32)
            if broker_ns - since_ns >= 1e9 * min(seconds, settings.max_throttle_seconds):
                yield instance, epoch
