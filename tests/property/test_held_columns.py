"""`held` says by lines what `match` says by name, over every index, whatever happens meanwhile."""

import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.events.codec import DecodedBatch
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import BatchArrived, ControlArrived
from kvatlas.indexer.index.flat import FlatRadixIndex
from kvatlas.indexer.index.naming import NamedIndex
from kvatlas.indexer.index.reference import ReferenceIndex
from kvatlas.indexer.index.shared.arrays import SharedArrays
from kvatlas.indexer.index.shared.publication import IndexPublication, WriterStatus
from kvatlas.indexer.index.shared.reader import SharedIndexReader
from kvatlas.indexer.reader import IndexReader, InstanceSelection
from kvatlas.indexer.trust_overlay import TrustOverlay
from kvatlas.schemas.hashing import reuse_point
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import BlockStored, KvEvent, WorkerDown
from testkit.builders import ROOT, a_batch, a_control, hashes, inventory, removed, stored, up
from testkit.histories import FLEET
from testkit.indexes import tiny_index

CHAIN = range(1, 7)
NOBODY = InstanceId("nobody", 0)
blocks = st.lists(st.sampled_from(CHAIN), max_size=6)
tiers = st.sampled_from([Tier.hbm, Tier.dram])
kinds = ["stored"] * 4 + ["point"] * 2 + ["removed", "inventory", "up", "hybrid", "down", "banned"]
#: so that there is something to lose from the first step on
BEGINNING = [(kind, who, [1, 2, 3], Tier.hbm) for who in (0, 1, 2) for kind in ("up", "stored")]
#: kind of what happens, to whom, which blocks, in which tier
steps = st.tuples(st.sampled_from(kinds), st.integers(0, len(FLEET) - 1), blocks, tiers)


def events_of(kind: str, told: list[int], tier: Tier, seq: int) -> list[KvEvent]:
    match kind:
        case "stored":
            return [stored(*told, tier=tier)]
        case "point":
            return [BlockStored(ROOT, reuse_point(hashes(block)), None, tier) for block in told]
        case "removed":
            return [removed(*told, tier=tier)]
        case "inventory":
            return [inventory(*told, as_of=seq, tier=tier)]
        case "up" | "hybrid":
            return [up(ends_at_reuse_points=kind == "hybrid")]
        case _:
            return [WorkerDown("end")]


def agree(index: IndexReader, selection: InstanceSelection) -> None:
    """Ask for a chain, a part of it, and one that nobody holds."""
    for chain in (hashes(*CHAIN), hashes(1, 2), hashes(99), b""):
        found = {match.instance: match.by_tier for match in index.match(chain)}
        expected = [found.get(instance, (0, 0, 0, 0, 0)) for instance in selection.instances]
        assert [tuple(line) for line in index.held(chain, selection).tolist()] == expected


@given(st.lists(steps, max_size=20))
def test_lines_are_matches(history: list[tuple[str, int, list[int], Tier]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        arrays = SharedArrays(Path(name))
        states = [IndexState(tiny_index(arrays=arrays)), IndexState(ReferenceIndex())]
        states.append(IndexState(FlatRadixIndex()))
        publication = IndexPublication(arrays, states[0], states[0])
        indexes: list[IndexReader] = [
            *states,
            TrustOverlay(states[1]),
            SharedIndexReader(Path(name)),
        ]
        publication.publish_status(WriterStatus(True, True, 0, 0.0, {}))
        #: each index's own are kept, as a candidate set is; one is asked of all in turn
        wandering, some, nobody = InstanceSelection(FLEET), [FLEET[2], FLEET[0]], list[InstanceId]()
        selections = [
            (
                index,
                [
                    wandering,
                    InstanceSelection([*FLEET, NOBODY]),
                    InstanceSelection(some),
                    InstanceSelection(nobody),
                ],
            )
            for index in indexes
        ]
        epochs, seqs = dict.fromkeys(FLEET, 1), dict.fromkeys(FLEET, 0)
        for at, (kind, number, told, tier) in enumerate(BEGINNING + history, 1):
            who = FLEET[number]
            stimulus: BatchArrived | ControlArrived
            if kind == "banned":
                record = a_control(who.worker, who.rank, epochs[who], "quarantined")
                stimulus = ControlArrived(at, at, record)
            else:
                seqs[who] += 1
                events = tuple(events_of(kind, told, tier, seqs[who]))
                batch = a_batch(worker=who.worker, rank=who.rank, epoch=epochs[who], seq=seqs[who])
                batch = msgspec.structs.replace(batch, events=events)
                stimulus = BatchArrived(at, at, DecodedBatch(batch))
            for state in states[1:]:
                state.handle(stimulus)
            with publication:
                states[0].handle(stimulus)
            if kind == "down":
                epochs[who], seqs[who] = epochs[who] + 1, 0
            for index, its_selections in selections:
                for selection in its_selections:
                    agree(index, selection)
        arrays.close()


def test_a_number_that_stands_for_nobody_is_an_error() -> None:
    """A shared index tells by it that it was read half changed."""
    index = FlatRadixIndex()
    index.store(index.add_instance(), Tier.hbm, ROOT, hashes(1))
    named, selection = NamedIndex(index), InstanceSelection(FLEET)
    assert not named.held(hashes(2), selection).any()
    with pytest.raises(IndexError):
        named.held(hashes(1), selection)
