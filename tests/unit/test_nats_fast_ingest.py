"""When a publisher uses the broker's fast ingest, and what answers mean."""

from kvatlas.events.nats.publishing.fast_ingest import (
    LULL_TICKS,
    REST_SECONDS,
    ApiError,
    BatchAnswer,
    FastIngest,
    IngestPhase,
    decode_answer,
)


def a_batch(sent: int = 10, flow: int = 4) -> FastIngest:
    """Return an open batch of the messages 101, 102, ..."""
    ingest = FastIngest(busy_messages=4, max_unacked=4 * flow)
    ingest.drain()
    ingest.open("in.id.", 101, sent, sent * 100)
    for _ in range(sent):
        ingest.next_reply()
    ingest.apply(ack(0, flow))
    ingest.phase = IngestPhase.open
    return ingest


def ack(place: int, flow: int = 4) -> BatchAnswer:
    return BatchAnswer("ack", place, flow)


def last(count: int) -> BatchAnswer:
    return BatchAnswer(seq=1000, count=count)


def test_a_batch_pays_from_so_many_messages_on() -> None:
    ingest = FastIngest(busy_messages=64)
    assert not ingest.wants_batch(63, 63 * 500, 0.0)
    assert ingest.wants_batch(64, 64 * 500, 0.0)
    assert not FastIngest(busy_messages=0).wants_batch(1000, 1000, 0.0)


def test_large_messages_go_one_by_one() -> None:
    ingest = FastIngest(busy_messages=16, max_unacked=1024, max_unacked_bytes=1 << 20)
    assert ingest.wants_batch(16, 16 * 10_000, 0.0)
    assert not ingest.wants_batch(16, 16 * 60_000, 0.0)


def test_a_full_window_always_gets_an_answer() -> None:
    ingest = FastIngest(busy_messages=4, max_unacked=100, max_unacked_bytes=100_000)
    ingest.open("in.id.", 1, 10, 10 * 500)
    assert ingest.flow == 25
    ingest.open("in.id.", 1, 10, 10 * 5_000)
    assert ingest.flow == 4


def test_reply_subjects_name_flow_place_and_role() -> None:
    ingest = FastIngest(busy_messages=4, max_unacked=40)
    ingest.open("in.id.", 7, 3, 300)
    assert ingest.next_reply() == "in.id.10.fail.1.0.$FI"
    assert ingest.next_reply() == "in.id.10.fail.2.1.$FI"
    assert ingest.end() == "in.id.10.fail.3.3.$FI"


def test_consent_stores_nothing() -> None:
    ingest = FastIngest(busy_messages=4)
    ingest.open("in.id.", 7, 3, 300)
    ingest.next_reply()
    assert ingest.apply(decode_answer(b'{"type":"ack","seq":0,"msgs":10}')) == (range(7, 7), "")
    assert ingest.is_accepted
    assert ingest.flow == 10


def test_an_answer_covers_all_before_it_once() -> None:
    ingest = a_batch()
    assert ingest.apply(ack(4)) == (range(101, 105), "")
    assert ingest.apply(ack(4)).stored == range(105, 105)
    assert ingest.apply(ack(8)).stored == range(105, 109)
    assert ingest.apply(ack(4)).stored == range(109, 109)


def test_an_answer_does_not_cover_what_was_not_sent() -> None:
    ingest = a_batch(sent=2)
    assert ingest.apply(ack(4)).stored == range(101, 103)


def test_the_last_answer_to_an_end_stores_the_rest() -> None:
    ingest = a_batch()
    ingest.apply(ack(8))
    ingest.end()
    assert ingest.apply(last(10)) == (range(109, 111), "")
    assert ingest.phase is IngestPhase.draining


def test_a_batch_that_the_broker_ends_has_failed_after_what_is_stored() -> None:
    ingest = a_batch()
    assert ingest.apply(BatchAnswer("gap", 7)) == (range(101, 101), "")
    assert ingest.apply(last(5)) == (range(101, 106), "the batch ended after 5 of 10")


def test_an_end_before_the_last_message_is_a_failure() -> None:
    ingest = a_batch()
    ingest.end()
    taken = ingest.apply(last(9))
    assert taken.stored == range(101, 110)
    assert taken.failure


def test_errors_are_failures() -> None:
    disabled = BatchAnswer(error=ApiError(400, 10205, "batch publish is disabled"))
    assert a_batch().apply(disabled) == (range(0), "batch publish is disabled")
    assert a_batch().apply(BatchAnswer(error=ApiError(503))) == (range(0), "error 503")
    assert a_batch().apply(None).failure == "nobody stores it"


def test_a_broker_that_knows_no_batches_has_stored_the_first_message() -> None:
    ingest = FastIngest(busy_messages=4)
    ingest.open("in.id.", 7, 3, 300)
    ingest.next_reply()
    taken = ingest.apply(decode_answer(b'{"stream":"TEST","seq":5}'))
    assert taken == (range(7, 8), "the broker knows no batches")


def test_after_a_failure_all_goes_one_by_one_for_a_while() -> None:
    ingest = a_batch()
    ingest.fail(now=100.0)
    assert ingest.phase is IngestPhase.single
    assert not ingest.wants_batch(500, 500, 100.0 + REST_SECONDS - 0.1)
    assert ingest.wants_batch(500, 500, 100.0 + REST_SECONDS)


def test_a_batch_that_gets_no_more_messages_ends() -> None:
    ingest = a_batch()
    ingest.tick()
    assert not ingest.is_ending
    ingest.next_reply()
    ingest.tick()
    assert not ingest.is_ending
    ingest.tick()
    assert ingest.is_ending


def test_a_batch_that_gets_few_messages_ends() -> None:
    ingest = a_batch()
    for _ in range(LULL_TICKS):
        ingest.next_reply()
        assert not ingest.is_ending
        ingest.tick()
    assert ingest.is_ending


def test_a_batch_with_answers_goes_on() -> None:
    ingest = a_batch()
    for tick in range(3 * LULL_TICKS):
        for _ in range(4):
            ingest.next_reply()
        ingest.apply(ack(4 * tick))
        ingest.tick()
    assert not ingest.is_ending


def test_a_publisher_that_waits_for_an_answer_which_is_not_due_ends_the_batch() -> None:
    ingest = a_batch(sent=10)
    ingest.apply(ack(4))
    ingest.hurry()
    assert not ingest.is_ending
    ingest.apply(ack(8))
    ingest.hurry()
    assert ingest.is_ending
