"""Asking instances for their inventories until the fold needs them no more."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator

from kvatlas.events.bus import Bus
from kvatlas.events.subjects import inventory_subject
from kvatlas.indexer.state import IndexState
from kvatlas.schemas.errors import BusUnavailable, RequestFailed
from kvatlas.schemas.ids import InstanceId

#: how often it is looked whether an inventory that is under way has helped
LOOK_SECONDS = 0.01

_logger = logging.getLogger(__name__)


class _Place:
    """One of few places, left once: by who has it or when its time is over."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free, self._is_left = free, False

    def leave(self) -> None:
        if not self._is_left:
            self._is_left = True
            self._free.release()


class InventoryRequests:
    """One repair at a time per instance, `max_requests` in all, with growing pauses.

    An answer only says that the inventory is on its way through the log. The next instance has its
    turn when that has helped, so that however many are broken at once, few inventories come
    between requests; or after the pause and no later than `timeout_seconds`, so that one which
    does not help holds up nobody for long, and already after `patience_seconds` without an answer,
    which is still waited for. Then the instance is asked again. Replicas ask each for
    themselves, so the first request waits a random part of `jitter_seconds`, in which another's
    answer may arrive. Who has not healed after `give_up_after` requests is given up once, and
    asked on.
    """

    def __init__(
        self,
        bus: Bus,
        state: IndexState,
        *,
        jitter_seconds: float,
        timeout_seconds: float,
        patience_seconds: float,
        retry_seconds: float,
        max_retry_seconds: float,
        max_requests: int,
        give_up_after: int,
        on_give_up: Callable[[InstanceId], None],
    ) -> None:
        self._bus, self._state = bus, state
        self._jitter_seconds, self._timeout_seconds = jitter_seconds, timeout_seconds
        self._patience_seconds = patience_seconds
        self._retry_seconds, self._max_retry_seconds = retry_seconds, max_retry_seconds
        self._give_up_after, self._on_give_up = give_up_after, on_give_up
        self._free = asyncio.Semaphore(max_requests)
        #: instances with a task of their own, or about to get one
        self._wanted: set[InstanceId] = set()
        #: those of `_wanted` without a task yet, so it needs no bound of its own
        self._news: asyncio.Queue[InstanceId] = asyncio.Queue()
        self.num_requests = 0
        self.num_failed_requests = 0

    def want(self, instance: InstanceId) -> None:
        """Ask an instance in a moment, if it is not being asked already."""
        if instance not in self._wanted:
            self._wanted.add(instance)
            self._news.put_nowait(instance)

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._ask(await self._news.get()))

    async def _ask(self, instance: InstanceId) -> None:
        await asyncio.sleep(random.random() * self._jitter_seconds)
        while self._wants(instance):
            await self._ask_until_healed(instance)
        self._wanted.discard(instance)

    async def _ask_until_healed(self, instance: InstanceId) -> None:
        """Ask with growing pauses; the last one passes also after it has healed."""
        for number, pause in enumerate(pauses(self._retry_seconds, self._max_retry_seconds)):
            if number == self._give_up_after:
                self._on_give_up(instance)
            waited_seconds = await self._ask_once(instance, min(pause, self._timeout_seconds))
            has_healed = not self._wants(instance)
            await asyncio.sleep(pause - waited_seconds)
            if has_healed or not self._wants(instance):
                return

    async def _ask_once(self, instance: InstanceId, seconds: float) -> float:
        """Ask when there is a place; return how long it was waited for help after the answer."""
        await self._free.acquire()
        place = _Place(self._free)
        timer = asyncio.get_running_loop().call_later(self._patience_seconds, place.leave)
        try:
            if self._wants(instance) and await self._request(instance):
                timer.cancel()
                return await self._until_healed(instance, seconds)
            return 0.0
        finally:
            timer.cancel()
            place.leave()

    def _wants(self, instance: InstanceId) -> bool:
        return self._state.fleet.wants_inventory(instance)

    async def _request(self, instance: InstanceId) -> bool:
        """Return whether there was an answer."""
        self.num_requests += 1
        try:
            await self._bus.request(inventory_subject(instance), b"", self._timeout_seconds)
        except (BusUnavailable, RequestFailed) as error:
            self.num_failed_requests += 1
            _logger.info("no inventory of %s yet: %s", instance, error)
            return False
        return True

    async def _until_healed(self, instance: InstanceId, seconds: float) -> float:
        """Return when the inventory has helped, or after so long, how long that took."""
        began = time.monotonic()
        # few look at a time, and to tell them of each message would cost each message
        while self._wants(instance) and time.monotonic() - began < seconds:  # noqa: ASYNC110
            await asyncio.sleep(min(LOOK_SECONDS, seconds))
        return time.monotonic() - began


def pauses(first_seconds: float, longest_seconds: float) -> Iterator[float]:
    """Yield how long to wait after each request: twice as long each time, up to the longest."""
    seconds = min(first_seconds, longest_seconds)
    while True:
        yield seconds
        seconds = min(2 * seconds, longest_seconds)
