"""The compiled code of the index: the block table, the holder sets, and the walks over both.

    block table, one cell a block                      holder sets, one row a distinct set
    cell     0     1     2     3                       row     0      1         2
    key    [ -  |  k1 |  k9 |  k4 ]                    rows  [ {} | 2 cells | 1 cell ]
    row    [ 0  |  1  |  1  |  2  ]  0: free cell                    |         |
    parent [ -  |  r  |  k1 |  k1 ]  the key before    words [ w0 w1  |  w7  ...  free ]

Blocks that are held alike share a row, so a block costs one cell however many hold it, and a walk
along a chain looks into a set only where the row changes. Rows are interned: equal sets, equal row.

Invariants, kept by every kernel that returns:
- a cell with a key has a row other than 0; in a segment no free cell lies between the cell where
  the search for a key begins and the key; a quarter of the cells is free;
- rows[r, BLOCKS] counts the cells of row r; a row with no cells is garbage until `collect`;
- the words of a row are sorted by group, and none is without a tier bit;
- `seek` finds every row that is in use under rows[r, HASH], the XOR of its mixed words;
- the memo is only a cache, and names no freed row.

Every integer in here is a uint64: met by an int64, a key above 2**63 turns negative.

    compiling, caching        how a function becomes a kernel, and when its machine code is stale
    layout, handles           the arrays: columns, constants, and all of them as one argument
    arithmetic                mixing and bits
    block_table, holder_sets  the two structures, with a picture of each
    changes, sweeping         what events do, and what reclaims
    matching                  what a reader asks along a chain
    auditing, tree_runs       what costs O(index)
"""

from kvatlas.indexer.index.kernel.arithmetic import key_at, mix64
from kvatlas.indexer.index.kernel.auditing import audit
from kvatlas.indexer.index.kernel.block_table import row_of
from kvatlas.indexer.index.kernel.changes import clear, remove, store, store_runs
from kvatlas.indexer.index.kernel.compiling import IS_COMPILED, all_kernels, compiled, warm
from kvatlas.indexer.index.kernel.handles import handle_of
from kvatlas.indexer.index.kernel.layout import (
    BITS,
    BLOCKS,
    COUNT,
    DIRECTORY_ROOM,
    DIRECTORY_SHIFT,
    FULL,
    GROUP,
    GROUP_MASK,
    GROUP_SHIFT,
    HASH,
    HEAD,
    HELD,
    LACKING,
    LENGTH,
    LOW,
    MAX_SEGMENTS,
    MULTIPLIER,
    NUM_BLOCKS,
    NUM_COLUMNS,
    NUM_HALVES,
    NUM_ROWS,
    NUM_SEGMENTS,
    NUM_STATES,
    NUM_WORDS,
    PARENT_HIGH,
    PARENT_LOW,
    ROW,
    SEGMENT_BITS,
    SEGMENT_ROOM,
    SET_ROOM,
    START,
)
from kvatlas.indexer.index.kernel.matching import match, put_in_lines
from kvatlas.indexer.index.kernel.sweeping import collect, free_void, strip, strip_some
from kvatlas.indexer.index.kernel.tree_runs import compress, count_holders

__all__ = [
    "BITS",
    "BLOCKS",
    "COUNT",
    "DIRECTORY_ROOM",
    "DIRECTORY_SHIFT",
    "FULL",
    "GROUP",
    "GROUP_MASK",
    "GROUP_SHIFT",
    "HASH",
    "HEAD",
    "HELD",
    "IS_COMPILED",
    "LACKING",
    "LENGTH",
    "LOW",
    "MAX_SEGMENTS",
    "MULTIPLIER",
    "NUM_BLOCKS",
    "NUM_COLUMNS",
    "NUM_HALVES",
    "NUM_ROWS",
    "NUM_SEGMENTS",
    "NUM_STATES",
    "NUM_WORDS",
    "PARENT_HIGH",
    "PARENT_LOW",
    "ROW",
    "SEGMENT_BITS",
    "SEGMENT_ROOM",
    "SET_ROOM",
    "START",
    "all_kernels",
    "audit",
    "clear",
    "collect",
    "compiled",
    "compress",
    "count_holders",
    "free_void",
    "handle_of",
    "key_at",
    "match",
    "mix64",
    "put_in_lines",
    "remove",
    "row_of",
    "store",
    "store_runs",
    "strip",
    "strip_some",
    "warm",
]
