"""Formats of recordings, damage, and redaction."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.schemas.errors import CaptureUnreadable
from kvatlas.worker_hooks.recordings.captures import (
    CaptureFile,
    Frame,
    read_capture,
    write_jsonl,
    write_kvcap,
)
from kvatlas.worker_hooks.recordings.redaction import UNREADABLE, Redactor

BATCH: list[Any] = [1.5, [["BlockStored", [5, 2**64 - 1], None, [1, 2, 3, 4], 2, None]], 0]
PACKED = msgspec.msgpack.encode(BATCH)
FRAMES = [Frame(PACKED, "kv@w@m", 0), Frame(PACKED, "kv@w@m", 1)]


def kvcap() -> bytes:
    out = io.BytesIO()
    for frame in FRAMES:
        write_kvcap(out, frame)
    return out.getvalue()


def jsonl() -> bytes:
    out = io.BytesIO()
    for frame in FRAMES:
        write_jsonl(out, frame, 1.0)
    return out.getvalue()


def read(folder: Path, content: bytes) -> list[Frame]:
    file = folder / "capture"
    file.write_bytes(content)
    capture = read_capture(file)
    assert capture.damage is None
    return capture.frames


@pytest.mark.parametrize("content", [kvcap(), jsonl()], ids=["kvcap", "jsonl"])
def test_what_was_written_is_read_again(tmp_path: Path, content: bytes) -> None:
    assert read(tmp_path, content) == FRAMES


@pytest.mark.parametrize(
    "content",
    [
        PACKED + PACKED,
        PACKED + b"\n" + PACKED + b"\n",
        2 * (len(PACKED).to_bytes(4, "big") + PACKED),
        2 * (msgspec.json.encode(BATCH) + b"\n"),
    ],
    ids=["concatenated", "lines", "prefixed", "json"],
)
def test_raw_batches_come_in_several_wrappings(tmp_path: Path, content: bytes) -> None:
    assert read(tmp_path, content) == [Frame(PACKED), Frame(PACKED)]


@pytest.mark.parametrize("content", [kvcap(), PACKED + PACKED], ids=["kvcap", "msgpack"])
def test_a_truncated_file_keeps_what_is_whole(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "capture"
    for end in range(len(content) // 2 + 1, len(content)):
        file.write_bytes(content[:end])
        capture = read_capture(file)
        assert len(capture.frames) == 1
        assert capture.damage is not None
        assert capture.damage.offset == len(content) // 2


def test_a_truncated_line_keeps_the_lines_before(tmp_path: Path) -> None:
    file = tmp_path / "capture"
    file.write_bytes(jsonl()[:-20])
    capture = read_capture(file)
    assert capture.frames == FRAMES[:1]
    assert capture.damage is not None


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "capture").write_bytes(b"hello")
    with pytest.raises(CaptureUnreadable):
        read_capture(tmp_path / "capture")
    with pytest.raises(CaptureUnreadable):
        read_capture(tmp_path / "nothing")


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (nested(5000), "nested_too_deeply"),
        (nested(900), "nested_too_deeply"),
        ('{"event_id": ' + "9" * 5000 + "}", "number_out_of_range"),
        ("[1.0, [" + "9" * 400 + "], 0]", "number_out_of_range"),
        ('{"payload_hex": "zz"}', "malformed_line"),
        ("{no json}", "malformed_line"),
        ("5", "malformed_line"),
    ],
)
def test_a_line_that_cannot_be_read_costs_only_itself(tmp_path: Path, bad: str, kind: str) -> None:
    file = tmp_path / "capture"
    first, second = jsonl().splitlines(keepends=True)
    file.write_bytes(first + bad.encode() + b"\n" + second)
    capture = read_capture(file)
    assert capture.frames == FRAMES
    assert [line.kind for line in capture.rejected] == [kind]
    assert capture.damage is None


def test_an_object_of_a_list_that_cannot_be_read_costs_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "capture"
    file.write_text('[{"seq": 1}, {"payload_hex": "zz"}, {"seq": 2}]')
    capture = read_capture(file)
    assert [frame.sequence for frame in capture.frames] == [1, 2]
    assert [line.kind for line in capture.rejected] == ["malformed_line"]


def test_a_recording_without_room_says_so_and_counts_what_is_written() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(CaptureUnreadable, match="No space left"), CaptureFile(full) as out:
        out.put_frame(FRAMES[0])
    with pytest.raises(CaptureUnreadable, match="No space left"), CaptureFile(full) as out:
        out.put_row({"worker": "w"})
    with pytest.raises(CaptureUnreadable, match="name another FILE"):
        CaptureFile(full / "below")


class TestRedaction:
    def test_equal_blocks_stay_equal_and_no_token_is_left(self) -> None:
        redactor = Redactor(b"key")
        payload = msgspec.msgpack.encode(
            [1.0, [["BlockStored", [1, 2, 3], None, [70001, 70002, 70001, 70002, 5, 6], 2]], 0]
        )
        tokens = msgspec.msgpack.decode(redactor.payload(payload))[1][0][3]
        assert tokens[:2] == tokens[2:4] != tokens[4:]
        assert not {70001, 70002, 5, 6} & set(tokens)

    def test_texts_of_tenants_become_the_same_pseudonym_everywhere(self) -> None:
        event = {
            "type": "BlockStored",
            "block_hashes": [1],
            "token_ids": [1, 2],
            "block_size": 2,
            "lora_name": "customer-x",
            "extra_keys": [["customer-x", "tenant-A", ["image-of-a-cat", 3], b"embedding"]],
            "session_id": "sess-1",
            "surprise": {"prompt": "hello world"},
        }
        redacted = Redactor().payload(msgspec.msgpack.encode([1.0, [event], 0]))
        for text in (b"customer", b"tenant", b"cat", b"embedding", b"sess-1", b"hello"):
            assert text not in redacted
        found = msgspec.msgpack.decode(redacted)[1][0]
        assert found["extra_keys"][0][0] == found["lora_name"]
        assert found["extra_keys"][0][2][1] == 3
        assert found["block_hashes"] == [1]

    def test_two_recordings_cannot_be_compared(self) -> None:
        assert Redactor().payload(PACKED) != Redactor().payload(PACKED)

    def test_what_cannot_be_read_is_not_written(self) -> None:
        assert Redactor().payload(b"\x93my prompt") == UNREADABLE

    def test_names_of_fields_that_nobody_knows_are_pseudonyms_too(self) -> None:
        secret: dict[Any, Any] = {"my prompt": 1, 70007: 2, b"my bytes": 3}
        events: list[Any] = [
            {"type": "BlockStored", "block_hashes": [1], **secret, "metadata": dict(secret)},
            {"type": "my prompt", "medium": "my prompt", "token_ids": [dict(secret)]},
            ["BlockStored", [1], None, [dict(secret)], 2, None, "GPU", dict(secret)],
            dict(secret),
        ]
        for payload in (msgspec.msgpack.encode([1.0, events, 0]), msgspec.msgpack.encode(events)):
            redacted = Redactor().payload(payload)
            assert redacted != UNREADABLE
            for text in (b"my prompt", b"my bytes", msgspec.msgpack.encode(70007)):
                assert text not in redacted

    @pytest.mark.parametrize(
        "event",
        [
            [70007, 70008, "text"],
            {"surprise": [70007, "text", [70008]]},
            {"surprise": 70007, "token": 70008},
            {"type": "BlockStored", "extra_keys": [70007, 70008, [70007, 70008]]},
            ["BlockStored", [1], None, [], 2, None, "GPU", None, [[70007], 70008]],
            ["BlockStored", [1], None, [], 2, None, "GPU", None, None, [70007, 70008]],
            msgspec.msgpack.Ext(5, msgspec.msgpack.encode([70007, 70008])),
        ],
    )
    def test_numbers_that_may_be_tokens_are_not_kept(self, event: Any) -> None:
        redacted = Redactor().payload(msgspec.msgpack.encode([1.0, [event], 0]))
        assert redacted != UNREADABLE
        for token in (70007, 70008):
            assert msgspec.msgpack.encode(token) not in redacted

    def test_hashes_that_are_text_are_kept_only_where_they_are_digests(self) -> None:
        digest = bytes(range(200, 232))
        event = {"type": "BlockRemoved", "block_hashes": [digest, b"my own prompt 16", 5, "words"]}
        redacted = Redactor().payload(msgspec.msgpack.encode([1.0, [event], 0]))
        first, second, third, fourth = msgspec.msgpack.decode(redacted)[1][0]["block_hashes"]
        assert (first, third) == (digest, 5)
        assert (len(second), fourth.startswith("redacted-")) == (16, True)
        assert b"prompt" not in redacted

    def test_an_event_of_our_own_log_that_nobody_knows_keeps_its_name_only(self) -> None:
        row = {"events": [["told", "my prompt"], ["namespace", "r", "m", 4, "h", "tenant", True]]}
        told, namespace = Redactor().own_batch(row)["events"]
        assert told == ["told"]
        assert namespace[:5] == ["namespace", "r", "m", 4, "h"]
        assert namespace[5].startswith("redacted-")
