"""The yardstick: one cache with the whole fleet's capacity and no cost of moving anything.

The block rules are the engines': only full prompt blocks can hit, a hit ends at the first block
that is absent, generated tokens fill blocks of their own, the leaf used longest ago leaves first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvatlas.demo.prompts import PlayedRequest


def one_big_lru_hit_ratio(requests: Iterable[PlayedRequest], capacity_blocks: int) -> float:
    """Return the share of full prompt blocks that such a cache holds when they are asked for."""
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    num_hits = num_asked = 0
    for number, request in enumerate(requests):
        prompt = [(block_id, 0) for block_id in request.block_ids[: request.num_prompt_blocks]]
        num_asked += len(prompt)
        num_hits += _leading(prompt, held)
        generated = [(-1 - number, i) for i in range(request.num_blocks - len(prompt))]
        for block in reversed([*prompt, *generated]):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity_blocks:
            held.popitem(last=False)
    return num_hits / num_asked if num_asked else 0.0


def _leading(prompt: list[tuple[int, int]], held: OrderedDict[tuple[int, int], None]) -> int:
    return next((i for i, block in enumerate(prompt) if block not in held), len(prompt))
