"""Marks of the last batches, by which a late repetition is told from another incarnation."""

from array import array

import xxhash

#: batches remembered: more than any engine sends between two looks at one of them
DEFAULT_SIZE = 8192


def mark_of(payload: bytes) -> int:
    """Return what stands for a batch; batches carry their time, so no two are equal."""
    return xxhash.xxh3_64_intdigest(payload)


class PayloadMarks:
    """The marks of the last `size` sequences. Every step is O(1), memory 16 bytes each."""

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        self._size = size
        self._sequences = array("q", [-1]) * size
        self._marks = array("Q", [0]) * size

    def put(self, sequence: int, mark: int) -> None:
        """Remember a mark, in place of the one `size` sequences before it."""
        self._sequences[sequence % self._size] = sequence
        self._marks[sequence % self._size] = mark

    def get(self, sequence: int) -> int | None:
        """Return the mark of a sequence, None if it is not remembered."""
        at = sequence % self._size
        return self._marks[at] if self._sequences[at] == sequence else None
