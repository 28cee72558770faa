"""Recorded batches of an engine: reads every format they come in, writes two of them.

    .kvcap    u32 n | topic n | u64 sequence | u32 m | payload m, back to back, big-endian
    .jsonl    {"topic", "seq", "payload_hex", ...}, one a line
    raw       msgpack batches back to back, or each behind its u32 length
    JSON      one batch or event a line, or one list of event objects
    log       batches of our own log, as `kvatlas record --nats` writes them, one JSON object a line

The format is told from the content. What comes before a damage is kept; a line or an object that
cannot be read costs only itself.
"""

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import msgspec

from kvatlas.common.own_files import open_output
from kvatlas.schemas.errors import CaptureDamaged, CaptureUnreadable
from kvatlas.worker_hooks.recordings.msgpack_ends import end_of_value

#: of a record; no engine sends nearly as much, and a damaged length often says more
MAX_RECORD_BYTES = 256 * 1024 * 1024
#: without a batch for so long at the beginning of a recording, somebody may wait in vain
QUIET_SECONDS = 5.0
_U32, _SEQ_AND_U32 = struct.Struct(">I"), struct.Struct(">QI")
_FIXARRAYS = range(0x90, 0xA0)
_JSON_STARTS = b"{[ \t\r\n"
#: what reading or writing JSON and msgpack says to a value that it cannot take
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


class Frame(NamedTuple):
    """A batch as it was recorded; `sequence` is None where nothing numbers the batches."""

    payload: bytes
    topic: str = ""
    sequence: int | None = None
    #: of whoever counts the sequence: where it changes, the count begins anew
    incarnation: int | None = None


class BadLine(NamedTuple):
    """A part of a recording that could not be read; `kind` is from a small fixed set."""

    kind: str
    reason: str


class Capture(NamedTuple):
    """What could be read of a file, and what ended the reading before its end."""

    frames: list[Frame]
    damage: CaptureDamaged | None = None
    #: what was left out on the way
    rejected: tuple[BadLine, ...] = ()
    #: batches of our own log, as rows of `stream_rows`
    batches: tuple[dict[str, Any], ...] = ()


def read_capture(path: Path) -> Capture:
    """Return the batches of a file; raises CaptureUnreadable for what is no capture at all."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CaptureUnreadable(path, error.strerror or str(error)) from error
    frames: list[Frame] = []
    rejected: list[BadLine] = []
    batches: list[dict[str, Any]] = []
    damage = None
    try:
        for item in _items(path, content):
            match item:
                case Frame():
                    frames.append(item)
                case BadLine():
                    rejected.append(item)
                case _:
                    batches.append(item)
    except CaptureDamaged as error:
        damage = error
    return Capture(frames, damage, tuple(rejected), tuple(batches))


class CaptureFile:
    """A recording under way; each batch is in the file when the call returns.

    Making one and every call raise CaptureUnreadable, with what the system says, where the file
    cannot be written. Making one raises ForeignFile for a file that is there and no recording.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._is_text = path, path.suffix == ".jsonl"
        self.num_written = 0
        try:
            fd = open_output(path, is_recording, "a recording", "name another FILE")
            self._file: IO[bytes] = os.fdopen(fd, "wb")
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._file.close()
        except OSError as error:
            if kind is None:
                raise self._unwritable(error) from error

    def put_frame(self, frame: Frame) -> None:
        """Append an engine's batch, in the format that the file's name asks for."""
        try:
            if self._is_text:
                write_jsonl(self._file, frame, time.time())
            else:
                write_kvcap(self._file, frame)
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error
        self.num_written += 1

    def put_row(self, row: dict[str, Any]) -> None:
        """Append a batch of our own log as a line."""
        try:
            self._file.write(msgspec.json.encode(row) + b"\n")
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from error
        self.num_written += 1

    def _unwritable(self, error: OSError) -> CaptureUnreadable:
        done = f" after {self.num_written} batches" if self.num_written else ""
        problem = f"cannot be written{done}: {error.strerror or error}; name another FILE"
        return CaptureUnreadable(self._path, problem)


def is_recording(beginning: bytes) -> bool:
    """Whether a file that begins so is one that `CaptureFile` has written."""
    if beginning.startswith((b'{"recv_ts": ', b'{"stream_sequence":')):
        return True
    if len(beginning) < 4:
        return False
    (num_topic_bytes,) = _U32.unpack_from(beginning)
    payload_at = 4 + num_topic_bytes + _SEQ_AND_U32.size
    if payload_at >= len(beginning):
        return False
    _, num_bytes = _SEQ_AND_U32.unpack_from(beginning, 4 + num_topic_bytes)
    is_batch = beginning[payload_at] in _FIXARRAYS or beginning[payload_at] in b"\xdc\xdd"
    return is_batch and 0 < num_bytes <= MAX_RECORD_BYTES


def write_kvcap(file: IO[bytes], frame: Frame) -> None:
    """Append a batch in the binary format."""
    topic = frame.topic.encode()
    file.write(_U32.pack(len(topic)) + topic)
    file.write(_SEQ_AND_U32.pack(frame.sequence or 0, len(frame.payload)) + frame.payload)


def write_jsonl(file: IO[bytes], frame: Frame, received: float) -> None:
    """Append a batch as a line, with its content decoded for people."""
    row = {
        "recv_ts": received,
        "nparts": 3,
        "topic": frame.topic,
        "seq": frame.sequence or 0,
        "payload_hex": frame.payload.hex(),
    }
    try:
        content = jsonable(msgspec.msgpack.decode(frame.payload))
        line = json.dumps(row | {"decoded": content})
    except _UNREADABLE:
        line = json.dumps(row | {"decoded": None})
    file.write(line.encode() + b"\n")


def jsonable(value: Any) -> Any:
    """Return a value with its bytes as {"$bytes": hex}."""
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def with_bytes(value: Any) -> Any:
    """Return a value of `jsonable` as it was; what only looks like bytes is None."""
    match value:
        case {"$bytes": str(digits)} if len(value) == 1:
            try:
                return bytes.fromhex(digits)
            except ValueError:
                return None
        case dict():
            return {key: with_bytes(item) for key, item in value.items()}
        case list():
            return [with_bytes(item) for item in value]
        case _:
            return value


def _items(path: Path, content: bytes) -> "Iterator[_Item]":
    if not content:
        return iter(())
    if content[0] in _JSON_STARTS:
        return _json_items(path, content)
    if content[0] >= 0x80:
        return _msgpack_frames(path, content)
    if content[0] == 0:
        is_prefixed = len(content) > 4 and content[4] in _FIXARRAYS
        return _prefixed_frames(path, content) if is_prefixed else _kvcap_frames(path, content)
    raise CaptureUnreadable(path, "neither .kvcap nor msgpack nor JSON")


# --- binary -----------------------------------------------------------------------------------


class _Cursor:
    """Reads records; raises CaptureDamaged where one is not whole, with where it began."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content
        self.at = self.record = 0

    def __bool__(self) -> bool:
        self.record = self.at
        return self.at < len(self._content)

    def read(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > MAX_RECORD_BYTES:
            raise CaptureDamaged(self._path, self.record, f"{what} of {num_bytes} bytes")
        found = self._content[self.at : self.at + num_bytes]
        if len(found) < num_bytes:
            problem = f"the file ends within {what}: {len(found)} of {num_bytes} bytes"
            raise CaptureDamaged(self._path, self.record, problem)
        self.at += num_bytes
        return found


def _kvcap_frames(path: Path, content: bytes) -> Iterator[Frame]:
    cursor = _Cursor(path, content)
    while cursor:
        (num_bytes,) = _U32.unpack(cursor.read(4, "a topic's length"))
        topic = cursor.read(num_bytes, "a topic").decode(errors="replace")
        sequence, num_bytes = _SEQ_AND_U32.unpack(cursor.read(12, "a sequence and length"))
        yield Frame(cursor.read(num_bytes, "a payload"), topic, sequence)


def _prefixed_frames(path: Path, content: bytes) -> Iterator[Frame]:
    cursor = _Cursor(path, content)
    while cursor:
        (num_bytes,) = _U32.unpack(cursor.read(4, "a payload's length"))
        yield Frame(cursor.read(num_bytes, "a payload"))


def _msgpack_frames(path: Path, content: bytes) -> Iterator[Frame]:
    at = 0
    while at < len(content):
        if content[at] in b"\r\n":
            at += 1  # between batches one a line; no batch begins so
            continue
        end = end_of_value(content, at)
        if end is None:
            raise CaptureDamaged(path, at, "the file ends within a msgpack value, or it is none")
        yield Frame(content[at:end])
        at = end


# --- JSON -------------------------------------------------------------------------------------


#: what a piece of JSON in a recording is; a dictionary is a batch of our own log
_Item = Frame | BadLine | dict[str, Any]


def _json_items(path: Path, content: bytes) -> Iterator[_Item]:
    try:
        whole = msgspec.json.decode(content)
    except _UNREADABLE:
        yield from _line_items(path, content)
    else:
        yield from _items_of(0, whole)


def _line_items(path: Path, content: bytes) -> Iterator[_Item]:
    at = 0
    for line in content.splitlines(keepends=True):
        if line.strip():
            try:
                value = msgspec.json.decode(line)
            except _UNREADABLE as error:
                kind = _kind(error)
                if kind == "malformed_line" and not line.endswith((b"\n", b"\r")):
                    raise CaptureDamaged(path, at, f"a line without its end: {error}") from error
                yield BadLine(kind, f"line at byte {at}: {error}")
            else:
                yield from _items_of(at, value)
        at += len(line)


def _items_of(at: int, value: Any) -> Iterator[_Item]:
    """Yield what one JSON value is: a recorded row, a batch, or events."""
    match value:
        case [dict(), *_]:
            for position, item in enumerate(value):
                yield _item_of(f"object {position} at byte {at}", item)
        case dict() | list():
            yield _item_of(f"line at byte {at}", value)
        case _:
            yield BadLine("malformed_line", f"line at byte {at}: neither an object nor a list")


def _item_of(where: str, value: Any) -> _Item:
    try:
        match value:
            case {"payload_hex": str(digits)}:
                return _row_frame(value, digits)
            case {"stream_sequence": _, "worker": _, "epoch": _, "seq": _, "events": list()}:
                return value  # type: ignore[no-any-return]
            case list():
                # an engine's batch, which its adapter reads in msgpack
                return Frame(msgspec.msgpack.encode(with_bytes(value)))
            case _:
                return _object_frame(value)
    except _UNREADABLE as error:
        return BadLine(_kind(error), f"{where}: {error}")


def _kind(error: Exception) -> str:
    match error:
        case RecursionError():
            return "nested_too_deeply"
        case OverflowError() | msgspec.ValidationError():
            return "number_out_of_range"
        case _:
            return "malformed_line"


def _row_frame(row: dict[str, Any], digits: str) -> Frame:
    topic, payload = row.get("topic"), bytes.fromhex(digits)
    return Frame(payload, topic if isinstance(topic, str) else "", _count(row.get("seq")))


def _object_frame(item: Any) -> Frame:
    """Return an event or batch that is an object, with what numbers it and who sent it."""
    payload = msgspec.json.encode(item)
    if not isinstance(item, dict):
        return Frame(payload)
    sender = item.get("instance_id") or item.get("backend_id")
    topic = sender if isinstance(sender, str) else ""
    # only TensorRT-LLM's event ids have no holes of their own
    is_numbered = "seq" in item or "data" in item
    sequence = _count(item.get("seq", item.get("event_id"))) if is_numbered else None
    return Frame(payload, topic, sequence, _count(item.get("incarnation")))


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64
    return value if is_count else None
