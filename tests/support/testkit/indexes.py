"""Indexes that tests compare."""

from kvatlas.indexer import FlatRadixIndex
from kvatlas.indexer.index.arrays import Arrays


def tiny_index(max_instances: int = 1 << 16, arrays: Arrays | None = None) -> FlatRadixIndex:
    """Return an index that has to grow and to sweep everything from the first blocks on."""
    return FlatRadixIndex(
        max_instances=max_instances,
        max_bytes=1 << 23,
        segment_cells=4,
        first_segments=2,
        set_rows=2,
        set_words=2,
        arrays=arrays,
    )
