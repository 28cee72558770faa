"""What became of the played requests, and the figures of a run."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct


class PlayedRequestOutcome(Struct, frozen=True):
    """One request: where it ran and where the KV of its prompt came from.

    Blocks are full prompt blocks: prompt = local + pulled + computed. `ttft_ms` is on the model's
    clock, with the router's own time added as it was.
    """

    worker: str
    prompt_blocks: int
    local_blocks: int
    pulled_blocks: int
    computed_blocks: int
    ttft_ms: float
    pulled_bytes: int = 0
    verified_blocks: int = 0
    failed_pull_blocks: int = 0
    transport: str = ""
    retries: int = 0


class PolicyFigures(Struct, frozen=True):
    """How a policy did on all requests; ratios are shares of full prompt blocks."""

    hit_ratio: float
    local_hit_ratio: float
    pulled_ratio: float
    max_over_mean_work: float
    ttft_ms: dict[str, float]
    requests: int
    retries: int


class PullFigures(Struct, frozen=True):
    """All pulls of a run. A verified block had the right checksum and the right content."""

    blocks: int
    bytes: int
    verified: int
    failed: int
    transport: str


def policy_figures(outcomes: Sequence[PlayedRequestOutcome], num_workers: int) -> PolicyFigures:
    """Return the figures of one policy; work is the prompt blocks that a worker computed."""
    asked = sum(o.prompt_blocks for o in outcomes) or 1
    local = sum(o.local_blocks for o in outcomes)
    pulled = sum(o.pulled_blocks for o in outcomes)
    work: Counter[str] = Counter()
    for outcome in outcomes:
        work[outcome.worker] += outcome.computed_blocks
    mean = work.total() / num_workers
    return PolicyFigures(
        hit_ratio=round((local + pulled) / asked, 4),
        local_hit_ratio=round(local / asked, 4),
        pulled_ratio=round(pulled / asked, 4),
        max_over_mean_work=round(max(work.values(), default=0) / mean, 4) if mean else 1.0,
        ttft_ms=percentiles([o.ttft_ms for o in outcomes]),
        requests=len(outcomes),
        retries=sum(o.retries for o in outcomes),
    )


def pull_figures(outcomes: Sequence[PlayedRequestOutcome]) -> PullFigures:
    """Return the sum of all pulls."""
    return PullFigures(
        blocks=sum(o.pulled_blocks for o in outcomes),
        bytes=sum(o.pulled_bytes for o in outcomes),
        verified=sum(o.verified_blocks for o in outcomes),
        failed=sum(o.failed_pull_blocks for o in outcomes),
        transport=next((o.transport for o in outcomes if o.transport), "none"),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 by nearest rank; zeros for no values."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": 0.0, "p99": 0.0}
    ranks = {"p50": len(ordered) // 2, "p99": min(int(len(ordered) * 0.99), len(ordered) - 1)}
    return {name: round(ordered[rank], 2) for name, rank in ranks.items()}
