"""What the fleet holds: an exact prefix index, and the state that feeds it."""

from kvatlas.indexer.index.flat import FlatRadixIndex
from kvatlas.indexer.index.port import Match, MatchColumns, PrefixIndex, TreeNode
from kvatlas.indexer.index.reference import ReferenceIndex

__all__ = ["FlatRadixIndex", "Match", "MatchColumns", "PrefixIndex", "ReferenceIndex", "TreeNode"]
