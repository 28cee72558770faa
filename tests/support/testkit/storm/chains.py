"""The prompts of a storm: families of chains with a common beginning, the same for everybody."""

from random import Random

from kvatlas.schemas.digest import index_key, mix64, split_hashes
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, pack_tokens

MODEL = "storm"
BLOCK_TOKENS = 4
DESCRIPTOR = NamespaceDescriptor(BLOCK_TOKENS)
NUM_FAMILIES, CHAINS_PER_FAMILY = 12, 4
SHARED_BLOCKS, CHAIN_BLOCKS = 8, 24


class Chain:
    """A prompt: its tokens, and its blocks as numbers that are equal where blocks are equal."""

    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        self.tokens, self.blocks = tokens, blocks

    def packed(self, first: int, num_blocks: int) -> bytes:
        """Return the tokens of some of its blocks."""
        return pack_tokens(self.tokens[first * BLOCK_TOKENS : (first + num_blocks) * BLOCK_TOKENS])


class Chains:
    """All prompts of a storm with this seed; `mixed` are its blocks' parts of a digest."""

    def __init__(self, seed: int) -> None:
        random = Random(f"chains {seed}")
        hasher = BlockHasher(DESCRIPTOR.namespace(MODEL, None, None))
        self.chains: list[Chain] = []
        self.mixed: list[int] = []
        number_of: dict[bytes, int] = {}
        for _ in range(NUM_FAMILIES):
            shared = _tokens(random, SHARED_BLOCKS)
            for _ in range(CHAINS_PER_FAMILY):
                tokens = shared + _tokens(random, CHAIN_BLOCKS - SHARED_BLOCKS)
                blocks = []
                for block_hash in split_hashes(hasher.chain(pack_tokens(tokens))):
                    if block_hash not in number_of:
                        number_of[block_hash] = len(number_of)
                        self.mixed.append(mix64(index_key(block_hash)))
                    blocks.append(number_of[block_hash])
                self.chains.append(Chain(tokens, blocks))


def _tokens(random: Random, num_blocks: int) -> list[int]:
    return [random.randrange(100_000) for _ in range(num_blocks * BLOCK_TOKENS)]
