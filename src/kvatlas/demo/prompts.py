"""Requests to play, and the tokens that their blocks stand for."""

import sys
from array import array
from functools import lru_cache
from hashlib import shake_128

from msgspec import Struct

TRACE_BLOCK_TOKENS = 512


class PlayedRequest(Struct, frozen=True):
    """One request: when it arrives, the trace blocks of its prompt, and its lengths in tokens.

    Only the first `num_prompt_blocks` blocks are full; they are the denominator of every ratio.
    """

    arrival_ms: float
    block_ids: tuple[int, ...]
    input_tokens: int
    output_tokens: int

    @property
    def num_prompt_blocks(self) -> int:
        """Number of full blocks of the prompt."""
        return self.input_tokens // TRACE_BLOCK_TOKENS

    @property
    def num_blocks(self) -> int:
        """Number of full blocks when the request has ended, generated ones included."""
        return (self.input_tokens + self.output_tokens) // TRACE_BLOCK_TOKENS

    def prompt(self) -> bytes:
        """Return the prompt as u32 LE tokens; the partial last block is a part of its id's."""
        return b"".join(map(block_tokens, self.block_ids))[: 4 * self.input_tokens]


@lru_cache(maxsize=65_536)
def block_tokens(block_id: int) -> bytes:
    """Return the 512 tokens (u32 LE, each below 65,536) that a block id of a trace stands for."""
    narrow = array("H", shake_128(b"block %d" % block_id).digest(2 * TRACE_BLOCK_TOKENS))
    wide = array("I", narrow)
    if sys.byteorder == "big":
        wide.byteswap()
    return wide.tobytes()
