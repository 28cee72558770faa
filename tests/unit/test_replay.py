"""The past of a fleet, from an archive and from the stream."""

import json
import struct
from collections.abc import AsyncIterator, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import msgspec
import pytest

from kvatlas.events.archive.memory import MemoryArchive
from kvatlas.events.archive.port import BatchKey, EventRecord, Hole
from kvatlas.events.archive.replay import archived_log, parse_time, stream_log, stream_sequence_at
from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.hindsight.replay import (
    Moment,
    Replayed,
    match_tokens,
    read_tokens,
    replay,
    replay_stream,
    report_of,
)
from kvatlas.hindsight.reports import replay_lines
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import stimulus_of
from kvatlas.schemas.errors import InvalidBlock, InvalidRequest, UnknownModel
from kvatlas.schemas.fleet import Trust, WorkerInfo
from kvatlas.schemas.hashing import BlockHasher, Namespace
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import BlockStored, ControlRecord, EventBatch, WorkerUp
from testkit.builders import (
    MODEL,
    SECOND,
    a_batch,
    a_control,
    an_info,
    messages,
    stored,
    subject_of,
    up,
)

LOG: list[EventBatch | ControlRecord] = [
    a_batch(up(), stored(1, 2)),
    a_batch(up(), stored(1), worker="w2"),
    a_batch(stored(3, tier=Tier.dram), seq=2),
    a_control(worker="w2"),
    a_batch(stored(4), seq=3),
]


def an_archive(
    log: list[EventBatch | ControlRecord], holes: tuple[Hole, ...] = (), cursor: int | None = None
) -> MemoryArchive:
    archive = MemoryArchive()
    lost = {number for hole in holes for number in range(hole.first, hole.last + 1)}
    records = [
        EventRecord(
            message,
            BatchKey(item.worker, item.rank, item.epoch, item.seq)
            if isinstance(item, EventBatch)
            else None,
        )
        for item, message in zip(log, messages(log), strict=True)
        if message.stream_sequence not in lost
    ]
    archive.append_events(records, holes, cursor or len(log))
    return archive


def live_digests(log: list[EventBatch | ControlRecord]) -> Iterator[str]:
    state = IndexState(ReferenceIndex())
    yield state.state_digest()
    for message in messages(log):
        state.handle(stimulus_of(message))
        yield state.state_digest()


# --- from an archive ----------------------------------------------------------------------------


def test_a_replay_to_the_end_is_the_live_state() -> None:
    replayed = replay(an_archive(LOG), make_index=ReferenceIndex)
    assert replayed.state_digest == list(live_digests(LOG))[-1]
    assert (replayed.stream_sequence, replayed.num_batches, replayed.num_events) == (5, 4, 6)
    assert replayed.holes == ()


def test_a_replay_to_a_sequence_is_what_was_live_then() -> None:
    archive = an_archive(LOG)
    for sequence, digest in enumerate(live_digests(LOG)):
        replayed = replay(archive, Moment(sequence=sequence), ReferenceIndex)
        assert (replayed.state_digest, replayed.stream_sequence) == (digest, sequence)


def test_a_replay_to_a_time_takes_what_the_broker_had_stored_by_then() -> None:
    archive = an_archive(LOG)
    asked = {0: 0, SECOND: 1, 3 * SECOND - 1: 2, 10**20: 5}
    for time_ns, sequence in asked.items():
        found = replay(archive, Moment(time_ns=time_ns), ReferenceIndex)
        assert found.stream_sequence == sequence


def test_the_earlier_of_two_moments_counts_and_none_is_behind_the_archive() -> None:
    archive = an_archive(LOG)
    earlier = replay(archive, Moment(sequence=4, time_ns=2 * SECOND), ReferenceIndex)
    assert earlier.stream_sequence == 2
    assert replay(archive, Moment(sequence=99), ReferenceIndex).stream_sequence == 5


@pytest.mark.parametrize(("asked", "is_beyond"), [(5, False), (6, True)])
def test_a_replay_beyond_the_archive_says_where_that_ends(asked: int, is_beyond: bool) -> None:
    moment = Moment(sequence=asked)
    report = report_of(replay(an_archive(LOG), moment, ReferenceIndex))
    assert report.log_end == 5
    lines = replay_lines(report, moment)
    assert ("the archive ends at 5" in lines) is is_beyond
    assert "4 batches that counted" in lines[0]


def test_a_hole_in_the_archive_shows_in_the_replay() -> None:
    replayed = replay(an_archive(LOG, holes=(Hole(2, 3),)), make_index=ReferenceIndex)
    assert replayed.holes == (Hole(2, 3),)
    assert [view.trust for view in replayed.state.instances()] == [Trust.degraded]
    assert replayed.state.stats().unknown_controls == 1, "what w2 is was in the hole"


def test_messages_and_holes_come_in_stream_order() -> None:
    archive = an_archive(LOG, holes=(Hole(1, 1), Hole(3, 4), Hole(6, 9)), cursor=9)
    log = [
        item if isinstance(item, Hole) else item.stream_sequence
        for item in archived_log(archive, 5)
    ]
    assert log == [Hole(1, 1), 2, Hole(3, 4), 5]


# --- from the stream ----------------------------------------------------------------------------


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        publisher = bus.publisher(KV_EVENTS)
        for item in LOG:
            await publisher.publish(subject_of(item), encode(item))
        yield bus


async def test_a_replay_of_the_stream_is_the_same(bus: MemoryBus) -> None:
    for sequence, digest in enumerate(live_digests(LOG)):
        replayed = await replay_stream(bus, Moment(sequence=sequence), ReferenceIndex)
        assert (replayed.state_digest, replayed.stream_sequence) == (digest, sequence)


async def test_what_the_stream_no_longer_keeps_is_a_hole(
    bus: MemoryBus, broker: MemoryBroker
) -> None:
    broker.purge(KV_EVENTS, 3)
    replayed = await replay_stream(bus, make_index=ReferenceIndex)
    assert replayed.holes == (Hole(1, 2),)
    broker.purge(KV_EVENTS, 9)
    assert [item async for item in stream_log(bus, 5)] == [Hole(1, 5)]


async def test_a_time_is_found_in_the_stream(bus: MemoryBus, broker: MemoryBroker) -> None:
    stored_at = {m.stream_sequence: m.broker_ns async for m in bus.read_range(KV_EVENTS, 1, 5)}
    for sequence, broker_ns in stored_at.items():
        newest = max(s for s, ns in stored_at.items() if ns <= broker_ns)
        assert await stream_sequence_at(bus, broker_ns) == newest >= sequence
    assert await stream_sequence_at(bus, stored_at[1] - 1) == 0
    broker.purge(KV_EVENTS, 4)
    assert await stream_sequence_at(bus, stored_at[5]) == 5
    replayed = await replay_stream(bus, Moment(time_ns=stored_at[5]), ReferenceIndex)
    assert replayed.stream_sequence == 5


# --- times --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("0", 0),
        ("1700000000", 1_700_000_000_000),
        ("1700000000.25", 1_700_000_000_250),
        ("2023-11-14T22:13:20", 1_700_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14T23:13:20.251+01:00", 1_700_000_000_251),
        ("2023-11-14", 1_699_920_000_000),
    ],
)
def test_a_time_is_seconds_or_iso_8601(text: str, milliseconds: int) -> None:
    assert parse_time(text) == milliseconds * 1_000_000


NOW = datetime(2026, 11, 30, 15, 30, tzinfo=timezone(timedelta(hours=2)))


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("14:00", "2026-11-30T14:00+02:00"),
        ("14:00:30.5", "2026-11-30T14:00:30.5+02:00"),
        (" 15:30 ", "2026-11-30T15:30+02:00"),
        ("15:31", "2026-11-29T15:31+02:00"),
        ("12:00Z", "2026-11-30T12:00+00:00"),
        ("-10m", "2026-11-30T15:20+02:00"),
        ("-10min", "2026-11-30T15:20+02:00"),
        ("-1h30m", "2026-11-30T14:00+02:00"),
        ("-2d", "2026-11-28T15:30+02:00"),
        ("-90s", "2026-11-30T15:28:30+02:00"),
        ("-0.5h", "2026-11-30T15:00+02:00"),
        ("2026-11-30T14:00+02:00", "2026-11-30T14:00+02:00"),
        ("2026-11-30 14:00", "2026-11-30T14:00+00:00"),
        ("2026-11-30", "2026-11-30T00:00+00:00"),
    ],
)
def test_a_time_is_written_as_people_do(text: str, moment: str) -> None:
    expected = datetime.fromisoformat(moment)
    assert parse_time(text, NOW) == round(expected.timestamp() * 1000) * 1_000_000


@pytest.mark.parametrize(
    "text",
    ["", "-", "yesterday", "nan", "inf", "2023-13-01", "25:00", "-10x", "-999999999d"],
)
def test_what_is_no_time_is_answered_with_what_is(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"time: .*14:00.*-10m.*1970; found"):
        parse_time(text, NOW)


def test_what_a_time_was_taken_for_is_said() -> None:
    archive = an_archive(LOG)
    moment = Moment(time_ns=parse_time("1970-01-01T00:00:02Z"))
    lines = replay_lines(report_of(replay(archive, moment, ReferenceIndex)), moment)
    assert "up to 1970-01-01T00:00:02.000+00:00 by the broker's clock" in lines


# --- questions ----------------------------------------------------------------------------------

TOKENS = struct.pack("<10I", *range(10))


def test_token_files_are_json_or_packed(tmp_path: Path) -> None:
    as_json, packed = tmp_path / "tokens.json", tmp_path / "tokens.bin"
    as_json.write_text(json.dumps(list(range(10))))
    packed.write_bytes(TOKENS)
    assert read_tokens(as_json) == read_tokens(packed) == TOKENS


@pytest.mark.parametrize("content", [b"[1, 2", b"abc", b"[-1]", b'["a"]'])
def test_a_token_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(content)
    with pytest.raises(InvalidBlock):
        read_tokens(file)


def test_a_token_that_is_no_number_is_named_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text('[1, "a"]')
    with pytest.raises(InvalidBlock, match=r"tokens: \[1\]: expected an int"):
        read_tokens(file)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        read_tokens(tmp_path / "nowhere")


def chain_of(block_tokens: int, lora: str | None = None, salt: str | None = None) -> BlockStored:
    hasher = BlockHasher(Namespace(MODEL, block_tokens, lora=lora, cache_salt=salt))
    return BlockStored(hasher.root, hasher.chain(TOKENS))


def replayed_of(*workers: tuple[str, WorkerInfo, BlockStored]) -> Replayed:
    log: list[EventBatch | ControlRecord] = [
        a_batch(WorkerUp(info), event, worker=worker) for worker, info, event in workers
    ]
    return replay(an_archive(log), make_index=ReferenceIndex)


def test_a_prompt_is_matched_in_tokens_across_block_sizes() -> None:
    replayed = replayed_of(
        ("small", an_info(block_tokens=2), chain_of(2)),
        ("large", an_info(block_tokens=4), chain_of(4)),
        ("empty", an_info(block_tokens=4), BlockStored(bytes(16), b"")),
    )
    found = [
        (m.worker, m.match_tokens, m.num_blocks)
        for m in match_tokens(replayed.state, MODEL, TOKENS)
    ]
    assert found == [("small", 10, 5), ("large", 8, 2), ("empty", 0, 0)]


def test_adapters_and_salts_match_their_own_blocks_only() -> None:
    info = an_info(block_tokens=2, adapters={"sql": MODEL})
    state = replayed_of(
        ("lora", info, chain_of(2, lora="sql")), ("salted", info, chain_of(2, salt="tenant"))
    ).state

    def best(model: str, salt: str | None = None) -> list[str]:
        found = match_tokens(state, model, TOKENS, cache_salt=salt)
        return [match.worker for match in found if match.match_tokens]

    assert best("sql") == ["lora"]
    assert best(MODEL, salt="tenant") == ["salted"]
    assert best(MODEL) == []


def test_a_model_that_nobody_served_is_named() -> None:
    with pytest.raises(UnknownModel, match="other"):
        match_tokens(replay(an_archive(LOG), make_index=ReferenceIndex).state, "other", TOKENS)


def test_the_report_has_a_digest_per_worker_and_can_be_encoded() -> None:
    report = report_of(replay(an_archive(LOG), make_index=ReferenceIndex))
    document = msgspec.json.decode(msgspec.json.encode(report))
    assert (document["stream_sequence"], document["batches"]) == (5, 4)
    one, two = document["workers"]
    assert (one["worker"], one["seq"], one["trust"]) == ("w1", 3, "exact")
    assert one["digests"]["hbm"]["count"] == 3
    assert len(one["digests"]["dram"]["xor"]) == 16
    assert (two["trust"], two["digests"]) == ("gone", {})
