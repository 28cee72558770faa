"""How much may be told of a namespace, and for how long it is muted beyond that.

    blocks told  --take-->  within its budget?   no: muted for 1 s, 2 s, 4 s, ... up to 300 s
    time passes  --due-->   whose mute has lasted long enough: all that it holds is told at once

A tenant is a namespace (model, adapter, salt), named by its root. Pure: times are arguments, in
seconds of one monotonic clock.
"""

from msgspec import Struct

from kvatlas.common.token_bucket import TokenBucket
from kvatlas.schemas.settings import ReportingSettings

#: buckets kept; whoever is left out has a full one
MAX_BUCKETS = 16_384
#: namespaces muted at a time; more are left to the instance's own budget (indexer/fold/budgets.py)
MAX_MUTED = 1024

_DEFAULTS = ReportingSettings()


class NamespaceBudgetSettings(Struct, frozen=True):
    """An engine at 20,000 tokens/s stores about 1,250 blocks/s and removes as many."""

    #: see ReportingSettings
    blocks_per_second: float = _DEFAULTS.namespace_blocks_per_second
    burst_blocks: float = _DEFAULTS.namespace_burst_blocks
    #: how long the first mute lasts
    mute_seconds: float = 1.0
    #: doubled each time up to this; without a mute for so long, it begins anew
    max_mute_seconds: float = 300.0


class _Bucket(TokenBucket, gc=False):
    """The blocks that may still be told of a namespace, and how often it was more than that."""

    num_mutes: int = 0
    mute_ended: float = 0.0


class NamespaceBudgets:
    """A bucket for each namespace; it fills with time and empties by what is told.

    What is told of a muted one, such as the removal of what was told before, costs it nothing.
    """

    def __init__(self, settings: NamespaceBudgetSettings) -> None:
        self.settings = settings
        #: the least recently used first
        self._buckets: dict[bytes, _Bucket] = {}
        #: root -> when it ends
        self._muted: dict[bytes, float] = {}

    @property
    def num_over_budget(self) -> int:
        """Namespaces that are muted now."""
        return len(self._muted)

    def spend(self, root: bytes, num_blocks: int, now: float) -> bool:
        """Take blocks out of a bucket; return False if the namespace is muted from now on."""
        settings = self.settings
        if not settings.blocks_per_second or root in self._muted:
            return True
        rate, burst, now_ns = settings.blocks_per_second, settings.burst_blocks, round(now * 1e9)
        bucket = self._buckets.pop(root, None) or _Bucket.full(rate, burst, now_ns)
        self._buckets[root] = bucket  # the most recently used
        is_over = not bucket.spend(num_blocks, now_ns) and len(self._muted) < MAX_MUTED
        if is_over:
            self._exceed(root, bucket, now)
        if len(self._buckets) > MAX_BUCKETS:
            del self._buckets[next(each for each in self._buckets if each not in self._muted)]
        return not is_over

    def due(self, now: float) -> list[bytes]:
        """Return the namespaces whose mute has ended, each once."""
        ended = [root for root, until in self._muted.items() if until <= now]
        for root in ended:
            del self._muted[root]
            self._buckets[root].mute_ended = now
        return ended

    def _exceed(self, root: bytes, bucket: _Bucket, now: float) -> None:
        settings = self.settings
        if now >= bucket.mute_ended + settings.max_mute_seconds:
            bucket.num_mutes = 0
        seconds = settings.mute_seconds * 2.0 ** min(bucket.num_mutes, 32)
        self._muted[root] = now + min(seconds, settings.max_mute_seconds)
        bucket.num_mutes += 1
