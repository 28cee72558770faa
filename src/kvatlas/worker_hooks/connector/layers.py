"""Between a slot of the serve pool and the engine's tensors: layer by layer, in one fixed order."""

from typing import Any

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.worker_hooks.pool import ServePool


class LayerMemory:
    """The engine's KV tensors of one KV group: `(blocks, ...)` each, a block in one piece.

    Raises InvalidSetting for a tensor whose block is not contiguous.
    """

    def __init__(self, kv_caches: dict[str, Any]) -> None:
        self._layers = list(kv_caches.values())
        for name, layer in kv_caches.items():
            if not layer[0].is_contiguous():
                shape = f"{tuple(layer.shape)} with strides {layer.stride()}"
                raise InvalidSetting("kv_cache_layout", name, f"a block is in pieces: {shape}")
        self.block_bytes = sum(layer[0].nbytes for layer in self._layers)

    def parts(self, block_id: int) -> list[Any]:
        """Return a block's bytes in host memory, one part a layer."""
        return [layer[block_id].cpu() for layer in self._layers]

    def fill(self, block_id: int, pool: ServePool, slot: int) -> None:
        """Copy a slot's bytes into a block."""
        import torch

        source = torch.frombuffer(pool.block(slot), dtype=torch.uint8)
        at = 0
        for layer in self._layers:
            target = layer[block_id].view(torch.uint8).view(-1)
            target.copy_(source[at : at + target.numel()])
            at += target.numel()
