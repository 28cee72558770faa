"""Which epochs nobody living can speak in any more, through a forgery or a lost bucket; pure.

    batch of a lower epoch           --spoke-->  its lease     --due-->  the epoch has to end, so
    batches of sequences passed      --passed-->  is renewed,            that its instance begins
    the end of an epoch              --ended-->  and again               one above

An instance whose name another process has taken loses its lease to it, and ends. One that goes on
and renews its lease is alive, and what it says has no effect: a higher epoch is nobody's, somebody
else spoke in its own one with a sequence far ahead, or said that it leaves. It begins an epoch
above on a record that the one in the way has expired.
"""

from typing import NamedTuple

from msgspec import Struct

from kvatlas.events.leases import LeaseChange
from kvatlas.schemas.ids import InstanceId

#: instances that are watched; more are left out until one of them is settled
MAX_WATCHED = 1_024
#: renewals of the lower epoch's lease after it spoke: the first may have been on its way before
#: the higher epoch took over
RENEWALS = 2


#: after so many it is no longer watched unless it speaks again: it had published a batch twice
MAX_RENEWALS = 16


class Superseded(NamedTuple):
    """An epoch that has to end, so that who lives begins one above."""

    instance: InstanceId
    epoch: int
    #: only where the fold still is at this sequence; 0: wherever it is
    at_seq: int = 0


class _Watched(Struct):
    epoch: int
    newer: int
    at_seq: int = 0
    #: the highest sequence that was passed
    told: int = 0
    num_renewals: int = 0
    #: what came late once may be a batch that was published twice
    has_gone_on: bool = True


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

    def passed(self, instance: InstanceId, epoch: int, seq: int, at_seq: int) -> None:
        """Note a batch of the newest epoch with a sequence that the fold, at `at_seq`, has passed.

        One that lives and was passed by a forgery says higher and higher ones.
        """
        watched = self._watched.get(instance)
        if watched is None and len(self._watched) >= MAX_WATCHED:
            return
        if watched is None or (watched.newer, watched.at_seq) != (epoch, at_seq):
            watched = _Watched(epoch, epoch, at_seq, seq, has_gone_on=False)
            self._watched[instance] = watched
        elif seq > watched.told:
            watched.told = seq
            watched.has_gone_on = watched.has_gone_on or watched.num_renewals > 0

    def ended(self, instance: InstanceId, epoch: int) -> None:
        """Note that an epoch is over in the log, and has its lease."""
        watched = self._watched.get(instance)
        if watched is None and len(self._watched) >= MAX_WATCHED:
            return
        if watched is None or watched.newer < epoch or watched.at_seq:
            self._watched[instance] = _Watched(epoch, epoch)

    def take(self, change: LeaseChange) -> None:
        """Take in what a lease did."""
        watched = self._watched.get(change.instance)
        if watched is None:
            return
        if change.kind == "alive" and change.epoch == watched.epoch:
            watched.num_renewals += 1
            if watched.num_renewals > MAX_RENEWALS:
                del self._watched[change.instance]
        else:  # it ended, or somebody else has it
            del self._watched[change.instance]

    def due(self) -> list[Superseded]:
        """Return the epochs that have to end: their instances live, and cannot speak in them.

        Each is returned once; it is watched anew when it speaks again.
        """
        found = [
            Superseded(name, each.newer, each.at_seq)
            for name, each in self._watched.items()
            if each.num_renewals >= RENEWALS and each.has_gone_on
        ]
        for each in found:
            del self._watched[each.instance]
        return found
