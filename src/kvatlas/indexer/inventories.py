"""Asking instances for their inventories until the fold needs them no more."""

import asyncio
import logging
import random
from collections.abc import Callable
from itertools import count

from kvatlas.events.bus import Bus
from kvatlas.events.subjects import inventory_subject
from kvatlas.indexer.state import IndexState
from kvatlas.schemas.errors import BusUnavailable, RequestFailed
from kvatlas.schemas.ids import InstanceId

_logger = logging.getLogger(__name__)


class InventoryRequests:
    """One request at a time per instance, `max_requests` in all, with growing pauses.

    An answer only says that the inventory is on its way through the log; the instance is asked
    again when it has not healed after the pause. Replicas ask each for themselves, so the first
    request waits a random part of `jitter_seconds`, in which another's answer may arrive. Who has
    not healed after `give_up_after` requests is given up once, and asked on.
    """

    def __init__(
        self,
        bus: Bus,
        state: IndexState,
        *,
        jitter_seconds: float,
        timeout_seconds: float,
        retry_seconds: float,
        max_retry_seconds: float,
        max_requests: int,
        give_up_after: int,
        on_give_up: Callable[[InstanceId], None],
    ) -> None:
        self._bus, self._state = bus, state
        self._jitter_seconds, self._timeout_seconds = jitter_seconds, timeout_seconds
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
        pause, retry = random.random() * self._jitter_seconds, self._retry_seconds
        for number in count():
            await asyncio.sleep(pause)
            if not self._state.wants_inventory(instance):
                break
            if number == self._give_up_after:
                self._on_give_up(instance)
            async with self._free:
                await self._request(instance)
            pause, retry = retry, min(2 * retry, self._max_retry_seconds)
        self._wanted.discard(instance)

    async def _request(self, instance: InstanceId) -> None:
        self.num_requests += 1
        try:
            await self._bus.request(inventory_subject(instance), b"", self._timeout_seconds)
        except (BusUnavailable, RequestFailed) as error:
            self.num_failed_requests += 1
            _logger.info("no inventory of %s yet: %s", instance, error)
