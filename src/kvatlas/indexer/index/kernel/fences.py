"""Compiled code for one writer and many readers of the same memory: a sequence lock.

    version   even: nobody writes      odd: somebody does
    writer    +1, fence, writes, fence, +1
    reader    version, fence, reads, fence, version again: equal and even, or the reads are void

The fences are what a processor with weak ordering (ARM) needs; on x86 they cost some nanoseconds.
A plain load or store of an aligned u64 is one instruction on both.
"""

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kvatlas.indexer.index.kernel.compiling import IS_COMPILED, compiled
from kvatlas.indexer.index.kernel.layout import ONE, ZERO

U64 = NDArray[np.uint64]

#: where the version stands in the array that both sides share
VERSION = 0
#: from here on to its end: until when readers ask the writer to wait, ns, 0 for not
FIRST_PAUSE = 48
HEADER_WORDS = 64


def _full_fence(typing_context: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


def _no_fence() -> None:
    """As plain Python the interpreter lock orders all."""


#: lets no load or store pass it in either direction
fence: Any = intrinsic(_full_fence) if IS_COMPILED else _no_fence


@compiled("uint64(uint64[::1], boolean)")
def open_window(header: U64, is_forced: bool) -> Any:
    """Begin to write and return 0; unless forced, only if no reader asks for a pause.

    Otherwise returns the latest time until which one asks.
    """
    latest = ZERO
    if not is_forced:
        for slot in range(FIRST_PAUSE, HEADER_WORDS):
            latest = max(latest, header[slot])
    if latest == ZERO:
        header[VERSION] += ONE
        fence()
    return latest


@compiled("void(uint64[::1])")
def close_window(header: U64) -> None:
    """End writing."""
    fence()
    header[VERSION] += ONE


@compiled("uint64(uint64[::1])")
def version_before(header: U64) -> Any:
    """Return the version; what is read later is not older than it."""
    version = header[VERSION]
    fence()
    return version


@compiled("boolean(uint64[::1], uint64)")
def is_unchanged(header: U64, version: Any) -> Any:
    """Say whether all that was read since `version_before` is of this version."""
    fence()
    return header[VERSION] == version
