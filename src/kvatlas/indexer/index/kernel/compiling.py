"""How a Python function becomes a kernel; `warm` has all of them ready."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core import config

from kvatlas.indexer.index.kernel.caching import kept_by_all_sources

#: False under NUMBA_DISABLE_JIT, which measures coverage
IS_COMPILED = not vars(config)["DISABLE_JIT"]
#: kernels that `warm` has to compile
_declared: list[tuple[Any, str]] = []
#: all kernels, those of other modules included
_made: list[Any] = []
_warming = threading.Lock()

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(signature: str = "") -> Callable[[Function], Function]:
    """Compile with the options that all kernels share.

    A kernel that Python calls declares its signature and is compiled for nothing else, by `warm`;
    one that only kernels call has none. Where no folder for the on-disk cache is writable, it is
    compiled anew in each process.
    """

    def decorate(function: Function) -> Function:
        try:
            with kept_by_all_sources():
                dispatcher: Any = numba.njit(nogil=True, cache=True)(function)
        except RuntimeError:  # numba found no cache folder
            dispatcher = numba.njit(nogil=True)(function)
        if signature:
            _declared.append((dispatcher, signature))
        _made.append(dispatcher)
        made: Function = dispatcher
        return made

    return decorate


def all_kernels() -> list[Any]:
    """Return the kernels of all modules imported so far; none under NUMBA_DISABLE_JIT."""
    return [each for each in _made if hasattr(each, "stats")]


def warm() -> float:
    """Compile all kernels, or load them from the on-disk cache; return the seconds it took.

    Later calls cost next to nothing. Kernels must not be called before; any thread may warm them.
    """
    started = time.perf_counter()
    with _warming:
        while _declared and IS_COMPILED:
            dispatcher, signature = _declared[-1]
            dispatcher.compile(signature)
            dispatcher.disable_compile()
            _declared.pop()
    return time.perf_counter() - started
