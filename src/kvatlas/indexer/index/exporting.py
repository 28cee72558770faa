"""What a snapshot of the fold is made of; the bytes around it are in snapshot_format.py.

    IndexState.export --> copy --> {"tables": ..., "flat.rows": ..., ...} --> IndexState.restore

Parts are one consistent cut and stand for exactly the stream sequence that the tables name.
Arrays are parts as they lie in memory.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvatlas.schemas.errors import IndexFull, InvalidInput

#: name -> bytes; nobody changes them afterwards
Parts = Mapping[str, memoryview]
#: memory that the system has found already: finding it takes far longer than a copy
Room = NDArray[np.uint8]
#: a copy that is made; asked once, in any thread, it is put into parts
Export = Callable[[], dict[str, memoryview]]


class InvalidSnapshot(InvalidInput):
    """A snapshot that cannot be used: damaged, of another version, or of another log."""


@runtime_checkable
class Exportable(Protocol):
    """What an index has to do besides, so that snapshots can be taken of it."""

    def export(self, room: Room | None = None) -> Export:
        """Copy everything in it, as of now. O(index), in one go; parts are made later.

        What is large goes into `room`, where that is given and large enough.
        """
        ...

    def restore(self, parts: Parts, numbers: Set[int] | None = None) -> None:
        """Replace everything in it by what was exported from an index of its kind.

        Digests, matches and instance numbers are as they were there, and so is what any further
        event does. `numbers` are those that have to be given out. Raises InvalidSnapshot, and then
        has changed nothing.
        """
        ...


def part_of(array: NDArray[np.generic]) -> memoryview:
    """Return the bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def array_of(parts: Parts, name: str, dtype: DTypeLike, *shape: int) -> NDArray[np.generic]:
    """Return a part as a read-only view of this shape; raises InvalidSnapshot."""
    array = np.frombuffer(bytes_of(parts, name), np.uint8)
    wanted = np.dtype(dtype)
    try:
        found = array.view(wanted).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise InvalidSnapshot(f"part {name}: {array.size} bytes, expected {shape}") from error
    found.flags.writeable = False
    return found


def bytes_of(parts: Parts, name: str) -> memoryview:
    """Return a part; raises InvalidSnapshot when there is none of the name."""
    if name not in parts:
        raise InvalidSnapshot(f"no part {name}: it is of another kind of index")
    return parts[name]


@contextmanager
def refusing() -> Iterator[None]:
    """Let every failure over a snapshot's bytes be an InvalidSnapshot; IndexFull stays one.

    The checks name what is wrong where they can. Whatever passes them and fails later, lack of
    memory included, must not end a start that would succeed with an older snapshot or the log.
    """
    try:
        yield
    except (InvalidSnapshot, IndexFull):
        raise
    except Exception as error:
        raise InvalidSnapshot(f"{type(error).__name__}: {error}") from error


def check_numbers(given: Set[int], wanted: Set[int] | None) -> None:
    """Raise InvalidSnapshot unless the numbers of an index are those that instances have."""
    if wanted is not None and given != wanted:
        raise InvalidSnapshot("instances have other numbers than the index has given out")
