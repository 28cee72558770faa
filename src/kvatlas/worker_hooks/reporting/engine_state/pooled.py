"""Blocks of the serve pool, which the fleet knows as `dram`."""

from collections.abc import Callable, Iterable

from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.reporting.engine_state.publication import Publication

#: root and parent of a block
Position = tuple[bytes, bytes]


class PooledBlocks:
    """Tells what the serve pool holds, as soon as the engine's events have said where it belongs.

    The pool knows a block by our hash alone. `position_of` finds its root and parent among the
    blocks that the engine has told of.
    """

    def __init__(
        self, publication: Publication, position_of: Callable[[bytes], Position | None]
    ) -> None:
        self._publication, self._position_of = publication, position_of
        #: None while nothing has said where the block belongs: it is not told yet
        self._positions: dict[bytes, Position | None] = {}

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._positions

    def add(self, hashes: Iterable[bytes]) -> None:
        """Note blocks that came into the pool."""
        for block_hash in hashes:
            if block_hash not in self._positions:
                self._positions[block_hash] = None
                self.named(block_hash)

    def drop(self, hashes: Iterable[bytes]) -> None:
        """Note blocks that left it."""
        for block_hash in hashes:
            position = self._positions.pop(block_hash, None)
            if position is not None:
                self._publication.release(Tier.dram, block_hash, position[0])

    def named(self, block_hash: bytes) -> None:
        """Tell a block of the pool, if it is clear now where it belongs."""
        position = self._position_of(block_hash)
        if position is not None and self._positions.get(block_hash, position) is None:
            self._publish(block_hash, position)

    def publish_again(self) -> None:
        """Tell all of it anew: the tier was cleared, the pool was not."""
        for block_hash, position in self._positions.items():
            if position is not None:
                self._publish(block_hash, position)

    def _publish(self, block_hash: bytes, position: Position) -> None:
        self._positions[block_hash] = position
        root, parent = position
        if self._publication.add(Tier.dram, block_hash, root):
            self._publication.publish(root, parent, block_hash, Tier.dram)
