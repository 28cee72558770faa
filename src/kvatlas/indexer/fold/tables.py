"""The tables of a snapshot, checked before a fold goes on with them.

A fold relies on its tables agreeing with one another: with ones that do not, it would fail at some
later message, with a log and bytes that are in order.
"""

from collections.abc import Iterator

from kvatlas.indexer.fold.fleet import FleetTables
from kvatlas.indexer.fold.instances import DegradedReason, Instance, OpenInventory, numbers_of
from kvatlas.indexer.index.exporting import InvalidSnapshot
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import NUM_TIERS

Rules = Iterator[tuple[str, bool]]


def check_tables(tables: FleetTables) -> None:
    """Raise InvalidSnapshot unless a fold can go on with the tables; ranges were checked before."""
    for rule, holds in _fleet(tables):
        if not holds:
            raise InvalidSnapshot(f"part tables: it does not hold that {rule}")
    for instance in tables.instances:
        for rule, holds in _instance(instance):
            if not holds:
                raise InvalidSnapshot(f"part tables: of {instance.id} it does not hold that {rule}")


def _fleet(tables: FleetTables) -> Rules:
    known = {each.id: each for each in tables.instances}
    numbers, gone = numbers_of(tables.instances), set(tables.gone)
    yield "an instance is in it once", len(known) == len(tables.instances)
    yield "a number is given once", len(set(numbers)) == len(numbers)
    yield "a gone one is in the list once", len(gone) == len(tables.gone)
    yield "the list is of the gone", gone == {each.id for each in known.values() if each.is_gone}
    order = {each.instance: each for each in tables.order}
    yield "each has one position", len(order) == len(tables.order) and order.keys() == known.keys()
    yield (
        "positions are those of the instances",
        all(
            (each.epoch, each.seq, each.is_gone) == order[name][1:] for name, each in known.items()
        ),
    )
    named = tables.residency.excluded | tables.residency.ending_at_points
    yield "what is laid over matches is of instances", named <= known.keys()
    quarantined = {
        name for name, each in known.items() if DegradedReason.quarantined in each.damages
    }
    yield "the quarantined are left out of matches", tables.residency.excluded == quarantined


def _instance(instance: Instance) -> Rules:
    staging, open_ones = instance.staging, instance.open_inventories
    is_degraded = instance.trust is Trust.degraded
    yield "it has begun", instance.epoch > 0
    yield (
        "a gone one holds and describes nothing",
        not instance.is_gone
        or (
            instance.number is None
            and instance.info is None
            and staging is None
            and not open_ones
            and not instance.damages
        ),
    )
    yield (
        "a degraded one has a reason",
        instance.is_gone
        or (
            is_degraded == bool(instance.damages)
            and instance.trust in (Trust.exact, Trust.degraded)
        ),
    )
    yield "only a degraded one wants an inventory", is_degraded or not instance.wants_inventory
    yield (
        "a throttled one is in doubt and wants none",
        instance.is_gone
        or (
            not instance.throttled_ns
            or (DegradedReason.throttled in instance.damages and not instance.wants_inventory)
        ),
    )
    yield "a tier has a last change", len(instance.changed_at) == NUM_TIERS
    yield "roots have 16 bytes", all(len(root) == BLOCK_HASH_BYTES for root in instance.muted)
    yield "parts of an inventory are missing", not any(map(_is_whole, open_ones.values()))
    yield "open inventories are of hashes", all(map(_is_of_hashes, open_ones.values()))
    if staging is not None:
        whole = staging.whole
        yield "what is whole was begun", whole.keys() <= staging.begun
        yield "it is told to the end", all(map(_is_whole, whole.values()))
        yield "it is of hashes", all(map(_is_of_hashes, whole.values()))
        yield "nothing whole is open", not whole.keys() & open_ones.keys()


def _is_whole(inventory: OpenInventory) -> bool:
    return inventory.is_complete


def _is_of_hashes(inventory: OpenInventory) -> bool:
    return inventory.num_seen <= inventory.parts and all(
        len(root) == BLOCK_HASH_BYTES and not len(hashes) % BLOCK_HASH_BYTES
        for root, hashes in inventory.runs
    )
