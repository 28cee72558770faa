"""Between a slot of the serve pool and the engine's tensors: layer by layer, in one fixed order.

(blocks, ...)       a block is one piece a layer
(2, blocks, ...)    keys and values apart: a block is two pieces a layer, keys first
"""

from typing import Any

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.worker_hooks.transfer.pool import ServePool


class LayerMemory:
    """The engine's KV tensors of one KV group of `num_blocks` blocks.

    Raises InvalidSetting for a tensor that is cut in another way, or whose pieces are not
    contiguous.
    """

    def __init__(self, kv_caches: dict[str, Any], num_blocks: int) -> None:
        #: tensors of which each has a piece of every block, by the block's id
        self._pieces = [
            piece
            for name, layer in kv_caches.items()
            for piece in _by_block(name, layer, num_blocks)
        ]
        self.block_bytes = sum(piece[0].nbytes for piece in self._pieces)

    def parts(self, block_id: int) -> list[Any]:
        """Return a block's bytes in host memory, piece by piece."""
        return [piece[block_id].cpu() for piece in self._pieces]

    def fill(self, block_id: int, pool: ServePool, slot: int) -> None:
        """Copy a slot's bytes into a block."""
        import torch

        source = torch.frombuffer(pool.block(slot), dtype=torch.uint8)
        at = 0
        for piece in self._pieces:
            target = piece[block_id].view(torch.uint8).view(-1)
            target.copy_(source[at : at + target.numel()])
            at += target.numel()


def _by_block(name: str, layer: Any, num_blocks: int) -> list[Any]:
    shape = tuple(layer.shape)
    is_apart = shape[:2] == (2, num_blocks)
    if is_apart == (shape[:1] == (num_blocks,)):  # neither, or both could be meant
        problem = f"{shape} is not clearly ({num_blocks}, ...) or (2, {num_blocks}, ...)"
        raise InvalidSetting("kv_cache_layout", name, problem)
    pieces = [layer[0], layer[1]] if is_apart else [layer]
    if not all(piece[0].is_contiguous() for piece in pieces):
        problem = f"a block is in pieces: {shape} with strides {layer.stride()}"
        raise InvalidSetting("kv_cache_layout", name, problem)
    return pieces
