"""Whom to ask what it is: instances that are there and that the fold does not know; pure.

    a lease without an instance,   --due-->  a request for its inventory, which begins with WorkerUp
    a batch of an unknown name

A living instance is unknown when what it said of itself has left the log, or was lost, or when
there were too many instances then. Names that somebody invents cost a few requests, which nobody
answers.
"""

from collections.abc import Callable, Iterable

from kvatlas.schemas.ids import InstanceId

#: names that have spoken and wait to be asked; more wait until they speak again
MAX_WAITING = 256
#: names that were asked, with the pause until they are asked again; the longest known goes first
MAX_ASKED = 4_096
#: of these pauses: twice as long each time, up to the longest
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 2.0, 60.0


class Introductions:
    """Says who is asked next: who has a lease before who has only spoken, each now and then."""

    def __init__(self) -> None:
        #: names that have spoken, the first one first
        self._waiting: dict[InstanceId, None] = {}
        #: name -> when it may be asked again, and the pause after that
        self._asked: dict[InstanceId, tuple[float, float]] = {}

    def spoke(self, instance: InstanceId) -> None:
        """Note that an unknown instance has said something."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting[instance] = None

    def due(
        self,
        leased: Iterable[InstanceId],
        is_known: Callable[[InstanceId], bool],
        most: int,
        now: float,
    ) -> list[InstanceId]:
        """Return up to so many that are to be asked now; `leased` are those with a lease.

        O(leases). Those that are returned are not due again before their pause is over.
        """
        found: list[InstanceId] = []
        for instance in leased:
            if len(found) == most:
                return found
            if not is_known(instance):
                self._take(instance, now, found)
        while self._waiting and len(found) < most:
            instance = next(iter(self._waiting))
            del self._waiting[instance]
            if not is_known(instance):
                self._take(instance, now, found)
        return found

    def _take(self, instance: InstanceId, now: float, found: list[InstanceId]) -> None:
        self._waiting.pop(instance, None)
        next_at, pause = self._asked.get(instance, (now, FIRST_PAUSE_SECONDS))
        if now < next_at:
            return
        self._asked.pop(instance, None)
        self._asked[instance] = now + pause, min(2 * pause, MAX_PAUSE_SECONDS)
        if len(self._asked) > MAX_ASKED:
            del self._asked[next(iter(self._asked))]
        found.append(instance)
