"""An instance's inventory: everything it holds, cut into events of bounded size."""

from collections.abc import Iterator
from itertools import islice

from kvatlas.schemas.ids import Tier
from kvatlas.schemas.kv_events import Inventory
from kvatlas.worker_hooks.reporting.residency import HeldByTier

#: hashes in one part, which readers fold in one go while their requests wait (tests/bench/index.py
#: has the time of events of 512); larger ones make them wait longer, smaller ones are more batches
MAX_PART_BLOCKS = 512


def inventory_of(
    residency: HeldByTier,
    as_of_seq: int,
    empty_root: bytes,
    max_part_blocks: int = MAX_PART_BLOCKS,
) -> Iterator[Inventory]:
    """Yield the parts of every tier in order; an empty tier is one part without hashes.

    A part has one root. `empty_root` stands in the part of an empty tier.
    """
    for tier in Tier:
        parts = list(_parts(residency, tier, max_part_blocks)) or [(empty_root, b"")]
        for number, (root, hashes) in enumerate(parts, 1):
            yield Inventory(as_of_seq, number, len(parts), tier, root, hashes)


def _parts(
    residency: HeldByTier, tier: Tier, max_part_blocks: int
) -> Iterator[tuple[bytes, bytes]]:
    by_root: dict[bytes, list[bytes]] = {}
    for block, root in residency.blocks(tier):
        by_root.setdefault(root, []).append(block)
    for root, blocks in by_root.items():
        rest = iter(blocks)
        while part := b"".join(islice(rest, max_part_blocks)):
            yield root, part
