"""Compiled code that walks a body before anything is built from it.

What is refused for its length is counted up to the limit and not read to its end. A walk ends
where a value ends, where more was found than may be (TOO_MANY), or at what is no value (NO_VALUE),
which is left to the decoder.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index.kernel import compiled

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]

TOO_MANY, NO_VALUE = -1, -2
#: how a string's length is written behind its tag
_STRING_SIZES = {0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_TEXT = "Array(uint8, 1, 'C', readonly=True)"


@compiled(f"int64({_TEXT}, int64, int64)")
def end_of_json(text: U8, at: int, max_commas: int) -> int:
    """Return where the JSON value that begins at a byte ends, if it has no more commas than that.

    Those in strings do not count. What it takes for a value may be none; it always ends.
    """
    depth, commas, in_string, is_escaped = 0, 0, False, False
    for i in range(at, text.size):
        byte = text[i]
        if in_string:
            if is_escaped:
                is_escaped = False
            elif byte == 92:  # \
                is_escaped = True
            elif byte == 34:
                in_string = False
                if depth == 0:
                    return i + 1
        elif byte == 34:  # "
            in_string = True
        elif byte == 44:  # ,
            if depth == 0:
                return i
            commas += 1
            if commas > max_commas:
                return TOO_MANY
        elif byte == 91 or byte == 123:  # [ {
            depth += 1
        elif byte == 93 or byte == 125:  # ] }
            if depth == 0:
                return i
            depth -= 1
            if depth == 0:
                return i + 1
    return NO_VALUE


@compiled()
def number_at(text: U8, at: int, num_bytes: int) -> Any:
    """Return the big-endian number that begins at a byte; 0 where the text is cut off."""
    value = 0
    if at + num_bytes <= text.size:
        for i in range(num_bytes):
            value = value * 256 + int(text[at + i])
    return value


@compiled(f"int64({_TEXT}, int64, int64)")
def end_of_msgpack(text: U8, at: int, max_items: int) -> int:
    """Return where the msgpack value that begins at a byte ends, if it has no more items than that.

    Items are those of all arrays and maps in it, keys and values apart.
    """
    todo, items = 1, 0
    while todo > 0:
        if at >= text.size:
            return NO_VALUE
        todo -= 1
        tag = int(text[at])
        at += 1
        more = 0
        if tag <= 0x7F or tag >= 0xE0 or tag == 0xC0 or tag == 0xC2 or tag == 0xC3:
            pass
        elif tag <= 0x8F:
            more = 2 * (tag & 15)
        elif tag <= 0x9F:
            more = tag & 15
        elif tag <= 0xBF:
            at += tag & 31
        elif tag == 0xC4 or tag == 0xD9:
            at += 1 + number_at(text, at, 1)
        elif tag == 0xC5 or tag == 0xDA:
            at += 2 + number_at(text, at, 2)
        elif tag == 0xC6 or tag == 0xDB:
            at += 4 + number_at(text, at, 4)
        elif tag == 0xCC or tag == 0xD0:
            at += 1
        elif tag == 0xCD or tag == 0xD1:
            at += 2
        elif tag == 0xCE or tag == 0xD2 or tag == 0xCA:
            at += 4
        elif tag == 0xCF or tag == 0xD3 or tag == 0xCB:
            at += 8
        elif tag == 0xDC:
            more = number_at(text, at, 2)
            at += 2
        elif tag == 0xDD:
            more = number_at(text, at, 4)
            at += 4
        elif tag == 0xDE:
            more = 2 * number_at(text, at, 2)
            at += 2
        elif tag == 0xDF:
            more = 2 * number_at(text, at, 4)
            at += 4
        else:  # extensions, of which no body has any
            return NO_VALUE
        todo += more
        items += more
        if items > max_items:
            return TOO_MANY
    return at if at <= text.size else NO_VALUE


@compiled(f"int64({_TEXT}, int64, uint32[::1])")
def read_packed_tokens(text: U8, at: int, tokens: U32) -> int:
    """Fill `tokens` with the msgpack integers that begin at a byte; return where they end.

    NO_VALUE where one is no u32.
    """
    for i in range(tokens.size):
        if at >= text.size:
            return NO_VALUE
        tag = int(text[at])
        at += 1
        if tag <= 0x7F:
            tokens[i] = np.uint32(tag)
            continue
        num_bytes = 0
        if tag == 0xCC or tag == 0xD0:
            num_bytes = 1
        elif tag == 0xCD or tag == 0xD1:
            num_bytes = 2
        elif tag == 0xCE or tag == 0xD2:
            num_bytes = 4
        elif tag == 0xCF or tag == 0xD3:
            num_bytes = 8
        if num_bytes == 0 or at + num_bytes > text.size:
            return NO_VALUE
        if tag >= 0xD0 and text[at] >= 128:  # negative
            return NO_VALUE
        value = number_at(text, at, num_bytes) if num_bytes < 8 else number_at(text, at + 4, 4)
        if num_bytes == 8 and number_at(text, at, 4) != 0:
            return NO_VALUE
        tokens[i] = np.uint32(value)
        at += num_bytes
    return at


def bytes_of(body: bytes) -> U8:
    """Return a body as what the kernels walk."""
    return np.frombuffer(body, np.uint8)


# --- the few lengths that are read one by one ---------------------------------------------


def msgpack_array(body: bytes, at: int) -> tuple[int, int] | None:
    """Return the number of items of the array at a byte, and where they begin, or None."""
    return _header(body, at, 0x90, 0xDC)


def msgpack_map(body: bytes, at: int) -> tuple[int, int] | None:
    """Return the number of pairs of the map at a byte, and where they begin, or None."""
    return _header(body, at, 0x80, 0xDE)


def msgpack_name(body: bytes, at: int) -> tuple[bytes, int] | None:
    """Return the string at a byte, and where it ends; None for anything else."""
    tag = body[at] if at < len(body) else 0
    begin, size = at + 1, tag & 31
    if tag in _STRING_SIZES:
        form = _STRING_SIZES[tag]
        begin = at + 1 + struct.calcsize(form)
        if begin > len(body):
            return None
        (size,) = struct.unpack(form, body[at + 1 : begin])
    elif not 0xA0 <= tag <= 0xBF:
        return None
    return (body[begin : begin + size], begin + size) if begin + size <= len(body) else None


def _header(body: bytes, at: int, short: int, long: int) -> tuple[int, int] | None:
    tag = body[at] if at < len(body) else 0
    if tag & 0xF0 == short:
        return tag & 15, at + 1
    if tag in (long, long + 1):
        form = ">H" if tag == long else ">I"
        end = at + 1 + struct.calcsize(form)
        return (*struct.unpack(form, body[at + 1 : end]), end) if end <= len(body) else None
    return None
