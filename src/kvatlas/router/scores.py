"""What answers and decisions show of a candidate: one line of a slate, in words."""

from collections.abc import Sequence

from kvatlas.router import price_kernel as k
from kvatlas.router.pricing import TERMS
from kvatlas.router.slate import Slate
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.routing import CandidateScore

_TIER_NAMES = tuple(tier.name for tier in Tier)


def scores_of(slate: Slate, lines: Sequence[int]) -> tuple[CandidateScore, ...]:
    """Return the scores of some candidates, in this order."""
    numbers = slate.lines[list(lines)].tolist()
    return tuple([_score(slate, at, each) for at, each in zip(lines, numbers, strict=True)])


def _score(slate: Slate, line: int, numbers: list[float]) -> CandidateScore:
    lineup = slate.lineup
    seat = lineup.seats[line]
    terms = numbers[k.TERMS : k.REUSE]
    _, tier_load, predicted, trust, _, compute, _ = terms
    by_tier: dict[str, int] = {}
    match_tokens = int(numbers[k.MATCH]) * seat.block_tokens
    if match_tokens:
        for name, num_blocks in zip(_TIER_NAMES, numbers[: k.PREDICTED], strict=True):
            if num_blocks:
                by_tier[name] = int(num_blocks) * seat.block_tokens
    return CandidateScore(
        seat.worker,
        seat.rank,
        lineup.infos[line].base_url,
        seat.trust,
        match_tokens,
        by_tier,
        numbers[k.COST],
        dict(zip(TERMS, terms, strict=True)),
        int(numbers[k.PREDICTED]) * seat.block_tokens,
        # expected: the terms that only steer are left out, and what they replace put in
        numbers[k.QUEUED] + tier_load + predicted + trust + numbers[k.PULL_MS] + compute,
        lineup.mutes.get(lineup.views[line].instance, "") if lineup.mutes else "",
    )
