"""What leases say: whose has ended for long enough to count, and that the log should say more.

Pure, called by the index service.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from kvatlas.events.leases import LeaseChange
from kvatlas.schemas.ids import InstanceId


class LeaseExpiry:
    """Follows the leases, and says whose is missing for too long.

    A lease that was seen to end counts after `ended_seconds`, one that never was there after
    `missing_seconds`. In the first `settling_seconds` after a connect holders whose leases ran out
    during an outage take them again: then only a lease counts that was renewed after the connect.
    """

    def __init__(
        self, ended_seconds: float, missing_seconds: float, settling_seconds: float
    ) -> None:
        self._ended_seconds, self._missing_seconds = ended_seconds, missing_seconds
        self._settling_seconds = settling_seconds
        self._connected_at: float | None = None
        #: instance -> epoch of its lease
        self._held: dict[InstanceId, int] = {}
        #: instances whose lease was seen to end and not to begin again
        self._ended: set[InstanceId] = set()
        #: told to be alive since the connect: the first time may be the state that was found
        self._tellings: Counter[InstanceId] = Counter()
        #: (instance, epoch) without a lease -> since when
        self._missing: dict[tuple[InstanceId, int], float] = {}

    def apply(self, change: LeaseChange) -> None:
        """Take in what a lease did."""
        if change.kind == "alive" and change.epoch is not None:
            self._held[change.instance] = change.epoch
            self._tellings[change.instance] += 1
            self._ended.discard(change.instance)
        else:
            self._held.pop(change.instance, None)
            self._ended.add(change.instance)

    @property
    def held(self) -> Mapping[InstanceId, int]:
        """Each instance that has a lease, with its epoch."""
        return self._held

    def due(
        self, alive: Iterable[tuple[InstanceId, int]], is_connected: bool, now: float
    ) -> list[tuple[InstanceId, int]]:
        """Return those of `alive`, instances with epochs, that are to be declared dead."""
        if not is_connected:
            self._connected_at = None
            self._missing.clear()
            self._tellings.clear()
            return []
        if self._connected_at is None:
            self._connected_at = now
        alive = list(alive)
        without = [(name, epoch) for name, epoch in alive if self._held.get(name, 0) < epoch]
        self._missing = {each: self._missing.get(each, now) for each in without}
        self._ended.intersection_update(name for name, _ in without)
        # names of leases are anybody's: what is kept has a lease, or is an instance
        for name in self._tellings.keys() - self._held.keys() - {name for name, _ in alive}:
            del self._tellings[name]
        is_settling = now - self._connected_at < self._settling_seconds
        return [
            each
            for each in without
            if now - self._missing[each] >= self._grace(each[0])
            and (not is_settling or self._tellings[each[0]] > 1)
        ]

    def _grace(self, instance: InstanceId) -> float:
        return self._ended_seconds if instance in self._ended else self._missing_seconds


class LogSilence:
    """Notices that instances live and nothing that they publish comes: it may not be stored.

    An instance that lives publishes digests, and renews its lease in another stream, which may be
    stored while the log is not (a write to the log's file has failed).
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._connected_at: float | None = None
        self._renewed_at = 0.0

    def renewed(self, now: float) -> None:
        """Note that a lease was taken or renewed."""
        self._renewed_at = now

    def is_silent(self, newest_at: float, is_connected: bool, now: float) -> bool:
        """Say whether the log lacks what was to come since its newest message."""
        if not is_connected:
            self._connected_at = None
            return False
        if self._connected_at is None:
            self._connected_at = now
        since = max(newest_at, self._connected_at)
        return now - since >= self._seconds and self._renewed_at >= since + self._seconds / 2
