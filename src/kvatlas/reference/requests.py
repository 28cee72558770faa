"""A request on its way through the reference engine, and what comes out."""

import asyncio
import hashlib
from array import array
from collections.abc import Callable

from msgspec import Struct

from kvatlas.schemas.digest import split_hashes
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.routing import Plan


class PullCounts(Struct, frozen=True):
    """What pulling did for a request; `verified` blocks had the right bytes, `failed` had not."""

    bytes: int = 0
    verified: int = 0
    failed: int = 0
    missing: int = 0
    transport: str = ""
    ms: float = 0.0


class Completion(Struct, frozen=True):
    """How a request was served. Milliseconds are of model time.

    `ttft_ms` = `queue_ms` + `prefill_ms`. Blocks are full blocks of the prompt, so that
    local + pulled + computed = `prompt_blocks`; `computed_tokens` has the partial tail in it.
    """

    local_blocks: int
    pulled_blocks: int
    computed_blocks: int
    prompt_blocks: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    num_preemptions: int
    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    total_ms: float
    pull: PullCounts


class Request:
    """A prompt, the tokens that grew out of it and the slots that hold their KV."""

    def __init__(
        self, prompt: bytes, max_tokens: int, hasher: BlockHasher, salt: str | None, arrived: float
    ) -> None:
        self.hasher, self.salt = hasher, salt
        self.tokens = bytearray(prompt)
        self.num_prompt_tokens = len(prompt) // 4
        self.max_tokens = max_tokens
        self.output = generated_tokens(prompt, max_tokens)
        self.num_generated = 0
        #: hashes of the full blocks of `tokens`
        self.chain: list[bytes] = list(split_hashes(hasher.chain(prompt)))
        self.num_prompt_blocks = len(self.chain)
        #: one a block, in order; they hold the KV of the leading tokens
        self.slots: list[int] = []
        self.plan: Plan | None = None
        #: hashes that a pull brought
        self.pulled: set[bytes] = set()
        self.pull_result = PullCounts()
        self.arrived = arrived
        #: from when on it could have been prefilled: its arrival, or the end of its pull
        self.ready_at = arrived
        self.is_pulling = False
        #: nobody waits for it any more; whoever works on it stops
        self.is_withdrawn = False
        self.num_preemptions = 0
        #: set by the first prefill
        self.first_prefill: FirstPrefill | None = None
        self.task: asyncio.Task[None] | None = None
        #: gets the tokens of the output as they come, packed
        self.on_tokens: Callable[[bytes], None] | None = None
        self.done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def block_tokens(self) -> int:
        return self.hasher.namespace.block_tokens

    @property
    def max_reuse_blocks(self) -> int:
        """Blocks that may come from the cache: the last token is computed in any case."""
        return (self.num_tokens - 1) // self.block_tokens

    def parent(self, block: int) -> bytes | None:
        """Return the hash before a block of the chain; None for the first."""
        return self.chain[block - 1] if block else None

    def tokens_of(self, first_block: int, end_block: int) -> bytes:
        """Return the tokens of full blocks."""
        width = 4 * self.block_tokens
        return bytes(self.tokens[width * first_block : width * end_block])

    def generate(self, num_tokens: int) -> None:
        """Append the next tokens of the output, and the hashes of the blocks that they fill."""
        first = 4 * self.num_generated
        new_tokens = self.output[first : first + 4 * num_tokens]
        self.tokens += new_tokens
        self.num_generated += num_tokens
        if self.on_tokens is not None and new_tokens:
            self.on_tokens(new_tokens)
        num_hashed = len(self.chain)
        rest = self.tokens_of(num_hashed, self.num_tokens // self.block_tokens)
        self.chain += split_hashes(self.hasher.chain(rest, parent=self.parent(num_hashed)))


class FirstPrefill(Struct, frozen=True):
    """What the first prefill of a request found and took."""

    local_blocks: int
    pulled_blocks: int
    computed_tokens: int
    started: float
    ended: float


def generated_tokens(prompt: bytes, num_tokens: int) -> bytes:
    """Return the output of a prompt (u32 LE): the same for the same prompt, below 2**16."""
    narrow = array("H", hashlib.shake_128(b"output" + prompt).digest(2 * num_tokens))
    return array("I", narrow).tobytes()
