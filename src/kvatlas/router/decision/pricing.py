"""What a request costs at each candidate, in predicted milliseconds, term by term.

    wait       prefill queued ahead of it, beyond the load window
    tier_load  matched blocks, read from the tiers they lie in
    predicted  blocks that earlier decisions are about to bring, discounted: they may not come
    trust      what the match of a candidate that is not `exact` may lack
    pull       blocks that peers hold beyond that, weighted so that affinity is kept
    compute    the remaining tokens
    balance    surplus of cumulative work over the mean of the candidates

The terms add up to the cost, from the first to the last. Pure: all inputs are in the question and
the settings. price_kernel.py is the same over columns, as fast as a fleet may be large; a property
test walks both.
"""

from math import fsum
from typing import NamedTuple

from msgspec import Struct

from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.routing import Candidate, Question
from kvatlas.schemas.settings import RouterSettings

#: owners whose blocks are worth asking for; the owner confirms with a lease in any case
OWNER_TRUST = frozenset([Trust.exact, Trust.catching_up])
NOTHING_HELD = (0, 0, 0, 0, 0)


class Price(Struct, frozen=True, gc=False):
    """The cost of one candidate; `terms` in the order of TERMS."""

    cost_ms: float
    terms: tuple[float, float, float, float, float, float, float]
    #: blocks taken as present at the candidate
    reuse_blocks: int
    #: end of the blocks to pull, which begin at `reuse_blocks`; 0 pulls nothing
    pull_end: int
    #: the pull's time without its weight
    pull_ms: float


TERMS = ("wait", "tier_load", "predicted", "trust", "pull", "compute", "balance")


def price_all(question: Question, settings: RouterSettings) -> list[Price]:
    """Return the price of each candidate, in the order of the question.

    A longer match never costs more: a tier slower than computing or pulling is priced as those,
    and a pull costs at least what computing `min_pull_tokens` would.
    """
    candidates = question.candidates
    prompt_tokens = question.prompt_tokens
    window_ms, balance_weight = settings.load_window_ms, settings.balance_weight
    mean_work_ms = fsum([c.work_ms for c in candidates]) / len(candidates) if candidates else 0.0
    owners = _longest_owners(candidates)
    tier_prices = _tier_prices(settings)
    least_tokens = settings.min_pull_tokens or 1
    prices = []
    for position, c in enumerate(candidates):
        queued_ms = c.queued_ms
        wait = queued_ms - window_ms if queued_ms > window_ms else 0.0
        balance = balance_weight * (c.work_ms - mean_work_ms)
        owned = 0
        if owners and (found := owners.get(c.kv_class)) is not None:
            owned = found.next_blocks if found.position == position else found.blocks
        blocks, *elsewhere = c.held
        # what most candidates are: nothing in doubt, nothing to read or to pull
        is_plain = c.trust is Trust.exact or not blocks
        if (
            is_plain
            and not c.predicted_blocks
            and (owned - blocks) * c.block_tokens < least_tokens
            and not any(elsewhere)
        ):
            rest = c.compute_ms_per_token * max(prompt_tokens - blocks * c.block_tokens, 1)
            terms = (wait, 0.0, 0.0, 0.0, 0.0, rest, balance)
            prices.append(Price(wait + rest + balance, terms, blocks, 0, 0.0))
        else:
            prices.append(_price(c, prompt_tokens, owned, wait, balance, tier_prices, settings))
    return prices


def _price(
    c: Candidate,
    prompt_tokens: int,
    owned_blocks: int,
    wait: float,
    balance: float,
    tier_prices: tuple[float, ...],
    settings: RouterSettings,
) -> Price:
    block_tokens, compute = c.block_tokens, c.compute_ms_per_token
    share = 1.0 if c.trust is Trust.exact else settings.degraded_match_share
    least_tokens = settings.min_pull_tokens or 1
    owned_tokens = owned_blocks * block_tokens
    held_blocks = sum(c.held)
    reuse_blocks = held_blocks + c.predicted_blocks
    pull = settings.pull_weight * c.pull_ms_per_token if owned_blocks else 0.0
    tier_load = trust = predicted = 0.0
    if held_blocks and (share < 1.0 or held_blocks != c.held[0]):
        cap = min(compute, pull) if owned_tokens >= least_tokens else compute
        tier_load, trust = _held_terms(c, compute, cap, share, tier_prices)
    if c.predicted_blocks:
        doubt = 1.0 - share * settings.predicted_match_share
        predicted = doubt * compute * c.predicted_blocks * block_tokens
    rest = compute * max(prompt_tokens - reuse_blocks * block_tokens, 1)
    pulled = pull_ms = 0.0
    pull_end = 0
    if owned_tokens >= least_tokens:
        best_ms = tier_load + predicted + trust + rest
        rest_after_pull = compute * max(prompt_tokens - owned_tokens, 1)
        wanted = owned_tokens - reuse_blocks * block_tokens
        if wanted >= least_tokens:
            term = _pull_term(wanted, compute, pull, settings)
            with_pull_ms = tier_load + predicted + trust + term + rest_after_pull
            if with_pull_ms < best_ms:
                best_ms, pulled, rest, pull_end = with_pull_ms, term, rest_after_pull, owned_blocks
        if share < 1.0 and reuse_blocks:
            # Or count on nothing that is there, and pull all of it.
            term = _pull_term(owned_tokens, compute, pull, settings)
            if term + rest_after_pull < best_ms:
                tier_load = predicted = trust = 0.0
                pulled, rest, reuse_blocks, pull_end = term, rest_after_pull, 0, owned_blocks
    if pull_end:
        pulled_tokens = (pull_end - reuse_blocks) * block_tokens
        pull_ms = settings.pull_fixed_ms + c.pull_ms_per_token * pulled_tokens
    terms = (wait, tier_load, predicted, trust, pulled, rest, balance)
    return Price(_total(terms), terms, reuse_blocks, pull_end, pull_ms)


def _total(terms: tuple[float, ...]) -> float:
    """Return what a decision made again adds up to as well: `sum` rounds as each Python likes."""
    total = 0.0
    for term in terms:
        total += term
    return total


def _held_terms(
    c: Candidate, compute: float, cap: float, share: float, tier_prices: tuple[float, ...]
) -> tuple[float, float]:
    """Return the terms tier_load and trust of the match.

    `cap` is what a token costs without the match. Either every matched token is priced below it,
    or none is; then ignoring the match is the better option, which `_price` compares.
    """
    in_doubt = (1.0 - share) * compute
    ceiling = cap if in_doubt < cap else compute
    tier_load = total = 0.0
    for tier, num_blocks in enumerate(c.held):
        if num_blocks:
            read = share * min(tier_prices[tier], cap)
            tier_load += read * num_blocks
            total += min(read + in_doubt, ceiling) * num_blocks
    return tier_load * c.block_tokens, (total - tier_load) * c.block_tokens


def _pull_term(tokens: int, compute: float, pull: float, settings: RouterSettings) -> float:
    least = settings.min_pull_tokens
    first = max(compute * least, settings.pull_weight * settings.pull_fixed_ms + pull * least)
    return first + pull * (tokens - least)


class _Longest(NamedTuple):
    """The longest match of a KV class, where it is, and the longest elsewhere."""

    blocks: int
    position: int
    next_blocks: int


def _longest_owners(candidates: tuple[Candidate, ...]) -> dict[int, _Longest]:
    owners: dict[int, _Longest] = {}
    for position, c in enumerate(candidates):
        if not c.kv_class or c.held == NOTHING_HELD or c.trust not in OWNER_TRUST:
            continue
        blocks = sum(c.held)
        known = owners.get(c.kv_class)
        if known is None or blocks > known.blocks:
            owners[c.kv_class] = _Longest(blocks, position, known.blocks if known else 0)
        elif blocks > known.next_blocks:
            owners[c.kv_class] = known._replace(next_blocks=blocks)
    return owners


def price_settings(settings: RouterSettings) -> tuple[float, ...]:
    """Return the settings that prices depend on, as price_kernel knows them."""
    return (
        settings.load_window_ms,
        settings.balance_weight,
        settings.pull_weight,
        settings.pull_fixed_ms,
        settings.degraded_match_share,
        settings.predicted_match_share,
        *_tier_prices(settings),
    )


def _tier_prices(settings: RouterSettings) -> tuple[float, ...]:
    """Return ms per token by tier; an unknown tier is worth nothing: as dear as computing."""
    per_1k = (
        0.0,
        settings.dram_ms_per_1k_tokens,
        settings.ssd_ms_per_1k_tokens,
        settings.remote_ms_per_1k_tokens,
    )
    return (*(price / 1000 for price in per_1k), float("inf"))
