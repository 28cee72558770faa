"""The page that writer and readers share: what each of its words means."""

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvatlas.common.own_files import open_file, take_room
from kvatlas.indexer.index.kernel.fences import HEADER_WORDS
from kvatlas.indexer.index.shared.folder import FORMAT_MARK, HEADER, SharedFolder
from kvatlas.schemas.errors import IndexFull

U64 = NDArray[np.uint64]

FILE = HEADER
#: of this layout; readers refuse any other
FORMAT = FORMAT_MARK << 8 | 0x02

# words of the header; `VERSION` is the first, pauses are the last
FORMAT_WORD = 1
#: names the files of this writer
TOKEN = 2
#: monotonic ns of the writer's last sign of life, which all processes of a host read alike
PULSE_NS = 3
IS_ENDED = 4
IS_READY, IS_CONNECTED, STREAM_SEQUENCE, LAST_IN_STREAM, HEARD_AT_NS = 5, 6, 7, 8, 9
FLEET_VERSION, FLEET_GENERATION, FLEET_BYTES = 10, 11, 12
MULTIPLIER, DIRECTORY_SHIFT, SEGMENT_BITS = 13, 14, 15
#: generation and lines of each array
FIRST_ARRAY = 16
ARRAYS = ("cells", "directory", "rows", "words", "masks")

HEADER_BYTES = 8 * HEADER_WORDS


def create_header(folder: SharedFolder, name: str) -> U64:
    """Return a fresh header in a file of its own, zero but for its format. Raises IndexFull."""
    try:
        descriptor = folder.create(name)
        try:
            take_room(descriptor, HEADER_BYTES)
            header = np.frombuffer(mmap.mmap(descriptor, HEADER_BYTES), np.uint64)
        finally:
            os.close(descriptor)
    except OSError as error:
        folder.remove(name)
        problem = f"no room for the header of a shared index ({error.strerror or error})"
        raise IndexFull(f"{problem}: {folder.shortage(HEADER_BYTES)}") from error
    header[FORMAT_WORD] = FORMAT
    return header


def open_header(path: Path) -> tuple[U64, int] | None:
    """Return the header and the number of its file; None if there is none of this format.

    Raises OSError where there is a file that cannot be opened.
    """
    try:
        descriptor = open_file(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_size != HEADER_BYTES:
            return None
        header = np.frombuffer(mmap.mmap(descriptor, HEADER_BYTES), np.uint64)
    finally:
        os.close(descriptor)
    return (header, status.st_ino) if header[FORMAT_WORD] == FORMAT else None
