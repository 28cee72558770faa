"""A recorded decision in words: what was asked, who was considered, why this one, how sure.

explain(decision)        text for people
explanation(decision)    the same findings for scripts (`msgspec.json.encode`)
"""

from datetime import UTC, datetime

from msgspec import Struct

from kvatlas.events.archive.port import Archive
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.printable import printable
from kvatlas.schemas.routing import CandidateScore, Decision, Plan, decode_decision


class TermDifference(Struct, frozen=True):
    """By how much a term speaks for the chosen candidate (positive) or against it."""

    term: str
    ms: float


class Comparison(Struct, frozen=True):
    """The chosen candidate against the best of the others, the weightiest term first."""

    worker: str
    rank: int
    cheaper_ms: float
    by_term: tuple[TermDifference, ...]


class Explanation(Struct, frozen=True):
    """What can be said of a decision beyond what is recorded in it."""

    decision: Decision
    runner_up: Comparison | None
    #: nobody recorded costs less; if somebody does, the policy has other reasons than cost
    is_cheapest: bool
    #: what makes the index's part in this doubtful, in words
    doubts: tuple[str, ...]


def archived_decision(archive: Archive, decision_id: str) -> Decision:
    """Return a decision from an archive. Raises UnknownDecision and ArchiveUnavailable."""
    return decode_decision(archive.decision(decision_id).payload)


def explanation(decision: Decision) -> Explanation:
    """Return what follows from a decision's record."""
    chosen = decision.chosen
    others = [each for each in decision.candidates if _name(each) != _name(chosen)]
    runner_up = min(others, key=lambda each: each.cost_ms, default=None)
    return Explanation(
        decision=decision,
        runner_up=None if runner_up is None else _compare(chosen, runner_up),
        is_cheapest=runner_up is None or chosen.cost_ms <= runner_up.cost_ms,
        doubts=_doubts(decision),
    )


def explain(decision: Decision) -> str:
    """Return the explanation as text, one fact a line."""
    found = explanation(decision)
    lines = [
        *_asked(decision),
        "",
        *_considered(decision),
        "",
        *_why(found),
        "",
        *_planned(decision.plan, decision.prompt_tokens),
        "",
        *_known(found),
    ]
    return "\n".join(map(printable, lines)) + "\n"


# --- what the text is made of -------------------------------------------------------------------


def _asked(decision: Decision) -> list[str]:
    return [
        f"decision {decision.id} at {moment_of(decision.ts_ns)}",
        f"asked     {decision.prompt_tokens} prompt tokens for model {decision.model}",
        f"policy    {decision.policy}",
        f"chosen    {_name(decision.chosen)} ({decision.chosen.base_url})",
    ]


def moment_of(ns: int) -> str:
    """Return a time in words, in UTC; what others recorded may be none."""
    try:
        return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return f"{ns} ns since 1970, which is no time"


def _considered(decision: Decision) -> list[str]:
    """Return a table: a row a candidate, the cheapest first, a column a term of the cost."""
    shown = sorted(_with_chosen(decision), key=lambda each: each.cost_ms)
    terms = _terms(shown)
    header = ["", "worker", "trust", "match", "cost ms", *terms]
    rows = [header]
    for each in shown:
        mark = "->" if _name(each) == _name(decision.chosen) else ""
        match = f"{each.match_tokens}{_tiers(each)}"
        if each.predicted_tokens:
            match += f" +{each.predicted_tokens} predicted"
        costs = [_ms(each.terms.get(term, 0.0)) for term in terms]
        rows.append([mark, _name(each), each.trust, match, _ms(each.cost_ms), *costs])
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    table = [
        "  ".join(
            cell.rjust(width) if column > 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    hidden = decision.num_candidates - len(shown)
    more = [f"and {hidden} more, which cost more"] if hidden > 0 else []
    title = (
        "1 candidate" if decision.num_candidates == 1 else f"{decision.num_candidates} candidates"
    )
    return [f"{title}, predicted ms by term", *table, *more]


def _why(found: Explanation) -> list[str]:
    lines = [f"because   {reason}" for reason in found.decision.reasons]
    runner_up = found.runner_up
    if runner_up is None:
        return [*lines, "          nobody else could take it"]
    other = f"{runner_up.worker}/{runner_up.rank}"
    if _ms(runner_up.cheaper_ms) == _ms(0.0):
        lines.append(f"          equal to {other}, the next best")
    elif found.is_cheapest:
        lines.append(
            f"          {_ms(runner_up.cheaper_ms)} ms cheaper than {other}, the next best"
        )
    else:
        lines.append(
            f"          {_ms(-runner_up.cheaper_ms)} ms dearer than {other}: "
            f"{found.decision.policy} does not choose by cost alone"
        )
    shown = [each for each in runner_up.by_term if _ms(each.ms) != _ms(0.0)]
    for difference in shown:
        side = "for" if difference.ms > 0 else "against"
        lines.append(f"            {difference.term:<10} {_ms(abs(difference.ms))} ms {side} it")
    return lines


def _planned(plan: Plan, prompt_tokens: int) -> list[str]:
    size = plan.block_tokens
    reused = min(plan.reuse_blocks * size, prompt_tokens)
    lines = [f"plan      reuse {reused} tokens ({counted(plan.reuse_blocks, 'block')} of {size})"]
    for pull in plan.pulls:
        last = pull.first_block + pull.num_blocks - 1
        blocks = f"blocks {pull.first_block} to {last}" if pull.num_blocks > 1 else f"block {last}"
        line = (
            f"          pull {pull.num_blocks * size} tokens from {pull.worker}/{pull.rank} "
            f"({blocks})"
        )
        if pull.fallbacks:
            line += f", else from {', '.join(map(str, pull.fallbacks))}"
        lines.append(line)
    lines.append(f"          compute {plan.compute_tokens} tokens")
    return lines


def _known(found: Explanation) -> list[str]:
    decision = found.decision
    lines = [
        f"index     at stream sequence {decision.stream_sequence}, "
        f"broker last heard {decision.index_age_ms:.0f} ms before"
    ]
    lines += [f"doubt     {doubt}" for doubt in found.doubts]
    return lines


def _doubts(decision: Decision) -> tuple[str, ...]:
    doubts = []
    if decision.chosen.trust is not Trust.exact:
        doubts.append(f"the index is {decision.chosen.trust} about {_name(decision.chosen)}")
    others = [
        _name(each)
        for each in decision.candidates
        if each.trust is not Trust.exact and _name(each) != _name(decision.chosen)
    ]
    if others:
        doubts.append(f"the index is not exact about {', '.join(others)}")
    if decision.chosen.predicted_tokens:
        doubts.append(
            f"{decision.chosen.predicted_tokens} tokens were counted on that earlier requests were "
            "about to bring"
        )
    if decision.left_out:
        fields = ", ".join(decision.left_out)
        doubts.append(f"its message was too large for the broker: {fields} were left out")
    if not decision.is_question_complete:
        doubts.append("not all candidates are recorded, so running it again may choose otherwise")
    return tuple(doubts)


def _compare(chosen: CandidateScore, other: CandidateScore) -> Comparison:
    differences = [
        TermDifference(term, other.terms.get(term, 0.0) - chosen.terms.get(term, 0.0))
        for term in _terms([chosen, other])
    ]
    weighty = sorted((d for d in differences if d.ms), key=lambda difference: -abs(difference.ms))
    return Comparison(other.worker, other.rank, other.cost_ms - chosen.cost_ms, tuple(weighty))


def _with_chosen(decision: Decision) -> list[CandidateScore]:
    names = {_name(each) for each in decision.candidates}
    missing = [] if _name(decision.chosen) in names else [decision.chosen]
    return [*missing, *decision.candidates]


def _terms(scores: list[CandidateScore]) -> list[str]:
    """Return the terms that anybody has anything of, in the order of their first mention."""
    named = dict.fromkeys(term for each in scores for term in each.terms)
    return [term for term in named if any(each.terms.get(term) for each in scores)]


def _tiers(score: CandidateScore) -> str:
    held = {tier: tokens for tier, tokens in score.match_tokens_by_tier.items() if tokens}
    if not held or set(held) == {"hbm"}:
        return ""
    return f" ({', '.join(f'{tier} {tokens}' for tier, tokens in held.items())})"


def _name(score: CandidateScore) -> str:
    return f"{score.worker}/{score.rank}"


def counted(number: int, what: str) -> str:
    """Return a number of things in words: 1 block, 2 blocks."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _ms(value: float) -> str:
    return f"{value:z.1f}"
