"""Pulls blocks of peers into this worker's pool: the shell around `PullState`.

pull --PullAsked--> PullState --RequestLease--> owner's LeaseServer, over the bus
                              --ReadBlocks----> Transport, into bounce slots
                              --CheckAndFill--> ServePool.fill
                              --CloseBatch----> bounce slots back, LeaseRelease
                              --EndPull-------> PullResult
"""

import asyncio
import itertools
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

from msgspec import Struct

from kvatlas.schemas.digest import BLOCK_HASH_BYTES, split_hashes
from kvatlas.schemas.errors import (
    InvalidBlock,
    InvalidSetting,
    MalformedBatch,
    NoResponder,
    RequestTimedOut,
    Unavailable,
)
from kvatlas.schemas.transfer import (
    LeaseGranted,
    LeaseMissing,
    LeaseRelease,
    LeaseReleased,
    LeaseRequest,
    TransferAnswer,
    TransferRequest,
    decode_transfer_answer,
    encode_transfer,
)
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pull_protocol import (
    BatchId,
    BlocksArrived,
    BlocksChecked,
    CheckAndFill,
    CloseBatch,
    Effect,
    EndPull,
    LeaseDenied,
    LeaseGiven,
    Owner,
    Priority,
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
from kvatlas.worker_hooks.transfer.pull_state import PullState, StoryLine
from kvatlas.worker_hooks.transfer.transport import (
    BouncePlaces,
    ReadStatus,
    Row,
    SourceRef,
    Transport,
    metadata_version,
)

#: subject, payload, timeout in seconds -> payload; raises Unavailable
Request: TypeAlias = Callable[[str, bytes, float], Awaitable[bytes]]

_RELEASE_SECONDS = 1.0
_BATCH_BYTES = 4 << 20


class PullResult(Struct, frozen=True):
    """What became of a pull; indexes are positions in what was asked."""

    held: Sequence[int]
    #: (index, reason), to be recomputed
    missing: Sequence[tuple[int, str]]
    num_bytes: int
    num_checksum_failures: int
    #: names of the transports that were used
    transports: tuple[str, ...]
    seconds: float

    @property
    def num_leading(self) -> int:
        """How many blocks from the first on are held: what a prefix can use."""
        missing = self.missing
        return missing[0][0] if missing else len(self.held)


class _Waiter(Struct):
    """Who asked for a pull."""

    future: "asyncio.Future[EndPull]"
    transports: set[str]


class _Work(Struct):
    """What a batch has in the shell: its owner's grant, then what was read."""

    subject: str
    waiter: _Waiter
    grant: LeaseGranted | None = None
    transport: Transport | None = None
    #: bounce places that go back when the batch is closed
    places: Sequence[int] = ()


class Puller:
    """Pulls for one worker; an `async with` owns what is under way.

    Transports are used in their order of preference, all over the same bounce places. They, the
    pool and the bus outlive the puller. Without settings, four reads share the bounce places.
    """

    def __init__(
        self,
        requester: str,
        fingerprint: bytes,
        pool: ServePool,
        bounce: BouncePlaces,
        transports: Sequence[Transport],
        request: Request,
        settings: PullSettings | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._requester, self._fingerprint = requester, fingerprint
        self._pool, self._request, self._clock_ns = pool, request, clock_ns
        self._transports = {transport.name: transport for transport in transports}
        self._bounce = bounce
        self._state = PullState(_fit(settings, bounce, pool.block_bytes))
        self._numbers = itertools.count(1)
        self._waiters: dict[int, _Waiter] = {}
        self._work: dict[BatchId, _Work] = {}
        #: the last known way to reach each subject's owner
        self._sources: dict[str, SourceRef] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: asyncio.TaskGroup

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for number in list(self._waiters):
            self._apply(PullCancelled(number))
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.__aexit__(kind, error, at)

    async def pull(
        self,
        hashes: bytes,
        slots: Sequence[int],
        owners: Sequence[Owner],
        deadline_seconds: float,
        priority: Priority = Priority.high,
    ) -> PullResult:
        """Bring blocks into slots that the engine has offered for them (`ServePool.offer`).

        Answers by the deadline and raises for no fault of a peer, bus or transport: what could not
        be had is `missing`. A slot is filled only while it is offered for its block.
        """
        if len(hashes) != len(slots) * BLOCK_HASH_BYTES:
            raise InvalidBlock(f"{len(hashes)} bytes of hashes for {len(slots)} slots")
        now_ns, number = self._clock_ns(), next(self._numbers)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), set())
        self._waiters[number] = waiter
        deadline_ns = now_ns + int(deadline_seconds * 1e9)
        self._apply(PullAsked(number, hashes, slots, owners, deadline_ns, priority))
        try:
            ended = await waiter.future
        except asyncio.CancelledError:
            self._apply(PullCancelled(number))
            raise
        return PullResult(
            ended.held,
            ended.missing,
            len(ended.held) * self._pool.block_bytes,
            ended.num_corrupt,
            tuple(sorted(waiter.transports)),
            (self._clock_ns() - now_ns) / 1e9,
        )

    async def connect(self, owner: Owner, source: SourceRef, deadline_seconds: float) -> bool:
        """Prepare for pulls from an owner whose source was announced; False when it failed."""
        transport = self._transports.get(source.transport)
        if transport is None:
            return False
        self._sources[owner.subject] = source
        return await transport.connect(source, deadline_seconds) is ReadStatus.done

    def story(self, block_hash: bytes) -> list[StoryLine]:
        """Return what is remembered of a block, oldest first."""
        return self._state.story(block_hash)

    # --- carrying out -----------------------------------------------------------------------

    def _apply(self, stimulus: Stimulus) -> None:
        """Tell the state what happened, and do what it says."""
        stimuli = [stimulus]
        while stimuli:
            for effect in self._state.handle(stimuli.pop(0), self._clock_ns()):
                follow_up = self._carry_out(effect)
                if follow_up is not None:
                    stimuli.append(follow_up)

    def _carry_out(self, effect: Effect) -> Stimulus | None:
        match effect:
            case RequestLease(batch):
                self._work[batch] = _Work(effect.owner.subject, self._waiters[effect.pull])
                self._start(self._request_lease(effect))
            case ReadBlocks(batch, deadline_ns):
                self._start(self._read(batch, deadline_ns))
            case CheckAndFill(batch, hashes, slots):
                return self._check_and_fill(batch, hashes, slots)
            case CloseBatch(batch):
                self._close(batch)
            case EndPull(pull):
                waiter = self._waiters.pop(pull)
                if not waiter.future.done():
                    waiter.future.set_result(effect)
            case WakeAt(time_ns):
                self._wake_at(time_ns)
        return None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)

    def _wake_at(self, time_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        seconds = max(0.0, (time_ns - self._clock_ns()) / 1e9)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._apply, TimePassed())

    # --- leases -----------------------------------------------------------------------------

    async def _request_lease(self, effect: RequestLease) -> None:
        known = self._sources.get(effect.owner.subject)
        asked_ns = self._clock_ns()
        request = LeaseRequest(
            fingerprint=self._fingerprint,
            hashes=effect.hashes,
            ttl_ms=effect.ttl_ms,
            requester=self._requester,
            transports=tuple(self._transports),
            epoch=effect.owner.epoch,
            known_metadata=known.metadata_version if known else 0,
        )
        answer = await self._send_request(effect.owner.subject, request, effect.deadline_ns)
        match answer:
            case LeaseGranted():
                self._apply(self._granted(effect, answer, asked_ns))
            case LeaseMissing(reason=reason):
                self._apply(LeaseDenied(effect.batch, reason))
            case LeaseReleased():
                self._apply(LeaseDenied(effect.batch, PullReason.malformed_answer))
            case PullReason():
                self._apply(LeaseDenied(effect.batch, answer))

    def _granted(
        self, effect: RequestLease, grant: LeaseGranted, asked_ns: int
    ) -> LeaseGiven | LeaseDenied:
        work = self._work[effect.batch]
        work.grant = grant
        transport = self._transports.get(grant.transport)
        source = self._source_of(effect.owner.subject, grant)
        is_sane = grant.missing_from <= len(effect.hashes) // BLOCK_HASH_BYTES
        if transport is None or source is None or not is_sane:
            return LeaseDenied(effect.batch, PullReason.malformed_answer)
        work.transport = transport
        expires_ns = asked_ns + grant.expires_in_ms * 1_000_000
        return LeaseGiven(effect.batch, grant.missing_from, expires_ns, grant.missing_reason)

    def _source_of(self, subject: str, grant: LeaseGranted) -> SourceRef | None:
        """Return how to reach the owner; None when neither grant nor memory tell."""
        if grant.metadata:
            if metadata_version(grant.metadata) != grant.metadata_version:
                return None
            source = SourceRef(grant.transport, grant.agent, grant.metadata, grant.metadata_version)
            self._sources[subject] = source
            return source
        known = self._sources.get(subject)
        is_same = known is not None and known.metadata_version == grant.metadata_version
        return known if is_same else None

    async def _send_request(
        self, subject: str, message: TransferRequest, deadline_ns: int
    ) -> TransferAnswer | PullReason:
        seconds = (deadline_ns - self._clock_ns()) / 1e9
        if seconds <= 0:
            return PullReason.timed_out
        try:
            payload = await self._request(subject, encode_transfer(message), seconds)
            return decode_transfer_answer(payload)
        except (RequestTimedOut, TimeoutError):
            return PullReason.timed_out
        except NoResponder:
            return PullReason.no_responder
        except Unavailable:
            return PullReason.bus_unavailable
        except MalformedBatch:
            return PullReason.malformed_answer

    def _close(self, batch: BatchId) -> None:
        work = self._work.pop(batch)
        if work.places:
            self._bounce.release(work.places)
        if work.grant is not None:
            self._start(self._release(work.subject, work.grant.lease_id))

    async def _release(self, subject: str, lease_id: int) -> None:
        """Tell the owner; it ends the lease by itself if this does not arrive."""
        deadline_ns = self._clock_ns() + int(_RELEASE_SECONDS * 1e9)
        await self._send_request(subject, LeaseRelease(lease_id=lease_id), deadline_ns)

    # --- reads ------------------------------------------------------------------------------

    async def _read(self, batch: BatchId, deadline_ns: int) -> None:
        work = self._work[batch]
        grant, transport = work.grant, work.transport
        source = self._sources.get(work.subject)
        assert grant is not None
        assert transport is not None
        if source is None or source.metadata_version != grant.metadata_version:
            self._apply(ReadFailed(batch, PullReason.lease_expired))  # its owner started again
            return
        rows = [Row(*row) for row in grant.rows]
        seconds = max(0.0, (deadline_ns - self._clock_ns()) / 1e9)
        outcome = await transport.read(source, rows, seconds)
        if outcome.status is not ReadStatus.done:
            self._apply(ReadFailed(batch, outcome.status))
            return
        work.places = outcome.places
        self._apply(BlocksArrived(batch))

    def _check_and_fill(self, batch: BatchId, hashes: bytes, slots: Sequence[int]) -> BlocksChecked:
        work = self._work[batch]
        assert work.grant is not None
        checksums = struct.unpack(f"<{len(slots)}Q", work.grant.checksums)
        filled = self._pool.fill(work.places, slots, list(split_hashes(hashes)), checksums)
        work.places = filled.places
        if len(filled.corrupt) + len(filled.revoked) < len(slots):
            work.waiter.transports.add(work.grant.transport)
        return BlocksChecked(batch, filled.corrupt, filled.revoked)


def _fit(settings: PullSettings | None, bounce: BouncePlaces, block_bytes: int) -> PullSettings:
    """Return settings whose reads have room, or raise InvalidSetting."""
    if settings is None:
        largest = max(1, _BATCH_BYTES // block_bytes)
        batch_blocks = max(1, min(bounce.num_places // 4, largest, 256))
        num_reads = max(1, min(4, bounce.num_places // batch_blocks))
        return PullSettings(batch_blocks, num_reads, 2 * num_reads, 2 * num_reads)
    if settings.batch_blocks * settings.max_reads > bounce.num_places:
        problem = f"{settings.max_reads} x {settings.batch_blocks} for {bounce.num_places} places"
        raise InvalidSetting("batch_blocks", "pull", problem)
    return settings
