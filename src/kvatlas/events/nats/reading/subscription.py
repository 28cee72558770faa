"""Listening on a subject of core NATS: a subscription that follows the connection."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.events.nats.connection import NatsConnection
from kvatlas.events.nats.errors import DRIVER_ERRORS
from kvatlas.schemas.errors import BusUnavailable

_logger = logging.getLogger(__name__)

OnArrival = Callable[[Client, Msg], Awaitable[None]]


class NatsListener:
    """Calls back with each message of a subject, over one connection after the other.

    The `Subscription` of `listen`. What comes while there is no connection is lost.
    """

    def __init__(self, connection: NatsConnection, subject: str, on_arrival: OnArrival) -> None:
        self._connection, self._subject, self._on_arrival = connection, subject, on_arrival
        self._task: asyncio.Task[None] | None = None
        #: of `start`: done when messages arrive or never will
        self._first: asyncio.Future[None] | None = None
        #: times that it listened again after a connection was lost
        self.num_healed = 0
        self.is_closed = False

    async def start(self) -> None:
        """Return when messages arrive."""
        self._first = first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(first))
        try:
            await first
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        self.is_closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._first is not None and not self._first.done():
            self._first.set_exception(BusUnavailable("the bus is closed"))

    async def _arrived(self, client: Client, message: Msg) -> None:
        if not self.is_closed:
            await self._on_arrival(client, message)

    async def _run(self, first: asyncio.Future[None]) -> None:
        client: Client | None = None
        while True:
            client = here = await self._connection.next_client(client)

            async def arrived(message: Msg, client: Client = here) -> None:
                await self._arrived(client, message)

            try:
                subscription = await client.subscribe(self._subject, cb=arrived)
            except DRIVER_ERRORS as error:
                _logger.warning("cannot listen on %s yet: %s", self._subject, error)
                continue
            try:
                await self._connection.settle(client)
                if first.done():
                    self.num_healed += 1
                else:
                    first.set_result(None)
                await self._connection.lost(client)
            finally:
                with suppress(nats.errors.Error):  # its connection is gone, and it with it
                    await subscription.unsubscribe()
