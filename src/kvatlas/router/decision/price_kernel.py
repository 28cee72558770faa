"""The compiled code of a decision: loads as of now, what each candidate costs, the cheapest few.

    candidate table   a line per candidate: what is asked about it, then its price
            [ held 5 | predicted | in flight | queued | work | rates 2 | cost | terms 7 | ... ]

`price` computes what pricing.py does, with the same operations in the same order, so that costs are
equal to the last bit; pricing.py is the judge, and the stand-in where nothing is compiled. Numbers
of blocks are whole and far below 2**53, so a float64 keeps them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index.kernel import IS_COMPILED, compiled

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
U32 = NDArray[np.uint32]

# columns of a candidate table: the candidate, in the order of schemas.routing.Candidate
HELD = 0
PREDICTED, IN_FLIGHT, QUEUED, WORK, COMPUTE, PULL = 5, 6, 7, 8, 9, 10
NUM_ASKED = 11
# and its price, in the order of pricing.Price
COST, TERMS, REUSE, PULL_END, PULL_MS = 11, 12, 19, 20, 21
#: blocks of the match
MATCH = 22
NUM_COLUMNS = 23

# columns of `traits`, which hold as long as the fleet stands
BLOCK_TOKENS, KV_CLASS, TRUST = 0, 1, 2
NUM_TRAITS = 3
#: values of TRUST: all that a price depends on
EXACT, OWNER, DOUBTFUL = 0, 1, 2

# columns of the table of loads; see loads.py
GIVEN, DRAINED, REPORTED, DONE_WORK, AS_OF, SEEN_AT, FLYING, COMPUTE_RATE, PULL_RATE = range(9)
NUM_LOADS = 9

# entries of `knobs`
WINDOW, BALANCE, PULL_WEIGHT, PULL_FIXED, DEGRADED_SHARE, PREDICTED_SHARE, TIERS = range(7)
NUM_KNOBS = 11

NUM_TIERS, NUM_TERMS = 5, 7
#: partial sums of an exact sum; a float64 spans no more
MAX_PARTIALS = 64
#: more of the cheapest are found faster by sorting all
FEW = 32

_LINES, _READ = "float64[:, ::1]", "Array(float64, 1, 'C', readonly=True)"
_WHOLE, _WHOLES = (f"Array(int64, {n}, 'C', readonly=True)" for n in (1, 2))


# --- loads --------------------------------------------------------------------------------


@compiled(f"void({_LINES}, {_LINES}, int64[::1], {_WHOLE}, {_WHOLE}, float64, float64)")
def fill_loads(
    candidate_table: F64,
    table: F64,
    epochs: I64,
    rows: I64,
    asked_epochs: I64,
    now: Any,
    half_life: Any,
) -> None:
    """Bring load rows up to `now` and write them into the candidate table; predict nothing.

    What LoadTracker.of does for one. Most rows are as of the same time, so a factor is used again.
    """
    last_seconds, factor = 0.0, 1.0
    for line in range(rows.size):
        row = rows[line]
        if asked_epochs[line] > epochs[row]:
            epochs[row] = asked_epochs[line]
            table[row, FLYING] = 0.0
            table[row, GIVEN] = table[row, DRAINED] = table[row, REPORTED] = 0.0
        seconds = now - table[row, AS_OF]
        if seconds > 0.0:
            table[row, AS_OF] = now
            if table[row, DRAINED] < table[row, GIVEN]:
                table[row, DRAINED] = min(table[row, GIVEN], table[row, DRAINED] + 1000.0 * seconds)
            if table[row, DONE_WORK] != 0.0:
                if seconds != last_seconds:
                    last_seconds, factor = seconds, 0.5 ** (seconds / half_life)
                table[row, DONE_WORK] *= factor
        table[row, SEEN_AT] = now
        candidate_table[line, PREDICTED] = 0.0
        candidate_table[line, IN_FLIGHT] = table[row, FLYING]
        candidate_table[line, QUEUED] = table[row, GIVEN] - table[row, DRAINED]
        candidate_table[line, WORK] = table[row, DONE_WORK]
        candidate_table[line, COMPUTE] = table[row, COMPUTE_RATE]
        candidate_table[line, PULL] = table[row, PULL_RATE]


# --- prices -------------------------------------------------------------------------------


@compiled()
def exact_mean(candidate_table: F64, column: int) -> Any:
    """Return what math.fsum says of a column, over its length: the sum is rounded once."""
    partials, count = np.empty(MAX_PARTIALS, np.float64), 0
    for line in range(candidate_table.shape[0]):
        x, kept = candidate_table[line, column], 0
        for at in range(count):
            y = partials[at]
            if abs(x) < abs(y):
                x, y = y, x
            high = x + y
            low = y - (high - x)
            if low != 0.0:
                partials[kept] = low
                kept += 1
            x = high
        count = kept
        if x != 0.0:
            partials[count] = x
            count += 1
    high = low = 0.0
    if count > 0:
        count -= 1
        high = partials[count]
        while count > 0:
            count -= 1
            x, y = high, partials[count]
            high = x + y
            low = y - (high - x)
            if low != 0.0:
                break
        below = partials[count - 1] if count > 0 else 0.0
        if (low < 0.0 and below < 0.0) or (low > 0.0 and below > 0.0):
            y = low * 2.0
            x = high + y
            if y == x - high:
                high = x
    return high / candidate_table.shape[0]


@compiled()
def pull_term(tokens: int, compute: Any, pull: Any, least: int, knobs: F64) -> Any:
    """Return what pulling so many tokens costs."""
    first = max(compute * least, knobs[PULL_WEIGHT] * knobs[PULL_FIXED] + pull * least)
    return first + pull * (tokens - least)


@compiled()
def longest_owners(candidate_table: F64, traits: I64, owners: I64) -> None:
    """Note of each KV class the longest match, its line, and the longest elsewhere."""
    for line in range(candidate_table.shape[0]):
        kv_class, blocks = traits[line, KV_CLASS], np.int64(candidate_table[line, MATCH])
        if kv_class == 0 or blocks == 0 or traits[line, TRUST] == DOUBTFUL:
            continue
        if blocks > owners[kv_class, 0]:
            owners[kv_class, 2] = owners[kv_class, 0]
            owners[kv_class, 0], owners[kv_class, 1] = blocks, line
        elif blocks > owners[kv_class, 2]:
            owners[kv_class, 2] = blocks


@compiled()
def price_line(
    candidate_table: F64,
    line: int,
    traits: I64,
    owned: int,
    prompt_tokens: int,
    least: int,
    knobs: F64,
) -> None:
    """Put everything of a price behind wait and balance into a line; see pricing._price."""
    block_tokens, is_exact = traits[line, BLOCK_TOKENS], traits[line, TRUST] == EXACT
    compute = candidate_table[line, COMPUTE]
    share = 1.0 if is_exact else knobs[DEGRADED_SHARE]
    least_tokens = max(least, 1)
    owned_tokens = owned * block_tokens
    held, waiting = (
        np.int64(candidate_table[line, MATCH]),
        np.int64(candidate_table[line, PREDICTED]),
    )
    reuse = held + waiting
    pull = knobs[PULL_WEIGHT] * candidate_table[line, PULL] if owned > 0 else 0.0
    tier_load = trust = predicted = 0.0
    if held > 0 and (share < 1.0 or held != np.int64(candidate_table[line, HELD])):
        cap = min(compute, pull) if owned_tokens >= least_tokens else compute
        in_doubt = (1.0 - share) * compute
        ceiling = cap if in_doubt < cap else compute
        total = 0.0
        for tier in range(NUM_TIERS):
            if candidate_table[line, HELD + tier] > 0.0:
                read = share * min(knobs[TIERS + tier], cap)
                tier_load += read * candidate_table[line, HELD + tier]
                total += min(read + in_doubt, ceiling) * candidate_table[line, HELD + tier]
        trust = (total - tier_load) * block_tokens
        tier_load = tier_load * block_tokens
    if waiting > 0:
        doubt = 1.0 - share * knobs[PREDICTED_SHARE]
        predicted = doubt * compute * waiting * block_tokens
    rest = compute * max(prompt_tokens - reuse * block_tokens, 1)
    pulled = pull_ms = 0.0
    pull_end = 0
    if owned_tokens >= least_tokens:
        best_ms = tier_load + predicted + trust + rest
        rest_after_pull = compute * max(prompt_tokens - owned_tokens, 1)
        wanted = owned_tokens - reuse * block_tokens
        if wanted >= least_tokens:
            term = pull_term(wanted, compute, pull, least, knobs)
            with_pull_ms = tier_load + predicted + trust + term + rest_after_pull
            if with_pull_ms < best_ms:
                best_ms, pulled, rest, pull_end = with_pull_ms, term, rest_after_pull, owned
        if share < 1.0 and reuse > 0:
            term = pull_term(owned_tokens, compute, pull, least, knobs)
            if term + rest_after_pull < best_ms:
                tier_load = predicted = trust = 0.0
                pulled, rest, reuse, pull_end = term, rest_after_pull, np.int64(0), owned
    if pull_end > 0:
        pulled_tokens = (pull_end - reuse) * block_tokens
        pull_ms = knobs[PULL_FIXED] + candidate_table[line, PULL] * pulled_tokens
    candidate_table[line, TERMS + 1], candidate_table[line, TERMS + 2] = tier_load, predicted
    candidate_table[line, TERMS + 3], candidate_table[line, TERMS + 4] = trust, pulled
    candidate_table[line, TERMS + 5] = rest
    (
        candidate_table[line, REUSE],
        candidate_table[line, PULL_END],
        candidate_table[line, PULL_MS],
    ) = reuse, pull_end, pull_ms


@compiled(f"UniTuple(int64, 3)({_LINES}, uint32[:, ::1], {_WHOLES}, int64, int64, int64, {_READ})")
def price(
    candidate_table: F64,
    held: U32,
    traits: I64,
    num_classes: int,
    prompt_tokens: int,
    least: int,
    knobs: F64,
) -> tuple[Any, Any, Any]:
    """Price all candidates of a candidate table whose loads are in it; there is at least one.

    Returns the first line with the lowest cost, how many have that, and the first line with the
    longest match in tokens.
    """
    for line in range(candidate_table.shape[0]):
        blocks = np.int64(0)
        for tier in range(NUM_TIERS):
            candidate_table[line, HELD + tier] = held[line, tier]
            blocks += np.int64(held[line, tier])
        candidate_table[line, MATCH] = blocks
    mean_work_ms = exact_mean(candidate_table, WORK)
    owners = np.zeros((num_classes + 1, 3), np.int64)
    longest_owners(candidate_table, traits, owners)
    cheapest = num_cheapest = longest = 0
    for line in range(candidate_table.shape[0]):
        queued, kv_class = candidate_table[line, QUEUED], traits[line, KV_CLASS]
        owned = owners[kv_class, 2] if owners[kv_class, 1] == line else owners[kv_class, 0]
        candidate_table[line, TERMS] = queued - knobs[WINDOW] if queued > knobs[WINDOW] else 0.0
        candidate_table[line, TERMS + 6] = knobs[BALANCE] * (
            candidate_table[line, WORK] - mean_work_ms
        )
        price_line(candidate_table, line, traits, owned, prompt_tokens, least, knobs)
        cost = 0.0
        for term in range(NUM_TERMS):
            cost += candidate_table[line, TERMS + term]
        candidate_table[line, COST] = cost
        if cost < candidate_table[cheapest, COST] or line == 0:
            cheapest, num_cheapest = line, 1
        elif cost == candidate_table[cheapest, COST]:
            num_cheapest += 1
        tokens = candidate_table[line, MATCH] * traits[line, BLOCK_TOKENS]
        if tokens > candidate_table[longest, MATCH] * traits[longest, BLOCK_TOKENS]:
            longest = line
    return cheapest, num_cheapest, longest


# --- the cheapest few ---------------------------------------------------------------------


@compiled(f"int64({_LINES}, int64, int64[::1])")
def lightest_alike(candidate_table: F64, cheapest: int, lines: I64) -> Any:
    """Fill `lines` with those that cost as much as a line and have the least load; return how many.

    `lines` has room for all that cost as much.
    """
    cost, queued, in_flight = candidate_table[cheapest, COST], 0.0, 0.0
    count = 0
    for line in range(candidate_table.shape[0]):
        if candidate_table[line, COST] != cost:
            continue
        line_queued, line_in_flight = (
            candidate_table[line, QUEUED],
            candidate_table[line, IN_FLIGHT],
        )
        if count > 0 and line_queued == queued and line_in_flight == in_flight:
            lines[count] = line
            count += 1
            continue
        is_lighter = line_queued < queued or (line_queued == queued and line_in_flight < in_flight)
        if count == 0 or is_lighter:
            queued, in_flight = line_queued, line_in_flight
            lines[0], count = line, 1
    return count


@compiled(f"int64({_LINES}, int64[::1])")
def cheapest_few(candidate_table: F64, lines: I64) -> Any:
    """Fill `lines` with those of the lowest costs, equal ones in order; return how many."""
    count = 0
    for line in range(candidate_table.shape[0]):
        cost = candidate_table[line, COST]
        if count == lines.size and cost >= candidate_table[lines[count - 1], COST]:
            continue
        at = count if count < lines.size else count - 1
        count = at + 1
        while at > 0 and cost < candidate_table[lines[at - 1], COST]:
            lines[at] = lines[at - 1]
            at -= 1
        lines[at] = line
    return count


def cheapest_lines(candidate_table: F64, count: int) -> list[int]:
    """Return the lines with the lowest costs, the cheapest first, equal ones in their order."""
    if IS_COMPILED and 0 < count <= FEW:
        lines = np.empty(count, np.int64)
        lines = lines[: cheapest_few(candidate_table, lines)]
    else:
        lines = np.argsort(candidate_table[:, COST], kind="stable")[:count]
    found: list[int] = lines.tolist()
    return found
