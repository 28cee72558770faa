"""Where the arrays of an index live: in this process alone, or where others can read them.

The index asks for arrays by name and tells when one has been replaced. What readers need is
`cells`, `directory`, `rows`, `words` and `masks`; everything else stays with the index.
"""

import math
import mmap
import sys
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvatlas.schemas.errors import IndexFull

U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Number = TypeVar("Number", np.uint32, np.uint64)


#: Python names it from 3.13 on only. Without it a kernel that does not overcommit counts the whole
#: reservation, and a fork fails
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0


class TableLayout(NamedTuple):
    """What a search in the block table has to know beside the arrays: see kernel.layout."""

    multiplier: int
    directory_shift: int
    segment_bits: int


class ReadArrays(NamedTuple):
    """The arrays that a match walks."""

    cells: U32
    directory: U32
    rows: U64
    words: U64
    masks: U64


class Arrays(Protocol):
    """Gives zeroed arrays. Of two arrays of one name, the older one is void after `bind`."""

    def reserve(self, name: str, num_lines: int, num_columns: int) -> U32:
        """Return an array that takes address space now, and memory by and by.

        Raises IndexFull when there is no address space for it. Only lines that `provide` has said
        yes to may be touched.
        """
        ...

    def provide(self, name: str, num_lines: int) -> bool:
        """Have memory for the first lines of a reserved array; False if there is none."""
        ...

    def shortage(self, num_bytes: int) -> str:
        """Return, for a message, where there is no memory, how much is free, what to change."""
        ...

    def zeros(self, name: str, shape: tuple[int, ...], kind: type[Number]) -> NDArray[Number]:
        """Return an array.

        Raises IndexFull when there is no memory for it; all arrays since the last `bind` are void
        then.
        """
        ...

    def bind(self, arrays: ReadArrays, layout: TableLayout) -> None:
        """Take it that from now on readers find the index in these."""
        ...


class PrivateArrays:
    """Arrays in the memory of this process; the system gives it where they are written to."""

    def reserve(self, name: str, num_lines: int, num_columns: int) -> U32:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        num_bytes = 4 * num_lines * num_columns
        try:
            region = mmap.mmap(-1, num_bytes, flags=flags)
        except OSError as error:
            raise IndexFull(f"no address space for {name}: {self.shortage(num_bytes)}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                region.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(region, np.uint32).reshape(num_lines, num_columns)

    def provide(self, name: str, num_lines: int) -> bool:
        return True

    def shortage(self, num_bytes: int) -> str:
        return (
            f"{num_bytes} bytes are needed in this process: raise its limit of memory (ulimit -v)"
        )

    def zeros(self, name: str, shape: tuple[int, ...], kind: type[Number]) -> NDArray[Number]:
        try:
            return np.zeros(shape, kind)
        except MemoryError as error:
            num_bytes = math.prod(shape) * np.dtype(kind).itemsize
            raise IndexFull(f"no memory for {name}: {self.shortage(num_bytes)}") from error

    def bind(self, arrays: ReadArrays, layout: TableLayout) -> None:
        """Nobody else looks."""
