"""Which epochs were replaced by one that is not there: forged, or of a lost bucket; pure.

    batch of a lower epoch --spoke--> its lease is renewed, and again --due--> its instance has to
                                                                   hear that the higher one is over

An instance whose name another process has taken loses its lease to it, and ends. One that goes on
and renews its lease is alive, and the higher epoch is nobody's: what it says has no effect until it
begins an epoch above. It does so on a record that the higher one has expired.
"""

from msgspec import Struct

from kvatlas.events.leases import LeaseChange
from kvatlas.schemas.ids import InstanceId

#: instances that are watched; more are left out until one of them is settled
MAX_WATCHED = 1_024
#: renewals of the lower epoch's lease after it spoke: the first may have been on its way before
#: the higher epoch took over
RENEWALS = 2


class _Watched(Struct):
    epoch: int
    newer: int
    num_renewals: int = 0


class SupersededEpochs:
    """Follows instances that speak in an epoch that a newer one has replaced."""

    def __init__(self) -> None:
        self._watched: dict[InstanceId, _Watched] = {}

    def spoke(self, instance: InstanceId, epoch: int, newer: int) -> None:
        """Note a batch of an epoch that `newer` has replaced."""
        watched = self._watched.get(instance)
        if watched is None and len(self._watched) >= MAX_WATCHED:
            return
        if watched is None or (epoch, newer) > (watched.epoch, watched.newer):
            self._watched[instance] = _Watched(epoch, newer)

    def take(self, change: LeaseChange) -> None:
        """Take in what a lease did."""
        watched = self._watched.get(change.instance)
        if watched is None:
            return
        if change.kind == "alive" and change.epoch == watched.epoch:
            watched.num_renewals += 1
        else:  # it ended, or somebody else has it
            del self._watched[change.instance]

    def due(self) -> list[tuple[InstanceId, int]]:
        """Return instances that live in a lower epoch, each with the higher one that is nobody's.

        Each is returned once; it is watched anew when it speaks again.
        """
        found = [
            (name, each.newer)
            for name, each in self._watched.items()
            if each.num_renewals >= RENEWALS
        ]
        for name, _ in found:
            del self._watched[name]
        return found
