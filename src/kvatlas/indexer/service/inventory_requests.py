"""Asking instances for their inventories until the fold needs them no more."""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator

from kvatlas.events.bus import Bus
from kvatlas.events.subjects import inventory_subject
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.schemas.errors import BusUnavailable, RequestFailed
from kvatlas.schemas.ids import InstanceId

#: how often it is looked whether an inventory that is under way has helped
LOOK_SECONDS = 0.01

_logger = logging.getLogger(__name__)


class _RequestSlot:
    """One of few turns, ended once: by who has it or when its time is over."""

    def __init__(self, free: asyncio.Semaphore) -> None:
        self._free, self._is_over = free, False

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._free.release()


class InventoryRequests:
    """One repair at a time per instance, a few in all, with growing pauses; see ServiceSettings.

    An answer only says that the inventory is on its way through the log. The next instance has its
    turn when that has helped, so that however many are broken at once, few inventories come
    between requests; or after the pause and no later than a request's time limit, so that one which
    does not help holds up nobody for long, and already when patience with one that does not answer
    is over, which is still waited for. Then the instance is asked again. Replicas ask each for
    themselves, so the first request waits a random while, in which another's answer may arrive. Who
    has not healed after so many requests is given up once, and asked on.
    """

    def __init__(
        self,
        bus: Bus,
        state: IndexState,
        settings: IndexServiceLimits,
        on_give_up: Callable[[InstanceId], None],
    ) -> None:
        self._bus, self._state, self._settings = bus, state, settings
        self._on_give_up = on_give_up
        self._free = asyncio.Semaphore(settings.max_inventory_requests)
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
                tasks.create_task(self._request_in_slot(await self._news.get()))

    async def _request_in_slot(self, instance: InstanceId) -> None:
        await asyncio.sleep(random.random() * self._settings.inventory_jitter_seconds)
        while self._wants(instance):
            await self._request_until_repaired(instance)
        self._wanted.discard(instance)

    async def _request_until_repaired(self, instance: InstanceId) -> None:
        """Ask with growing pauses; the last one passes also after it has healed."""
        settings = self._settings
        seconds = settings.inventory_retry_seconds, settings.inventory_max_retry_seconds
        for number, pause in enumerate(pauses(*seconds)):
            if number == settings.max_vain_inventory_requests:
                self._on_give_up(instance)
            at_most = min(pause, settings.inventory_timeout_seconds)
            waited_seconds = await self._request_once(instance, at_most)
            has_healed = not self._wants(instance)
            await asyncio.sleep(pause - waited_seconds)
            if has_healed or not self._wants(instance):
                return

    async def _request_once(self, instance: InstanceId, seconds: float) -> float:
        """Ask when it is its turn; return for how many seconds an answer was given to help."""
        await self._free.acquire()
        turn = _RequestSlot(self._free)
        timer = asyncio.get_running_loop().call_later(
            self._settings.inventory_patience_seconds, turn.end
        )
        try:
            if self._wants(instance) and await self.ask_once(instance):
                timer.cancel()
                return await self._until_repaired(instance, seconds)
            return 0.0
        finally:
            timer.cancel()
            turn.end()

    def _wants(self, instance: InstanceId) -> bool:
        return self._state.fleet.wants_inventory(instance)

    async def ask_once(self, instance: InstanceId) -> bool:
        """Ask for an inventory, whoever it is; return whether there was an answer."""
        self.num_requests += 1
        try:
            await self._bus.request(
                inventory_subject(instance), b"", self._settings.inventory_timeout_seconds
            )
        except (BusUnavailable, RequestFailed) as error:
            self.num_failed_requests += 1
            # names that somebody invents must not each have a line
            is_known = self._state.instance(instance) is not None
            level = logging.INFO if is_known else logging.DEBUG
            _logger.log(level, "no inventory of %s yet: %s", instance, error)
            return False
        return True

    async def _until_repaired(self, instance: InstanceId, seconds: float) -> float:
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
