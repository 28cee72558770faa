"""Minor 100 of the wire, frozen, beside today's: who reads whom, and what they make of it."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

import wire_100
from kvatlas.events.codec import decode, decode_control, encode
from kvatlas.schemas.errors import UnsupportedVersion
from kvatlas.schemas.kv_events import OLDEST_WIRE_VERSION, WIRE_VERSION, EventBatch, NamespacesMuted
from testkit.builders import ROOT, a_batch, stored
from wire_100 import codec as codec_100
from wire_100 import messages as messages_100

GOLDEN = Path(__file__).parents[1] / "golden"
VECTORS: dict[str, Any] = json.loads((GOLDEN / "wire_100.json").read_text())["messages"]
TODAYS: dict[str, Any] = json.loads((GOLDEN / "wire.json").read_text())["messages"]
#: all of them say so much at once that what is new is among it
ALL_EVENTS = "several events"


def payload_of(name: str) -> bytes:
    return bytes.fromhex(VECTORS[name]["payload"])


def plain(message: object) -> Any:
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def is_record(name: str) -> bool:
    return name == "control record"


@pytest.mark.parametrize("name", VECTORS)
def test_the_frozen_wire_writes_and_reads_its_golden_bytes(name: str) -> None:
    payload = payload_of(name)
    if is_record(name):
        message: Any = wire_100.decode_control(payload)
    else:
        message, rejected = wire_100.decode(payload)
        assert rejected == ()
    assert message.v == wire_100.WIRE_VERSION == 100
    assert wire_100.encode(message) == payload


def test_the_golden_file_says_every_event_of_minor_100() -> None:
    batch = wire_100.decode(payload_of(ALL_EVENTS)).batch
    assert {type(event) for event in batch.events} == set(get_args(messages_100.KvEvent))


@pytest.mark.parametrize("name", VECTORS)
def test_todays_reader_reads_minor_100_alike_and_writes_the_same_bytes(name: str) -> None:
    payload = payload_of(name)
    if is_record(name):
        record = decode_control(payload)
        assert plain(record) == plain(wire_100.decode_control(payload))
        assert encode(record) == payload
        return
    today, rejected = decode(payload)
    assert rejected == ()
    assert plain(today) == plain(wire_100.decode(payload).batch)
    assert encode(today) == payload


@pytest.mark.parametrize("name", sorted(VECTORS.keys() - {ALL_EVENTS}))
def test_a_later_minor_has_changed_no_message_of_this_one(name: str) -> None:
    (version, *told), (todays_version, *todays) = VECTORS[name]["content"], TODAYS[name]["content"]
    assert (version, todays_version) == (100, WIRE_VERSION)
    assert told == todays


def test_a_reader_of_100_skips_the_event_that_it_does_not_know_and_never_the_batch() -> None:
    batch = a_batch(stored(1), NamespacesMuted(ROOT, "why"), stored(2))
    read = wire_100.decode(encode(batch))
    assert [plain(event) for event in read.batch.events] == [plain(stored(1)), plain(stored(2))]
    assert [(each.position, each.kind) for each in read.rejected] == [(1, "unknown")]
    assert (read.batch.v, read.batch.seq) == (WIRE_VERSION, batch.seq)


def test_a_newer_major_is_refused_by_name_by_both() -> None:
    newer = encode(msgspec.structs.replace(a_batch(), v=200))
    with pytest.raises(codec_100.UnsupportedVersion, match=r"200.* up to 100"):
        wire_100.decode(newer)
    with pytest.raises(UnsupportedVersion, match=rf"200.* up to {WIRE_VERSION}"):
        decode(newer)


def test_there_is_a_frozen_wire_for_each_minor_that_can_be_written_besides_todays() -> None:
    assert range(OLDEST_WIRE_VERSION, WIRE_VERSION) == range(wire_100.WIRE_VERSION, 101)
    assert isinstance(decode(payload_of(ALL_EVENTS)).batch, EventBatch)
