"""Blocks of the serve pool, which the fleet knows as `dram`."""

from collections.abc import Callable, Iterable

from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.telling import Telling

#: root and parent of a block
Place = tuple[bytes, bytes]


class PooledBlocks:
    """Tells what the serve pool holds, as soon as the engine's events have said where it belongs.

    The pool knows a block by our hash alone. `place_of` finds its root and parent among the blocks
    that the engine has told of.
    """

    def __init__(self, telling: Telling, place_of: Callable[[bytes], Place | None]) -> None:
        self._telling, self._place_of = telling, place_of
        #: None while nothing has said where the block belongs: it is not told yet
        self._places: dict[bytes, Place | None] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._places

    def hold(self, hashes: Iterable[bytes]) -> None:
        """Note blocks that came into the pool."""
        for block_hash in hashes:
            if block_hash not in self._places:
                self._places[block_hash] = None
                self.named(block_hash)

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Note blocks that left it."""
        for block_hash in hashes:
            place = self._places.pop(block_hash, None)
            if place is not None:
                self._telling.release(Tier.dram, block_hash, place[0])

    def named(self, block_hash: bytes) -> None:
        """Tell a block of the pool, if it is clear now where it belongs."""
        place = self._place_of(block_hash)
        if place is not None and self._places.get(block_hash, place) is None:
            self._tell(block_hash, place)

    def tell_again(self) -> None:
        """Tell all of it anew: the tier was cleared, the pool was not."""
        for block_hash, place in self._places.items():
            if place is not None:
                self._tell(block_hash, place)

    def _tell(self, block_hash: bytes, place: Place) -> None:
        self._places[block_hash] = place
        root, parent = place
        if self._telling.hold(Tier.dram, block_hash, root):
            self._telling.tell(root, parent, block_hash, Tier.dram)
