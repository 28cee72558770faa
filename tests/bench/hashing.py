"""What naming the blocks of a prompt costs, beside NVIDIA Dynamo's `compute_block_hash_for_seq`.

    .venv/bin/python tests/bench/hashing.py [--quick] [--peer dynamo|none] [--save]

Tokens in, packed 16-byte hashes out, each chained to the one before. `kernel` is what the router
runs: `pack_tokens`, then one compiled call for the whole prompt. `plain` is `BlockHasher`, a call
of xxhash per block, which sidecars run: they do without numba. The peer takes a list of integers
only and hashes each block by itself; chaining, which an index needs as well, comes on top there and
is not counted. Figures are microseconds a prompt; `tokens_per_second` is that of the fastest
repetition.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from kvatlas.indexer import prompt_kernel
from kvatlas.schemas.hashing import BlockHasher, Namespace, pack_tokens
from testkit.measuring import Bench, pin_to_one_cpu
from testkit.measuring.bench import OURS, Cell
from testkit.measuring.sides import Sides
from testkit.measuring.timing import mean_us

PROMPTS = (8 * 1024, 128 * 1024)
#: tokens of a prompt -> calls per sample
NUM_CALLS = {PROMPTS[0]: 20, PROMPTS[1]: 2}
#: the peer is compared at 8,192 blocks of 16 tokens
COMPARED = (PROMPTS[1], 16)


class OurHashing:
    """Our side: the same prompt in three forms, through two implementations."""

    def __init__(self) -> None:
        prompt_kernel.warm()
        self._forms: dict[str, Any] = {}

    def prepare_tokens(self, num_tokens: int) -> None:
        """Make a prompt of random token ids, in all forms."""
        random = Random(num_tokens)
        tokens = [random.randrange(2**17) for _ in range(num_tokens)]
        array = np.array(tokens, np.uint32)
        self._forms = {"list": tokens, "bytes": array.tobytes(), "numpy": array}

    def num_hashes(self, block_tokens: int) -> int:
        """Return how many blocks of the prompt get a hash."""
        return len(_kernel(block_tokens)(self._forms["bytes"])) // 16

    def is_right(self, block_tokens: int) -> bool:
        """Say whether both implementations give the same chain from every form."""
        plain, kernel = _plain(block_tokens), _kernel(block_tokens)
        chains = {name(form) for name in (plain, kernel) for form in self._forms.values()}
        return len(chains) == 1

    def hash_us(self, block_tokens: int, calls: int) -> dict[str, float]:
        """Return the mean time of hashing the prompt, by implementation and form."""
        ways = {"kernel": _kernel(block_tokens), "plain": _plain(block_tokens)}
        return {
            f"{way}, from {form}": mean_us(lambda: hash_chain(tokens), calls)  # noqa: B023
            for way, hash_chain in ways.items()
            for form, tokens in self._forms.items()
        }


def _kernel(block_tokens: int) -> Callable[[Any], bytes]:
    root = Namespace("model", block_tokens).root()

    def hash_chain(tokens: Any) -> bytes:
        return prompt_kernel.hash_chain(root, _packed(tokens), block_tokens)

    return hash_chain


def _plain(block_tokens: int) -> Callable[[Any], bytes]:
    hasher = BlockHasher(Namespace("model", block_tokens))
    return lambda tokens: hasher.chain(_packed(tokens))


def _packed(tokens: Any) -> bytes:
    if isinstance(tokens, np.ndarray):
        return tokens.tobytes()
    return pack_tokens(tokens)


def main() -> None:
    """Check the hashes, then measure."""
    bench = Bench("hashing", __doc__)
    pin_to_one_cpu()
    with Sides(OurHashing, "dynamo.py" if bench.has_peer else None) as sides:
        bench.versions |= sides.peer_versions()
        sides.each("prepare_tokens", num_tokens=1_000)
        for block_tokens in (16, 64):
            is_right = sides.ours("is_right", block_tokens=block_tokens)
            bench.gate(f"one chain from all forms, {block_tokens} tokens a block", is_right)
            found = sides.each("num_hashes", block_tokens=block_tokens)
            bench.gate(f"full blocks only: {found}", {*found.values()} == {1_000 // block_tokens})
        for num_tokens in PROMPTS[1:] if bench.is_quick else PROMPTS:
            sides.each("prepare_tokens", num_tokens=num_tokens)
            for block_tokens in (16,) if bench.is_quick else (16, 64):
                measure(bench, sides, num_tokens, block_tokens)
    bench.finish()


def measure(bench: Bench, sides: Sides, num_tokens: int, block_tokens: int) -> None:
    """Time all ways of one prompt."""
    repetitions = 15
    calls = NUM_CALLS[num_tokens]
    ways = sides.phases_in_turn(repetitions, "hash_us", block_tokens=block_tokens, calls=calls)
    theirs = ways.get("binding, from list", {})
    for way, samples in ways.items():
        where: dict[str, Cell] = {"tokens": num_tokens, "block_tokens": block_tokens}
        bench.row(way, "us", samples, **where)
        fastest = {side: num_tokens / min(each) * 1e6 for side, each in samples.items()}
        for side, tokens_per_second in fastest.items():
            bench.figure(way, **where, side=side, tokens_per_second=tokens_per_second)
    if (num_tokens, block_tokens) == COMPARED:
        for form in ("list", "bytes"):
            samples = {OURS: ways[f"kernel, from {form}"][OURS], **theirs}
            bench.ratio_of_times(f"from_{form}_8192_blocks", samples, sides.peer)
            bench.absolute(f"ms_from_{form}_8192_blocks", min(samples[OURS]) / 1e3)


if __name__ == "__main__":
    main()
