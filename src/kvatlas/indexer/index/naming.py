"""An index that knows numbers, asked by name: whose match is whose, and what counts of it.

Trust, exclusion and reuse points belong to instances, not to blocks, so they are laid over the
answers here, alike for who folds the log and for who reads another process's memory.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import repeat
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index.kernel import put_in_lines
from kvatlas.indexer.index.port import Match, MatchColumns
from kvatlas.indexer.reader import InstanceMatch, InstanceSelection
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.hashing import reuse_point
from kvatlas.schemas.ids import NUM_TIERS, InstanceId, Tier

_name, _trust = attrgetter("id"), attrgetter("trust")
_NOTHING = (0,) * NUM_TIERS


class Matcher(Protocol):
    """The part of a PrefixIndex that answers about blocks."""

    def match(self, chain: bytes) -> list[Match]:
        """See PrefixIndex."""
        ...

    def match_columns(self, chain: bytes) -> MatchColumns:
        """See PrefixIndex."""
        ...

    def holders(self, block_hash: bytes) -> list[tuple[int, Tier]]:
        """See PrefixIndex."""
        ...


class InstanceNumbers(Protocol):
    """Who has a number."""

    @property
    def id(self) -> InstanceId: ...

    @property
    def trust(self) -> Trust: ...


class InstanceOrdinal(NamedTuple):
    """An instance's number in the index, and how its matches are to be read."""

    number: int
    instance: InstanceId
    is_excluded: bool
    ends_at_reuse_points: bool
    #: it stands for what its instance is telling, and shows in no answer yet
    is_staging: bool = False


class NamedIndex:
    """Answers of an index with names; whoever owns it says who has which number."""

    def __init__(self, index: Matcher) -> None:
        self._index = index
        self._by_number: dict[int, InstanceNumbers] = {}
        #: number in the index -> its instance; all four change by the methods below only
        self.by_number: Mapping[int, InstanceNumbers] = MappingProxyType(self._by_number)
        #: instances whose blocks count for nothing in a match, while they have a place
        self.excluded: frozenset[InstanceId] = frozenset()
        #: instances whose matches end at reuse points, while they have a place
        self.ending_at_points: frozenset[InstanceId] = frozenset()
        #: numbers whose blocks count for nothing yet, each beside its instance's own
        self.hidden: frozenset[int] = frozenset()
        #: rises whenever one of the tables changes
        self.version = 0

    def admit(self, number: int, named: InstanceNumbers) -> None:
        """Let a number stand for an instance."""
        self.version += 1
        self._by_number[number] = named

    def release(self, number: int | None, instance: InstanceId) -> None:
        """Forget how an instance's matches are read, and its number if it has one."""
        self.version += 1
        self.excluded -= {instance}
        self.ending_at_points -= {instance}
        if number is not None:
            del self._by_number[number]

    def renumber(self, number: int, to: int) -> None:
        """Let another number stand for an instance."""
        self.version += 1
        self._by_number[to] = self._by_number.pop(number)

    def add_staging(self, number: int, named: InstanceNumbers) -> None:
        """Let a number stand for what an instance is telling, in no answer yet."""
        self.version += 1
        self._by_number[number] = named
        self.hidden |= {number}

    def promote_staging(self, number: int, instead_of: int | None) -> None:
        """Let a hidden number stand for its instance, instead of the one that it has."""
        self.version += 1
        self.hidden -= {number}
        if instead_of is not None:
            del self._by_number[instead_of]

    def drop_staging(self, number: int) -> None:
        """Let a hidden number stand for nobody."""
        self.version += 1
        self.hidden -= {number}
        del self._by_number[number]

    def exclude(self, instance: InstanceId) -> None:
        """Let an instance's blocks count for nothing in a match."""
        self.version += 1
        self.excluded |= {instance}

    def include(self, instance: InstanceId) -> None:
        """Let an instance's blocks count in a match again."""
        self.version += 1
        self.excluded -= {instance}

    def end_at_points(self, instance: InstanceId, ends: bool) -> None:
        """Say whether an instance's matches end at reuse points."""
        if ends == (instance in self.ending_at_points):
            return
        self.version += 1
        if ends:
            self.ending_at_points |= {instance}
        else:
            self.ending_at_points -= {instance}

    def replace(
        self,
        by_number: Mapping[int, InstanceNumbers],
        excluded: Set[InstanceId],
        ending: Set[InstanceId],
        hidden: Iterable[int],
    ) -> None:
        """Begin anew with these tables."""
        self.version += 1
        self._by_number = dict(by_number)
        self.by_number = MappingProxyType(self._by_number)
        self.excluded, self.ending_at_points = frozenset(excluded), frozenset(ending)
        self.hidden = frozenset(hidden)

    def ordinals(self) -> list[InstanceOrdinal]:
        """Return the tables in one."""
        return [
            InstanceOrdinal(
                number,
                each.id,
                each.id in self.excluded,
                each.id in self.ending_at_points,
                number in self.hidden,
            )
            for number, each in self.by_number.items()
        ]

    def load_ordinals(
        self, places: Sequence[InstanceOrdinal], named: Iterable[InstanceNumbers]
    ) -> None:
        """Replace the tables by those of another process; `named` has everybody in `places`."""
        by_name = {each.id: each for each in named}
        self.replace(
            {place.number: by_name[place.instance] for place in places},
            {place.instance for place in places if place.is_excluded},
            {place.instance for place in places if place.ends_at_reuse_points},
            [place.number for place in places if place.is_staging],
        )

    def match(self, chain: bytes) -> list[InstanceMatch]:
        """Return the matches of a chain, but for excluded instances."""
        matches = self._index.match(chain)
        if self.hidden:
            matches = [match for match in matches if match.instance not in self.hidden]
        if not matches:
            return []
        numbers, num_blocks, by_tier = zip(*matches, strict=True)
        found = [self.by_number[number] for number in numbers]
        fields = zip(map(_name, found), map(_trust, found), num_blocks, by_tier, strict=True)
        # what InstanceMatch(...) does, without a Python call per match
        named = list(map(tuple.__new__, repeat(InstanceMatch), fields))
        if self.ending_at_points:
            named = self._up_to_reuse_points(chain, numbers, named)
        if self.excluded:
            return [match for match in named if match.instance not in self.excluded]
        return named

    def held(self, chain: bytes, selection: InstanceSelection) -> NDArray[np.uint32]:
        """Return the same, a line for each instance on the roll, zeros where there is no match."""
        if selection.placed_by is not self or selection.version != self.version:
            self._place(selection)
        if selection.has_reuse_points:
            found = {match.instance: match.by_tier for match in self.match(chain)}
            lines = [found.get(instance, _NOTHING) for instance in selection.instances]
            return np.array(lines, np.uint32).reshape(len(lines), NUM_TIERS)
        columns = self._index.match_columns(chain)
        held = np.zeros((len(selection), NUM_TIERS), np.uint32)
        if not put_in_lines(columns.instances, columns.by_tier, selection.line_of, held):
            raise IndexError("a number that stands for nobody")
        return held

    def _place(self, selection: InstanceSelection) -> None:
        """Find the numbers of a roll's instances."""
        nobody = len(selection)
        selection.line_of = np.full(max(self.by_number, default=-1) + 1, nobody, np.intp)
        for number, each in self.by_number.items():
            if each.id not in self.excluded and number not in self.hidden:
                selection.line_of[number] = selection.lines.get(each.id, nobody)
        selection.has_reuse_points = any(
            each in self.ending_at_points for each in selection.instances
        )
        selection.placed_by, selection.version = self, self.version

    def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
        """Return who holds a block, and where."""
        found = self._index.holders(block_hash)
        return [(self.by_number[n].id, tier) for n, tier in found if n not in self.hidden]

    def visible_slots(self, numbers: Iterable[int]) -> tuple[InstanceId, ...]:
        """Return the instances that numbers stand for, but for hidden ones."""
        return tuple(self.by_number[n].id for n in numbers if n not in self.hidden)

    # --- reuse points ----------------------------------------------------------------------------

    def _up_to_reuse_points(
        self, chain: bytes, numbers: Sequence[int], matches: list[InstanceMatch]
    ) -> list[InstanceMatch]:
        """Cut each match of an instance that reuses up to a reuse point only (ADR-0006).

        O(blocks behind the last point) for all of them together, and a match per length left.
        """
        holders: dict[int, set[int]] = {}
        cut: dict[int, dict[int, tuple[int, int, int, int, int]]] = {}
        kept = []
        for number, match in zip(numbers, matches, strict=True):
            if match.instance not in self.ending_at_points:
                kept.append(match)
                continue
            end = match.num_blocks
            while end and number not in self._ending_with(chain, end, holders):
                end -= 1
            if end:
                if end not in cut:
                    shorter = self._index.match(chain[: end * BLOCK_HASH_BYTES])
                    cut[end] = {found.instance: found.by_tier for found in shorter}
                kept.append(match._replace(num_blocks=end, by_tier=cut[end][number]))
        return kept

    def _ending_with(self, chain: bytes, end: int, holders: dict[int, set[int]]) -> set[int]:
        """Return who can end reuse after so many blocks; `holders` remembers."""
        if end not in holders:
            point = reuse_point(chain[(end - 1) * BLOCK_HASH_BYTES : end * BLOCK_HASH_BYTES])
            holders[end] = {number for number, _ in self._index.holders(point)}
        return holders[end]
