"""Who failed requests lately, and how long to stay away; pure."""

from typing import NamedTuple

from kvatlas.schemas.ids import InstanceId


class _Failing(NamedTuple):
    pause_seconds: float
    until: float


class Failures:
    """Avoids an instance after a failed request, twice as long each time until one succeeds.

    The index forgets a dead worker when its lease ends; until then its callers know better.
    """

    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first_seconds, self._max_seconds = first_seconds, max_seconds
        self._failing: dict[InstanceId, _Failing] = {}

    def failed(self, instance: InstanceId, now: float) -> None:
        """A request failed. Several that were under way together count once."""
        known = self._failing.get(instance)
        if known is not None and now < known.until:
            return
        is_recent = known is not None and now < known.until + self._max_seconds
        pause = 2 * known.pause_seconds if known is not None and is_recent else self._first_seconds
        pause = min(pause, self._max_seconds)
        self._failing[instance] = _Failing(pause, now + pause)

    def succeeded(self, instance: InstanceId) -> None:
        """A request succeeded."""
        self._failing.pop(instance, None)

    def avoided(self, now: float) -> frozenset[InstanceId]:
        """Return who is to be left out for now."""
        if not self._failing:
            return frozenset()
        return frozenset(name for name, failing in self._failing.items() if now < failing.until)
