"""The reference engine's cache: slots, their bytes, and the events that tell of both."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from msgspec import Struct

from kvatlas.reference.block_pool import BlockPool
from kvatlas.reference.kv_bytes import engine_hash, kv_bytes
from kvatlas.reference.requests import Request
from kvatlas.schemas.ids import Tier
from kvatlas.worker_hooks.raw_events import RawStored
from kvatlas.worker_hooks.reporting.hook import WorkerHook


class SlotMemory(Protocol):
    """The bytes of the slots; `ServePool` is one that peers can read."""

    def commit(self, slot: int, block_hash: bytes, *parts: bytes) -> None:
        """Hold a block in an empty slot."""
        ...

    def try_evict(self, slots: Sequence[int]) -> list[int]:
        """Empty those of the slots that nobody reads, and return them."""
        ...

    def offer(self, slots: Sequence[int], hashes: bytes) -> bool:
        """Let a pull fill empty slots; False if that is not possible now."""
        ...

    def block(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        ...


class _Content(Struct, frozen=True, gc=False):
    """What a cached block stands for, kept to list it again."""

    position: int
    parent: bytes | None
    tokens: bytes
    salt: str | None


class BlockStore:
    """Allocates, fills and evicts slots; every change of what is cached goes to the hook at once.

    Without memory the slots have no bytes, and nothing can be pulled from here.
    """

    def __init__(
        self, num_slots: int, block_bytes: int, hook: WorkerHook, memory: SlotMemory | None
    ) -> None:
        self.block_bytes, self.memory = block_bytes, memory
        self.pool = BlockPool(num_slots, self._try_evict)
        self._hook = hook
        hook.answer_listings(self.held)
        self._content: dict[bytes, _Content] = {}

    def move_to(self, memory: SlotMemory) -> None:
        """Go on in another, empty memory, as after a restart of the sidecar that made the last."""
        self.memory = memory
        for slot, block_hash in self.pool.contents():
            self.compute(block_hash, slot)

    def allocate(self, num_slots: int) -> list[int] | None:
        """Take slots, evicting what is in the way; None if there are not enough now."""
        slots, evicted = self.pool.allocate(num_slots)
        if evicted:
            for block_hash in evicted:
                del self._content[block_hash]
            self._hook.removed([engine_hash(block_hash) for block_hash in evicted])
        return slots if len(slots) == num_slots else None

    def compute(self, block_hash: bytes, slot: int) -> None:
        """Put the KV of a block into its slot; lookups find it after `publish`."""
        if self.memory is not None:
            self.memory.commit(slot, block_hash, kv_bytes(block_hash, self.block_bytes))

    def is_right(self, block_hash: bytes, slot: int) -> bool:
        """Return whether a slot has the bytes that computing the block would give."""
        assert self.memory is not None
        return self.memory.block(slot) == kv_bytes(block_hash, self.block_bytes)

    def publish(self, request: Request, first_block: int, slots: Sequence[int]) -> None:
        """Let lookups find blocks of a request from `first_block` on, and report them."""
        if not slots:
            return
        end = first_block + len(slots)
        for position, slot in enumerate(slots, first_block):
            block_hash = request.chain[position]
            if self.pool.commit(slot, block_hash):
                tokens = request.tokens_of(position, position + 1)
                self._content[block_hash] = _Content(
                    position, request.parent(position), tokens, request.salt
                )
        parent = request.parent(first_block)
        self._hook.stored(
            [engine_hash(block_hash) for block_hash in request.chain[first_block:end]],
            None if parent is None else engine_hash(parent),
            request.tokens_of(first_block, end),
            tier=Tier.hbm,
            cache_salt=request.salt,
        )

    def give_up(self, slots: Sequence[int]) -> None:
        """Free slots that were offered for a pull and got nothing, or the wrong thing."""
        self.pool.free_unclean(slots)

    def free(self, slots: Sequence[int]) -> None:
        """Free the slots of a chain, its tail first."""
        self.pool.free(reversed(slots))

    def reset(self) -> bool:
        """Forget all that is cached; False while requests use slots."""
        if not self.pool.reset():
            return False
        self._content.clear()
        self._hook.cleared()
        return True

    def _try_evict(self, slots: list[int]) -> list[int]:
        return slots if self.memory is None else self.memory.try_evict(slots)

    def held(self) -> Iterator[RawStored]:
        """List what is cached now, parents first; what goes meanwhile is passed over."""
        order = sorted((content.position, block) for block, content in self._content.items())
        for _, block_hash in order:
            content = self._content.get(block_hash)
            if content is not None:
                parent = None if content.parent is None else engine_hash(content.parent)
                yield RawStored(
                    (engine_hash(block_hash),),
                    parent,
                    content.tokens,
                    Tier.hbm,
                    cache_salt=content.salt,
                )
