"""Who failed requests lately, and how long to stay away; pure."""

from kvatlas.common.backoff import Backoff
from kvatlas.schemas.ids import InstanceId


class Failures:
    """Avoids an instance after a failed request, twice as long each time until one succeeds.

    The index forgets a dead worker when its lease ends; until then its callers know better.
    """

    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first_seconds, self._max_seconds = first_seconds, max_seconds
        self._failing: dict[InstanceId, Backoff] = {}

    def failed(self, instance: InstanceId, now: float) -> None:
        """A request failed. Several that were under way together count once."""
        failing = self._failing.get(instance)
        if failing is None:
            longest = self._max_seconds
            failing = self._failing[instance] = Backoff(self._first_seconds, longest, longest)
        if not failing.seconds_left(now):
            failing.next(now)

    def succeeded(self, instance: InstanceId) -> None:
        """A request succeeded."""
        self._failing.pop(instance, None)

    def avoided(self, now: float) -> frozenset[InstanceId]:
        """Return who is to be left out for now."""
        if not self._failing:
            return frozenset()
        return frozenset(
            name for name, failing in self._failing.items() if failing.seconds_left(now)
        )
