"""Random lives of a small fleet, as what is published to the log: good, late and wrong."""

from collections.abc import Iterator

import msgspec
from hypothesis import strategies as st

from kvatlas.events.codec import encode
from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.instances import DegradedReason
from kvatlas.indexer.fold.state import IndexState
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    AllBlocksCleared,
    EventBatch,
    Inventory,
    KvEvent,
    Resync,
    SourceDegraded,
    WorkerDown,
)
from testkit.builders import (
    a_batch,
    a_control,
    digest,
    inventory,
    removed,
    stored,
    subject_of,
    up,
)

FLEET = (InstanceId("w1", 0), InstanceId("w1", 1), InstanceId("w2", 0))

Published = tuple[str, bytes]

_blocks = st.lists(st.integers(1, 9), max_size=4)
_tiers = st.sampled_from([Tier.hbm, Tier.dram])


@st.composite
def _events(draw: st.DrawFn) -> KvEvent:
    blocks, tier = draw(_blocks), draw(_tiers)
    match draw(st.integers(0, 11)):
        case 0 | 1 | 2 | 3 | 4:
            return stored(*blocks, tier=tier)
        case 5 | 6:
            return removed(*blocks, tier=tier)
        case 7:
            return AllBlocksCleared(draw(st.sampled_from([None, tier])))
        case 8:
            # as_of is put right by `publish`, unless it is to be wrong
            parts = draw(st.integers(1, 2))
            part = draw(st.integers(1, parts))
            wrong = draw(st.integers(-3, 0))
            return inventory(*blocks, as_of=wrong, tier=tier, part=part, parts=parts)
        case 9:
            return digest(*blocks, tier=tier)
        case 10:
            said: list[KvEvent] = [up(), Resync(0, 0), SourceDegraded("why"), SourceDegraded("")]
            return draw(st.sampled_from(said))
        case _:
            return up() if draw(st.booleans()) else WorkerDown("end")


class Step(msgspec.Struct, frozen=True):
    """One thing that happens to an instance."""

    kind: str
    who: int
    events: tuple[KvEvent, ...] = ()


steps = st.builds(
    Step,
    st.sampled_from(
        ["batch"] * 12
        + ["lost", "late", "repeat", "restart", "straggler"]
        + ["expired", "quarantined", "garbage", "spoofed"]
        + ["forgotten", "throttled", "released"]
    ),
    st.integers(0, len(FLEET) - 1),
    st.lists(_events(), max_size=3).map(tuple),
)
histories = st.lists(steps, max_size=40)


def publish(history: list[Step]) -> Iterator[Published]:
    """Yield (subject, payload) of each step that publishes something."""
    epochs = dict.fromkeys(FLEET, 1)
    seqs = dict.fromkeys(FLEET, 0)
    lost: dict[InstanceId, EventBatch] = {}
    last: dict[InstanceId, EventBatch] = {}
    numbers: dict[tuple[InstanceId, int, str], int] = {}
    for step in history:
        who = FLEET[step.who]
        match step.kind:
            case "batch" | "lost":
                seqs[who] += 1
                # who speaks comes first in each epoch, as long as that is not what gets lost
                says = step.events if seqs[who] > 1 else (up(), *step.events)
                batch = _a_batch(who, epochs[who], seqs[who], says)
                if step.kind == "lost":
                    lost[who] = batch
                else:
                    last[who] = batch
                    yield subject_of(batch), encode(batch)
            case "late" if who in lost:
                yield subject_of(lost[who]), encode(lost[who])
            case "repeat" if who in last:
                yield subject_of(last[who]), encode(last[who])
            case "restart":
                epochs[who] += 1
                seqs[who] = 0
            case "straggler" if epochs[who] > 1:
                batch = _a_batch(who, epochs[who] - 1, 99, step.events)
                yield subject_of(batch), encode(batch)
            case "expired" | "quarantined":
                control = a_control(who.worker, who.rank, epochs[who], step.kind)
                yield subject_of(control), encode(control)
            case "forgotten" | "throttled" | "released":
                number = numbers[who, epochs[who], step.kind] = (
                    numbers.get((who, epochs[who], step.kind), 0) + 1
                )
                control = a_control(who.worker, who.rank, epochs[who], step.kind, str(number))
                yield subject_of(control), encode(control)
            case "garbage":
                yield f"kv.events.model.{who.worker}.{who.rank}", b"\xc1garbage"
            case "spoofed":
                batch = _a_batch(who, epochs[who], seqs[who] + 1, step.events)
                yield "kv.events.model.mallory.0", encode(batch)


def _a_batch(who: InstanceId, epoch: int, seq: int, events: tuple[KvEvent, ...]) -> EventBatch:
    batch = a_batch(worker=who.worker, rank=who.rank, epoch=epoch, seq=seq)
    put_right = tuple(
        msgspec.structs.replace(event, as_of_seq=seq + event.as_of_seq)
        if isinstance(event, Inventory)
        else event
        for event in events
    )
    return msgspec.structs.replace(batch, events=put_right)


def validate(state: IndexState) -> None:
    """Check what always holds between the parts of a fold."""
    numbers, hidden = {}, set[int]()
    for name, instance in state.fleet.instances.items():
        assert instance.id == name
        assert instance.is_gone == (name in state.fleet.gone)
        assert instance.is_gone or (instance.trust is Trust.exact) == (not instance.damages)
        assert not (instance.wants_inventory and instance.trust is not Trust.degraded)
        assert not instance.is_gone or (instance.number is None and instance.info is None)
        if instance.number is not None:
            numbers[instance.number] = instance
        if instance.staging is not None:
            assert instance.staging.begun >= instance.staging.whole.keys()
            numbers[instance.staging.number] = instance
            hidden.add(instance.staging.number)
        position = state.fleet.order.position(name)
        assert position.epoch == instance.epoch
        assert instance.is_gone or position.seq == instance.seq
        if instance.throttled_ns and not instance.is_gone:
            assert DegradedReason.throttled in instance.damages
            assert not instance.wants_inventory
        is_excluded = name in state.fleet.residency._named.excluded
        assert is_excluded == (DegradedReason.quarantined in instance.damages)
    assert numbers == state.fleet.residency._named.by_number
    index = state.fleet.residency._index
    assert not isinstance(index, FlatRadixIndex) or numbers.keys() == index._live
    assert hidden == state.fleet.residency._named.hidden
