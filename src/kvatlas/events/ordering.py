"""Order within an instance's stream of batches; pure, asked by `IndexState` for each batch."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kvatlas.schemas.ids import InstanceId


class Verdict(StrEnum):
    """What a batch is, seen from those before it."""

    next = "next"
    #: first batch of a higher epoch: whatever the instance held before is gone
    new_epoch = "new_epoch"
    #: the same epoch, but batches before this one are missing
    gap = "gap"
    duplicate = "duplicate"
    old_epoch = "old_epoch"
    #: the epoch has ended: its instance went down or was declared dead
    ended_epoch = "ended_epoch"


class Position(NamedTuple):
    """The last batch of an instance that counts."""

    epoch: int
    seq: int


class Tracked(NamedTuple):
    """All that is known of one instance's order."""

    instance: InstanceId
    epoch: int
    seq: int
    has_ended: bool


_NOWHERE = Position(0, 0)
# An enum's members cost an attribute look-up each time, and every batch passes here.
_NEXT, _DUPLICATE = Verdict.next, Verdict.duplicate


class SequenceTracker:
    """Decides whether a batch is next, old, or proof that one was missed.

    A higher epoch restarts the count; when its first batch is not number 1, those before are
    missing, which the caller sees from the number. A lower epoch is old news. After a gap the count
    goes on from the batch that showed it, so that one loss is one gap, and a batch that turns up
    late is a duplicate.
    """

    def __init__(self) -> None:
        #: (epoch, seq) of the last batch that counts
        self._last: dict[InstanceId, tuple[int, int]] = {}
        #: instances whose epoch in _last has ended
        self._ended: set[InstanceId] = set()

    def judge(self, instance: InstanceId, epoch: int, seq: int) -> Verdict:
        """Return what the batch is and take it as the last one where it moves the count."""
        last_epoch, last_seq = self._last.get(instance, _NOWHERE)
        if epoch == last_epoch:
            if instance in self._ended:
                return Verdict.ended_epoch
            if seq <= last_seq:
                return _DUPLICATE
            self._last[instance] = epoch, seq
            return _NEXT if seq == last_seq + 1 else Verdict.gap
        if epoch < last_epoch:
            return Verdict.old_epoch
        self._last[instance] = epoch, seq
        self._ended.discard(instance)
        return Verdict.new_epoch

    def begin(self, instance: InstanceId, epoch: int) -> None:
        """Open a higher epoch before its first batch; another one changes nothing."""
        if epoch > self.position(instance).epoch:
            self._last[instance] = epoch, 0
            self._ended.discard(instance)

    def end(self, instance: InstanceId, epoch: int) -> None:
        """Let nothing of `epoch` or before count any more; an older epoch changes nothing."""
        last = self.position(instance)
        if epoch < last.epoch:
            return
        if epoch > last.epoch:
            self._last[instance] = epoch, 0
        self._ended.add(instance)

    def forget(self, instance: InstanceId) -> None:
        """Drop all memory of the instance: its next batch, whatever it is, opens an epoch."""
        self._last.pop(instance, None)
        self._ended.discard(instance)

    def position(self, instance: InstanceId) -> Position:
        """Return the last batch of the instance that counts; (0, 0) before any."""
        return Position(*self._last.get(instance, _NOWHERE))

    def export(self) -> list[Tracked]:
        """Return everything, for `restore`."""
        return [
            Tracked(instance, epoch, seq, instance in self._ended)
            for instance, (epoch, seq) in self._last.items()
        ]

    def restore(self, every: Sequence[Tracked]) -> None:
        """Know what was exported and nothing else."""
        self._last = {each.instance: (each.epoch, each.seq) for each in every}
        self._ended = {each.instance for each in every if each.has_ended}
