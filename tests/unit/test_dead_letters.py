"""Dead letters without a broker: who gets one, what is in it, and how many there may be."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.events.bus import Message
from kvatlas.events.codec import encode
from kvatlas.events.dead_letters import (
    KINDS,
    LETTER_VERSION,
    LOOK_BACK,
    MAX_KEPT_BYTES,
    MAX_REASON_CHARACTERS,
    DeadLetter,
    Mark,
    address_of,
    decode_letter,
    encode_letter,
    letter_about,
    newest_mark,
    read_letters,
    whole_payload,
)
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.streams import (
    KV_DEAD_LETTERS,
    KV_EVENTS,
    dead_letters_stream,
    events_stream,
    subject_matches,
)
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import stimulus_of
from kvatlas.indexer.service.dead_letters import (
    MAX_BUCKETS,
    DeadLetterBudget,
    DeadLetterSettings,
    DeadLetterWriter,
    UnreadableMessage,
    unreadable_message_of,
)
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.schemas.errors import MalformedLetter
from kvatlas.schemas.ids import InstanceId
from testkit.builders import a_batch, a_control, hashes, stored, subject_of, up
from testkit.waiting import until

SUBJECT = "kv.events.model.w1.0"
GARBAGE = UnreadableMessage("w1", "payload", "no batch")


def a_message(payload: bytes = b"\xc1", at: int = 1, subject: str = SUBJECT) -> Message:
    return Message(at, subject, payload, at * 1000)


def with_events(*events: object) -> bytes:
    """Return a batch whose events are whatever they are."""
    fields = msgspec.msgpack.decode(encode(a_batch()))
    return msgspec.msgpack.encode([*fields[:6], list(events)])


def poison(payload: bytes, subject: str = SUBJECT) -> UnreadableMessage | None:
    return unreadable_message_of(stimulus_of(a_message(payload, subject=subject)))


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    async with broker.connect() as bus:
        await bus.declare_stream(events_stream())
        await bus.declare_stream(dead_letters_stream())
        yield bus


async def put_letters(bus: MemoryBus, *letters: DeadLetter) -> None:
    publisher = bus.publisher(KV_DEAD_LETTERS)
    for letter in letters:
        await publisher.publish(address_of(letter), encode_letter(letter))
    await publisher.flush()


def a_letter(at: int = 1, payload: bytes = b"\xc1", subject: str = SUBJECT) -> DeadLetter:
    return letter_about(a_message(payload, at, subject), "payload", "no batch", "me")


async def letters_of(bus: MemoryBus, worker: str | None = None) -> list[DeadLetter]:
    return [letter async for letter in read_letters(bus, worker)]


# --- who gets one -------------------------------------------------------------------------------


def test_what_can_be_read_gets_none() -> None:
    assert poison(encode(a_batch(up(), stored(1)))) is None
    assert poison(encode(a_control()), "kv.control.w1.0") is None


def test_an_event_of_a_newer_minor_is_no_poison() -> None:
    assert poison(with_events(["sung", 1], stored(1))) is None


def test_each_way_to_be_unreadable_has_its_kind() -> None:
    newer = msgspec.msgpack.encode([900, "w1", 0])
    found = {
        poison(b"\xc1"),
        poison(newer),
        poison(encode(a_batch(worker="w2"))),
        poison(encode(a_batch()), "kv.events.nonsense"),
        poison(bytes((8 << 20) + 1)),
        poison(with_events(["stored", 5])),
    }
    kinds = {one.kind: one.worker for one in found if one is not None}
    assert kinds == dict.fromkeys(KINDS, "w1") | {"subject": ""}


def test_a_batch_with_bad_events_is_told_which() -> None:
    found = poison(with_events(["stored", 5], ["sung"], *[["removed"]] * 5))
    assert found is not None
    assert found.reason.startswith("6 of 7 events skipped: 0 (stored): Expected `array`")
    assert "; 2 (removed): " in found.reason
    assert found.reason.endswith("; 3 more")


@given(st.binary() | st.binary().map(lambda tail: encode(a_batch())[:20] + tail), st.text())
def test_no_bytes_and_no_subject_raise(payload: bytes, subject: str) -> None:
    for each in (SUBJECT, "kv.control.w1.0", f"kv.events.m.{subject}.0", subject):
        message = a_message(payload, subject=each)
        found = unreadable_message_of(stimulus_of(message))
        if found is not None:
            assert found.kind in KINDS
            letter = letter_about(message, found.kind, found.reason, "me")
            assert decode_letter(encode_letter(letter)) == letter
            assert letter.worker == found.worker
            assert subject_matches("kv.dead.*.1", address_of(letter))


# --- what is in it ------------------------------------------------------------------------------


def test_a_letter_is_bounded_and_says_what_is_cut() -> None:
    letter = letter_about(a_message(bytes(MAX_KEPT_BYTES + 1)), "payload", "x" * 9_999, "me")
    assert (letter.num_bytes, len(letter.payload), letter.is_cut) == (65_537, 65_536, True)
    assert len(letter.reason) == MAX_REASON_CHARACTERS
    assert letter.reason.endswith("x...")
    assert not letter_about(a_message(bytes(MAX_KEPT_BYTES)), "payload", "x", "me").is_cut


def test_an_unknown_worker_shares_no_subject_with_a_known_one() -> None:
    subjects = {address_of(a_letter(subject=f"kv.events.m.{one}.0")) for one in ("_", "=", "=2E")}
    assert subjects == {"kv.dead._.1", "kv.dead.=.1", "kv.dead.=2E.1"}
    assert address_of(a_letter(subject="kv.nonsense")) == "kv.dead.=.1"


@given(st.binary())
def test_what_is_no_letter_is_malformed(payload: bytes) -> None:
    try:
        decode_letter(payload)
    except MalformedLetter:
        return
    msgspec.msgpack.decode(payload, type=DeadLetter)


def test_letters_of_a_newer_minor_are_read_and_of_a_newer_major_not() -> None:
    fields = list(msgspec.structs.astuple(a_letter()))
    minor = msgspec.msgpack.encode([LETTER_VERSION + 1, *fields[1:], "new field"])
    assert decode_letter(minor).reason == "no batch"
    with pytest.raises(MalformedLetter, match="version 200"):
        decode_letter(msgspec.msgpack.encode([LETTER_VERSION + 100, *fields[1:]]))


async def test_all_of_a_cut_message_is_there_while_the_log_has_it(
    bus: MemoryBus, broker: MemoryBroker
) -> None:
    payload = bytes(MAX_KEPT_BYTES + 9)
    await bus.publisher(KV_EVENTS).publish(SUBJECT, payload)
    (message,) = [message async for message in bus.read_range(KV_EVENTS, 1, 1)]
    letter = letter_about(message, "payload", "", "me")
    assert await whole_payload(bus, letter) == payload
    other = msgspec.structs.replace(letter, broker_ns=letter.broker_ns - 1)
    assert await whole_payload(bus, other) == letter.payload, "of a log that was lost"
    broker.purge(KV_EVENTS, 2)
    assert await whole_payload(bus, letter) == letter.payload


# --- what there is ------------------------------------------------------------------------------


async def test_letters_are_found_by_worker_and_garbage_among_them_is_left_out(
    bus: MemoryBus,
) -> None:
    publisher = bus.publisher(KV_DEAD_LETTERS)
    await publisher.publish("kv.dead.w1.7", b"garbage")
    of_w2 = a_letter(2, subject="kv.control.w2.0")
    await put_letters(bus, a_letter(1), of_w2, a_letter(3), a_letter(1))
    assert [letter.stream_sequence for letter in await letters_of(bus)] == [2, 3, 1]
    assert await letters_of(bus, "w2") == [of_w2]
    assert await letters_of(bus, "w3") == []


async def test_the_mark_is_of_the_newest_message_though_a_slow_replica_wrote_last(
    bus: MemoryBus,
) -> None:
    assert await newest_mark(bus) == Mark()
    await put_letters(bus, *map(a_letter, range(1, LOOK_BACK + 1)), a_letter(5))
    await bus.publisher(KV_DEAD_LETTERS).publish("kv.dead.w1.999", b"garbage")
    assert await newest_mark(bus) == Mark(LOOK_BACK, LOOK_BACK * 1000)


def test_a_mark_covers_nothing_of_a_log_that_has_begun_anew() -> None:
    mark = Mark(50, 50_000)
    assert mark.covers(a_message(at=50))
    assert not mark.covers(a_message(at=51))
    assert not mark.covers(Message(3, SUBJECT, b"", 60_000))


# --- how many -----------------------------------------------------------------------------------


def taken(budget: DeadLetterBudget, worker: str, times: int, now: float) -> int:
    return sum(budget.spend(worker, "payload", now) for _ in range(times))


def test_a_flood_of_one_worker_leaves_room_for_others() -> None:
    budget = DeadLetterBudget(DeadLetterSettings(letters_per_second=10, burst=100, share=0.25))
    assert taken(budget, "loud", 1_000, now=5.0) == 25
    assert taken(budget, "quiet", 1, now=5.0) == 1
    assert sum(taken(budget, f"w{n}", 1_000, now=5.0) for n in range(10)) == 74
    assert taken(budget, "quiet", 1, now=5.0) == 0
    assert sum(taken(budget, f"w{n}", 1_000, now=7.0) for n in range(10)) == 20, "10 a second"


def test_a_clock_that_goes_back_gives_no_letters() -> None:
    budget = DeadLetterBudget(DeadLetterSettings(letters_per_second=1, burst=4, share=1))
    assert taken(budget, "loud", 10, now=9.0) == 4
    assert taken(budget, "loud", 10, now=5.0) == 0
    assert taken(budget, "loud", 10, now=9.0) == 0
    assert taken(budget, "loud", 10, now=10.0) == 1


def test_a_letter_that_one_bucket_lacks_costs_the_other_nothing() -> None:
    budget = DeadLetterBudget(DeadLetterSettings(letters_per_second=1, burst=4, share=0.5))
    assert taken(budget, "loud", 100, now=1.0) == 2
    assert taken(budget, "quiet", 100, now=1.0) == 2
    assert taken(budget, "third", 100, now=1.0) == 0
    assert taken(budget, "third", 100, now=3.0) == 2, "its share was full all the while"


def test_buckets_are_bounded_and_names_made_up_win_no_more_than_all() -> None:
    budget = DeadLetterBudget(DeadLetterSettings(letters_per_second=1, burst=10))
    assert sum(budget.spend(f"w{n}", "payload", 1.0) for n in range(3 * MAX_BUCKETS)) == 10
    assert len(budget._shares) == MAX_BUCKETS


async def test_what_waits_for_the_broker_is_bounded_by_count_and_bytes(bus: MemoryBus) -> None:
    few = DeadLetterWriter(bus, "me", DeadLetterSettings(max_waiting=3))
    small = DeadLetterWriter(bus, "me", DeadLetterSettings(max_waiting_bytes=100_000))
    for at in range(1, 11):
        few.put(a_message(at=at), GARBAGE)
        small.put(a_message(bytes(99_000), at=at), GARBAGE)
    assert (few.num_waiting, few.num_dropped) == (3, 7)
    assert (small.num_waiting, small.num_dropped) == (2, 8)


async def test_letters_wait_while_the_broker_is_away(bus: MemoryBus) -> None:
    writer = DeadLetterWriter(bus, "me", DeadLetterSettings())
    async with asyncio.TaskGroup() as group:
        running = group.create_task(writer.run())
        bus.cut()
        for at in (1, 2, 3):
            writer.put(a_message(at=at), GARBAGE)
        for _ in range(5):
            await asyncio.sleep(0)
        assert (writer.num_waiting, writer.num_written["payload"]) == (3, 0)
        bus.restore()
        await until(lambda: writer.num_written["payload"] == 3)
        running.cancel()
    assert [letter.stream_sequence for letter in await letters_of(bus)] == [1, 2, 3]
    assert (writer.num_waiting, writer.num_dropped) == (0, 0)


async def test_letters_that_are_refused_are_counted_and_hold_up_nothing(
    broker: MemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    async with broker.connect() as bus, asyncio.TaskGroup() as group:
        writer = DeadLetterWriter(bus, "me", DeadLetterSettings())
        await writer.begin(0)
        running = group.create_task(writer.run())
        for at in range(1, 6):
            writer.put(a_message(at=at), GARBAGE)
        await until(lambda: writer.num_dropped == 5)
        await bus.declare_stream(dead_letters_stream())
        writer.put(a_message(at=6), GARBAGE)
        await until(lambda: writer.num_written["payload"] == 1)
        running.cancel()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "one about the start, one about all that was refused"


async def test_a_forged_letter_hides_nothing_that_is_still_to_come(bus: MemoryBus) -> None:
    forged = letter_about(Message(2**62, SUBJECT, b"", 2**62), "payload", "", "me")
    await put_letters(bus, forged)
    writer = DeadLetterWriter(bus, "me", DeadLetterSettings())
    await writer.begin(log_end=10)
    writer.put(a_message(at=10), GARBAGE)
    assert writer.num_waiting == 0
    writer.put(a_message(at=11), GARBAGE)
    assert writer.num_waiting == 1


# --- in the service -----------------------------------------------------------------------------


async def test_one_bad_event_costs_neither_its_batch_nor_the_stream(bus: MemoryBus) -> None:
    publisher = bus.publisher(KV_EVENTS)
    await publisher.publish(SUBJECT, with_events(up(), stored(1), ["digest", "x"]))
    await publisher.publish(SUBJECT, b"\xc1")
    batch = a_batch(stored(2), seq=2)
    await publisher.publish(subject_of(batch), encode(batch))
    settings = DeadLetterSettings()
    async with IndexService(bus, IndexState(ReferenceIndex()), dead_letters=settings) as service:
        await service.wait_ready()
        assert [match.num_blocks for match in service.index.match(hashes(1, 2))] == [2]
        letters = service.letters
        assert letters is not None
        await until(lambda: letters.num_written.total() == 2)
    found = [(letter.stream_sequence, letter.kind, letter.by) for letter in await letters_of(bus)]
    assert found == [(1, "event", "indexer"), (2, "payload", "indexer")]
    assert service.index.instance(InstanceId("w1", 0)) is not None


async def test_without_settings_no_letters_are_written(bus: MemoryBus) -> None:
    await bus.publisher(KV_EVENTS).publish(SUBJECT, b"\xc1")
    async with IndexService(bus, IndexState(ReferenceIndex())) as service:
        await service.wait_ready()
        assert service.letters is None
    assert await letters_of(bus) == []
