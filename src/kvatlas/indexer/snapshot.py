"""What a snapshot of the fold is made of; the bytes around it are in snapshot_format.py.

    IndexState.export --> copy --> {"tables": ..., "flat.rows": ..., ...} --> IndexState.restore

Parts are one consistent cut and stand for exactly the stream sequence that the tables name.
Arrays are parts as they lie in memory.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvatlas.schemas.errors import InvalidInput

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

    def restore(self, parts: Parts) -> None:
        """Replace everything in it by what was exported from an index of its kind.

        Digests, matches and instance numbers are as they were there, and so is what any further
        event does. Raises InvalidSnapshot, and then has changed nothing.
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
    except ValueError as error:
        raise InvalidSnapshot(f"part {name}: {array.size} bytes, expected {shape}") from error
    found.flags.writeable = False
    return found


def bytes_of(parts: Parts, name: str) -> memoryview:
    """Return a part; raises InvalidSnapshot when there is none of the name."""
    if name not in parts:
        raise InvalidSnapshot(f"no part {name}: it is of another kind of index")
    return parts[name]
