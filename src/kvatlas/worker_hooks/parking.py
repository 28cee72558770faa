"""Chains whose parent has not been told yet: events may overtake one another, and some get lost."""

from collections.abc import Iterator, Sequence

from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.raw_events import EngineHash, RawRemoved, RawStored

_FIXED_BYTES = 200


class _Parked:
    """A chain, and what was removed of it while it waited."""

    def __init__(self, event: RawStored) -> None:
        self.event = event
        self.removals: list[RawRemoved] = []
        self.num_bytes = _FIXED_BYTES + len(event.tokens) + 40 * len(event.engine_hashes)


class Parking:
    """Holds stores until their parent comes, at most `max_bytes` of them; the oldest leave first.

    A removal of a parked block waits with it, so that nothing rises again.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        #: number of a parked chain, rising -> the chain
        self._chains: dict[int, _Parked] = {}
        self._next_number = 0
        self._by_parent: dict[EngineHash, list[int]] = {}
        #: (engine hash, tier, group) in a parked chain and not removed since -> the youngest one
        self._by_block: dict[tuple[EngineHash, Tier, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._chains)

    def park(self, event: RawStored) -> int:
        """Hold a store; return how many had to leave for it, itself included if it is too big."""
        assert event.parent is not None
        number, self._next_number = self._next_number, self._next_number + 1
        parked = self._chains[number] = _Parked(event)
        self._num_bytes += parked.num_bytes
        self._by_parent.setdefault(event.parent, []).append(number)
        self._by_block.update(dict.fromkeys(_places(event), number))
        num_gone = 0
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._chains)))
            num_gone += 1
        return num_gone

    def take(self, parents: Sequence[EngineHash]) -> list[RawStored | RawRemoved]:
        """Return the chains below these blocks in the order they came, each with its removals."""
        taken: list[RawStored | RawRemoved] = []
        for parent in parents:
            for number in list(self._by_parent.get(parent, ())):
                parked = self._drop(number)
                taken += [parked.event, *parked.removals]
        return taken

    def remove(self, engine_hash: EngineHash, removal: RawRemoved) -> bool:
        """Note the removal of a parked block; return False if it is in no parked chain."""
        number = self._by_block.pop((engine_hash, removal.tier, removal.group), None)
        if number is None:
            return False
        noted = RawRemoved((engine_hash,), removal.tier, removal.group)
        self._chains[number].removals.append(noted)
        return True

    def clear(self, tier: Tier | None) -> None:
        """Drop the chains of a tier, or all."""
        for number, parked in list(self._chains.items()):
            if tier is None or parked.event.tier is tier:
                self._drop(number)

    def _drop(self, number: int) -> _Parked:
        parked = self._chains.pop(number)
        self._num_bytes -= parked.num_bytes
        parent = parked.event.parent
        assert parent is not None
        siblings = self._by_parent[parent]
        siblings.remove(number)
        if not siblings:
            del self._by_parent[parent]
        for place in _places(parked.event):
            if self._by_block.get(place) == number:
                del self._by_block[place]
        return parked


def _places(event: RawStored) -> Iterator[tuple[EngineHash, Tier, int]]:
    return ((engine_hash, event.tier, event.group) for engine_hash in event.engine_hashes)
