"""Decisions on their way into the log, over the memory bus."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from kvatlas.events.bus import Message
from kvatlas.events.memory.bus import MemoryBroker, MemoryBus
from kvatlas.events.streams import KV_DECISIONS, decisions_stream
from kvatlas.events.subjects import decisions_subject
from kvatlas.router.recorder import MemoryDecisionLog, StreamDecisionLog, without_chains
from kvatlas.schemas.errors import MessageTooLarge, StreamRefused
from kvatlas.schemas.routing import Decision, Question, decode_decision, encode_decision
from kvatlas.schemas.settings import RouterSettings
from testkit.bus import Collected
from testkit.fleet import Fleet, a_prompt, a_request
from testkit.waiting import until

SETTINGS = RouterSettings(max_unrecorded_decisions=3, max_kept_decisions=2)
STRANGE_MODEL = "org/m@v1.2"


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBroker().connect() as bus:
        await bus.declare_stream(decisions_stream())
        yield bus


def decisions(count: int) -> list[Decision]:
    fleet = Fleet()
    fleet.up("w1", model=STRANGE_MODEL)
    router = fleet.router()
    ids = [
        router.route(a_request(a_prompt(64), model=STRANGE_MODEL)).decision_id for _ in range(count)
    ]
    return [router.decision(decision_id) for decision_id in ids]


async def test_decisions_arrive_whole_and_in_order(bus: MemoryBus) -> None:
    arrived: Collected[Message] = Collected()
    await bus.follow(KV_DECISIONS, 1, arrived)
    made = decisions(3)
    async with StreamDecisionLog(bus.publisher(KV_DECISIONS), SETTINGS) as log:
        for decision in made:
            log.record(decision)
    messages = await arrived.count(3)
    assert [decode_decision(message.payload) for message in messages] == made
    assert {message.subject for message in messages} == {decisions_subject(STRANGE_MODEL)}
    assert (log.num_published, log.num_dropped, log.num_waiting) == (3, 0, 0)


async def test_the_newest_are_kept_in_memory(bus: MemoryBus) -> None:
    one, two, three = decisions(3)
    async with StreamDecisionLog(bus.publisher(KV_DECISIONS), SETTINGS) as log:
        for decision in (one, two, three):
            log.record(decision)
        assert log.find(one.id) is None
        assert log.find(three.id) == three


async def test_a_question_is_made_when_somebody_looks_at_it(bus: MemoryBus) -> None:
    arrived: Collected[Message] = Collected()
    await bus.follow(KV_DECISIONS, 1, arrived)
    [whole] = decisions(1)
    assert whole.question.candidates
    asked = msgspec.structs.replace(whole.question, candidates=())
    outline = msgspec.structs.replace(whole, question=asked)
    made: list[str] = []

    class Watched:
        num_bytes = 0

        def __call__(self) -> Question:
            made.append("again")
            return whole.question

    async with StreamDecisionLog(bus.publisher(KV_DECISIONS), SETTINGS) as log:
        log.record(outline, Watched())
        assert (log.outline(whole.id), made) == (outline, [])
        assert log.find(whole.id) == whole
    [message] = await arrived.count(1)
    assert decode_decision(message.payload) == whole


class StuckPublisher:
    """A publisher whose window is full for good."""

    num_unacked = unacked_bytes = 0

    def __init__(self) -> None:
        self.asked = 0

    async def publish(self, subject: str, payload: bytes) -> None:
        self.asked += 1
        await until(lambda: False)

    async def flush(self) -> None:
        raise AssertionError("nothing was accepted")


async def test_a_broker_that_is_away_costs_decisions_and_no_time() -> None:
    publisher = StuckPublisher()
    async with StreamDecisionLog(publisher, SETTINGS, drain_seconds=0.01) as log:
        log.record(decisions(1)[0])
        await until(lambda: publisher.asked == 1)
        for decision in decisions(5):
            log.record(decision)
        assert (log.num_waiting, log.num_dropped) == (3, 3)
    assert (log.num_waiting, log.num_dropped) == (0, 6)


class RefusingPublisher(StuckPublisher):
    """A publisher that refuses everything."""

    async def publish(self, subject: str, payload: bytes) -> None:
        raise StreamRefused("no room")

    async def flush(self) -> None:
        pass


async def test_what_the_broker_refuses_is_counted() -> None:
    async with StreamDecisionLog(RefusingPublisher(), SETTINGS) as log:
        for decision in decisions(2):
            log.record(decision)
    assert (log.num_published, log.num_dropped) == (0, 2)


class ForgetfulPublisher(RefusingPublisher):
    """A publisher that tells late of a refusal, once."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[bytes] = []

    async def publish(self, subject: str, payload: bytes) -> None:
        self.asked += 1
        if self.asked == 2:
            raise StreamRefused("the first one was too large")
        self.taken.append(payload)


async def test_a_late_refusal_costs_one_decision_only() -> None:
    publisher = ForgetfulPublisher()
    made = decisions(2)
    async with StreamDecisionLog(publisher, SETTINGS) as log:
        for decision in made:
            log.record(decision)
    assert [decode_decision(payload) for payload in publisher.taken] == made
    assert log.num_dropped == 1


class NarrowPublisher(ForgetfulPublisher):
    """A publisher to a broker that takes so many bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    async def publish(self, subject: str, payload: bytes) -> None:
        if len(payload) > self._limit:
            raise MessageTooLarge(len(payload), self._limit)
        self.taken.append(payload)


@pytest.mark.parametrize(
    ("limit", "left_out"),
    [
        (200_000, ()),
        (50_000, ("groups.chain",)),
        (None, ("groups", "candidates", "question.candidates")),
    ],
)
async def test_a_decision_too_large_for_the_broker_is_recorded_without_some_parts(
    limit: int | None, left_out: tuple[str, ...]
) -> None:
    [decision] = long_decisions(1, 100_000)
    too_few = len(encode_decision(without_chains(decision))) - 1
    publisher, settings = NarrowPublisher(limit or too_few), RouterSettings()
    async with StreamDecisionLog(publisher, settings) as log:
        log.record(decision)
    [found] = map(decode_decision, publisher.taken)
    assert (found.id, found.chosen, found.plan) == (decision.id, decision.chosen, decision.plan)
    assert found.left_out == left_out
    assert (found.groups == ()) is ("groups" in left_out)
    assert (found.question == decision.question) is ("question.candidates" not in left_out)
    assert bool(found.chain) is not bool(left_out)
    assert (log.num_published, log.num_cut, log.num_dropped) == (1, bool(left_out), 0)
    assert log.find(decision.id) == decision


async def test_a_decision_too_large_costs_no_other_and_is_counted() -> None:
    publisher, made = NarrowPublisher(500), long_decisions(2, 100_000)
    async with StreamDecisionLog(publisher, RouterSettings()) as log:
        for decision in made:
            log.record(decision)
    assert (publisher.taken, log.num_dropped, log.num_cut) == ([], 2, 0)


async def test_a_late_refusal_and_a_decision_too_large_cost_what_they_are() -> None:
    class Both(NarrowPublisher):
        async def publish(self, subject: str, payload: bytes) -> None:
            self.asked += 1
            if self.asked == 1:
                raise StreamRefused("an earlier one")
            await super().publish(subject, payload)

    publisher, made = Both(50_000), long_decisions(1, 100_000)
    async with StreamDecisionLog(publisher, RouterSettings()) as log:
        log.record(made[0])
    assert [decode_decision(each).left_out for each in publisher.taken] == [("groups.chain",)]
    assert (log.num_dropped, log.num_cut) == (1, 1)


async def test_nothing_is_taken_after_the_end(bus: MemoryBus) -> None:
    async with StreamDecisionLog(bus.publisher(KV_DECISIONS), SETTINGS) as log:
        pass
    log.record(decisions(1)[0])
    assert (log.num_waiting, log.num_dropped) == (0, 1)


def test_a_router_without_a_log_keeps_the_newest() -> None:
    one, two, three = decisions(3)
    log = MemoryDecisionLog(SETTINGS)
    for decision in (one, two, three):
        log.record(decision)
    assert (log.find(one.id), log.find(two.id), log.find(three.id)) == (None, two, three)
    assert (len(log), log.num_dropped, log.num_waiting) == (2, 0, 0)


def long_decisions(count: int, num_bytes: int) -> list[Decision]:
    """Decisions about prompts whose chains have so many bytes."""
    made = []
    for decision in decisions(count):
        [group] = decision.groups
        group = msgspec.structs.replace(group, chain=bytes(num_bytes))
        made.append(msgspec.structs.replace(decision, groups=(group,)))
    return made


def test_beyond_the_bytes_an_outline_is_kept() -> None:
    settings = RouterSettings(max_kept_decision_bytes=250_000, max_kept_decisions=4)
    log = MemoryDecisionLog(settings)
    made = long_decisions(6, 100_000)
    for decision in made:
        log.record(decision)
    assert [log.find(each.id) for each in made] == [None] * 4 + made[4:]
    outlines = [log.outline(each.id) for each in made]
    assert outlines[:2] == [None, None]
    assert outlines[4:] == made[4:]
    for outline, decision in zip(outlines[2:4], made[2:4], strict=True):
        assert outline is not None
        assert (outline.chosen, outline.plan) == (decision.chosen, decision.plan)
        assert (outline.chain, outline.candidates, outline.question.candidates) == (b"", (), ())
    assert (len(log), log.num_reduced) == (4, 4)
    assert 200_000 < log.kept_bytes <= 250_000


def test_what_a_client_or_a_fleet_makes_large_is_counted() -> None:
    fleet = Fleet()
    for number in range(300):
        fleet.up(f"w{number}")
    log = MemoryDecisionLog(RouterSettings())
    router = fleet.router(log=log)
    sizes = []
    for count in (1, 300):
        before = log.kept_bytes
        router.route(a_request(a_prompt(64), max_candidates=count))
        sizes.append(log.kept_bytes - before)
    few, many = sizes
    assert few > 256 * 11 * 8, "the question's columns"
    assert many - few > 250 * 1_000, "the candidates that were asked for"


def test_a_decision_larger_than_the_bound_is_an_outline_at_once() -> None:
    log = MemoryDecisionLog(RouterSettings(max_kept_decision_bytes=1_000))
    [decision] = decisions(1)
    log.record(decision)
    assert log.find(decision.id) is None
    outline = log.outline(decision.id)
    assert outline is not None
    assert outline.chosen == decision.chosen
    assert log.kept_bytes == 0


async def test_what_waits_for_the_broker_is_bounded_in_bytes() -> None:
    settings = RouterSettings(max_unrecorded_decision_bytes=250_000)
    publisher = StuckPublisher()
    async with StreamDecisionLog(publisher, settings, drain_seconds=0.01) as log:
        for decision in long_decisions(5, 100_000):
            log.record(decision)
        assert (log.num_waiting, log.num_dropped) == (2, 3)


async def test_room_for_bytes_comes_back_when_they_have_left(bus: MemoryBus) -> None:
    settings = RouterSettings(max_unrecorded_decision_bytes=250_000)
    async with StreamDecisionLog(bus.publisher(KV_DECISIONS), settings) as log:
        for decision in long_decisions(5, 100_000):
            log.record(decision)
            await until(lambda: log.num_waiting == 0)
        assert log.num_dropped == 0
