"""The prefix index beside NVIDIA Dynamo's RadixTree: events, matches, memory, and the worst cases.

    .venv/bin/python tests/bench/index.py [--quick] [--peer dynamo|none] [--save]

One event in: encoded bytes until the index is changed, on both sides (`stored`, `duplicate`,
`removed`; `fold ...` is our service's whole step, with order, epochs and trust). One match out, in
three forms: `as a dict` has equal content on both sides, worker and depth, and gives the ratios
`match_...`; `match` is a list of named tuples with each depth split by tier, which the peer does
not know (`..._split_by_tier`); `as columns` is that as arrays, and what the router reads. Up to
2,048 blocks `as a dict` has no target: its time is that of a Python object per holder, which no
request of the router makes. Both sides hold the same chains, events arrive in the same order, and
everything runs on one CPU, which is Dynamo's best case.

Figures are microseconds, the mean over an event or a call; each side's repetitions take turns.
Memory is the growth of a fresh process. Needs Linux.
"""

import sys
from pathlib import Path

# not this folder: its http.py is not the library's
sys.path[0] = str(Path(__file__).parents[1] / "support")

import os

from testkit.measuring import Bench, Stopped, pin_to_one_cpu
from testkit.measuring.bench import OURS, Cell
from testkit.measuring.index_extremes import (
    agrees_with_reference,
    at_the_cap,
    beside_a_writer,
    during_growth,
    random_sets,
)
from testkit.measuring.index_ours import OurIndex
from testkit.measuring.index_plans import LAYOUTS, ApplyCell, MatchCell
from testkit.measuring.sides import Sides, in_a_fresh_process

WORKERS = 256
HITS = (0, 50, 100)
#: blocks per event -> events per pass
NUM_EVENTS = {1: 8192, 16: 4096, 64: 4096, 512: 1024}
#: blocks of a query -> calls per sample, a millisecond or two: short samples slip between whatever
#: else the machine does, so that the smallest of many is undisturbed
NUM_CALLS = {512: 20, 2048: 10, 8192: 5}
#: (layout, blocks) -> the ratio that it gives, at 256 holders of all of the chain
RATIOS = {("one chain", blocks): f"match_{blocks}" for blocks in NUM_CALLS}
RATIOS["forked", 8192] = "match_forked_8192"


def main() -> None:
    """Check answers, then measure."""
    bench = Bench("index", __doc__)
    cpus = sorted(os.sched_getaffinity(0))
    pin_to_one_cpu()
    with Sides(OurIndex, "dynamo.py" if bench.has_peer else None) as sides:
        bench.versions |= sides.peer_versions()
        check_answers(bench, sides)
        measure_apply(bench, sides)
        measure_match(bench, sides)
        measure_memory(bench, sides)
        if not bench.is_quick:
            measure_churn(bench, sides)
            measure_clear(bench, sides)
            measure_extremes(bench, cpus)
    bench.finish()


# --- gates ------------------------------------------------------------------------------------


def check_answers(bench: Bench, sides: Sides) -> None:
    """Stop unless all sides answer right, before anything is timed."""
    bench.gate(
        "600 random steps end as in ReferenceIndex, and so does each", agrees_with_reference(600)
    )
    cell = ApplyCell(workers=64, blocks_per_event=64, num_events=512, shared_by=16)
    right = [cell.num_pairs, cell.num_pairs, 0]
    for side, found in sides.each("visible_pairs", **cell._asdict()).items():
        bench.gate(f"{side}: all events are visible: pairs found {found}", found == right)
    for layout in LAYOUTS:
        wrong = prepare(sides, MatchCell(layout, 512, 8, WORKERS))
        bench.gate(f"{' and '.join(sides.names)}: right scores, {layout}{wrong}", not wrong)
    found = at_the_cap(max_bytes=4 << 20, workers=64, holders=16)
    bench.gate("4 MiB: stores end in IndexFull", found["is_full"])
    bench.gate("4 MiB: memory stays below", found["memory_bytes"] <= 4 << 20)
    is_empty = found["removed"] >= found["pairs"] and not found["blocks_after_removal"]
    bench.gate("4 MiB: a full index still removes everything", is_empty)
    bench.gate("4 MiB: and then stores again", found["stored_again"] == 64)
    bench.figure("index full at 4 MiB, random sets of 16 of 64", pairs=found["pairs"])


def prepare(sides: Sides, cell: MatchCell) -> str:
    """Fill all sides alike; return which one answers wrong, and how, or nothing."""
    sides.each("prepare_match", **cell._asdict())
    for hit_percent in HITS:
        right = [[*pair] for pair in sorted(cell.depths(hit_percent).items())]
        for side, found in sides.each("depths", hit_percent=hit_percent).items():
            if found != right:
                return f", {side} at {hit_percent} %: {found}, expected {right}"
    return ""


# --- events -----------------------------------------------------------------------------------


def measure_apply(bench: Bench, sides: Sides) -> None:
    """Time events of all sizes; the ratios are of 64 blocks, 256 workers."""
    sizes, fleets = (NUM_EVENTS, (8, 64, 256, 1024)) if not bench.is_quick else ((64,), (256,))
    for blocks_per_event in sizes:
        for workers in fleets:
            for shared_by in (1, 16):
                num_events = NUM_EVENTS[blocks_per_event]
                cell = ApplyCell(workers, blocks_per_event, num_events, min(shared_by, workers))
                measure_apply_cell(bench, sides, cell)


def measure_apply_cell(bench: Bench, sides: Sides, cell: ApplyCell) -> None:
    """Time one cell's phases."""
    repetitions = 5 if bench.is_quick else 7
    phases = sides.phases_in_turn(repetitions, "apply_us", **cell._asdict())
    for phase, samples in phases.items():
        bench.row(f"apply {phase}", "us", samples, **cell._asdict())
    if (cell.blocks_per_event, cell.workers) == (64, WORKERS):
        if cell.shared_by == 1:
            bench.ratio_of_times("apply_stored_unique_64", phases["stored"], sides.peer)
            bench.ratio_of_times("apply_removed_64", phases["removed"], sides.peer)
        else:
            bench.ratio_of_times("apply_stored_shared_64", phases["stored"], sides.peer)


# --- matches ----------------------------------------------------------------------------------


def measure_match(bench: Bench, sides: Sides) -> None:
    """Time matches, in quick runs only those that give ratios."""
    if bench.is_quick:
        cells = [MatchCell(layout, blocks, WORKERS, WORKERS) for layout, blocks in RATIOS]
    else:
        cells = [
            MatchCell(layout, blocks, holders, WORKERS)
            for layout in LAYOUTS
            for blocks in NUM_CALLS
            for holders in (1, 8, 64, 256)
        ]
    for cell in cells:
        if wrong := prepare(sides, cell):
            raise Stopped(f"{cell}{wrong}")
        for hit_percent in (100,) if bench.is_quick else HITS:
            measure_match_cell(bench, sides, cell, hit_percent)


def measure_match_cell(bench: Bench, sides: Sides, cell: MatchCell, hit_percent: int) -> None:
    """Time one query in the forms that an answer can have."""
    asked = {"hit_percent": hit_percent, "calls": NUM_CALLS[cell.num_blocks]}
    where: dict[str, Cell] = {**cell._asdict(), "hit_percent": hit_percent}
    forms = sides.phases_in_turn(25, "match_us", **asked)
    theirs = {side: samples for side, samples in forms["match"].items() if side != OURS}
    forms["match as a dict"] |= theirs
    for form, samples in forms.items():
        bench.row(form, "us", samples, **where)
    key = RATIOS.get((cell.layout, cell.num_blocks))
    if key and (cell.holders, hit_percent) == (WORKERS, 100):
        bench.ratio_of_times(key, forms["match as a dict"], sides.peer)
        bench.ratio_of_times(f"{key}_split_by_tier", forms["match"], sides.peer)


# --- memory -----------------------------------------------------------------------------------


def measure_memory(bench: Bench, sides: Sides) -> None:
    """Measure bytes per (block, worker); ratios and absolutes are averages over one doubling."""
    num_blocks = 2**17 if bench.is_quick else 2**20
    for shared_by, name in ((1, "alone"), (16, "shared16")):
        found = sides.fresh("bytes_per_pair", shared_by=shared_by, num_blocks=num_blocks)
        for side, figures in found.items():
            cell: dict[str, Cell] = {"shared_by": shared_by, "blocks": 2 * num_blocks}
            bench.figure("bytes per pair", **cell, side=side, **figures)
        ours = found[OURS]
        bench.absolute(f"bytes_per_pair_{name}_before_growth", ours["told_least"])
        bench.absolute(f"bytes_per_pair_{name}_mean", ours["told_mean"])
        bench.absolute(f"rss_bytes_per_pair_{name}_mean", ours["rss_mean"])
        if sides.peer:
            bench.ratio(f"memory_pair_{name}", found[sides.peer]["rss_mean"] / ours["rss_mean"])


def measure_churn(bench: Bench, sides: Sides) -> None:
    """Let blocks come and go: resident memory must not grow with them."""
    num_blocks, held_blocks = 10_000_000, 200_000
    found = sides.fresh("churn", num_blocks=num_blocks, held_blocks=held_blocks)
    for side, rss_mib in found.items():
        grown = rss_mib["last"] - rss_mib["first"]
        cell: dict[str, Cell] = {"blocks": num_blocks, "held": held_blocks, "side": side}
        bench.figure("churn", **cell, **{f"rss_mib_{at}": each for at, each in rss_mib.items()})
        if side == OURS:
            bench.absolute("churn_rss_growth_mib", grown)


# --- the rest ---------------------------------------------------------------------------------


def measure_clear(bench: Bench, sides: Sides) -> None:
    """Time the end of a worker with 100,000 blocks among four and among sixteen."""
    for others in (3, 15):
        phases = sides.phases_in_turn(3, "clear_us", num_blocks=100_000, others=others)
        for phase, samples in phases.items():
            bench.row(f"{phase} 100,000 blocks", "us", samples, workers=others + 1)


def measure_extremes(bench: Bench, cpus: list[int]) -> None:
    """Measure what only our side has, or what only it is asked for."""
    for workers, holders in ((64, 4), (64, 16), (256, 16), (256, 64)):
        cell = {"workers": workers, "holders": holders}
        bench.figure("random holder sets", **cell, **random_sets(50_000, workers, holders))
    found = during_growth(100_000, 4_000_000, asked_blocks=2048)
    bench.figure("while the table grows", holders=64, blocks=2048, **found)
    bench.absolute("match_during_growth_p99_us", found["match_us_p99"])
    found = in_a_fresh_process(beside_a_writer, 2048, WORKERS, cpus)
    bench.figure("match beside a writer", holders=WORKERS, blocks=2048, unit="us", **found)
    bench.absolute("match_beside_writer_p99_us", found["beside_p99"])


if __name__ == "__main__":
    main()
