"""Every answer of a storm against the truth, offline.

answer at stream sequence S --log--> newest batch of each worker up to S --truth--> op
    --> blocks that the worker held after that op  ==  what the answer called exact
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.bus import Message
from kvatlas.events.codec import decode, decode_control
from kvatlas.hindsight.check import check_archive
from kvatlas.hindsight.replay import Moment, replay
from kvatlas.indexer.index.flat import FlatRadixIndex
from kvatlas.schemas.kv_events import WorkerDown
from testkit.storm.chains import Chains
from testkit.storm.truth import Truth
from testkit.storm.watching import Asker, Look, Matched, Seen

#: examples that are kept of each kind of contradiction
MAX_EXAMPLES = 10


class Recovery(Struct):
    """A fault that is over, and how long it took until everybody was exact again."""

    kind: str
    target: str
    repaired_at: float
    #: None: not within RECOVERY_SECONDS
    seconds: float | None = None


class Ended(Struct, frozen=True):
    """What is left when all processes are gone."""

    log: list[Message]
    truths: list[Truth]
    archive_url: str
    #: once with all workers alive, once with all gone: indexer -> (sequence, digest)
    agreements: list[dict[str, tuple[int, str]]]
    archive_status: int | None
    #: exits that nobody asked for, by process
    own_exits: dict[str, int]
    #: all workers were exact everywhere after the last fault
    is_settled: bool


class Verdict(Struct):
    """What a storm came to."""

    faults: dict[str, int]
    acked: int = 0
    acked_lost: int = 0
    #: exact candidates and exact workers that were looked at
    checked_exact: int = 0
    wrong_exact: int = 0
    #: of those, how many stand on a batch whose truth nobody knows
    unknown_truth: int = 0
    requests: int = 0
    retried: int = 0
    unanswered: int = 0
    statuses: dict[str, int] = {}
    messages: int = 0
    #: refused by the storm itself, or in a process when that was killed
    batches_lost_unacked: int = 0
    #: digests that workers told while they were in doubt: without any, healing was not tried
    doubted: int = 0
    not_converged: int = 0
    converge_seconds: list[float] = []
    converge_by_kind: dict[str, list[float]] = {}
    is_settled: bool = False
    digest_equal: bool = False
    #: of `kvatlas check` on the archive
    contradictions: int = 0
    own_exits: dict[str, int] = {}
    examples: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether nothing was lost, wrong or unanswered."""
        return (
            not (self.acked_lost or self.wrong_exact or self.unanswered or self.contradictions)
            and self.is_settled
            and self.digest_equal
        )


def judge(
    ended: Ended,
    looks: Sequence[Look],
    asker: Asker,
    recoveries: Sequence[Recovery],
    chains: Chains,
) -> Verdict:
    """Return what a storm came to."""
    verdict = Verdict(dict(Counter(each.kind for each in recoveries)))
    verdict.requests, verdict.retried = asker.num_asked, asker.num_retried
    verdict.unanswered = len(asker.unanswered)
    verdict.examples += asker.unanswered[:MAX_EXAMPLES]
    verdict.statuses = {str(status): n for status, n in sorted(asker.statuses.items())}
    verdict.messages, verdict.own_exits = len(ended.log), ended.own_exits
    verdict.is_settled = ended.is_settled
    _judge_recoveries(verdict, recoveries)
    log = Log(ended.log)
    _judge_acked(verdict, ended, log)
    _judge_exact(verdict, ended.truths, log, looks, asker.answers, chains)
    _judge_digests(verdict, ended)
    return verdict


class Log:
    """The stream, read once more: which batch of a worker counts at which stream sequence."""

    def __init__(self, messages: Iterable[Message]) -> None:
        #: worker -> stream sequences at which its position moved, and (epoch, seq) from there on
        self._moves: dict[str, tuple[list[int], list[tuple[int, int]]]] = defaultdict(
            lambda: ([], [])
        )
        #: (worker, epoch) -> stream sequence of the record or the goodbye that ended it
        self.ended_at: dict[tuple[str, int], int] = {}
        self.batches: set[tuple[str, int, int]] = set()
        for message in messages:
            self._take(message)

    def _take(self, message: Message) -> None:
        if message.subject.startswith("kv.control."):
            record = decode_control(message.payload)
            if record.kind == "expired":
                self.ended_at.setdefault((record.worker, record.epoch), message.stream_sequence)
            return
        batch = decode(message.payload).batch
        self.batches.add((batch.worker, batch.epoch, batch.seq))
        at, positions = self._moves[batch.worker]
        if not positions or (batch.epoch, batch.seq) > positions[-1]:
            at.append(message.stream_sequence)
            positions.append((batch.epoch, batch.seq))
        if any(isinstance(event, WorkerDown) for event in batch.events):
            self.ended_at.setdefault((batch.worker, batch.epoch), message.stream_sequence)

    def position(self, worker: str, stream_sequence: int) -> tuple[int, int] | None:
        """Return the (epoch, seq) that a worker has reached; None if it is gone or unknown."""
        at, positions = self._moves[worker]
        found = bisect_right(at, stream_sequence)
        if not found:
            return None
        position = positions[found - 1]
        ended_at = self.ended_at.get((worker, position[0]))
        return None if ended_at is not None and ended_at <= stream_sequence else position


class Claim(Struct, frozen=True, gc=False):
    """Something exact that was said of a worker; what it is about is one of the last two."""

    stream_sequence: int
    matched: tuple[Matched, int] | None = None
    seen: Seen | None = None


def _judge_recoveries(verdict: Verdict, recoveries: Sequence[Recovery]) -> None:
    for each in recoveries:
        if each.seconds is None:
            verdict.not_converged += 1
            verdict.examples.append(f"not exact again after {each.kind} of {each.target}")
            continue
        verdict.converge_seconds.append(each.seconds)
        verdict.converge_by_kind.setdefault(each.kind, []).append(round(each.seconds, 2))


def _judge_acked(verdict: Verdict, ended: Ended, log: Log) -> None:
    """Look for each acknowledged batch in the stream and in the archive."""
    with SqlArchive(ended.archive_url, must_exist=True) as archive:
        archived = Log(archive.read_events(1, 2**62)).batches
    for truth in ended.truths:
        worker = truth.name.rpartition("-")[0]
        verdict.acked += len(truth.acked)
        for epoch, seq in sorted(truth.acked):
            key = worker, epoch, seq
            if key not in log.batches or key not in archived:
                verdict.acked_lost += 1
                where = "archive" if key in log.batches else "stream"
                _example(verdict, f"acknowledged, not in the {where}: {key}")
        sent = {(worker, *key) for key in truth.sent}
        verdict.batches_lost_unacked += len(sent - log.batches)


def _judge_exact(
    verdict: Verdict,
    truths: Sequence[Truth],
    log: Log,
    looks: Sequence[Look],
    answers: Sequence[Matched],
    chains: Chains,
) -> None:
    by_batch: dict[tuple[str, int, int], list[Claim]] = defaultdict(list)
    for worker, claim in _claims(looks, answers):
        verdict.checked_exact += 1
        position = log.position(worker, claim.stream_sequence)
        if position is None:
            _wrong(verdict, f"{worker} is exact at {claim.stream_sequence}, where it is gone")
        elif claim.seen and (claim.seen.epoch, claim.seen.seq) != position:
            at = claim.seen.epoch, claim.seen.seq
            _wrong(verdict, f"{worker} is at {at}, the log at {position}, {claim.stream_sequence}")
        else:
            by_batch[worker, *position].append(claim)
    for truth in truths:
        _judge_against(verdict, truth, by_batch, chains)
    verdict.unknown_truth += sum(map(len, by_batch.values()))


def _claims(looks: Sequence[Look], answers: Sequence[Matched]) -> Iterable[tuple[str, Claim]]:
    for look in looks:
        for seen in look.workers:
            if seen.is_exact:
                yield seen.worker, Claim(look.stream_sequence, seen=seen)
    for answer in answers:
        for worker, num_blocks in answer.exact:
            yield worker, Claim(answer.stream_sequence, matched=(answer, num_blocks))


def _judge_against(
    verdict: Verdict,
    truth: Truth,
    by_batch: dict[tuple[str, int, int], list[Claim]],
    chains: Chains,
) -> None:
    """Judge, and take out, the claims about batches that one process has sent."""
    worker = truth.name.rpartition("-")[0]
    by_op: dict[int, list[Claim]] = defaultdict(list)
    for (epoch, seq), op in truth.sent.items():
        if op is not None and (claims := by_batch.pop((worker, epoch, seq), None)):
            by_op[op] += claims
    for op, held in truth.states():
        for claim in by_op.pop(op, ()):
            _judge_claim(verdict, worker, op, held, claim, chains)
    assert not by_op, f"{truth.name}: batches of ops that are not in the truth"


def _judge_claim(
    verdict: Verdict, worker: str, op: int, held: set[int], claim: Claim, chains: Chains
) -> None:
    where = f"{worker} at {claim.stream_sequence}, op {op}"
    if claim.matched is not None:
        answer, claimed = claim.matched
        blocks = chains.chains[answer.chain].blocks[: answer.num_blocks]
        true = next((n for n, block in enumerate(blocks) if block not in held), len(blocks))
        if claimed != true:
            _wrong(verdict, f"{where}: {claimed} blocks of chain {answer.chain}, in truth {true}")
    if claim.seen is not None:
        xor = 0
        for block in held:
            xor ^= chains.mixed[block]
        if (claim.seen.num_blocks, claim.seen.xor) != (len(held), xor):
            shown = claim.seen.num_blocks
            _wrong(verdict, f"{where}: {shown} blocks by its digest, in truth {len(held)}")


def _judge_digests(verdict: Verdict, ended: Ended) -> None:
    """Compare both indexers with each other and with a replay, and check the archive."""
    equal = ended.archive_status == 0
    with SqlArchive(ended.archive_url, must_exist=True) as archive:
        for agreement in ended.agreements:
            found = set(agreement.values())
            equal &= len(agreement) == 2 and len(found) == 1
            for sequence, digest in found:
                replayed = replay(archive, Moment(sequence=sequence), FlatRadixIndex)
                if (replayed.stream_sequence, replayed.state_digest) != (sequence, digest):
                    equal = False
                    _example(verdict, f"a replay to {sequence} differs from {digest}")
        report = check_archive(archive)
    verdict.digest_equal = equal
    verdict.contradictions = report.num_contradictions
    for each in report.checks:
        verdict.doubted += each.num_skipped if each.name == "digests" else 0
        verdict.examples += [f"check {each.name}: {text}" for text in each.examples]


def _wrong(verdict: Verdict, text: str) -> None:
    verdict.wrong_exact += 1
    _example(verdict, text)


def _example(verdict: Verdict, text: str) -> None:
    if len(verdict.examples) < 5 * MAX_EXAMPLES:
        verdict.examples.append(text)
