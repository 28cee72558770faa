"""A snapshot as bytes: what it stands for, then its parts, each with a checksum.

    "KVATLAS1"  bytes of the header  its XXH3-128     header, JSON     part | part | ...
    8           4, little-endian     16               padded           each padded

Everything is padded to 64 bytes, so in a file that is mapped each array lies aligned.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta, Struct

from kvatlas.events.bus import Message
from kvatlas.indexer.index.exporting import InvalidSnapshot, Parts, refusing

MAGIC = b"KVATLAS1"
#: of the parts; a reader refuses every other one, because arrays have no room for doubt
VERSION = 2
ALIGNMENT = 64
MAX_HEADER_BYTES = 1 << 20
_LENGTH_BYTES, _CHECKSUM_BYTES = 4, 16
_PREFIX_BYTES = len(MAGIC) + _LENGTH_BYTES + _CHECKSUM_BYTES


class Anchor(Struct, frozen=True):
    """A message of the log, by which the log is known again."""

    stream_sequence: int
    broker_ns: int
    #: XXH3-128 of subject and payload
    checksum: str

    @classmethod
    def of(cls, message: Message) -> "Anchor":
        """Return the anchor that a message is."""
        content = message.subject.encode() + b"\0" + message.payload
        checksum = xxhash.xxh3_128_hexdigest(content)
        return cls(message.stream_sequence, message.broker_ns, checksum)


class PartEntry(Struct, frozen=True):
    """A part, without its padding."""

    name: str
    num_bytes: Annotated[int, Meta(ge=0)]
    checksum: str


class SnapshotInfo(Struct, frozen=True):
    """What a snapshot stands for: the fold of everything up to `stream_sequence`, nothing else."""

    stream_sequence: int
    #: the newest message folded in; None where there was none
    anchor: Anchor | None
    #: IndexState.state_digest of the cut
    state_digest: str
    num_blocks: int
    #: by the writer's clock, for people
    taken_ns: int
    writer: str


class Header(Struct, frozen=True):
    """What stands before the parts."""

    version: int
    byte_order: str
    about: SnapshotInfo
    parts: tuple[PartEntry, ...]


def framed(about: SnapshotInfo, parts: Parts) -> Iterator[bytes | memoryview]:
    """Return the bytes of a snapshot. O(parts) for the checksums, and no copies."""
    entries = tuple(
        PartEntry(name, len(part), xxhash.xxh3_128_hexdigest(part)) for name, part in parts.items()
    )
    header = msgspec.json.encode(Header(VERSION, sys.byteorder, about, entries))
    header += b" " * _padding(_PREFIX_BYTES + len(header))
    length = len(header).to_bytes(_LENGTH_BYTES, "little")
    return _pieces(MAGIC + length + xxhash.xxh3_128_digest(header) + header, parts)


def _pieces(before: bytes, parts: Parts) -> Iterator[bytes | memoryview]:
    yield before
    for part in parts.values():
        yield part
        yield bytes(_padding(len(part)))


class SnapshotReader:
    """Takes a snapshot in as it arrives and holds each byte once.

    `num_bytes` is how many there have to be. `accepts` looks at what it stands for and raises
    InvalidSnapshot for what is of no use, before its parts are read.
    """

    def __init__(
        self, num_bytes: int, accepts: Callable[[SnapshotInfo], None] = lambda _: None
    ) -> None:
        self._num_bytes, self._accepts = num_bytes, accepts
        #: until there is a header: all that came
        self._begin = bytearray()
        self._header: Header | None = None
        #: all that came behind it; grows as it comes, so that a claimed size takes no memory
        self._body = bytearray()
        self._num_body_bytes = 0
        self._problem: InvalidSnapshot | None = None

    def feed(self, chunk: bytes) -> bool:
        """Take the next bytes; return whether more are wanted. See `events.objects.Take`."""
        try:
            with refusing():
                if self._header is None:
                    self._begin += chunk
                    self._read_header()
                else:
                    self._read_body(memoryview(chunk))
        except InvalidSnapshot as problem:
            self._problem = problem
        return self._problem is None

    def finish(self) -> tuple[SnapshotInfo, Parts]:
        """Return the snapshot. Raises InvalidSnapshot unless it is whole and undamaged."""
        if self._problem is not None:
            raise self._problem
        if self._header is None or len(self._body) < self._num_body_bytes:
            num_found = len(self._begin) + len(self._body)
            raise InvalidSnapshot(f"it ends after {num_found} of {self._num_bytes} bytes")
        parts: dict[str, memoryview] = {}
        offset = 0
        for entry in self._header.parts:
            part = memoryview(self._body)[offset : offset + entry.num_bytes].toreadonly()
            if xxhash.xxh3_128_hexdigest(part) != entry.checksum:
                raise InvalidSnapshot(f"part {entry.name} is damaged")
            parts[entry.name] = part
            offset += entry.num_bytes + _padding(entry.num_bytes)
        return self._header.about, parts

    def _read_header(self) -> None:
        begin = self._begin
        if not begin.startswith(MAGIC[: len(begin)]):
            raise InvalidSnapshot("no snapshot")
        if len(begin) < _PREFIX_BYTES:
            return
        length = int.from_bytes(begin[len(MAGIC) :][:_LENGTH_BYTES], "little")
        end = _PREFIX_BYTES + length
        if length > MAX_HEADER_BYTES:
            raise InvalidSnapshot(f"a header of {length} bytes")
        if len(begin) < end:
            return
        checksum = begin[_PREFIX_BYTES - _CHECKSUM_BYTES : _PREFIX_BYTES]
        content = bytes(begin[_PREFIX_BYTES:end])
        if xxhash.xxh3_128_digest(content) != checksum:
            raise InvalidSnapshot("its header is damaged")
        header = _decoded(content)
        self._accepts(header.about)
        num_bytes = sum(each.num_bytes + _padding(each.num_bytes) for each in header.parts)
        if end + num_bytes != self._num_bytes:
            raise InvalidSnapshot(f"{self._num_bytes} bytes, expected {end + num_bytes}")
        self._header, self._num_body_bytes = header, num_bytes
        rest = memoryview(bytes(begin[end:]))
        del begin[end:]
        self._read_body(rest)

    def _read_body(self, chunk: memoryview) -> None:
        if len(self._body) + len(chunk) > self._num_body_bytes:
            raise InvalidSnapshot(f"it goes on behind its end, {self._num_body_bytes} bytes")
        self._body += chunk


def _decoded(content: bytes) -> Header:
    try:
        header = msgspec.json.decode(content, type=Header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidSnapshot(f"its header: {error}") from error
    if header.version != VERSION:
        raise InvalidSnapshot(f"it is of version {header.version}, this reader knows {VERSION}")
    if header.byte_order != sys.byteorder:
        raise InvalidSnapshot(f"it is of a {header.byte_order}-endian machine")
    if len({each.name for each in header.parts}) != len(header.parts):
        raise InvalidSnapshot("two of its parts have one name")
    anchor = header.about.anchor
    if anchor is not None and not 1 <= anchor.stream_sequence <= header.about.stream_sequence:
        raise InvalidSnapshot(f"its newest message is {anchor.stream_sequence}, behind its end")
    return header


def _padding(num_bytes: int) -> int:
    return -num_bytes % ALIGNMENT
