"""Chains whose parent has not been told yet: events may overtake one another, and some get lost."""

from collections.abc import Sequence

from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.raw_events import EngineHash, RawStored

_FIXED_BYTES = 200


class OrphanBuffer:
    """Holds stores until their parent comes, at most `max_bytes` of them; the oldest leave first.

    Which of their blocks are held still is not known here: `HeldBlocks` keeps that from the first
    moment.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        #: number of a parked chain, rising -> the chain
        self._chains: dict[int, RawStored] = {}
        self._next_number = 0
        self._by_parent: dict[EngineHash, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._chains)

    def add(self, event: RawStored) -> int:
        """Hold a store; return how many had to leave for it, itself included if it is too big."""
        assert event.parent is not None
        number, self._next_number = self._next_number, self._next_number + 1
        self._chains[number] = event
        self._num_bytes += _num_bytes(event)
        self._by_parent.setdefault(event.parent, []).append(number)
        num_gone = 0
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._chains)))
            num_gone += 1
        return num_gone

    def pop_children_of(self, parents: Sequence[EngineHash]) -> list[RawStored]:
        """Return the chains below these blocks in the order they came."""
        return [
            self._drop(number)
            for parent in parents
            for number in list(self._by_parent.get(parent, ()))
        ]

    def clear(self, tier: Tier | None) -> None:
        """Drop the chains of a tier, or all."""
        for number, parked in list(self._chains.items()):
            if tier is None or parked.tier is tier:
                self._drop(number)

    def _drop(self, number: int) -> RawStored:
        parked = self._chains.pop(number)
        self._num_bytes -= _num_bytes(parked)
        assert parked.parent is not None
        siblings = self._by_parent[parked.parent]
        siblings.remove(number)
        if not siblings:
            del self._by_parent[parked.parent]
        return parked


def _num_bytes(event: RawStored) -> int:
    text = len(event.lora or "") + len(event.cache_salt or "")
    text += sum(_FIXED_BYTES + len(extra.kind) + len(extra.id) for extra in event.extras)
    text += len(event.lookahead)
    return _FIXED_BYTES + len(event.tokens) + 40 * len(event.engine_hashes) + text
