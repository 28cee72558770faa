"""What a bridge reads in a batch before it hands it on: numbers, and how prompts begin."""

from collections import OrderedDict
from typing import NamedTuple

import xxhash

from kvatlas.schemas.errors import MalformedBatch
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.engines.adapter import EngineAdapter
from kvatlas.worker_hooks.raw_events import EngineHash, RawCleared, RawRemoved, RawStored

#: pages remembered until another one follows them, and pages after which the longest is believed
MAX_PAGES = 1024
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
    #: tokens of a whole block, where the batch makes sure of it
    block_tokens: int = 0
    #: tokens behind a block that its hash covers, of the batch's last store with tokens
    lookahead_tokens: int | None = None


class PageSize:
    """How many tokens a whole block has, from what an engine stores.

    An engine may tell of the last page of a prompt although it is short, and such a page looks like
    any other. Two things make sure of a size: a store of several pages, which are all of one size,
    and a page that another one follows, for nothing follows a short one. After `MAX_PAGES` pages of
    which none did so the longest is believed.
    """

    def __init__(self) -> None:
        #: the engine's hash -> tokens, of pages that came alone; the oldest leave first
        self._tokens_of: OrderedDict[EngineHash, int] = OrderedDict()
        self._num_pages = self._longest = 0

    def observe(self, event: RawStored) -> int:
        """Return the size that a store makes sure of, 0 for none."""
        tokens = _block_tokens(event)
        if not tokens:
            return 0
        above = None if event.parent is None else self._tokens_of.get(event.parent)
        if len(event.engine_hashes) == 1:
            self._remember(event.engine_hashes[0], tokens)
        if len(event.engine_hashes) > 1 or above is not None:
            self._num_pages = 0
            return above or tokens
        return self._longest if self._num_pages >= MAX_PAGES else 0

    def _remember(self, page: EngineHash, tokens: int) -> None:
        self._num_pages += 1
        self._longest = max(self._longest, tokens)
        self._tokens_of[page] = tokens
        self._tokens_of.move_to_end(page)
        if len(self._tokens_of) > MAX_PAGES:
            self._tokens_of.popitem(last=False)


class PayloadReader:
    """Reads batches of one engine. What it cannot read is counted and says nothing.

    `has_short_pages` where the engine may tell of blocks that are not whole; of any other, every
    store with tokens says how long a block is.
    """

    def __init__(self, adapter: EngineAdapter, *, has_short_pages: bool = False) -> None:
        self._adapter = adapter
        self._page_size = PageSize() if has_short_pages else None
        self.num_rejected = 0

    def __call__(self, payload: bytes) -> Observed:
        try:
            decoded = self._adapter.decode(payload)
        except (MalformedBatch, RecursionError):
            self.num_rejected += 1
            return Observed()
        self.num_rejected += len(decoded.rejected)
        num_stored = num_removed = block_tokens = 0
        lookahead_tokens: int | None = None
        is_cleared = False
        first_blocks = []
        for event in decoded.events:
            match event:
                case RawStored(tier=Tier.hbm):
                    num_stored += len(event.engine_hashes)
                    block_tokens = self._sure_tokens(event) or block_tokens
                    if event.tokens:
                        lookahead_tokens = len(event.lookahead) // 4 // len(event.engine_hashes)
                    if event.parent is None and event.tokens and event.lora is None:
                        first_blocks.append(_first_block(event))
                case RawRemoved(tier=Tier.hbm):
                    num_removed += len(event.engine_hashes)
                case RawCleared(tier) if tier in (None, Tier.hbm):
                    num_stored = num_removed = 0
                    is_cleared = True
                case _:
                    pass
        return Observed(
            *(num_stored, num_removed, is_cleared, tuple(first_blocks)),
            *(block_tokens, lookahead_tokens),
        )

    def _sure_tokens(self, event: RawStored) -> int:
        return _block_tokens(event) if self._page_size is None else self._page_size.observe(event)


def _block_tokens(event: RawStored) -> int:
    if not event.engine_hashes:
        return 0
    return len(event.tokens) // 4 // len(event.engine_hashes)


def _first_block(event: RawStored) -> tuple[bytes, EngineHash]:
    tokens = event.tokens[: len(event.tokens) // len(event.engine_hashes)]
    # what lies behind a block may be a part of its hash, and then of what tells it from another
    ahead = event.lookahead[: len(event.lookahead) // len(event.engine_hashes)]
    content = repr((tokens, ahead, event.cache_salt, event.extras, event.group)).encode()
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

    def observe(self, observed: Observed) -> None:
        """Remember the beginnings of a batch."""
        for key, found in observed.first_blocks:
            self._known[key] = found
            self._known.move_to_end(key)
        while len(self._known) > MAX_FIRST_BLOCKS:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Know nothing."""
        self._known.clear()
