"""What kvatlas adds to a request, against the prefill time that the reused blocks save.

    .venv/bin/python tests/bench/coordination.py [--quick] [--save]
        [--prefill-tokens-per-second N] [--kv-bytes-per-token N] [--peer none]

t_coord of a request that finds its blocks where it is sent: JSON body to decision and answer, with
hashing and matching in it, the report of its end, and what the engine's hook takes for each block
that is computed and published. With `pulled`, the reused blocks come from a peer: a lease of up to
512 blocks over the broker and the check of every byte come on top. Moving the bytes is not in it,
that is the network's; nor is the socket of the HTTP server (tests/bench/http.py).

t_saved is arithmetic: reused tokens over the stated speed of prefill, 20,000 tokens/s a worker, the
speed that docs and designs here reckon with. A larger speed makes kvatlas' share larger. A block is
16 tokens; KV is 128 KiB a token by default (a model of 8 B with 8 KV heads in bf16).
TTFT is prefill of what is not reused plus t_coord; no queue, no decoding. The last block of a
prompt is never reused, since engines compute at least one token. All on one CPU, the nats-server
too. There is no peer; every bench takes `--peer`.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

import argparse
import math
import statistics
from typing import NamedTuple

from testkit.measuring import Bench, pin_to_one_cpu
from testkit.measuring.bench import OURS, Cell
from testkit.measuring.coordination_costs import (
    BLOCK_TOKENS,
    LEASE_BLOCKS,
    RoutedFleet,
    hash_us,
    hook_us_per_block,
    lease_us,
    verify_us,
)

PROMPTS = (1_024, 4_096, 8_192, 32_768, 131_072)
FLEETS = (8, 64, 256, 1_024)
REUSE_PERCENT = (0, 25, 50, 75, 100)
#: shares of TTFT are told for this fleet and reuse
TYPICAL_FLEET, TYPICAL_REUSE = 256, 50
#: blocks that a prefill publishes at a time
HOOK_BLOCKS = 64


class Assumed(NamedTuple):
    """What is stated, not measured."""

    prefill_tokens_per_second: float
    kv_bytes_per_token: int


class Parts(NamedTuple):
    """Measured costs in microseconds, all but those of routing. What is pulled is published too."""

    hook_per_block: float
    lease_fixed: float
    lease_per_block: float
    verify_per_block: float

    def pull_us(self, num_blocks: int) -> float:
        """Return leases and checks of so many blocks."""
        leases = -(-num_blocks // LEASE_BLOCKS) * self.lease_fixed
        return leases + num_blocks * self.per_pulled_block

    @property
    def per_pulled_block(self) -> float:
        """What each pulled block adds."""
        return self.lease_per_block + self.verify_per_block + self.hook_per_block


def main() -> None:
    """Measure the parts, then each prompt and fleet."""
    assumed = read_assumed()
    bench = Bench("coordination", __doc__)
    pin_to_one_cpu()
    parts = measure_parts(bench, assumed)
    fleets = (TYPICAL_FLEET,) if bench.is_quick else FLEETS
    for workers in fleets:
        fleet = RoutedFleet(workers, max(PROMPTS))
        found = fleet.longest_match(8_192, 4_096)
        bench.gate(f"{workers} workers: the router finds {found} of 4,096 tokens", found == 4_096)
        for num_tokens in PROMPTS:
            measure_prompt(bench, fleet, parts, assumed, workers, num_tokens)
    bench.finish()


def read_assumed() -> Assumed:
    """Take our own options off the command line; Bench reads the rest."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--prefill-tokens-per-second", type=float, default=20_000)
    parser.add_argument("--kv-bytes-per-token", type=int, default=128 << 10)
    asked, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return Assumed(asked.prefill_tokens_per_second, asked.kv_bytes_per_token)


# --- measuring --------------------------------------------------------------------------------


def measure_parts(bench: Bench, assumed: Assumed) -> Parts:
    """Measure what does not depend on the fleet; fixed and per-block parts from two sizes."""
    repetitions = 3 if bench.is_quick else 9
    bench.figure("assumed", **assumed._asdict(), block_tokens=BLOCK_TOKENS)
    hook = [hook_us_per_block(HOOK_BLOCKS, 2_000) for _ in range(repetitions)]
    bench.row("hook, a published block", "us", {OURS: hook}, blocks_per_event=HOOK_BLOCKS)
    for num_tokens in PROMPTS:
        hashing = [hash_us(num_tokens, 50) for _ in range(repetitions)]
        bench.row("hashing, in routing", "us", {OURS: hashing}, tokens=num_tokens)
    one, many = (lease_us(blocks, 50 * repetitions)[20:] for blocks in (1, LEASE_BLOCKS))
    bench.row("lease and release", "us", {OURS: one}, blocks=1)
    bench.row("lease and release", "us", {OURS: many}, blocks=LEASE_BLOCKS)
    block_bytes = assumed.kv_bytes_per_token * BLOCK_TOKENS
    verify = [verify_us(block_bytes, 100) for _ in range(repetitions)]
    bench.row("check of a pulled block", "us", {OURS: verify}, block_bytes=block_bytes)
    a_lease, per_block = statistics.median(one), 0.0
    per_block = max(0.0, statistics.median(many) - a_lease) / (LEASE_BLOCKS - 1)
    return Parts(min(hook), a_lease, per_block, min(verify))


def measure_prompt(
    bench: Bench,
    fleet: RoutedFleet,
    parts: Parts,
    assumed: Assumed,
    workers: int,
    num_tokens: int,
) -> None:
    """Measure routing of one prompt at each reuse, and tell what follows."""
    repetitions, num_prompts = (2, 5) if bench.is_quick else (5, 10)
    for percent in REUSE_PERCENT:
        reused = reused_tokens(num_tokens, percent)
        routes = [fleet.route_us(num_tokens, reused, num_prompts) for _ in range(repetitions)]
        where: dict[str, Cell] = {
            "workers": workers,
            "tokens": num_tokens,
            "reuse_percent": percent,
        }
        bench.row("route, from body to body", "us", {OURS: routes}, **where)
        t_local = min(routes) + (num_tokens - reused) / BLOCK_TOKENS * parts.hook_per_block
        t_pulled = t_local + parts.pull_us(reused // BLOCK_TOKENS)
        for way, t_coord_us in (("local", t_local), ("pulled", t_pulled)):
            share = tell(bench, assumed, where, way, t_coord_us)
            if (workers, percent) == (TYPICAL_FLEET, TYPICAL_REUSE):
                suffix = "" if way == "local" else "_pulled"
                bench.absolute(f"share_of_ttft_{num_tokens // 1024}k{suffix}", share)
        if percent == 0:
            tell_from_where(bench, assumed, parts, where, t_local)


# --- arithmetic -------------------------------------------------------------------------------


def reused_tokens(num_tokens: int, percent: int) -> int:
    """Return whole blocks of tokens, less the last one of a prompt: engines always compute that."""
    return min(num_tokens * percent // 100, num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def tell(
    bench: Bench, assumed: Assumed, where: dict[str, Cell], way: str, t_coord_us: float
) -> float:
    """Add a row of what it takes and saves; return the share of TTFT, 0 to 1."""
    tokens, percent = int(where["tokens"]), int(where["reuse_percent"])
    reused = reused_tokens(tokens, percent)
    t_coord_ms = t_coord_us / 1e3
    t_saved_ms = 1e3 * reused / assumed.prefill_tokens_per_second
    prefill_ms = 1e3 * (tokens - reused) / assumed.prefill_tokens_per_second
    share = t_coord_ms / (t_coord_ms + prefill_ms)
    figures: dict[str, Cell] = {"t_coord_ms": t_coord_ms, "t_saved_ms": t_saved_ms}
    if t_saved_ms:
        figures["t_coord_over_t_saved"] = t_coord_ms / t_saved_ms
    bench.figure("coordination", **where, way=way, **figures, share_of_ttft=share)
    return share


def tell_from_where(
    bench: Bench, assumed: Assumed, parts: Parts, where: dict[str, Cell], t_local_us: float
) -> None:
    """Add the fewest reused tokens, in whole blocks, that save more than they cost."""
    saved_us = 1e6 * BLOCK_TOKENS / assumed.prefill_tokens_per_second
    for way, fixed_us, per_block_us in (
        ("local", t_local_us, 0.0),
        ("pulled", t_local_us + parts.lease_fixed, parts.per_pulled_block),
    ):
        cell: dict[str, Cell] = {"workers": where["workers"], "tokens": where["tokens"], "way": way}
        if saved_us <= per_block_us:
            bench.figure("pays from", **cell, reused_tokens="never")
            continue
        least = BLOCK_TOKENS * math.ceil(fixed_us / (saved_us - per_block_us))
        share = 100 * least / int(where["tokens"])
        bench.figure("pays from", **cell, reused_tokens=least, reuse_percent=share)


if __name__ == "__main__":
    main()
