"""What `replay` and `explain` print, for people and as JSON."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvatlas.events.archive.sql import SqlArchive
from kvatlas.hindsight.explain import archived_decision, counted, explain, explanation, moment_of
from kvatlas.hindsight.replay import END, Moment, ReplayReport, TokenMatch
from kvatlas.schemas.errors import (
    ArchiveDamaged,
    MalformedBatch,
    UnknownDecision,
    UnsupportedVersion,
)
from kvatlas.schemas.routing import Decision, decode_decision

#: ids that are named where another one is asked for
MAX_NEWEST = 3
#: decisions that are read at a time
PAGE = 50


def replay_lines(report: ReplayReport, until: Moment = END) -> list[str]:
    """Return a replay's outcome as text: the whole, then each instance with its digests."""
    lines = [
        f"at stream sequence {report.stream_sequence}: {report.batches} batches that counted,"
        f" {report.events} events, replayed in {report.seconds} s",
        f"state digest {report.state_digest}",
    ]
    if until.time_ns is not None:
        lines.append(f"up to {moment_of(until.time_ns)} by the broker's clock")
    if until.sequence is not None and until.sequence > report.log_end:
        lines.append(f"the archive ends at {report.log_end}")
    lines += [
        f"hole: sequences {hole.first} to {hole.last} were never seen" for hole in report.holes
    ]
    lines += report.damaged
    lines += [
        f"skipped: {each.count} of {each.worker or 'no known worker'}"
        f" could not be read ({each.kind})"
        for each in report.rejected
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


def explained(
    archive_url: str,
    decision_id: str | None,
    as_json: bool,
    note: Callable[[str], object] = lambda _: None,
) -> str:
    """Return why a decision was taken; the newest one that can be read for None.

    Each one that cannot be read is a line to `note`. Raises UnknownDecision, ArchiveUnavailable,
    ArchiveDamaged and UnsupportedVersion.
    """
    with SqlArchive(archive_url, must_exist=True) as archive:
        if decision_id is None:
            decision = _newest(archive, note)
        else:
            try:
                decision = archived_decision(archive, decision_id)
            except MalformedBatch as error:
                raise ArchiveDamaged(str(archive), _unreadable(decision_id, error)) from error
            except UnknownDecision as error:
                newest = [each.id for each in _readable(archive, MAX_NEWEST, note)]
                raise UnknownDecision(decision_id, str(archive), newest) from error
    if as_json:
        return msgspec.json.encode(explanation(decision)).decode()
    return explain(decision)


def _newest(archive: SqlArchive, note: Callable[[str], object]) -> Decision:
    for decision in _readable(archive, 1, note):
        return decision
    raise UnknownDecision("", str(archive))


def _readable(archive: SqlArchive, limit: int, note: Callable[[str], object]) -> Iterator[Decision]:
    """Yield the newest decisions that can be read."""
    before, num_left = 2**63 - 1, limit
    while num_left and (page := archive.decisions(before, PAGE)):
        for message in page:
            try:
                yield decode_decision(message.payload)
            except (MalformedBatch, UnsupportedVersion) as error:
                where = f"stream_sequence {message.stream_sequence}"
                note(f"left out of {archive}: {_unreadable(where, error)}")
                continue
            num_left -= 1
            if not num_left:
                return
        before = page[-1].stream_sequence


def _unreadable(row: str, error: Exception) -> str:
    return f"table decisions, row {row}: payload is no decision: {error}"
