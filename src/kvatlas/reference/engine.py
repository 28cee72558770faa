"""The reference engine: a paged engine with prefix caching, on a clock of its own.

    submit -> waiting -> [pull from peers] -> prefill, one at a time -> decode, all at once -> done
                 ^------------------------- preempted, when no slot is left ------'

What it caches, evicts and reports is real, and so are the bytes; only the arithmetic of a model is
replaced by its duration.
"""

import asyncio
import contextlib
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from msgspec import Struct

from kvatlas.reference.clock import ModelClock
from kvatlas.reference.pulls import BlockPuller, PullChannel
from kvatlas.reference.requests import Completion, FirstPrefill, Request
from kvatlas.reference.store import BlockStore, SlotMemory
from kvatlas.schemas.errors import EngineStopped, InvalidRequest, PromptTooLarge
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, pack_tokens
from kvatlas.schemas.routing import Plan
from kvatlas.worker_hooks.reporting.hook import WorkerHook

#: how often an idle engine looks whether its sidecar wants a listing
PUMP_SECONDS = 0.05
#: how often a request without slots tries again: leases of peers end without a word
RETRY_SECONDS = 0.02
_BLOCKS_PER_TURN = 32
_MAX_HASHERS = 1024


class EngineOptions(Struct, frozen=True):
    """What engine to play. Too few blocks preempt, too slow a prefill queues."""

    model: str
    descriptor: NamespaceDescriptor
    num_blocks: int
    block_bytes: int
    prefill_tokens_per_second: float = 10_000.0
    #: of each request while it decodes
    decode_tokens_per_second: float = 50.0
    #: real time after which a pull is given up
    pull_deadline_seconds: float = 2.0
    fleet_key: bytes = b""


class ReferenceEngine:
    """Serves prompts inside `async with`; leaving it drops what is under way.

    Without `memory` its blocks have no bytes, without `channel` it pulls nothing.
    """

    def __init__(
        self,
        options: EngineOptions,
        hook: WorkerHook,
        clock: ModelClock,
        memory: SlotMemory | None = None,
        channel: PullChannel | None = None,
    ) -> None:
        self.options = options
        self.store = BlockStore(options.num_blocks, options.block_bytes, hook, memory)
        self._hook, self._clock = hook, clock
        self._puller = None
        if channel is not None and memory is not None:
            deadline = options.pull_deadline_seconds
            self._puller = BlockPuller(self.store, channel, clock, deadline)
        self._hashers: OrderedDict[str | None, BlockHasher] = OrderedDict()
        self._waiting: deque[Request] = deque()
        self._prefilling: Request | None = None
        #: in the order in which they began to decode; the last is preempted first
        self._decoding: list[Request] = []
        #: model time until which the prefill unit is busy
        self._prefill_free_at = 0.0
        #: something happened that a waiting request may have waited for
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._loops = [
            self._tasks.create_task(self._prefill_loop()),
            self._tasks.create_task(self._pump_loop()),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        prefilling = () if self._prefilling is None else (self._prefilling,)
        requests = [*self._waiting, *prefilling, *self._decoding]
        for task in [*self._loops, *(r.task for r in requests if r.task is not None)]:
            task.cancel()
        # an error of the body stays what it is; a cancellation may come from the group itself
        is_cancelled = kind is asyncio.CancelledError
        await self._tasks.__aexit__(*((kind, error, at) if is_cancelled else (None, None, None)))
        for request in requests:
            if not request.done.done():
                request.done.set_exception(EngineStopped("the engine stopped"))

    async def submit(
        self,
        prompt: bytes | list[int],
        max_tokens: int = 1,
        cache_salt: str | None = None,
        plan: Plan | None = None,
        on_tokens: Callable[[bytes], None] | None = None,
    ) -> Completion:
        """Serve a prompt (ids, or packed u32 LE) and return how it went.

        `on_tokens` gets the tokens of the output as they come, packed, each of them once.
        Raises PromptTooLarge for what never fits, InvalidBlock for what are no tokens. Cancelling
        it takes the request out of the engine.
        """
        packed = pack_tokens(prompt)
        self._check_size(len(packed) // 4, max_tokens)
        hasher = self._hasher(cache_salt)
        request = Request(packed, max_tokens, hasher, cache_salt, self._clock.now())
        request.plan, request.on_tokens = plan, on_tokens
        self._waiting.append(request)
        if plan is not None and plan.pulls and self._puller is not None:
            request.is_pulling = True
            request.task = self._tasks.create_task(self._pull(request))
        self._changed.set()
        try:
            return await request.done
        finally:
            self._withdraw(request)

    def reset(self) -> bool:
        """Drop the whole cache; False, and nothing happens, while requests use slots."""
        return self.store.reset()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._decoding) + (self._prefilling is not None)

    # --- waiting ---------------------------------------------------------------------------

    def _check_size(self, num_tokens: int, max_tokens: int) -> None:
        if num_tokens < 1 or max_tokens < 1:
            raise InvalidRequest("prompt", "takes at least one token in and one out")
        needed = math.ceil((num_tokens + max_tokens) / self.options.descriptor.block_tokens)
        if needed > self.options.num_blocks:
            limit = self.options.num_blocks
            raise PromptTooLarge("prompt", f"needs {needed} blocks, the engine has {limit}")

    def _hasher(self, salt: str | None) -> BlockHasher:
        hasher = self._hashers.get(salt)
        if hasher is None:
            namespace = self.options.descriptor.namespace(self.options.model, None, salt)
            hasher = self._hashers[salt] = BlockHasher(namespace, self.options.fleet_key)
            if len(self._hashers) > _MAX_HASHERS:
                self._hashers.popitem(last=False)
        return hasher

    async def _pull(self, request: Request) -> None:
        assert self._puller is not None
        try:
            await self._puller.pull(request)
        finally:
            request.is_pulling = False
            request.ready_at = self._clock.now()
            self._changed.set()
            if request.is_withdrawn:
                self._release(request)

    def _withdraw(self, request: Request) -> None:
        """Take out a request that is done, or that its caller gave up."""
        request.is_withdrawn = True
        if request in self._waiting:
            self._waiting.remove(request)
        if request in self._decoding:
            self._decoding.remove(request)
        if request.task is not None:
            request.task.cancel()
        if not request.is_pulling:
            self._release(request)

    def _release(self, request: Request) -> None:
        if request.slots:
            self.store.free(request.slots)
            request.slots = []
            self._changed.set()

    # --- prefill ---------------------------------------------------------------------------

    async def _prefill_loop(self) -> None:
        while True:
            request = next((r for r in self._waiting if not r.is_pulling), None)
            if request is None:
                await self._changed.wait()
                self._changed.clear()
            elif (num_reused := self._take_slots(request)) is None:
                await self._wait_for_slots()
                request.ready_at = self._clock.now()
            else:
                self._waiting.remove(request)
                self._prefilling = request
                await self._prefill(request, num_reused)
                self._prefilling = None

    def _take_slots(self, request: Request) -> int | None:
        """Give a request slots for all its tokens; return how many hold KV already.

        None if there are not enough; then later requests have let go of what they held early.
        """
        reused = self.store.pool.match(request.chain[: request.max_reuse_blocks])
        self.store.pool.use(reused)
        self._release(request)
        num_blocks = math.ceil(request.num_tokens / request.block_tokens)
        fresh = self.store.allocate(num_blocks - len(reused))
        if fresh is None:
            self.store.free(reused)
            self._take_back_early_holds()
            return None
        request.slots = [*reused, *fresh]
        return len(reused)

    def _take_back_early_holds(self) -> None:
        for request in reversed(self._waiting):
            if not request.is_pulling:
                self._release(request)

    async def _wait_for_slots(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_SECONDS):
                await self._changed.wait()
        self._changed.clear()

    async def _prefill(self, request: Request, num_reused: int) -> None:
        num_computed = request.num_tokens - num_reused * request.block_tokens
        started = max(self._prefill_free_at, request.ready_at)
        ended = started + num_computed / self.options.prefill_tokens_per_second
        self._prefill_free_at = ended
        if request.first_prefill is None:
            num_pulled = sum(block in request.pulled for block in request.chain[:num_reused])
            request.first_prefill = FirstPrefill(
                num_reused - num_pulled, num_pulled, num_computed, started, ended
            )
        await self._clock.sleep_until(ended)
        for first in range(num_reused, len(request.chain), _BLOCKS_PER_TURN):
            if request.is_withdrawn:
                return
            self._compute(request, first, min(first + _BLOCKS_PER_TURN, len(request.chain)))
            await asyncio.sleep(0)
        if not request.is_withdrawn:
            request.generate(1)
            self._decoding.append(request)
            request.task = self._tasks.create_task(self._decode(request, ended))

    def _compute(self, request: Request, first: int, end: int) -> None:
        for position in range(first, end):
            self.store.compute(request.chain[position], request.slots[position])
        self.store.publish(request, first, request.slots[first:end])

    # --- decode ----------------------------------------------------------------------------

    async def _decode(self, request: Request, moment: float) -> None:
        """Generate to the end, a block at a time; the last token of all has no KV."""
        block_tokens = request.block_tokens
        while request.num_generated < request.max_tokens:
            num_with_kv = request.num_tokens - 1
            room = len(request.slots) * block_tokens - num_with_kv
            if room == 0:
                slots = self.store.allocate(1)
                if slots is None:
                    if self._make_room_for(request):
                        return
                    await self._wait_for_slots()
                    moment = max(moment, self._clock.now())
                    continue
                request.slots += slots
                room = block_tokens
            steps = min(room, request.max_tokens - request.num_generated)
            moment += steps / self.options.decode_tokens_per_second
            await self._clock.sleep_until(moment)
            request.generate(steps)
            full_before, full_now = (n // block_tokens for n in (num_with_kv, num_with_kv + steps))
            self._compute(request, full_before, full_now)
        self._finish(request, moment)

    def _make_room_for(self, request: Request) -> bool:
        """Take slots from who has them for the shortest time; True if that is the request itself.

        It goes back to the head of the queue, with all its tokens, and finds in the cache what
        nobody has evicted by then. The only one that decodes waits instead.
        """
        self._take_back_early_holds()
        if self._changed.is_set() or len(self._decoding) == 1:
            return False
        victim = self._decoding.pop()
        victim.num_preemptions += 1
        victim.ready_at = self._clock.now()
        if victim is not request:
            assert victim.task is not None
            victim.task.cancel()
        self._release(victim)
        self._waiting.appendleft(victim)
        return victim is request

    def _finish(self, request: Request, moment: float) -> None:
        first = request.first_prefill
        assert first is not None
        self._decoding.remove(request)
        self._release(request)
        queue, prefill = first.started - request.arrived, first.ended - first.started
        request.done.set_result(
            Completion(
                local_blocks=first.local_blocks,
                pulled_blocks=first.pulled_blocks,
                computed_blocks=request.num_prompt_blocks
                - first.local_blocks
                - first.pulled_blocks,
                prompt_blocks=request.num_prompt_blocks,
                prompt_tokens=request.num_prompt_tokens,
                computed_tokens=first.computed_tokens,
                output_tokens=request.num_generated,
                num_preemptions=request.num_preemptions,
                queue_ms=queue * 1000,
                prefill_ms=prefill * 1000,
                ttft_ms=(queue + prefill) * 1000,
                total_ms=(moment - request.arrived) * 1000,
                pull=request.pull_result,
            )
        )

    async def _pump_loop(self) -> None:
        while True:
            self._hook.pump()
            await asyncio.sleep(PUMP_SECONDS)
