"""The page that writer and readers share: what each of its words means."""

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.fence_kernel import HEADER_WORDS
from kvatlas.schemas.errors import IndexFull

U64 = NDArray[np.uint64]

FILE = "header"
#: of this layout; readers refuse any other
FORMAT = 0x6B76_6174_6C61_7302

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


def create_header(path: Path) -> U64:
    """Return a fresh header in a file of its own, zero but for its format. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, HEADER_BYTES)
        if hasattr(os, "posix_fallocate"):  # or the first write would be a SIGBUS
            os.posix_fallocate(descriptor, 0, HEADER_BYTES)
        header = np.frombuffer(mmap.mmap(descriptor, HEADER_BYTES), np.uint64)
    except OSError as error:
        path.unlink()
        raise IndexFull(f"no room for the header of a shared index: {error}") from error
    finally:
        os.close(descriptor)
    header[FORMAT_WORD] = FORMAT
    return header


def open_header(path: Path) -> tuple[U64, int] | None:
    """Return the header and the number of its file; None if there is none of this format.

    Raises OSError where there is a file that cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
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
