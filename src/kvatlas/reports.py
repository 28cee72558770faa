"""What `replay` and `explain` print, for people and as JSON."""

from collections.abc import Sequence

import msgspec

from kvatlas.events.sql_archive import SqlArchive
from kvatlas.explain import archived_decision, counted, explain, explanation
from kvatlas.replay import END, Moment, ReplayReport, TokenMatch
from kvatlas.schemas.errors import UnknownDecision
from kvatlas.schemas.routing import decode_decision


def replay_lines(report: ReplayReport, until: Moment = END) -> list[str]:
    """Return a replay's outcome as text: the whole, then each instance with its digests."""
    lines = [
        f"at stream sequence {report.stream_sequence}: {report.batches} batches that counted,"
        f" {report.events} events, replayed in {report.seconds} s",
        f"state digest {report.state_digest}",
    ]
    if until.sequence is not None and until.sequence > report.log_end:
        lines.append(f"the archive ends at {report.log_end}")
    lines += [
        f"hole: sequences {hole.first} to {hole.last} were never seen" for hole in report.holes
    ]
    for worker in report.workers:
        why = f" ({'; '.join(worker.trust_reasons)})" if worker.trust_reasons else ""
        lines.append(
            f"{worker.worker}/{worker.rank}: {worker.trust}{why},"
            f" epoch {worker.epoch}, sequence {worker.seq}"
        )
        lines += [
            f"  {tier}: {counted(int(d['count']), 'block')}, xor {d['xor']}"
            for tier, d in worker.digests.items()
        ]
    return lines


def match_lines(matches: Sequence[TokenMatch]) -> list[str]:
    """Return who held how much of a prompt as text."""
    return [
        f"match {match.worker}/{match.rank}: {match.match_tokens} tokens"
        f" ({counted(match.num_blocks, 'block')} of {match.block_tokens}; {match.trust})"
        for match in matches
    ]


def report_json(report: ReplayReport, matches: Sequence[TokenMatch] | None) -> str:
    """Return a replay's outcome as one line of JSON."""
    content = msgspec.to_builtins(report)
    if matches is not None:
        content["matches"] = msgspec.to_builtins(list(matches))
    return msgspec.json.encode(content).decode()


def explained(archive_url: str, decision_id: str | None, as_json: bool) -> str:
    """Return why a decision was taken; the newest one for None. Raises UnknownDecision."""
    with SqlArchive(archive_url, must_exist=True) as archive:
        if decision_id is None:
            newest = archive.decisions(2**63 - 1, 1)
            if not newest:
                raise UnknownDecision("(the newest)")
            decision = decode_decision(newest[0].payload)
        else:
            decision = archived_decision(archive, decision_id)
    if as_json:
        return msgspec.json.encode(explanation(decision)).decode()
    return explain(decision)
