"""Live batches that wait while an engine is asked for those before them."""

from typing import NamedTuple

#: what a waiting batch costs beside its payload: the objects around it and its place in the map
WAITING_OVERHEAD_BYTES = 384


class WaitingBatch(NamedTuple):
    """A batch and when it came."""

    payload: bytes
    mark: int
    #: number of the last question before it
    ask: int


class WaitingBatches:
    """At most one batch a sequence, in `max_bytes` of memory; what finds no room is noted."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._batches: dict[int, WaitingBatch] = {}
        #: of memory that is taken up now
        self.num_bytes = 0
        #: highest sequence for which there was no room, -1 for none
        self.dropped_to = -1

    def __bool__(self) -> bool:
        return bool(self._batches)

    def put(self, sequence: int, batch: WaitingBatch) -> bool:
        """Keep a batch, in place of an earlier one of its sequence; False if there is no room."""
        before = self._batches.get(sequence)
        num_bytes = self.num_bytes + _cost(batch) - (_cost(before) if before else 0)
        if num_bytes > self._max_bytes:
            self.dropped_to = max(self.dropped_to, sequence)
            return False
        self.num_bytes = num_bytes
        self._batches[sequence] = batch
        return True

    def get(self, sequence: int) -> WaitingBatch | None:
        """Return the batch of a sequence."""
        return self._batches.get(sequence)

    def pop(self, sequence: int) -> WaitingBatch:
        """Return the batch of a sequence, which waits no longer."""
        batch = self._batches.pop(sequence)
        self.num_bytes -= _cost(batch)
        return batch

    def sequences(self) -> list[int]:
        """Return the sequences that wait now, lowest first."""
        return sorted(self._batches)

    def came_before(self, ask: int) -> list[int]:
        """Return the sequences of batches that came before a question."""
        return [sequence for sequence, batch in self._batches.items() if batch.ask < ask]

    def clear(self) -> None:
        """Let nothing wait, and nothing be missing."""
        self._batches.clear()
        self.num_bytes, self.dropped_to = 0, -1


def _cost(batch: WaitingBatch) -> int:
    return len(batch.payload) + WAITING_OVERHEAD_BYTES
