"""How the reference engine gets blocks from peers while a request waits in its queue."""

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from kvatlas.reference.clock import ModelClock
from kvatlas.reference.requests import PullCounts, Request
from kvatlas.reference.store import BlockStore
from kvatlas.schemas.errors import SidecarUnavailable
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import PullStep
from kvatlas.worker_hooks.sidecar.channel import PullEnded

#: blocks checked before other tasks run
_BLOCKS_PER_TURN = 32


class PullChannel(Protocol):
    """Who pulls for the engine: its sidecar."""

    async def pull(
        self,
        hashes: bytes,
        slots: Sequence[int],
        owners: Sequence[InstanceId],
        deadline_seconds: float,
    ) -> PullEnded:
        """Fill offered slots with blocks of owners, tried in order."""
        ...


class BlockPuller:
    """Brings the blocks that a plan names into the cache; what does not come is computed.

    A block is pulled once at a time: a second request waits for the first one's pull.
    """

    def __init__(
        self,
        store: BlockStore,
        channel: PullChannel,
        clock: ModelClock,
        deadline_seconds: float,
    ) -> None:
        self._store, self._channel, self._clock = store, channel, clock
        self._deadline_seconds = deadline_seconds
        #: block on its way -> set when its pull has ended
        self._under_way: dict[bytes, asyncio.Event] = {}

    async def pull(self, request: Request) -> None:
        """Pull what the plan of a request names beyond what is cached here.

        Afterwards `request.slots` are in use for the leading blocks, cached ones and pulled ones.
        """
        assert request.plan is not None
        started = self._clock.now()
        while True:
            self._hold_cached(request)
            wanted = self._wanted(request)
            if not wanted:
                return
            other = self._under_way.get(request.chain[wanted[0]])
            if other is None:
                break
            self._store.free(request.slots)
            request.slots = []
            await other.wait()
        slots = self._offered_slots(request, wanted)
        if slots:
            await self._bring(request, wanted, slots, started)

    def _hold_cached(self, request: Request) -> None:
        cached = self._store.pool.match(request.chain[: request.max_reuse_blocks])
        self._store.pool.use(cached)
        request.slots = cached

    def _wanted(self, request: Request) -> range:
        """Return the blocks to pull: from the first that is not cached to the plan's last."""
        assert request.plan is not None
        end = max((s.first_block + s.num_blocks for s in request.plan.pulls), default=0)
        return range(len(request.slots), min(end, request.max_reuse_blocks))

    def _offered_slots(self, request: Request, wanted: range) -> list[int]:
        slots = self._store.allocate(len(wanted))
        if slots is None:
            return []
        assert self._store.memory is not None
        hashes = b"".join(request.chain[wanted.start : wanted.stop])
        if not self._store.memory.offer(slots, hashes):
            self._store.pool.free(slots)
            return []
        return slots

    async def _bring(
        self, request: Request, wanted: range, slots: list[int], started: float
    ) -> None:
        ended = asyncio.Event()
        hashes = request.chain[wanted.start : wanted.stop]
        self._under_way.update(dict.fromkeys(hashes, ended))
        num_right, answers, num_wrong = 0, [], 0
        try:
            answers = await self._ask_owners(request, wanted, slots)
            held = {wanted.start + position for a in answers for position in a.held}
            while wanted.start + num_right in held:
                if not self._store.is_right(hashes[num_right], slots[num_right]):
                    num_wrong = 1
                    break
                num_right += 1
                if num_right % _BLOCKS_PER_TURN == 0:
                    await asyncio.sleep(0)
        finally:
            self._store.give_up(slots[num_right:])
            self._store.publish(request, wanted.start, slots[:num_right])
            request.slots += slots[:num_right]
            request.pulled.update(hashes[:num_right])
            for block_hash in hashes:
                del self._under_way[block_hash]
            ended.set()
        request.pull_result = PullCounts(
            bytes=sum(answer.num_bytes for answer in answers),
            verified=num_right,
            failed=num_wrong + sum(answer.checksum_failures for answer in answers),
            missing=len(wanted) - num_right,
            transport=next((a.transport for a in answers if a.transport), ""),
            ms=(self._clock.now() - started) * 1000,
        )

    async def _ask_owners(
        self, request: Request, wanted: range, slots: list[int]
    ) -> list[PullEnded]:
        """Ask for runs of blocks that the plan gives to one owner, all at the same time.

        `held` in the answers counts from the beginning of `wanted`. A sidecar that is gone counts
        as nothing held.
        """
        assert request.plan is not None
        steps = request.plan.pulls
        runs = [list(run) for _, run in groupby(wanted, lambda block: _owners(steps, block))]

        async def ask(run: list[int]) -> PullEnded | None:
            first = run[0] - wanted.start
            with contextlib.suppress(SidecarUnavailable):
                answer = await self._channel.pull(
                    b"".join(request.chain[run[0] : run[-1] + 1]),
                    slots[first : first + len(run)],
                    _owners(steps, run[0]),
                    self._deadline_seconds,
                )
                return _shifted(answer, first)
            return None

        answers = await asyncio.gather(*(ask(run) for run in runs))
        return [answer for answer in answers if answer is not None]


def _owners(steps: Sequence[PullStep], block: int) -> tuple[InstanceId, ...]:
    """Return whom to ask for a block: first who the plan says, or the first of all for a hole."""
    covering = [s for s in steps if s.first_block <= block < s.first_block + s.num_blocks]
    order = [*covering, *steps]
    return tuple(dict.fromkeys(InstanceId(step.worker, step.rank) for step in order))


def _shifted(answer: PullEnded, by: int) -> PullEnded:
    return PullEnded(
        answer.id,
        tuple(position + by for position in answer.held),
        answer.missing,
        answer.num_bytes,
        answer.transport,
        answer.checksum_failures,
        answer.seconds,
    )
