"""Serving requests over core NATS."""

import asyncio
import logging
from contextlib import suppress

from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.events.bus import OnRequest
from kvatlas.events.nats.connection import NatsConnection
from kvatlas.events.nats.errors import DRIVER_ERRORS
from kvatlas.events.nats.reading.subscription import NatsListener
from kvatlas.schemas.errors import KvatlasError

#: a reply with this header is an error, told by its value
ERROR_HEADER = "Kvatlas-Error"
MAX_ERROR_CHARS = 500
#: requests answered at a time; what comes beyond is told so at once
MAX_OPEN_REQUESTS = 256

_logger = logging.getLogger(__name__)


class NatsService:
    """The `Subscription` of `serve`."""

    def __init__(self, connection: NatsConnection, subject: str, handler: OnRequest) -> None:
        self._subject, self._handler = subject, handler
        self._listener = NatsListener(connection, subject, self._on_request)
        #: requests being answered
        self._open: set[asyncio.Task[None]] = set()

    @property
    def num_healed(self) -> int:
        return self._listener.num_healed

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._listener.is_closed

    async def start(self) -> None:
        """Return when requests arrive."""
        await self._listener.start()

    async def close(self) -> None:
        await self._listener.close()
        for task in tuple(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

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
            if not isinstance(
                answer, KvatlasError
            ):  # a refusal is an answer, and any client's work
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
