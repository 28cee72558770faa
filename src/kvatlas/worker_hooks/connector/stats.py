"""What became of loads, as vLLM carries it from the worker's side to its log and its metrics. Pure.

{"loads": 2, "seconds": 0.08, "blocks": {"held": 12, "not_held": 4}}
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvatlas.worker_hooks.connector.loads import CAME, LoadOutcomes

#: what vLLM's log and metrics call these figures
LOADS, SECONDS, BLOCKS = "loads", "seconds", "blocks"


def stats_of(outcomes: LoadOutcomes) -> dict[str, Any]:
    """Return the outcomes as a plain mapping; empty where no load has ended."""
    if not outcomes.num_loads:
        return {}
    blocks = {name: number for name, number in outcomes.blocks.items() if number}
    return {LOADS: outcomes.num_loads, SECONDS: outcomes.seconds, BLOCKS: blocks}


def added(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return both together."""
    return {
        LOADS: one.get(LOADS, 0) + other.get(LOADS, 0),
        SECONDS: one.get(SECONDS, 0.0) + other.get(SECONDS, 0.0),
        BLOCKS: dict(Counter(one.get(BLOCKS, {})) + Counter(other.get(BLOCKS, {}))),
    }


def in_words(stats: Mapping[str, Any]) -> dict[str, int | float]:
    """Return what a line of vLLM's log shows: loads, their mean time, what came, what did not."""
    num_loads, blocks = stats.get(LOADS, 0), stats.get(BLOCKS, {})
    shown: dict[str, int | float] = {
        "kvatlas loads": num_loads,
        "mean ms": round(1000 * stats.get(SECONDS, 0.0) / max(num_loads, 1), 1),
        "blocks": sum(blocks.get(name, 0) for name in CAME),
    }
    return shown | {
        f"blocks missing ({name})": blocks[name] for name in sorted(blocks) if name not in CAME
    }
