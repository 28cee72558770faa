"""What answers and decisions show of a candidate: one line of a candidate table, in words."""

from struct import Struct

from kvatlas.router.decision import price_kernel as k
from kvatlas.router.decision.candidate_table import CandidateTable
from kvatlas.schemas.ids import Tier
from kvatlas.schemas.routing import CandidateScore

_TIER_NAMES = tuple(tier.name for tier in Tier)
_BEST_TIER = _TIER_NAMES[0]
#: of a line's columns, see price_kernel: HELD, PREDICTED, QUEUED; and COST, TERMS, PULL_MS, MATCH
_unpack_held = Struct("6d 8x d").unpack_from
_unpack_price = Struct("8d 16x 2d").unpack_from


def scores_of(candidate_table: CandidateTable, lines: list[int]) -> tuple[CandidateScore, ...]:
    """Return the scores of some candidates, in this order."""
    candidate_set, scores = candidate_table.candidate_set, []
    shown, mutes = candidate_set.answer_fields, candidate_set.over_budget
    cells, (row_bytes, cell_bytes) = candidate_table.columns.data, candidate_table.columns.strides
    price_at = k.COST * cell_bytes
    for line in lines:
        at = line * row_bytes
        hbm, dram, ssd, remote, other, predicted_blocks, queued = _unpack_held(cells, at)
        price = _unpack_price(cells, at + price_at)
        cost, wait, tier_load, predicted, trust, pull, compute, balance, pull_ms, blocks = price
        worker, rank, base_url, worker_trust, block_tokens = shown[line]
        match_tokens = int(blocks) * block_tokens
        by_tier: dict[str, int] = {}
        if hbm == blocks > 0:
            by_tier[_BEST_TIER] = match_tokens
        elif blocks:
            for name, num_blocks in zip(_TIER_NAMES, (hbm, dram, ssd, remote, other), strict=True):
                if num_blocks:
                    by_tier[name] = int(num_blocks) * block_tokens
        terms = {
            "wait": wait,
            "tier_load": tier_load,
            "predicted": predicted,
            "trust": trust,
            "pull": pull,
            "compute": compute,
            "balance": balance,
        }
        score = CandidateScore(
            worker,
            rank,
            base_url,
            worker_trust,
            match_tokens,
            by_tier,
            cost,
            terms,
            int(predicted_blocks) * block_tokens if predicted_blocks else 0,
            # expected: the terms that only steer are left out, and what they replace put in
            queued + tier_load + predicted + trust + pull_ms + compute,
            mutes.get(candidate_table.instance(line), "") if mutes else "",
        )
        scores.append(score)
    return tuple(scores)
