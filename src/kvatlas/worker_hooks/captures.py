"""Recorded batches of an engine: reads every format they come in, writes two of them.

    .kvcap    u32 n | topic n | u64 sequence | u32 m | payload m, back to back, big-endian
    .jsonl    {"topic", "seq", "payload_hex", ...}, one a line
    raw       msgpack batches back to back, or each behind its u32 length
    JSON      one batch or event a line, or one list of event objects

The format is told from the content. What comes before a damage is kept.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from kvatlas.schemas.errors import CaptureDamaged, CaptureUnreadable
from kvatlas.worker_hooks.msgpack_ends import end_of_value

#: of a record; no engine sends nearly as much, and a damaged length often says more
MAX_RECORD_BYTES = 256 * 1024 * 1024
_U32, _SEQ_AND_U32 = struct.Struct(">I"), struct.Struct(">QI")
_FIXARRAYS = range(0x90, 0xA0)
_JSON_STARTS = b"{[ \t\r\n"


class Frame(NamedTuple):
    """A batch as it was recorded; `sequence` is None where nothing numbers the batches."""

    payload: bytes
    topic: str = ""
    sequence: int | None = None
    #: of whoever counts the sequence: where it changes, the count begins anew
    incarnation: int | None = None


class Capture(NamedTuple):
    """What could be read of a file, and what ended the reading before its end."""

    frames: list[Frame]
    damage: CaptureDamaged | None = None


def read_capture(path: Path) -> Capture:
    """Return the batches of a file; raises CaptureUnreadable for what is no capture at all."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CaptureUnreadable(path, error.strerror or str(error)) from error
    frames: list[Frame] = []
    try:
        for frame in _frames(path, content):
            frames.append(frame)
    except CaptureDamaged as damage:
        return Capture(frames, damage)
    return Capture(frames)


def write_kvcap(file: IO[bytes], frame: Frame) -> None:
    """Append a batch in the binary format."""
    topic = frame.topic.encode()
    file.write(_U32.pack(len(topic)) + topic)
    file.write(_SEQ_AND_U32.pack(frame.sequence or 0, len(frame.payload)) + frame.payload)


def write_jsonl(file: IO[bytes], frame: Frame, received: float) -> None:
    """Append a batch as a line, with its content decoded for people."""
    try:
        content = jsonable(msgspec.msgpack.decode(frame.payload))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        content = None
    row = {
        "recv_ts": received,
        "nparts": 3,
        "topic": frame.topic,
        "seq": frame.sequence or 0,
        "payload_hex": frame.payload.hex(),
        "decoded": content,
    }
    file.write(json.dumps(row).encode() + b"\n")


def jsonable(value: Any) -> Any:
    """Return a value with its bytes as {"$bytes": hex}."""
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _frames(path: Path, content: bytes) -> Iterator[Frame]:
    if not content:
        return iter(())
    if content[0] in _JSON_STARTS:
        return _json_frames(path, content)
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

    def take(self, num_bytes: int, what: str) -> bytes:
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
        (num_bytes,) = _U32.unpack(cursor.take(4, "a topic's length"))
        topic = cursor.take(num_bytes, "a topic").decode(errors="replace")
        sequence, num_bytes = _SEQ_AND_U32.unpack(cursor.take(12, "a sequence and length"))
        yield Frame(cursor.take(num_bytes, "a payload"), topic, sequence)


def _prefixed_frames(path: Path, content: bytes) -> Iterator[Frame]:
    cursor = _Cursor(path, content)
    while cursor:
        (num_bytes,) = _U32.unpack(cursor.take(4, "a payload's length"))
        yield Frame(cursor.take(num_bytes, "a payload"))


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


def _json_frames(path: Path, content: bytes) -> Iterator[Frame]:
    try:
        whole = msgspec.json.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        whole = None
    if whole is not None:
        yield from _frames_of(path, 0, whole)
        return
    at = 0
    for line in content.splitlines(keepends=True):
        if line.strip():
            try:
                value = msgspec.json.decode(line)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise CaptureDamaged(path, at, f"a line that is no JSON: {error}") from error
            yield from _frames_of(path, at, value)
        at += len(line)


def _frames_of(path: Path, at: int, value: Any) -> Iterator[Frame]:
    """Yield the frames of one JSON value: a recorded row, a batch, or events."""
    match value:
        case {"payload_hex": str(digits)}:
            yield _row_frame(path, at, value, digits)
        case dict():
            yield _object_frame(value)
        case [dict(), *_]:
            for item in value:
                yield _object_frame(item)
        case list():
            # an engine's batch, which its adapter reads in msgpack
            yield Frame(msgspec.msgpack.encode(_with_bytes(value)))
        case _:
            raise CaptureDamaged(path, at, "a line that is neither an object nor a list")


def _row_frame(path: Path, at: int, row: dict[str, Any], digits: str) -> Frame:
    topic, sequence = row.get("topic"), row.get("seq")
    try:
        payload = bytes.fromhex(digits)
    except ValueError as error:
        raise CaptureDamaged(path, at, f"payload_hex: {error}") from error
    return Frame(payload, topic if isinstance(topic, str) else "", _count(sequence))


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


def _with_bytes(value: Any) -> Any:
    match value:
        case {"$bytes": str(digits)} if len(value) == 1:
            try:
                return bytes.fromhex(digits)
            except ValueError:
                return None
        case dict():
            return {key: _with_bytes(item) for key, item in value.items()}
        case list():
            return [_with_bytes(item) for item in value]
        case _:
            return value
