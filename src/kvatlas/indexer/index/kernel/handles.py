"""All arrays as one argument, because each array that Python passes costs 0.2 us."""

import ctypes
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from kvatlas.indexer.index.kernel.compiling import IS_COMPILED, compiled
from kvatlas.indexer.index.kernel.layout import (
    NUM_COLUMNS,
    NUM_HALVES,
    NUM_TIERS,
    TWO,
    U32,
    U64,
    Number,
)

#: what a handle names, in this order: an address and the length of the first dimension each
HANDLED = ("cells", "directory", "segments", "rows", "words", "masks", "digests", "state")


def handle_of(*arrays: NDArray[Any]) -> U64:
    """Return the handle of the arrays in HANDLED; whoever has it keeps them alive."""
    places = [number for array in arrays for number in (array.ctypes.data, len(array))]
    return np.array(places, np.uint64)


def _pointer_to(kind: Any) -> Callable[..., Any]:
    pointer: Any = types.CPointer(kind)  # type: ignore[no-untyped-call]

    def pointer_to(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.uint64), emit

    return pointer_to


def _content_of(typing_context: Any, content: Any) -> Any:
    pointer: Any = types.CPointer(types.uint64)  # type: ignore[no-untyped-call]

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        made = context.make_array(signature.args[0])(context, builder, value=arguments[0])
        return builder.bitcast(made.data, context.get_value_type(pointer))

    return pointer(content), emit


def _prefetching(typing_context: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        declare: Any = cgutils.get_or_insert_function
        fetch = declare(builder.module, kind, "llvm.prefetch.p0")
        reads_to_keep = [ir.Constant(number, each) for each in (0, 3, 1)]
        builder.call(fetch, [builder.inttoptr(arguments[0], byte), *reads_to_keep])
        return context.get_dummy_value()

    return types.void(types.uint64), emit


def _no_prefetch(address: Number) -> None:
    """Plain Python knows no caches."""


#: has the processor fetch what lies at an address, and goes on
prefetch: Any = intrinsic(_prefetching) if IS_COMPILED else _no_prefetch
pointer_32: Any
pointer_64: Any
array_at: Any
if IS_COMPILED:
    pointer_32, pointer_64 = (intrinsic(_pointer_to(kind)) for kind in (types.uint32, types.uint64))
    content_of: Any = intrinsic(_content_of)
    array_at = numba.carray  # type: ignore[attr-defined]

    @compiled()
    def words_in(content: bytes) -> U64:
        """Return packed hashes as words."""
        words: U64 = array_at(content_of(content), len(content) // 8)
        return words
else:

    def _caster(kind: Any) -> Callable[[Number], Any]:
        return lambda address: ctypes.cast(int(address), ctypes.POINTER(kind))

    def _array_at(pointer: Any, shape: Any) -> NDArray[Any]:
        return np.ctypeslib.as_array(pointer, tuple(map(int, np.atleast_1d(shape))))

    pointer_32, pointer_64 = _caster(ctypes.c_uint32), _caster(ctypes.c_uint64)
    array_at = _array_at

    def words_in(content: bytes) -> U64:
        """Return packed hashes as words."""
        return np.frombuffer(content, np.uint64, len(content) // 8)


@compiled()
def table_of(handle: U64) -> tuple[U32, U32, U32]:
    """Return cells, directory and segments."""
    return (
        array_at(pointer_32(handle[0]), (handle[1], np.uint64(NUM_HALVES))),
        array_at(pointer_32(handle[2]), handle[3]),
        array_at(pointer_32(handle[4]), (handle[5], TWO)),
    )


@compiled()
def sets_of(handle: U64) -> tuple[U64, U64, U64]:
    """Return rows, words and live masks."""
    return (
        array_at(pointer_64(handle[6]), (handle[7], np.uint64(NUM_COLUMNS))),
        array_at(pointer_64(handle[8]), handle[9]),
        array_at(pointer_64(handle[10]), handle[11]),
    )


@compiled()
def digests_of(handle: U64) -> U64:
    """Return the digests."""
    digests: U64 = array_at(pointer_64(handle[12]), (handle[13], np.uint64(NUM_TIERS), TWO))
    return digests


@compiled()
def state_of(handle: U64) -> U64:
    """Return the state."""
    state: U64 = array_at(pointer_64(handle[14]), handle[15])
    return state
