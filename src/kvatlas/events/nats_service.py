"""Serving requests over core NATS: a subscription that follows the connection."""

import asyncio
import logging
from contextlib import suppress
from functools import partial

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.events.bus import OnRequest
from kvatlas.events.nats_connection import NatsConnection
from kvatlas.events.nats_errors import DRIVER_ERRORS
from kvatlas.schemas.errors import BusUnavailable

#: a reply with this header is an error, told by its value
ERROR_HEADER = "Kvatlas-Error"
MAX_ERROR_CHARS = 500
#: requests answered at a time; what comes beyond is told so at once
MAX_OPEN_REQUESTS = 256

_logger = logging.getLogger(__name__)


class NatsService:
    """The `Subscription` of `serve`."""

    def __init__(self, connection: NatsConnection, subject: str, handler: OnRequest) -> None:
        self._connection, self._subject, self._handler = connection, subject, handler
        #: requests being answered
        self._open: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        #: of `start`: done when requests arrive or never will
        self._first: asyncio.Future[None] | None = None
        self.num_healed = 0
        self.is_closed = False

    async def start(self) -> None:
        """Return when requests arrive."""
        self._first = first = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(first))
        try:
            await first
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        self.is_closed = True
        tasks = {task for task in (self._task, *self._open) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._first is not None and not self._first.done():
            self._first.set_exception(BusUnavailable("the bus is closed"))

    async def _run(self, first: asyncio.Future[None]) -> None:
        client: Client | None = None
        while True:
            client = await self._connection.next_client(client)
            try:
                subscription = await client.subscribe(
                    self._subject, cb=partial(self._on_request, client)
                )
            except DRIVER_ERRORS as error:
                _logger.warning("cannot serve %s yet: %s", self._subject, error)
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

    async def _on_request(self, client: Client, request: Msg) -> None:
        if len(self._open) >= MAX_OPEN_REQUESTS:
            await _answer_error(client, request, f"busy with {MAX_OPEN_REQUESTS} requests")
            return
        task = asyncio.create_task(self._answer(client, request))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _answer(self, client: Client, request: Msg) -> None:
        # gathered, so that whatever the handler raises comes back as a value
        (answer,) = await asyncio.gather(self._handle(request.data), return_exceptions=True)
        if isinstance(answer, BaseException):
            _logger.warning("a request to %s failed", self._subject, exc_info=answer)
            await _answer_error(client, request, f"{type(answer).__name__}: {answer}")
        elif len(answer) > client.max_payload:
            await _answer_error(client, request, f"an answer of {len(answer)} bytes")
        elif request.reply:
            with suppress(*DRIVER_ERRORS):  # who asked waits for the connection that is lost
                await client.publish(request.reply, answer)

    async def _handle(self, payload: bytes) -> bytes:
        return await self._handler(payload)


async def _answer_error(client: Client, request: Msg, text: str) -> None:
    if request.reply:
        with suppress(*DRIVER_ERRORS):
            await client.publish(
                request.reply, headers={ERROR_HEADER: text[:MAX_ERROR_CHARS] or "failed"}
            )
