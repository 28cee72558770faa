"""What a bridge reads in a batch before it hands it on: numbers, and how prompts begin."""

from collections import OrderedDict
from typing import NamedTuple

import xxhash

from kvatlas.schemas.errors import MalformedBatch
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.adapter import EngineAdapter
from kvatlas.worker_hooks.raw_events import EngineHash, RawCleared, RawRemoved, RawStored

#: first blocks remembered, to see that the engine's hashes begin with another seed
MAX_FIRST_BLOCKS = 4096


class Observed(NamedTuple):
    """What a batch says about the engine's own memory."""

    num_stored: int = 0
    num_removed: int = 0
    #: it was emptied, and the numbers are those since
    is_cleared: bool = False
    #: (what a prompt begins with, the engine's hash of it)
    first_blocks: tuple[tuple[bytes, EngineHash], ...] = ()
    #: tokens of a block, where the batch tells
    block_tokens: int = 0


class PayloadReader:
    """Reads batches of one engine. What it cannot read is counted and says nothing."""

    def __init__(self, adapter: EngineAdapter) -> None:
        self._adapter = adapter
        self.num_rejected = 0

    def __call__(self, payload: bytes) -> Observed:
        try:
            decoded = self._adapter.decode(payload)
        except MalformedBatch:
            self.num_rejected += 1
            return Observed()
        self.num_rejected += len(decoded.rejected)
        num_stored = num_removed = block_tokens = 0
        is_cleared = False
        first_blocks = []
        for event in decoded.events:
            match event:
                case RawStored(tier=Tier.hbm):
                    num_stored += len(event.engine_hashes)
                    block_tokens = block_tokens or _block_tokens(event)
                    if event.parent is None and event.tokens and event.lora is None:
                        first_blocks.append(_first_block(event))
                case RawRemoved(tier=Tier.hbm):
                    num_removed += len(event.engine_hashes)
                case RawCleared(tier) if tier in (None, Tier.hbm):
                    num_stored = num_removed = 0
                    is_cleared = True
                case _:
                    pass
        return Observed(num_stored, num_removed, is_cleared, tuple(first_blocks), block_tokens)


def _block_tokens(event: RawStored) -> int:
    if not event.engine_hashes:
        return 0
    return len(event.tokens) // 4 // len(event.engine_hashes)


def _first_block(event: RawStored) -> tuple[bytes, EngineHash]:
    tokens = event.tokens[: len(event.tokens) // len(event.engine_hashes)]
    content = repr((tokens, event.cache_salt, event.extras, event.group)).encode()
    return xxhash.xxh3_128_digest(content), event.engine_hashes[0]


class FirstBlocks:
    """The engine's hashes of how prompts begin; other ones for the same say that it began anew.

    Adapters are left out, for one may be loaded again with other weights under its name.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, EngineHash] = OrderedDict()

    def contradict(self, observed: Observed) -> bool:
        """Return whether a beginning has another hash than before."""
        return any(self._known.get(key, found) != found for key, found in observed.first_blocks)

    def take(self, observed: Observed) -> None:
        """Remember the beginnings of a batch."""
        for key, found in observed.first_blocks:
            self._known[key] = found
            self._known.move_to_end(key)
        while len(self._known) > MAX_FIRST_BLOCKS:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Know nothing."""
        self._known.clear()
