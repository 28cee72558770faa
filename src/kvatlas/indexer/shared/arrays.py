"""The arrays of an index as files in memory: made by the writer, mapped by readers."""

import ctypes
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer import kernel
from kvatlas.indexer.arrays import Layout, Number, ReadArrays
from kvatlas.indexer.shared import header as h
from kvatlas.schemas.errors import IndexFull, InvalidSetting

#: kind and columns of each array, 0 for one dimension
_SHAPES: dict[str, tuple[type[Any], int]] = {
    "cells": (np.uint32, kernel.NUM_HALVES),
    "directory": (np.uint32, 0),
    "rows": (np.uint64, kernel.NUM_COLUMNS),
    "words": (np.uint64, 0),
    "masks": (np.uint64, 0),
}
_C_TYPES = {np.uint32: ctypes.c_uint32, np.uint64: ctypes.c_uint64}


class SharedArrays:
    """Arrays (see indexer/arrays.py) that readers in other processes find by a folder.

    The folder belongs in memory (/dev/shm). One writer at a time: a second raises InvalidSetting.
    What an earlier one left is removed; readers that have it mapped keep it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InvalidSetting(
                "indexer.shared_folder", str(folder), "another index writes here"
            ) from None
        #: what an earlier writer left; readers may need it until our header is there
        self._left = [old for old in folder.iterdir() if old.name not in ("lock", h.FILE)]
        self._token = secrets.randbits(63)
        self.header = h.create_header(folder / f"{self._token:016x}.{h.FILE}")
        self.header[h.TOKEN] = self._token
        self._is_announced = False
        #: data address -> file of an array that was handed out
        self._files: dict[int, tuple[int, Path]] = {}
        #: name -> address of the array that readers use now
        self._bound: dict[str, int] = {}
        self._generation = 0

    def reserve(self, name: str, num_lines: int, num_columns: int) -> NDArray[np.uint32]:
        array = self._made(name, 4 * num_lines * num_columns, is_filled=False)
        return array.view(np.uint32).reshape(num_lines, num_columns)

    def provide(self, name: str, num_lines: int) -> bool:
        _, columns = _SHAPES[name]
        path = next(path for _, path in self._files.values() if path.name.split(".")[1] == name)
        descriptor = os.open(path, os.O_RDWR)
        try:
            _allocate(descriptor, 4 * columns * num_lines)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def zeros(self, name: str, shape: tuple[int, ...], kind: type[Number]) -> NDArray[Number]:
        num_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
        return self._made(name, num_bytes, is_filled=True).view(kind).reshape(shape)

    def bind(self, arrays: ReadArrays, layout: Layout) -> None:
        each: NDArray[Any]
        for at, each in enumerate(tuple[NDArray[Any], ...](arrays)):
            name, address = h.ARRAYS[at], each.ctypes.data
            generation, _ = self._files[address]
            self.header[h.FIRST_ARRAY + 2 * at] = generation
            self.header[h.FIRST_ARRAY + 2 * at + 1] = len(each)
            before = self._bound.get(name)
            self._bound[name] = address
            if before is not None and before != address:
                self._files.pop(before)[1].unlink(missing_ok=True)
        self.header[h.MULTIPLIER : h.SEGMENT_BITS + 1] = layout
        if not self._is_announced:
            self._is_announced = True
            mine = self._folder / f"{self._token:016x}.{h.FILE}"
            mine.replace(self._folder / h.FILE)
            for old in self._left:
                old.unlink(missing_ok=True)

    def write_file(self, name: str, generation: int, content: bytes) -> None:
        """Write a file that readers find by its generation, before they are told of it."""
        path = self._folder / f"{self._token:016x}.{name}.{generation}"
        try:
            path.write_bytes(content)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        # who has read the header before the last one may still open the one before this
        old = self._folder / f"{self._token:016x}.{name}.{generation - 2}"
        old.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the folder free; readers keep what they have."""
        os.close(self._lock)

    def _made(self, name: str, num_bytes: int, is_filled: bool) -> NDArray[np.uint8]:
        """Return a new array of a name, in a file of its own."""
        self._generation += 1
        path = self._folder / f"{self._token:016x}.{name}.{self._generation}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, num_bytes)
            if is_filled:
                _allocate(descriptor, num_bytes)
            array = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        except OSError as error:
            path.unlink()
            raise IndexFull(f"no room for {num_bytes} bytes of {name} in shared memory") from error
        finally:
            os.close(descriptor)
        self._files[array.ctypes.data] = self._generation, path
        return array


class MappedArrays:
    """The arrays as a reader sees them; maps what is new at each `follow`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: file -> array, and what keeps its memory
        self._mapped: dict[str, tuple[NDArray[Any], mmap.mmap]] = {}

    def follow(self, header: NDArray[np.uint64]) -> ReadArrays:
        """Return the arrays that a header names. Raises FileNotFoundError if some are gone."""
        token = int(header[h.TOKEN])
        found = {}
        for at, name in enumerate(h.ARRAYS):
            generation, num_lines = header[h.FIRST_ARRAY + 2 * at :][:2].tolist()
            file = f"{token:016x}.{name}.{generation}"
            found[file] = self._mapped.get(file) or self._map(file, name, num_lines)
        self._mapped = found
        return ReadArrays(*(array for array, _ in found.values()))

    def _map(self, file: str, name: str, num_lines: int) -> tuple[NDArray[Any], mmap.mmap]:
        kind, columns = _SHAPES[name]
        shape = (num_lines, columns) if columns else (num_lines,)
        with (self._folder / file).open("rb") as opened:
            num_bytes = int(np.prod(shape)) * np.dtype(kind).itemsize
            if os.fstat(opened.fileno()).st_size < num_bytes:
                raise ValueError(f"{file} is shorter than its {num_bytes} bytes")
            region = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        address = np.frombuffer(region, np.uint8).ctypes.data
        # kernels are compiled for arrays that may be written to; this memory may not, and would say
        content = (_C_TYPES[kind] * int(np.prod(shape))).from_address(address)
        return np.ctypeslib.as_array(content).reshape(shape), region


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Have memory for a file's first bytes now; that there is none would be a SIGBUS later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
