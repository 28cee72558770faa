"""Older minors of the wire, frozen, beside today's: who reads whom, and what they make of it."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import msgspec
import pytest

import wire_100
import wire_101
from kvatlas.events.codec import decode, decode_control, encode
from kvatlas.schemas.errors import UnsupportedVersion
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.kv_events import (
    OLDEST_WIRE_VERSION,
    WIRE_VERSION,
    EventBatch,
    NamespacesOverBudget,
    WorkerUp,
)
from testkit.builders import ROOT, a_batch, an_info, stored
from wire_100 import codec as codec_100
from wire_100 import messages as messages_100
from wire_101 import codec as codec_101
from wire_101 import messages as messages_101

GOLDEN = Path(__file__).parents[1] / "golden"
OLDER: dict[int, Any] = {100: wire_100, 101: wire_101}
MESSAGES_OF: dict[int, ModuleType] = {100: messages_100, 101: messages_101}
CODEC_OF: dict[int, Any] = {100: codec_100, 101: codec_101}
VECTORS: dict[int, dict[str, Any]] = {
    minor: json.loads((GOLDEN / f"wire_{minor}.json").read_text())["messages"] for minor in OLDER
}
TODAYS: dict[str, Any] = json.loads((GOLDEN / "wire.json").read_text())["messages"]
#: all of them say so much at once that what is new is among it
ALL_EVENTS = "several events"

minors = pytest.mark.parametrize("minor", OLDER)
messages = pytest.mark.parametrize(
    ("minor", "name"), [(minor, name) for minor, vectors in VECTORS.items() for name in vectors]
)


def payload_of(minor: int, name: str) -> bytes:
    return bytes.fromhex(VECTORS[minor][name]["payload"])


def plain(message: object) -> Any:
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def is_record(name: str) -> bool:
    return name == "control record"


def is_begun_by(longer: Any, shorter: Any) -> bool:
    """Return whether every array of the one has that of the other at its beginning."""
    if isinstance(shorter, list | tuple):
        is_alike = isinstance(longer, list | tuple) and len(longer) >= len(shorter)
        return is_alike and all(map(is_begun_by, longer, shorter))
    if isinstance(shorter, dict):
        return longer.keys() == shorter.keys() and all(
            is_begun_by(longer[key], value) for key, value in shorter.items()
        )
    return bool(longer == shorter)


@messages
def test_a_frozen_wire_writes_and_reads_its_golden_bytes(minor: int, name: str) -> None:
    payload, wire = payload_of(minor, name), OLDER[minor]
    if is_record(name):
        message: Any = wire.decode_control(payload)
    else:
        message, rejected = wire.decode(payload)
        assert rejected == ()
    assert message.v == wire.WIRE_VERSION == minor
    assert wire.encode(message) == payload


@minors
def test_a_golden_file_says_every_event_of_its_minor(minor: int) -> None:
    batch = OLDER[minor].decode(payload_of(minor, ALL_EVENTS)).batch
    assert {type(event) for event in batch.events} == set(get_args(MESSAGES_OF[minor].KvEvent))


@messages
def test_todays_reader_reads_an_older_minor_alike(minor: int, name: str) -> None:
    """What it writes of it again is the same to a reader of that minor."""
    payload, wire = payload_of(minor, name), OLDER[minor]
    if is_record(name):
        record = decode_control(payload)
        assert plain(record) == plain(wire.decode_control(payload))
        assert encode(record) == payload
        return
    today, rejected = decode(payload)
    older = wire.decode(payload).batch
    assert rejected == ()
    assert is_begun_by(plain(today), plain(older))
    again = wire.decode(encode(today))
    assert (again.batch, again.rejected) == (older, ())


@messages
def test_a_later_minor_only_adds_at_the_ends_of_messages(minor: int, name: str) -> None:
    if name == ALL_EVENTS:
        return
    (version, *told) = VECTORS[minor][name]["content"]
    (todays_version, *todays) = TODAYS[name]["content"]
    assert (version, todays_version) == (minor, WIRE_VERSION)
    assert is_begun_by(todays, told)


def test_a_reader_of_100_skips_the_event_that_it_does_not_know_and_never_the_batch() -> None:
    batch = a_batch(stored(1), NamespacesOverBudget(ROOT, "why"), stored(2))
    read = wire_100.decode(encode(batch))
    assert [plain(event) for event in read.batch.events] == [plain(stored(1)), plain(stored(2))]
    assert [(each.position, each.kind) for each in read.rejected] == [(1, "unknown")]
    assert (read.batch.v, read.batch.seq) == (WIRE_VERSION, batch.seq)


@minors
def test_an_older_reader_takes_a_worker_with_lookahead_for_one_of_another_namespace(
    minor: int,
) -> None:
    """It hashes without the lookahead, and no block of a prompt has such a name (ADR-0024)."""
    descriptor = NamespaceDescriptor(16, lookahead_tokens=1)
    info = msgspec.structs.replace(an_info(), descriptor=descriptor)
    ((up,), rejected) = _events_and_rejected(minor, a_batch(WorkerUp(info)))
    assert rejected == ()
    assert plain(up.info.descriptor) == [16, "xxh3_128"]
    older = NamespaceDescriptor(*plain(up.info.descriptor))
    roots = {each.namespace("m", None, None).root() for each in (older, descriptor)}
    assert len(roots) == 2


def _events_and_rejected(minor: int, batch: EventBatch) -> tuple[Any, Any]:
    read = OLDER[minor].decode(encode(batch))
    return read.batch.events, read.rejected


@minors
def test_a_newer_major_is_refused_by_name_by_both(minor: int) -> None:
    newer = encode(msgspec.structs.replace(a_batch(), v=200))
    with pytest.raises(CODEC_OF[minor].UnsupportedVersion, match=rf"200.* up to {minor}"):
        OLDER[minor].decode(newer)
    with pytest.raises(UnsupportedVersion, match=rf"200.* up to {WIRE_VERSION}"):
        decode(newer)


def test_there_is_a_frozen_wire_for_each_minor_that_can_be_written_besides_todays() -> None:
    assert list(range(OLDEST_WIRE_VERSION, WIRE_VERSION)) == list(OLDER)
    assert [wire.WIRE_VERSION for wire in OLDER.values()] == list(OLDER)
