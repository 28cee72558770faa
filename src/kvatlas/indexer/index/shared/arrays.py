"""The arrays of an index as files in memory: made by the writer, mapped by readers."""

import contextlib
import ctypes
import mmap
import os
import secrets
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.common.own_files import open_file, take_room
from kvatlas.indexer.index import kernel
from kvatlas.indexer.index.arrays import Number, ReadArrays, TableLayout
from kvatlas.indexer.index.shared import header as h
from kvatlas.indexer.index.shared.folder import SharedFolder
from kvatlas.schemas.errors import IndexFull

#: kind and columns of each array, 0 for one dimension
_SHAPES: dict[str, tuple[type[Any], int]] = {
    "cells": (np.uint32, kernel.NUM_HALVES),
    "directory": (np.uint32, 0),
    "rows": (np.uint64, kernel.NUM_COLUMNS),
    "words": (np.uint64, 0),
    "masks": (np.uint64, 0),
}
#: in which room for what is not in the arrays is taken
_ROOM_STEP_BYTES = 64 * 1024
_C_TYPES = {np.uint32: ctypes.c_uint32, np.uint64: ctypes.c_uint64}


class SharedArrays:
    """Arrays (see indexer/index/arrays.py) that readers in other processes find by a folder.

    The folder belongs in memory (/dev/shm). One writer at a time: see SharedFolder for what is
    refused. What an earlier one left is removed; readers that have it mapped keep it.
    Raises IndexFull where there is no room.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = SharedFolder(folder)
        self._token = secrets.randbits(63)
        try:
            self.header = h.create_header(self._folder, f"{self._token:016x}.{h.FILE}")
        except BaseException:
            self._folder.close()
            raise
        self.header[h.TOKEN] = self._token
        self._is_announced = False
        #: data address -> file of an array that was handed out
        self._files: dict[int, tuple[int, str]] = {}
        #: name -> address of the array that readers use now
        self._bound: dict[str, int] = {}
        self._generation = 0

    def reserve(self, name: str, num_lines: int, num_columns: int) -> NDArray[np.uint32]:
        array = self._made(name, 4 * num_lines * num_columns, is_filled=False)
        return array.view(np.uint32).reshape(num_lines, num_columns)

    def provide(self, name: str, num_lines: int) -> bool:
        _, columns = _SHAPES[name]
        file = next(file for _, file in self._files.values() if file.split(".")[1] == name)
        try:
            descriptor = self._folder.open(file)
        except OSError:  # somebody has removed it
            return False
        try:
            self._folder.take_room(descriptor, 4 * columns * num_lines)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def shortage(self, num_bytes: int) -> str:
        return self._folder.shortage(num_bytes)

    def zeros(self, name: str, shape: tuple[int, ...], kind: type[Number]) -> NDArray[Number]:
        num_bytes = prod(shape) * np.dtype(kind).itemsize
        return self._made(name, num_bytes, is_filled=True).view(kind).reshape(shape)

    def bind(self, arrays: ReadArrays, layout: TableLayout) -> None:
        each: NDArray[Any]
        for at, each in enumerate(tuple[NDArray[Any], ...](arrays)):
            name, address = h.ARRAYS[at], each.ctypes.data
            generation, _ = self._files[address]
            self.header[h.FIRST_ARRAY + 2 * at] = generation
            self.header[h.FIRST_ARRAY + 2 * at + 1] = len(each)
            before = self._bound.get(name)
            self._bound[name] = address
            if before is not None and before != address:
                self._folder.remove(self._files.pop(before)[1])
        self.header[h.MULTIPLIER : h.SEGMENT_BITS + 1] = layout
        if not self._is_announced:
            self._is_announced = True
            self._folder.rename(f"{self._token:016x}.{h.FILE}", h.FILE)
            for old in self._folder.left:
                self._folder.remove(old)

    def write_file(self, name: str, generation: int, content: bytes) -> None:
        """Write a file that readers find by its generation, before the header names it.

        Only while the version is odd: where there is no room, those of the two generations before
        go first. Raises OSError, and then none of them is left.
        """
        try:
            self._write_file(name, generation, content)
        except OSError:
            self._remove_file(name, generation - 2)
            self._remove_file(name, generation - 1)
            self._write_file(name, generation, content)
        # who has read the header before the last one may still open the one before this
        self._remove_file(name, generation - 2)

    def _write_file(self, name: str, generation: int, content: bytes) -> None:
        try:
            descriptor = self._folder.create(f"{self._token:016x}.{name}.{generation}")
            with open(descriptor, "wb") as opened:
                # room for more, which later ones take over where there is no other
                num_bytes = -(-len(content) // _ROOM_STEP_BYTES) * _ROOM_STEP_BYTES
                with contextlib.suppress(OSError):
                    take_room(descriptor, num_bytes)
                opened.write(content)
        except OSError:
            self._remove_file(name, generation)
            raise

    def _remove_file(self, name: str, generation: int) -> None:
        self._folder.remove(f"{self._token:016x}.{name}.{generation}")

    def close(self) -> None:
        """Give the folder free; readers keep what they have."""
        self._folder.close()

    def _made(self, name: str, num_bytes: int, is_filled: bool) -> NDArray[np.uint8]:
        """Return a new array of a name, in a file of its own."""
        self._generation += 1
        file = f"{self._token:016x}.{name}.{self._generation}"
        try:
            descriptor = self._folder.create(file)
            try:
                os.ftruncate(descriptor, num_bytes)
                if is_filled:
                    self._folder.take_room(descriptor, num_bytes)
                array = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._folder.remove(file)
            self._remove_unbound()
            problem = f"no room for {name} ({error.strerror or error})"
            raise IndexFull(f"{problem}: {self.shortage(num_bytes)}") from error
        self._files[array.ctypes.data] = self._generation, file
        return array

    def _remove_unbound(self) -> None:
        """Give back what was made for a change that comes to nothing."""
        for address in self._files.keys() - self._bound.values():
            self._folder.remove(self._files.pop(address)[1])


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
        with open(open_file(self._folder / file, os.O_RDONLY), "rb") as opened:
            num_bytes = prod(shape) * np.dtype(kind).itemsize
            if os.fstat(opened.fileno()).st_size < num_bytes:
                raise ValueError(f"{file} is shorter than its {num_bytes} bytes")
            region = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        address = np.frombuffer(region, np.uint8).ctypes.data
        # kernels are compiled for arrays that may be written to; this memory may not, and would say
        content = (_C_TYPES[kind] * prod(shape)).from_address(address)
        return np.ctypeslib.as_array(content).reshape(shape), region
