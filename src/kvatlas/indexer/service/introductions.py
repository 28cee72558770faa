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
    """Says who is asked next, each now and then.

    First who has a lease and has spoken, then who has a lease, in turn, then who has only spoken.
    Half of the places are for those who have spoken as long as some wait.
    """

    def __init__(self) -> None:
        #: names that have spoken, the first one first
        self._waiting: dict[InstanceId, None] = {}
        #: name -> when it may be asked again, and the pause after that
        self._asked: dict[InstanceId, tuple[float, float]] = {}
        #: unknown ones with a lease that were looked at so far: where the next look begins
        self._num_looked_at = 0

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
        unknown = [instance for instance in leased if not is_known(instance)]
        has_lease = frozenset(unknown)
        living = [name for name in self._waiting if name in has_lease]
        others = [name for name in self._waiting if name not in has_lease]
        self._take_all(living, is_known, most, now, found)
        self._take_all(others, is_known, most // 2, now, found)
        begin = self._num_looked_at % len(unknown) if unknown else 0
        for instance in unknown[begin:] + unknown[:begin]:
            if len(found) >= most:
                return found
            self._num_looked_at += 1
            self._take(instance, now, found)
        left = [name for name in others if name in self._waiting]
        self._take_all(left, is_known, most, now, found)
        return found

    def _take_all(
        self,
        names: Iterable[InstanceId],
        is_known: Callable[[InstanceId], bool],
        most: int,
        now: float,
        found: list[InstanceId],
    ) -> None:
        for instance in names:
            if len(found) >= most:
                return
            if is_known(instance):
                self._waiting.pop(instance, None)
            else:
                self._take(instance, now, found)

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
