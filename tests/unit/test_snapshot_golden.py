"""A snapshot that an earlier version wrote: what it says is read, or VERSION has been raised.

A change of the arrays' layout, of how keys find their cells, or of what the fold keeps of an
instance makes this fail. Then raise `snapshot_format.VERSION`, and write the file anew with
`pytest tests/unit/test_snapshot_golden.py --rewrite`.
"""

from pathlib import Path

import pytest

from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.fold.instances import Instance
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.snapshots.format import VERSION, SnapshotInfo, SnapshotReader, framed
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import ControlRecord, EventBatch, WorkerDown
from testkit.builders import a_batch, a_control, arrived, hashes, inventory, removed, stored, up

GOLDEN = Path(__file__).parents[1] / "golden" / f"snapshot_{VERSION}.bin"
W1, W2, W3, GONE = (InstanceId(name, 0) for name in ("w1", "w2", "w3", "gone"))
LOG: tuple[EventBatch | ControlRecord, ...] = (
    a_batch(up(), stored(1, 2, 3, 4)),
    a_batch(removed(3), stored(2, 9, tier=Tier.dram), seq=2),
    a_batch(up(ends_at_reuse_points=True), stored(1, 2), worker="w2", seq=5),
    a_batch(inventory(1, as_of=5, parts=2), worker="w2", seq=6),
    a_batch(inventory(1, 2, as_of=5, part=2, parts=2), worker="w2", seq=7),
    a_batch(inventory(7, as_of=5, parts=2, tier=Tier.dram), worker="w2", seq=8),
    a_batch(up(), stored(1), worker="w3"),
    a_control(worker="w3", kind="quarantined"),
    a_batch(up(), stored(1), worker="gone"),
    a_batch(WorkerDown("end"), worker="gone", seq=2),
)


def the_state() -> IndexState:
    state = IndexState(FlatRadixIndex())
    for at, batch in enumerate(LOG, 1):
        state.handle(arrived(batch, at))
    return state


def test_a_snapshot_of_this_version_is_what_it_was(request: pytest.FixtureRequest) -> None:
    truth = the_state()
    if request.config.getoption("--rewrite"):
        about = SnapshotInfo(len(LOG), None, truth.state_digest(), 1, 0, "golden")
        GOLDEN.write_bytes(b"".join(framed(about, truth.export()())))
    content = GOLDEN.read_bytes()
    reader = SnapshotReader(len(content))
    assert reader.feed(content)
    about, parts = reader.finish()
    state = IndexState(FlatRadixIndex())
    state.restore(parts)
    assert (about.stream_sequence, about.state_digest) == (len(LOG), truth.state_digest())
    assert state.state_digest() == truth.state_digest()
    assert state.instances() == truth.instances()
    chain = hashes(1, 2, 3, 4)
    assert [(each.instance, each.by_tier) for each in state.match(chain)] == [
        (each.instance, each.by_tier) for each in truth.match(chain)
    ]
    trusts = {view.instance: view.trust for view in state.instances()}
    degraded = dict.fromkeys((W2, W3), Trust.degraded)
    assert trusts == {W1: Trust.exact, GONE: Trust.gone, **degraded}
    for each in (state, truth):
        each.handle(arrived(a_batch(stored(3), seq=3), len(LOG) + 1))
    assert state.instances() == truth.instances()


def test_all_that_is_kept_of_an_instance_is_named_here() -> None:
    """An older snapshot would leave a new field at its default, and call that exact."""
    assert (VERSION, Instance.__struct_fields__) == (
        2,
        (
            "id",
            "epoch",
            "seq",
            "ts_ns",
            "number",
            "info",
            "trust",
            "ended",
            "damages",
            "inventoried",
            "unsettled",
            "open_inventories",
            "changed_at",
            "is_contradicted",
            "wants_inventory",
            "controls",
            "is_expiring",
            "throttled_ns",
            "num_records",
            "proposed",
            "last_event_ns",
            "muted",
            "replaced",
            "divergent",
            "staging",
        ),
    )
