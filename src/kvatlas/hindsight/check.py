"""`kvatlas check`: whether a recorded run kept its promises, found out from its archive alone.

    archive --archived_log--> fold --+-- order       sequences of the stream, and what routers saw
                                     +-- batches     each once, none missing without a word
                                     +-- digests     an exact instance's own digest is the fold's
                                     +-- decisions   what was called exact is what the fold holds
    archive --look_for_damage--------------- rows        each has the values that an archiver writes

A contradiction means that something recorded cannot have been true. What cannot be compared, such
as a salted prompt or an instance behind a hole, is counted as skipped.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from msgspec import Struct

from kvatlas.events.archive.port import Archive, Hole
from kvatlas.events.archive.replay import archived_log
from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.bus import Message
from kvatlas.events.streams import KV_EVENTS
from kvatlas.hindsight.replay import Fold
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import (
    BatchArrived,
    PayloadRejected,
    ReportDivergence,
    stimulus_of,
)
from kvatlas.indexer.index.flat import FlatRadixIndex
from kvatlas.indexer.index.port import PrefixIndex
from kvatlas.indexer.reader import InstanceMatch, InstanceView
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import MalformedBatch, UnknownDecision, UnsupportedVersion
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.kv_events import Digest, EventBatch, KvEvent, Resync, SourceDegraded
from kvatlas.schemas.routing import Decision, decode_decision

#: contradictions of each check that are told in words; the rest is only counted
MAX_EXAMPLES = 10
#: decisions that are read at a time
PAGE = 500
#: of a decision's id, before and behind the router's own (router/service.py)
_ID_TIME_DIGITS, _ID_DRAWN_DIGITS = 12, 8


class Check(Struct):
    """One promise: how often it was looked at, and how often it was broken."""

    name: str
    #: what was looked at, in words
    about: str
    num_checked: int = 0
    num_skipped: int = 0
    num_contradictions: int = 0
    examples: list[str] = []
    #: why something was skipped -> how often; their sum is num_skipped
    skipped: dict[str, int] = {}

    def skip(self, why: str, count: int = 1) -> None:
        """Count what cannot be compared."""
        if count:
            self.num_skipped += count
            self.skipped[why] = self.skipped.get(why, 0) + count

    def contradict(self, text: str) -> None:
        """Count a broken promise."""
        self.num_contradictions += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(text)


class CheckReport(Struct, frozen=True):
    """All checks of an archive; `state_digest` is that of its fold, to compare with a live one."""

    stream_sequence: int
    state_digest: str
    num_holes: int
    #: stream sequences of the log that are neither in the archive nor told as a hole: batches that
    #: the stream had twice are kept once
    num_absent: int
    checks: tuple[Check, ...]

    @property
    def num_contradictions(self) -> int:
        """Broken promises of all kinds."""
        return sum(check.num_contradictions for check in self.checks)


def check_archive(
    archive: Archive, make_index: Callable[[], PrefixIndex] = FlatRadixIndex
) -> CheckReport:
    """Read an archive from its beginning to its end and return what was found.

    The end is that of the moment when it begins: appends may go on meanwhile.
    Memory grows with the number of decisions and gaps, not with that of batches. Raises
    ArchiveUnavailable.
    """
    return _Checker(archive, make_index()).run()


def check_url(url: str) -> CheckReport:
    """Check the archive at a database URL. Raises ArchiveUnavailable, ArchiveNewer."""
    with SqlArchive(url, must_exist=True) as archive:
        return check_archive(archive)


def check_lines(report: CheckReport) -> list[str]:
    """Return a report as text: a line a check, and an indented one for each contradiction told."""
    lines = [
        f"log up to {report.stream_sequence}: {report.num_holes} holes,"
        f" {report.num_absent} sequences stored twice or lost, digest {report.state_digest}"
    ]
    for check in report.checks:
        mark = "BAD" if check.num_contradictions else "ok "
        reasons = "; ".join(f"{count} {why}" for why, count in check.skipped.items())
        skipped = f", {check.num_skipped} skipped ({reasons})" if check.num_skipped else ""
        lines.append(
            f"{mark} {check.name:<10} {check.num_checked} {check.about}{skipped},"
            f" {check.num_contradictions} contradictions"
        )
        lines += [f"      {example}" for example in check.examples]
    return lines


def check_json(report: CheckReport) -> str:
    """Return a report as one line of JSON."""
    content = msgspec.to_builtins(report)
    content["ok"] = not report.num_contradictions
    return msgspec.json.encode(content).decode()


class _Checker:
    """Walks the log once, with all checks beside the fold."""

    def __init__(self, archive: Archive, index: PrefixIndex) -> None:
        self._archive = archive
        self._cut = cut = archive.cut()
        self._last = cut.cursor
        self._fold = Fold(index)
        holes = [hole for hole in archive.holes(KV_EVENTS) if hole.first <= cut.cursor]
        self._order = _Order(holes, cut.cursor)
        self._batches = _Batches()
        self._digests = _Digests(self._fold.state)
        self._decisions = _Decisions(archive, self._fold, cut.last_decision)

    def run(self) -> CheckReport:
        for item in archived_log(self._archive, self._last):
            if isinstance(item, Hole):
                self._decisions.judge_before(item.first)
                self._batches.take_hole()
                self._fold.take(item)
            else:
                self._decisions.judge_before(item.stream_sequence)
                self._take(item)
        self._decisions.judge_before(self._last + 1)
        self._decisions.skip_rest()
        self._order.take_beyond(self._archive.read_events(self._last + 1, self._cut.last_event))
        self._order.take_decisions(self._decisions.pointers)
        self._batches.end(self._fold.state.stats().batches)
        rows = Check("rows", "rows of the archive", self._archive.look_for_damage())
        for damaged in self._archive.damaged.examples:
            rows.contradict(str(damaged))
        rows.num_contradictions = self._archive.damaged.num_rows
        return CheckReport(
            stream_sequence=self._last,
            state_digest=self._fold.state.state_digest(),
            num_holes=len(self._fold.holes),
            num_absent=self._order.num_absent,
            checks=(
                self._order.check,
                self._batches.check,
                self._digests.check,
                self._decisions.check,
                rows,
            ),
        )

    def _take(self, message: Message) -> None:
        self._order.observe(message)
        stimulus = stimulus_of(message)
        if isinstance(stimulus, BatchArrived):
            batch = stimulus.decoded.batch
            self._batches.observe(batch, message.stream_sequence)
            self._digests.expect(batch)
        elif isinstance(stimulus, PayloadRejected):
            self._batches.take_unreadable(stimulus.worker, message.stream_sequence)
        effects = self._fold.state.handle(stimulus)
        for effect in effects:
            if isinstance(effect, ReportDivergence):
                self._digests.diverged(effect, message.stream_sequence)


class _Order:
    """Sequences rise, none is both there and missing, none is beyond what was read."""

    def __init__(self, holes: list[Hole], cursor: int) -> None:
        self.check = Check("order", "messages and decisions")
        self._holes, self._cursor = holes, cursor
        self._last_sequence = self._last_ns = self._num_messages = 0

    @property
    def num_absent(self) -> int:
        """Sequences up to the cursor that are neither messages nor in a hole."""
        in_holes = sum(min(hole.last, self._cursor) - hole.first + 1 for hole in self._holes)
        return max(self._cursor - in_holes - self._num_messages, 0)

    def observe(self, message: Message) -> None:
        """Look at the next message of the log."""
        self.check.num_checked += 1
        self._num_messages += 1
        sequence = message.stream_sequence
        if sequence <= self._last_sequence:
            self.check.contradict(f"message {sequence} comes after {self._last_sequence}")
        self._last_sequence = sequence
        at = bisect_right(self._holes, sequence, key=lambda hole: hole.first) - 1
        if at >= 0 and sequence <= self._holes[at].last:
            hole = self._holes[at]
            self.check.contradict(
                f"message {sequence} is there, in the hole from {hole.first} to {hole.last}"
            )

    def take_beyond(self, messages: Iterator[Message]) -> None:
        """Look at what lies behind the cursor, which moves with what is written."""
        for message in messages:
            self.check.num_checked += 1
            text = f"message {message.stream_sequence} is beyond the cursor, {self._cursor}"
            self.check.contradict(text)

    def take_decisions(self, pointers: "list[_Pointer]") -> None:
        """Look at the index that each router decided by, in the order of its decisions."""
        # a router's decisions are in order for each model, which has a subject of its own
        newest: dict[tuple[str, str], int] = {}
        for pointer in sorted(pointers, key=lambda pointer: pointer.position):
            self.check.num_checked += 1
            feed = pointer.router, pointer.model
            before = newest.get(feed, 0)
            if pointer.stream_sequence < before:
                self.check.contradict(
                    f"the index of router {pointer.router} went back from {before}"
                    f" to {pointer.stream_sequence}, decision {pointer.decision_id}"
                )
            newest[feed] = max(before, pointer.stream_sequence)


class _Batches:
    """Each batch is there once, in its order, and what is missing was told to be."""

    def __init__(self) -> None:
        self.check = Check("batches", "batches in the log")
        self._last: dict[InstanceId, tuple[int, int]] = {}
        #: (instance, epoch) -> sequences that are missing, as (first, last, stream sequence)
        self._missing: dict[tuple[InstanceId, int], list[tuple[int, int, int]]] = {}
        #: (instance, epoch) -> losses that the instance has told
        self._told: dict[tuple[InstanceId, int], list[tuple[int, int]]] = defaultdict(list)
        #: instances that have spoken since the last hole; what others lack may lie in it
        self._heard: set[InstanceId] = set()
        self._has_hole = False
        #: workers of which a message could not be read: what they lack next may be that one
        self._unreadable: set[str] = set()
        #: stream sequence of the first of them; 0 without any
        self._first_unreadable = 0

    def take_hole(self) -> None:
        """Excuse one gap of everybody."""
        self._heard.clear()
        self._has_hole = True

    def take_unreadable(self, worker: str, stream_sequence: int) -> None:
        """Excuse one gap of a worker."""
        self._first_unreadable = self._first_unreadable or stream_sequence
        self.check.skip(f"unreadable, such as at {self._first_unreadable}")
        self._unreadable.add(worker)

    def observe(self, batch: EventBatch, stream_sequence: int) -> None:
        """Look at the next batch of the log."""
        self.check.num_checked += 1
        instance, key = batch.instance, (batch.instance, batch.epoch)
        epoch, seq = self._last.get(instance, (0, 0))
        if batch.epoch < epoch:
            return  # a replaced process may say its last words late, and they count for nothing
        if batch.epoch > epoch:
            seq = 0
        if batch.seq <= seq:
            self._take_repeated(batch, key, stream_sequence)
            return
        if batch.seq > seq + 1 and self._is_excused(instance):
            self.check.skip("gaps that a hole or something unreadable explains")
        elif batch.seq > seq + 1:
            missing = seq + 1, batch.seq - 1, stream_sequence
            self._missing.setdefault(key, []).append(missing)
        self._heard.add(instance)
        self._last[instance] = batch.epoch, batch.seq
        for event in batch.events:
            if isinstance(event, Resync):
                self._told[key].append((event.lost_from, event.lost_to))

    def _is_excused(self, instance: InstanceId) -> bool:
        if instance.worker in self._unreadable:
            self._unreadable.discard(instance.worker)
            return True
        return self._has_hole and instance not in self._heard

    def _take_repeated(
        self, batch: EventBatch, key: tuple[InstanceId, int], stream_sequence: int
    ) -> None:
        is_late = any(first <= batch.seq <= last for first, last, _ in self._missing.get(key, ()))
        what = "comes after its successors" if is_late else "is there twice"
        self.check.contradict(f"{_name(batch)} {what}, at {stream_sequence}")

    def end(self, num_counted: int) -> None:
        """Count the gaps that nobody ever told, and say how many batches counted in the fold."""
        if late := self.check.num_checked - num_counted:
            self.check.about = f"batches in the log ({num_counted} counted; {late} came after the"
            self.check.about += " end of their epoch, or twice)"
        for (instance, epoch), gaps in self._missing.items():
            for first, last, stream_sequence in gaps:
                if not _is_covered(first, last, self._told[instance, epoch]):
                    self.check.contradict(
                        f"{instance} epoch {epoch} lacks {first} to {last} without a word,"
                        f" at {stream_sequence}"
                    )


class _Digests:
    """An instance that the fold calls exact holds what it says itself."""

    def __init__(self, state: IndexState) -> None:
        self.check = Check("digests", "digests of exact instances")
        self._state = state
        self._is_exact = False

    def expect(self, batch: EventBatch) -> None:
        """Look at a batch that is about to be folded in."""
        view = self._state.instance(batch.instance)
        is_first = view is None or batch.epoch > view.epoch
        expected = 1 if view is None or is_first else view.seq + 1
        is_next = batch.seq == expected and (view is None or batch.epoch >= view.epoch)
        is_trusted = is_first or (view is not None and view.trust is Trust.exact)
        self._is_exact = is_next and is_trusted and not any(map(_is_doubt, batch.events))
        num_digests = sum(isinstance(event, Digest) for event in batch.events)
        if self._is_exact:
            self.check.num_checked += num_digests
        else:
            self.check.skip("of instances that were not exact", num_digests)

    def diverged(self, found: ReportDivergence, stream_sequence: int) -> None:
        """Count a digest that is not the fold's, unless the instance was in doubt anyway."""
        if self._is_exact:
            self.check.contradict(
                f"{found.instance} was exact and holds {found.told.count} blocks in"
                f" {found.tier.name} by its own digest, {found.found.count} in the fold, at"
                f" {stream_sequence}"
            )


class _Pointer(NamedTuple):
    """Where a decision is, and which index it was taken by."""

    stream_sequence: int
    #: of the decision's own message
    position: int
    router: str
    model: str
    decision_id: str


class _Decisions:
    """What a decision calls exact is what the fold holds at the decision's stream sequence."""

    def __init__(self, archive: Archive, fold: Fold, last: int) -> None:
        self.check = Check("decisions", "exact candidates of decisions")
        self._archive, self._fold = archive, fold
        #: stream sequence, among decisions, of the first that is met; 0 without any
        self._first_unreadable = 0
        self.pointers = sorted(self._read(last + 1))
        self._next = 0

    def _read(self, before: int) -> Iterator[_Pointer]:
        while page := self._archive.decisions(before, PAGE):
            for message in page:
                decision = self._decoded(message)
                if decision is not None:
                    router = decision.id[_ID_TIME_DIGITS:-_ID_DRAWN_DIGITS]
                    yield _Pointer(
                        decision.stream_sequence,
                        message.stream_sequence,
                        router,
                        decision.model,
                        decision.id,
                    )
            before = page[-1].stream_sequence

    def _decoded(self, message: Message) -> Decision | None:
        try:
            decision = decode_decision(message.payload)
        except (MalformedBatch, UnsupportedVersion):
            decision = None
        if decision is None or any(
            len(group.chain) % BLOCK_HASH_BYTES for group in decision.groups
        ):
            self._first_unreadable = self._first_unreadable or message.stream_sequence
            self.check.skip(f"unreadable decisions, such as at {self._first_unreadable}")
            return None
        return decision

    def judge_before(self, stream_sequence: int) -> None:
        """Judge all decisions by an index that is older than this, with the fold as it is."""
        while self._next < len(self.pointers):
            pointer = self.pointers[self._next]
            if pointer.stream_sequence >= stream_sequence:
                return
            self._next += 1
            try:
                decision = self._decoded(self._archive.decision(pointer.decision_id))
            except UnknownDecision:
                self.check.skip("decisions that are stored under another id")
                continue
            if decision is not None:
                self._judge(decision)

    def skip_rest(self) -> None:
        """Leave out decisions by an index that is newer than the archive of the log."""
        num_left = len(self.pointers) - self._next
        self.check.skip("decisions by an index that is newer than the archive", num_left)

    def _judge(self, decision: Decision) -> None:
        state = self._fold.state
        held = [
            {match.instance: match for match in state.match(group.chain)} if group.chain else None
            for group in decision.groups
        ]
        claims = _claims(decision)
        for instance, group, num_tokens in claims:
            view = state.instance(instance)
            matches = held[group] if 0 <= group < len(held) else None
            is_exact = view is not None and view.trust is Trust.exact
            if matches is None:
                self.check.skip("prompts whose blocks are not recorded, such as salted ones")
                continue
            if not is_exact and self._fold.holes:
                self.check.skip("not exact behind a hole of the archive")
                continue
            self.check.num_checked += 1
            where = f"decision {decision.id} at {decision.stream_sequence}: {instance}"
            if not is_exact:
                trust = "unknown" if view is None else view.trust
                self.check.contradict(f"{where} is called exact, the fold has it {trust}")
                continue
            match = matches.get(instance)
            true = _reused_blocks(match, view) * decision.groups[group].block_tokens
            if num_tokens != true:
                self.check.contradict(f"{where} matches {num_tokens} tokens, in the fold {true}")


def _reused_blocks(match: InstanceMatch | None, view: InstanceView | None) -> int:
    """Return the blocks of a match that the engine reuses."""
    if match is None or view is None or view.info is None:
        return 0 if match is None else match.num_blocks
    return max(match.num_blocks - view.info.num_unreusable_trailing_blocks, 0)


def _claims(decision: Decision) -> list[tuple[InstanceId, int, int]]:
    """Return (instance, group, matched tokens) of whatever a decision calls exact, each once."""
    groups = {each.instance: each.group for each in decision.question.candidates}
    found = {
        (each.instance, each.group, sum(each.held) * each.block_tokens)
        for each in decision.question.candidates
        if each.trust is Trust.exact
    }
    for score in (decision.chosen, *decision.candidates):
        instance = InstanceId(score.worker, score.rank)
        if score.trust is Trust.exact and instance in groups:
            found.add((instance, groups[instance], score.match_tokens))
    return sorted(found)


def _is_doubt(event: KvEvent) -> bool:
    """Say whether from this event on an instance is not exact by its own account."""
    return isinstance(event, Resync) or (isinstance(event, SourceDegraded) and bool(event.reason))


def _is_covered(first: int, last: int, told: list[tuple[int, int]]) -> bool:
    """Say whether all of a range lies in told losses."""
    for lost_from, lost_to in sorted(told):
        if lost_from > first:
            return False
        first = max(first, lost_to + 1)
        if first > last:
            return True
    return False


def _name(batch: EventBatch) -> str:
    return f"batch {batch.seq} of {batch.instance}, epoch {batch.epoch},"
