"""Whatever happens to a fleet: the fold stands, keeps its promises, and replays to the same."""

import asyncio
from collections.abc import Callable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.events.archive.archiver import Archiver, ArchiverSettings
from kvatlas.events.archive.memory import MemoryArchive
from kvatlas.events.bus import Message
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.streams import KV_EVENTS, events_stream
from kvatlas.hindsight.replay import Moment, replay
from kvatlas.indexer import FlatRadixIndex, PrefixIndex, ReferenceIndex
from kvatlas.indexer.fold.state import IndexState, IndexStats
from kvatlas.indexer.fold.stimuli import BatchArrived, HoleSeen, Stimulus, stimulus_of
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Inventory,
    WorkerDown,
    WorkerUp,
)
from testkit.builders import hashes
from testkit.histories import FLEET, Step, histories, publish, validate
from testkit.indexes import tiny_index

INDEXES: list[Callable[[], PrefixIndex]] = [FlatRadixIndex, tiny_index, ReferenceIndex]

faults = st.lists(st.sampled_from(["drop", "duplicate", "delay"]), max_size=4)


def the_log(history: list[Step]) -> list[Message]:
    published = enumerate(publish(history), 1)
    return [Message(at, subject, payload, at) for at, (subject, payload) in published]


@given(histories)
def test_the_fold_stands_whatever_happens(history: list[Step]) -> None:
    state = IndexState(ReferenceIndex(), max_gone=1)
    for message in the_log(history):
        state.handle(stimulus_of(message))
        validate(state)
        assert state.stream_sequence == message.stream_sequence


@given(histories)
def test_the_fold_is_the_same_over_either_index(history: list[Step]) -> None:
    flat, plain = IndexState(FlatRadixIndex()), IndexState(ReferenceIndex())
    for message in the_log(history):
        assert flat.handle(stimulus_of(message)) == plain.handle(stimulus_of(message))
        assert flat.state_digest() == plain.state_digest()
    for first in range(1, 10):
        chain = hashes(first, first + 1)
        assert sorted(flat.match(chain)) == sorted(plain.match(chain))


@given(histories, st.integers(0, 40))
def test_a_fold_that_loses_a_part_of_the_log_never_calls_it_exact(
    history: list[Step], lost_from: int
) -> None:
    """Whoever is exact after a hole holds what it would hold without one."""
    log = the_log(history)
    whole, torn = IndexState(ReferenceIndex()), IndexState(ReferenceIndex())
    for message in log:
        whole.handle(stimulus_of(message))
        if lost_from <= message.stream_sequence < lost_from + 3:
            torn.handle(HoleSeen(message.stream_sequence, message.stream_sequence + 1))
        else:
            torn.handle(stimulus_of(message))
    for view in torn.instances():
        truth = whole.instance(view.instance)
        if view.trust is Trust.exact and truth is not None and truth.trust is Trust.exact:
            assert view.digests == truth.digests


@settings(max_examples=300)
@given(histories, st.integers(0, 40), st.integers(0, 40), st.sampled_from(INDEXES))
def test_a_snapshot_and_what_follows_it_are_the_whole(
    history: list[Step], until: int, hole_at: int, make_index: Callable[[], PrefixIndex]
) -> None:
    """Taken anywhere, before or after a hole: the same effects, trust, counters, matches."""
    whole, until_then = IndexState(make_index(), max_gone=1), IndexState(make_index(), max_gone=1)
    stimuli: list[Stimulus] = []
    for message in the_log(history):
        if message.stream_sequence == hole_at:
            stimuli.append(HoleSeen(hole_at, hole_at + 1))
        else:
            stimuli.append(stimulus_of(message))
    for stimulus in stimuli[:until]:
        whole.handle(stimulus)
        until_then.handle(stimulus)
    later = IndexState(make_index(), max_gone=1)
    later.restore(until_then.export()())
    validate(later)
    for stimulus in stimuli[until:]:
        assert later.handle(stimulus) == whole.handle(stimulus)
        validate(later)
    assert later.stream_sequence == whole.stream_sequence
    assert later.state_digest() == whole.state_digest()
    assert later.instances() == whole.instances()
    assert later.fleet.wanted_inventories() == whole.fleet.wanted_inventories()
    assert counts(later) == counts(whole)
    for first in range(1, 10):
        chain = hashes(first, first + 1)
        assert sorted(later.match(chain)) == sorted(whole.match(chain))


def counts(state: IndexState) -> IndexStats:
    return msgspec.structs.replace(state.stats(), memory_bytes=0)


@settings(max_examples=60)
@given(histories, faults, st.integers(1, 5))
def test_a_replay_is_what_was_live_at_every_sequence(
    history: list[Step], wrong: list[str], max_queued: int
) -> None:
    async def live() -> tuple[MemoryArchive, dict[int, str]]:
        broker, archive = MemoryBroker(), MemoryArchive()
        state = IndexState(ReferenceIndex())
        digests = {0: state.state_digest()}

        def fold(message: Message) -> None:
            state.handle(stimulus_of(message))
            digests[message.stream_sequence] = state.state_digest()

        async with broker.connect() as bus:
            await bus.declare_stream(events_stream())
            await bus.follow(
                KV_EVENTS, 1, fold, lambda expected, got: fold_hole(state, expected, got)
            )
            small = ArchiverSettings(max_queued=max_queued, max_batch=3)
            async with Archiver(bus, archive, streams=(KV_EVENTS,), settings=small) as archiver:
                publisher = bus.publisher(KV_EVENTS)
                for number, (subject, payload) in enumerate(publish(history)):
                    if number % 5 == 2 and wrong:
                        match wrong.pop():
                            case "drop":
                                broker.faults.drop_next = 1
                            case "duplicate":
                                broker.faults.duplicate_next = 1
                            case "delay":
                                broker.faults.delay_next = 1
                    await publisher.publish(subject, payload)
                broker.release()
                broker.faults.drop_next = 0
                await publisher.publish("kv.control.last.0", b"")
                await archiver.caught_up()
        return archive, digests

    def fold_hole(state: IndexState, expected: int, got: int) -> None:
        state.handle(HoleSeen(expected, got))

    archive, digests = asyncio.run(live())
    for sequence, digest in digests.items():
        replayed = replay(archive, Moment(sequence=sequence), ReferenceIndex)
        assert replayed.state_digest == digest
    assert replay(archive, make_index=FlatRadixIndex).state_digest == digests[max(digests)]


@given(histories)
def test_what_is_held_is_what_a_plain_reading_of_the_log_says(history: list[Step]) -> None:
    """A second reading of the rules, without inventories, in sets."""
    state = IndexState(ReferenceIndex())
    held: dict[tuple[InstanceId, Tier], set[bytes]] = {}
    at: dict[InstanceId, tuple[int, float]] = {}
    for message in the_log(history):
        stimulus = stimulus_of(message)
        if isinstance(stimulus, BatchArrived):
            batch = stimulus.decoded.batch
            if any(isinstance(event, Inventory) for event in batch.events):
                continue
            state.handle(stimulus)
            if batch.instance not in at and not any(isinstance(e, WorkerUp) for e in batch.events):
                continue  # of a name that has not said what it is
            epoch, seq = at.get(batch.instance, (0, 0))
            if (batch.epoch, batch.seq) <= (epoch, seq):
                continue
            at[batch.instance] = batch.epoch, batch.seq
            if batch.epoch > epoch:
                held |= {(batch.instance, tier): set() for tier in Tier}
            for event in batch.events:
                match event:
                    case BlockStored(hashes=packed, tier=tier):
                        held[batch.instance, tier] |= set(split(packed))
                    case BlockRemoved(hashes=packed, tier=tier):
                        held[batch.instance, tier] -= set(split(packed))
                    case AllBlocksCleared(tier):
                        for each in Tier if tier is None else (tier,):
                            held[batch.instance, each] = set()
                    case WorkerDown():
                        held |= {(batch.instance, tier): set() for tier in Tier}
                        at[batch.instance] = batch.epoch, float("inf")
                        break
    for instance in FLEET:
        view = state.instance(instance)
        counts = {tier: len(held.get((instance, tier), ())) for tier in Tier}
        found = view.digests if view else {}
        assert {tier: found[tier].count if tier in found else 0 for tier in Tier} == counts


def split(packed: bytes) -> list[bytes]:
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]
