"""Decides what a worker asks of which owner, in which order, and what becomes of each block. Pure.

                 RequestLease      lease granted       read posted        read, verified
      wanted ------------------------> leased ----------> in_flight ------------> held
        ^  \\                            |                    |
        |   \\___ no owner is left, deadline, cancelled, slot taken back ________> missing
        |________ busy, not ready, corrupt: later; anything else: next owner ___|

What is in which collection:

  wanted     queue of its pull, by owner; `_waiting` during a backoff; a batch that asks for a lease
  leased     a batch in `_leased`: the lease is there, a free place to read into is not
  in_flight  a batch whose read, or verification, is under way
  held, missing   nowhere; the pull ends when all its blocks are one of these

Blocks of one pull and owner travel in *batches* (one lease, one read), lowest index first, batches
of more urgent pulls before others. A failed pull is no error: its missing blocks are recomputed.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field

from kvatlas.schemas.digest import BLOCK_HASH_BYTES, split_hashes
from kvatlas.schemas.transfer import MissingReason
from kvatlas.worker_hooks.transfer.pull_protocol import (
    BatchId,
    BlocksArrived,
    BlocksChecked,
    BlockState,
    CheckAndFill,
    CloseBatch,
    Effect,
    EndPull,
    LeaseDenied,
    LeaseGiven,
    Owner,
    PullAsked,
    PullCancelled,
    PullReason,
    PullSettings,
    ReadBlocks,
    ReadFailed,
    RequestLease,
    Stimulus,
    TimePassed,
    WakeAt,
)

#: a later try at the same owner may do
_RETRIED = frozenset(
    {
        *(MissingReason.busy, MissingReason.not_ready),
        *(PullReason.corrupt, PullReason.lease_expired, PullReason.failed),
    }
)
#: the owner as a whole is of no use for a while
_RESTS_OWNER = frozenset(
    {
        PullReason.timed_out,
        PullReason.no_responder,
        PullReason.bus_unavailable,
        PullReason.disconnected,
    }
)


class _Pull(Struct):
    pull: int
    hashes: bytes
    slots: Sequence[int]
    owners: Sequence[Owner]
    deadline_ns: int
    priority: int
    states: list[BlockState]
    #: position in `owners` of whom a block is asked of; only rises
    owner_at: list[int]
    #: retries at that owner
    num_retries: list[int]
    reasons: dict[int, str] = field(default_factory=dict)
    #: by owner position: heap of the indexes that are wanted, and neither wait nor are in a batch
    queues: list[list[int]] = field(default_factory=list)
    num_open: int = 0
    num_corrupt: int = 0

    def pack(self, indexes: Sequence[int]) -> bytes:
        """Return the packed hashes of ascending indexes."""
        size, hashes = BLOCK_HASH_BYTES, self.hashes
        if indexes and indexes[-1] - indexes[0] + 1 == len(indexes):
            return hashes[indexes[0] * size : (indexes[-1] + 1) * size]
        return b"".join([hashes[i * size : (i + 1) * size] for i in indexes])


class _Stage(StrEnum):
    asking = "asking"
    leased = "leased"
    reading = "reading"
    checking = "checking"


class _Batch(Struct):
    batch: BatchId
    pull: _Pull
    owner: Owner
    indexes: list[int]
    stage: _Stage = _Stage.asking
    expires_ns: int = 0
    #: when its request or read began
    started_ns: int = 0
    #: its pull is over; the batch only waits to be closed
    is_orphan: bool = False


class StoryLine(NamedTuple):
    """Something that happened to blocks."""

    time_ns: int
    pull: int
    what: str
    hashes: bytes


class PullState:
    """All pulls of a worker. `handle` takes what happened and returns what to do, in order."""

    def __init__(self, settings: PullSettings, story_lines: int = 1000) -> None:
        settings.validate()
        self._settings = settings
        self._pulls: dict[int, _Pull] = {}
        #: (priority, pull) of each open pull, sorted
        self._order: list[tuple[int, int]] = []
        self._batches: dict[BatchId, _Batch] = {}
        #: batches in stage `leased`, a heap
        self._leased: list[BatchId] = []
        #: batches in stage `reading` or `checking`
        self._num_reading = 0
        #: open batches of each owner; no zeros
        self._num_at_owner: dict[str, int] = {}
        #: (deadline, pull); also of pulls that ended
        self._deadlines: list[tuple[int, int]] = []
        #: (time, pull, index) of the blocks in a backoff; also of pulls that ended
        self._waiting: list[tuple[int, int, int]] = []
        #: owners (name, epoch) that failed, until when they are left alone
        self._resting: dict[tuple[str, int], int] = {}
        self._next_batch = 1
        self._wake_ns = 0
        self._now_ns = 0
        self._effects: list[Effect] = []
        self._story: deque[StoryLine] = deque(maxlen=story_lines)

    def handle(self, stimulus: Stimulus, now_ns: int) -> list[Effect]:
        """Return what to do now. Stimuli about batches and pulls that are over change nothing."""
        self._now_ns = now_ns
        self._effects = []
        match stimulus:
            case PullAsked():
                self._pull_asked(stimulus)
            case PullCancelled(pull):
                self._abandon(pull, PullReason.cancelled)
            case LeaseGiven(batch):
                self._lease_given(batch, stimulus)
            case LeaseDenied(batch, reason):
                self._batch_failed(batch, _Stage.asking, reason)
            case BlocksArrived(batch):
                self._blocks_arrived(batch)
            case ReadFailed(batch, reason):
                self._batch_failed(batch, _Stage.reading, reason)
            case BlocksChecked(batch):
                self._blocks_checked(batch, stimulus)
            case TimePassed():
                self._wake_ns = 0
        self._let_time_pass()
        self._start_reads()
        self._request_leases()
        self._plan_wake()
        return self._effects

    def story(self, block_hash: bytes) -> list[StoryLine]:
        """Return what is remembered of a block, oldest first."""
        return [line for line in self._story if block_hash in set(split_hashes(line.hashes))]

    def validate(self) -> None:
        """Assert what holds between calls: each open block is in exactly one place."""
        for pull in self._pulls.values():
            places = [i for queue in pull.queues for i in queue]
            places += [i for _, number, i in self._waiting if number == pull.pull]
            wanted = set(places)
            for batch in self._batches.values():
                if batch.pull is pull and not batch.is_orphan:
                    places += batch.indexes
                    expected = {
                        _Stage.asking: BlockState.wanted,
                        _Stage.leased: BlockState.leased,
                    }.get(batch.stage, BlockState.in_flight)
                    assert {pull.states[i] for i in batch.indexes} == {expected}
            ends = (BlockState.held, BlockState.missing)
            is_open = [i for i, state in enumerate(pull.states) if state not in ends]
            assert sorted(places) == is_open
            assert all(pull.states[i] is BlockState.wanted for i in wanted)
            assert pull.num_open == len(is_open) > 0
            is_missing = {i for i, state in enumerate(pull.states) if state is BlockState.missing}
            assert is_missing <= set(pull.reasons)
        stages = [batch.stage for batch in self._batches.values()]
        assert self._num_reading == sum(s in (_Stage.reading, _Stage.checking) for s in stages)
        assert self._num_reading <= self._settings.max_reads
        assert len(self._batches) <= self._settings.max_batches
        assert sorted(self._leased) == sorted(
            b for b, batch in self._batches.items() if batch.stage is _Stage.leased
        )
        counts: dict[str, int] = {}
        for batch in self._batches.values():
            counts[batch.owner.name] = counts.get(batch.owner.name, 0) + 1
        assert counts == self._num_at_owner
        assert all(n <= self._settings.max_batches_per_owner for n in counts.values())
        assert self._order == sorted((p.priority, p.pull) for p in self._pulls.values())

    # --- one method a stimulus --------------------------------------------------------------

    def _pull_asked(self, asked: PullAsked) -> None:
        num = len(asked.slots)
        pull = _Pull(
            asked.pull,
            asked.hashes,
            asked.slots,
            asked.owners,
            asked.deadline_ns,
            asked.priority,
            states=[BlockState.wanted] * num,
            owner_at=[-1] * num,
            num_retries=[0] * num,
            queues=[[] for _ in asked.owners],
            num_open=num,
        )
        self._pulls[pull.pull] = pull
        insort(self._order, (pull.priority, pull.pull))
        heapq.heappush(self._deadlines, (pull.deadline_ns, pull.pull))
        self._record(pull, "asked for", pull.hashes)
        first = 0  # blocks before it have an owner to ask
        for position, owner in enumerate(pull.owners):
            end = min(owner.num_blocks, num) or num
            if end > first and not self._is_resting(owner):
                pull.owner_at[first:end] = [position] * (end - first)
                pull.queues[position] = list(range(first, end))
                first = end
        for index in range(first, num):
            self._ask_next_owner(pull, index, PullReason.no_owner)
        self._end_if_done(pull)

    def _lease_given(self, batch_id: BatchId, given: LeaseGiven) -> None:
        batch = self._batches.get(batch_id)
        if batch is None or batch.stage is not _Stage.asking:
            return
        if batch.is_orphan:
            self._close(batch)
            return
        pull, rest = batch.pull, batch.indexes[given.num_blocks :]
        batch.indexes = batch.indexes[: given.num_blocks]
        batch.stage, batch.expires_ns = _Stage.leased, given.expires_ns
        self._set_states(batch, BlockState.leased)
        heapq.heappush(self._leased, batch_id)
        self._record(pull, f"leased from {batch.owner.name}", pull.pack(batch.indexes))
        for index in rest:
            if given.rest_reason == MissingReason.too_large:
                self._enqueue(pull, index)  # what was granted is progress enough
            else:
                self._fall(pull, index, given.rest_reason or MissingReason.not_held)
        self._end_if_done(pull)

    def _blocks_arrived(self, batch_id: BatchId) -> None:
        batch = self._batches.get(batch_id)
        if batch is None or batch.stage is not _Stage.reading:
            return
        if batch.is_orphan:
            self._close(batch)
            return
        batch.stage = _Stage.checking
        pull = batch.pull
        slots = [pull.slots[i] for i in batch.indexes]
        self._effects.append(CheckAndFill(batch_id, pull.pack(batch.indexes), slots))

    def _blocks_checked(self, batch_id: BatchId, checked: BlocksChecked) -> None:
        batch = self._batches.get(batch_id)
        if batch is None or batch.stage is not _Stage.checking:
            return
        self._close(batch)
        if batch.is_orphan:
            return
        pull = batch.pull
        failed = {position: PullReason.corrupt for position in checked.corrupt}
        failed |= {position: PullReason.revoked for position in checked.revoked}
        held = [i for position, i in enumerate(batch.indexes) if position not in failed]
        for index in held:
            pull.states[index] = BlockState.held
        pull.num_open -= len(held)
        pull.num_corrupt += len(checked.corrupt)
        self._record(pull, f"held from {batch.owner.name}", pull.pack(held))
        for position, reason in failed.items():
            self._fall(pull, batch.indexes[position], reason)
        self._end_if_done(pull)

    def _batch_failed(self, batch_id: BatchId, stage: _Stage, reason: str) -> None:
        batch = self._batches.get(batch_id)
        if batch is None or batch.stage is not stage:
            return
        self._close(batch)
        if reason in _RESTS_OWNER and (
            reason != PullReason.timed_out
            or self._now_ns - batch.started_ns >= self._settings.fair_ms * 1_000_000
        ):
            self._rest(batch.owner)
        if batch.is_orphan:
            return
        self._record(batch.pull, f"{reason} at {batch.owner.name}", batch.pull.pack(batch.indexes))
        for index in batch.indexes:
            self._fall(batch.pull, index, reason)
        self._end_if_done(batch.pull)

    # --- time ---------------------------------------------------------------------------------

    def _let_time_pass(self) -> None:
        now = self._now_ns
        while self._deadlines and self._deadlines[0][0] <= now:
            self._abandon(heapq.heappop(self._deadlines)[1], PullReason.deadline)
        while self._waiting and self._waiting[0][0] <= now:
            _, number, index = heapq.heappop(self._waiting)
            pull = self._pulls.get(number)
            if pull is not None:
                self._enqueue(pull, index)

    def _plan_wake(self) -> None:
        while self._deadlines and self._deadlines[0][1] not in self._pulls:
            heapq.heappop(self._deadlines)
        while self._waiting and self._waiting[0][1] not in self._pulls:
            heapq.heappop(self._waiting)
        times = [heap[0][0] for heap in (self._deadlines, self._waiting) if heap]
        if times and min(times) != self._wake_ns:
            self._wake_ns = min(times)
            self._effects.append(WakeAt(self._wake_ns))

    # --- starting -----------------------------------------------------------------------------

    def _start_reads(self) -> None:
        while self._leased and self._num_reading < self._settings.max_reads:
            batch = self._batches[heapq.heappop(self._leased)]
            if batch.expires_ns <= self._now_ns:
                self._close(batch)
                for index in batch.indexes:
                    self._fall(batch.pull, index, PullReason.lease_expired)
                self._end_if_done(batch.pull)
                continue
            batch.stage, batch.started_ns = _Stage.reading, self._now_ns
            self._num_reading += 1
            self._set_states(batch, BlockState.in_flight)
            deadline_ns = min(self._try_deadline_ns(batch.pull, batch.owner), batch.expires_ns)
            self._effects.append(ReadBlocks(batch.batch, deadline_ns))

    def _request_leases(self) -> None:
        for _, number in list(self._order):
            if len(self._batches) >= self._settings.max_batches:
                return
            pull = self._pulls[number]
            for position, owner in enumerate(pull.owners):
                if self._is_resting(owner):
                    waiting, pull.queues[position] = pull.queues[position], []
                    for index in sorted(waiting):
                        self._ask_next_owner(pull, index, PullReason.owner_resting)
                while pull.queues[position] and self._may_ask(owner):
                    self._request_lease(pull, owner, pull.queues[position])
            self._end_if_done(pull)

    def _request_lease(self, pull: _Pull, owner: Owner, wanted: list[int]) -> None:
        num = min(self._settings.batch_blocks, len(wanted))
        indexes = [heapq.heappop(wanted) for _ in range(num)]
        batch_id = BatchId(pull.priority, self._next_batch)
        self._next_batch += 1
        self._batches[batch_id] = _Batch(batch_id, pull, owner, indexes, started_ns=self._now_ns)
        self._num_at_owner[owner.name] = self._num_at_owner.get(owner.name, 0) + 1
        deadline_ns = self._try_deadline_ns(pull, owner)
        left_ms = (deadline_ns - self._now_ns) // 1_000_000
        ttl_ms = max(1, left_ms + self._settings.lease_slack_ms)
        self._effects.append(
            RequestLease(batch_id, pull.pull, owner, pull.pack(indexes), ttl_ms, deadline_ns)
        )

    def _may_ask(self, owner: Owner) -> bool:
        num_here = self._num_at_owner.get(owner.name, 0)
        has_room = len(self._batches) < self._settings.max_batches
        return has_room and num_here < self._settings.max_batches_per_owner

    def _try_deadline_ns(self, pull: _Pull, owner: Owner) -> int:
        left_ns = pull.deadline_ns - self._now_ns
        if owner is not pull.owners[-1]:
            left_ns //= 2
        return self._now_ns + min(left_ns, self._settings.try_ms * 1_000_000)

    # --- the ladder ---------------------------------------------------------------------------

    def _fall(self, pull: _Pull, index: int, reason: str) -> None:
        """Find the next rung for a block that is in no collection: same owner, next one, none."""
        if pull.states[index] in (BlockState.held, BlockState.missing):
            return
        pull.states[index] = BlockState.wanted
        if reason == PullReason.revoked:
            self._miss(pull, index, reason)
        elif reason == PullReason.no_room:
            self._wait(pull, index, 0)  # of our own making: no other owner would help
        elif reason in _RETRIED and pull.num_retries[index] < self._settings.max_retries:
            self._wait(pull, index, pull.num_retries[index])
            pull.num_retries[index] += 1
        else:
            self._ask_next_owner(pull, index, reason)

    def _ask_next_owner(self, pull: _Pull, index: int, reason: str) -> None:
        pull.num_retries[index] = 0
        for position in range(pull.owner_at[index] + 1, len(pull.owners)):
            owner = pull.owners[position]
            if owner.holds(index) and not self._is_resting(owner):
                pull.owner_at[index] = position
                self._enqueue(pull, index)
                return
            if owner.holds(index) and reason == PullReason.no_owner:
                reason = PullReason.owner_resting
        self._miss(pull, index, reason)

    def _wait(self, pull: _Pull, index: int, doublings: int) -> None:
        at_ns = self._now_ns + (self._settings.backoff_ms << doublings) * 1_000_000
        heapq.heappush(self._waiting, (at_ns, pull.pull, index))

    def _enqueue(self, pull: _Pull, index: int) -> None:
        heapq.heappush(pull.queues[pull.owner_at[index]], index)

    def _miss(self, pull: _Pull, index: int, reason: str) -> None:
        pull.states[index] = BlockState.missing
        pull.reasons[index] = str(reason)
        pull.num_open -= 1

    def _rest(self, owner: Owner) -> None:
        now = self._now_ns
        self._resting = {key: until for key, until in self._resting.items() if until > now}
        self._resting[owner.name, owner.epoch] = now + self._settings.rest_ms * 1_000_000

    def _is_resting(self, owner: Owner) -> bool:
        return self._resting.get((owner.name, owner.epoch), 0) > self._now_ns

    # --- ends ---------------------------------------------------------------------------------

    def _abandon(self, number: int, reason: PullReason) -> None:
        """End a pull now; what it has under way is closed as it comes back."""
        pull = self._pulls.get(number)
        if pull is None:
            return
        for batch in list(self._batches.values()):
            if batch.pull is pull:
                batch.is_orphan = True
                if batch.stage is _Stage.leased:
                    self._leased.remove(batch.batch)
                    heapq.heapify(self._leased)
                    self._close(batch)
        for index, state in enumerate(pull.states):
            if state not in (BlockState.held, BlockState.missing):
                self._miss(pull, index, reason)
        self._end_if_done(pull)

    def _end_if_done(self, pull: _Pull) -> None:
        if pull.num_open or self._pulls.pop(pull.pull, None) is None:
            return
        self._order.remove((pull.priority, pull.pull))
        held = [i for i, state in enumerate(pull.states) if state is BlockState.held]
        missing = sorted(pull.reasons.items())
        for reason in dict.fromkeys(pull.reasons.values()):
            those = [index for index, other in missing if other == reason]
            self._record(pull, f"missing: {reason}", pull.pack(those))
        self._effects.append(EndPull(pull.pull, held, missing, pull.num_corrupt))

    def _close(self, batch: _Batch) -> None:
        del self._batches[batch.batch]
        if batch.stage in (_Stage.reading, _Stage.checking):
            self._num_reading -= 1
        left = self._num_at_owner.pop(batch.owner.name) - 1
        if left:
            self._num_at_owner[batch.owner.name] = left
        self._effects.append(CloseBatch(batch.batch))

    def _set_states(self, batch: _Batch, state: BlockState) -> None:
        for index in batch.indexes:
            batch.pull.states[index] = state

    def _record(self, pull: _Pull, what: str, hashes: bytes) -> None:
        if hashes:
            self._story.append(StoryLine(self._now_ns, pull.pull, what, hashes))
