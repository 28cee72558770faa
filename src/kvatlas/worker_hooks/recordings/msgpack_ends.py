"""Where a msgpack value ends: batches lie back to back in files, and msgspec reads one a call."""

#: type byte -> (bytes of the length field, bytes a unit of it, values a unit)
_SIZED = {
    0xC4: (1, 1, 0), 0xC5: (2, 1, 0), 0xC6: (4, 1, 0),  # bin
    0xD9: (1, 1, 0), 0xDA: (2, 1, 0), 0xDB: (4, 1, 0),  # str
    0xDC: (2, 0, 1), 0xDD: (4, 0, 1),  # array
    0xDE: (2, 0, 2), 0xDF: (4, 0, 2),  # map
}  # fmt: skip
#: type byte -> bytes that follow
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8,
    0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,  # ext of fixed length
}  # fmt: skip
_EXT = {0xC7: 1, 0xC8: 2, 0xC9: 4}


def end_of_value(content: bytes, start: int) -> int | None:
    """Return where the value that begins at `start` ends; None if the content ends before."""
    at, num_open = start, 1
    while num_open:
        if at >= len(content):
            return None
        kind = content[at]
        at += 1
        num_open -= 1
        if kind <= 0x7F or kind >= 0xE0:  # small integers
            continue
        if kind <= 0x8F:
            num_open += 2 * (kind & 0x0F)
        elif kind <= 0x9F:
            num_open += kind & 0x0F
        elif kind <= 0xBF:
            at += kind & 0x1F
        elif kind in _FIXED:
            at += _FIXED[kind]
        elif kind in _EXT:
            length = int.from_bytes(content[at : at + _EXT[kind]], "big")
            at += _EXT[kind] + 1 + length
        elif kind in _SIZED:
            field_bytes, unit_bytes, unit_values = _SIZED[kind]
            length = int.from_bytes(content[at : at + field_bytes], "big")
            at += field_bytes + unit_bytes * length
            num_open += unit_values * length
        else:  # 0xC1 is never used
            return None
    return at if at <= len(content) else None
