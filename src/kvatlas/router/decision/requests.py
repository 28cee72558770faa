"""What is asked of a router and reported to it, as values that have been checked.

Decisions use these types; `router/http/bodies/decoding.py` makes them from bytes.
"""

from typing import Annotated

from msgspec import Meta, Struct

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.hashing import Extra, HashAlgorithm

Milliseconds = Annotated[float, Meta(ge=0, le=1e10)]
Amount = Annotated[int, Meta(ge=0, le=2**53)]


class HashedPrompt(Struct, frozen=True):
    """A prompt by the packed hashes of its full blocks, which LoRA and salt are part of.

    What is None follows from the workers that serve the model: `block_tokens`, `algorithm` and
    `lookahead_tokens` if all cut and name blocks alike, `num_tokens` as what the blocks cover.
    """

    hashes: bytes
    block_tokens: int | None = None
    algorithm: HashAlgorithm | None = None
    num_tokens: int | None = None
    lookahead_tokens: int | None = None

    @property
    def num_blocks(self) -> int:
        """Number of full blocks."""
        return len(self.hashes) // BLOCK_HASH_BYTES

    def __repr__(self) -> str:
        """Show what may stand in a log: no hashes, which may be of a salted prompt."""
        return f"HashedPrompt(num_blocks={self.num_blocks})"


class ScoreRequest(Struct, frozen=True):
    """A prompt, and who may serve it. `tokens` are packed u32 LE, empty where `hashed` is given."""

    model: str
    tokens: bytes
    lora: str | None = None
    cache_salt: str | None = None
    extras: tuple[Extra, ...] = ()
    max_candidates: int | None = None
    hashed: HashedPrompt | None = None
    #: whether only workers whose trust is `exact` may serve it
    requires_exact: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were sent."""
        return len(self.tokens) // 4

    def __repr__(self) -> str:
        """Show what may stand in a log: neither tokens nor salt."""
        prompt = self.hashed or f"num_tokens={self.num_tokens}"
        return f"ScoreRequest(model={self.model!r}, {prompt})"


class Report(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What became of a routed request, or of its prefill; what is left out is unknown.

    `prefill_ms` is computing time without waiting and without output, `ttft_ms` all since the
    decision. Times that cannot be true teach the router nothing; the rest of the report counts.
    """

    ttft_ms: Milliseconds | None = None
    prefill_ms: Milliseconds | None = None
    computed_tokens: Amount | None = None
    local_blocks: Amount | None = None
    pulled_blocks: Amount | None = None
    pull_ms: Milliseconds | None = None
    output_tokens: Amount | None = None
    failed: bool = False
    #: of the prompt, as engines report it: reused from the worker's cache or pulled from a peer
    cached_tokens: Amount | None = None
    #: of the prompt, as the engine counts it; with `cached_tokens` it gives `computed_tokens`
    prompt_tokens: Amount | None = None
