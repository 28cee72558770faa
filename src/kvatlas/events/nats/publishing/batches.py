"""A publisher's way through batches of the broker's fast ingest: sends what `FastIngest` decides.

Messages under way are all of one batch or all single, so that none overtakes another. Whatever is
wrong with a batch is trouble of all subjects (window.py), and they go one by one for a while.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from secrets import token_hex

from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.events.nats.errors import DRIVER_ERRORS
from kvatlas.events.nats.publishing.fast_ingest import FastIngest, IngestPhase, decode_answer
from kvatlas.events.nats.publishing.window import Unacked, Window

#: sends (number, message, reply subject)
Send = Callable[[Client, int, Unacked, str], Awaitable[None]]

_logger = logging.getLogger(__name__)


class Batches:
    """The batches of one publisher. `wake` has its task call `go_on`; `forget` takes answers."""

    def __init__(
        self,
        stream_name: str,
        window: Window,
        ingest: FastIngest,
        send: Send,
        forget: Callable[[int], None],
        wake: Callable[[], None],
    ) -> None:
        self._stream_name = stream_name
        self._window, self._ingest = window, ingest
        self._send, self._forget, self._wake = send, forget, wake
        #: below it come the answers to the present batch
        self._prefix = ""
        #: of the batch's newest message, which its end is published to
        self._subject = ""
        #: the look at the window before which that end was sent
        self._end_look = 0

    def look_for_business(self) -> None:
        """Leave the single way, if so much waits that a batch pays."""
        window, ingest = self._window, self._ingest
        num_unacked = len(window.messages)
        if (
            num_unacked >= ingest.busy_messages
            and not window.stalled
            and ingest.wants_batch(num_unacked, window.num_bytes, asyncio.get_running_loop().time())
        ):
            ingest.drain()

    def hurry(self) -> None:
        """Have the batch ended if the publisher waits for an answer that is not due."""
        if self._ingest.phase is IngestPhase.open:
            self._ingest.hurry()
            if self._ingest.is_ending:
                self._wake()

    async def append(self, client: Client, number: int, unacked: Unacked) -> None:
        """Send the batch's next message."""
        self._subject = unacked.subject
        await self._send(client, number, unacked, self._ingest.next_reply())

    async def go_on(self, client: Client, replies: str, is_flushing: bool) -> None:
        """Do what the phase asks for; answers come to subjects below `replies`."""
        match self._ingest.phase:
            case IngestPhase.draining:
                await self._end_draining(client, replies)
            case IngestPhase.opening if self._ingest.is_accepted:
                await self._fill(client)
            case IngestPhase.open if self._ingest.is_ending or is_flushing:
                self._end_look = self._window.look
                with suppress(*DRIVER_ERRORS):
                    await client.publish(self._subject, b"", self._ingest.end())
            case _:
                pass  # an answer has to come first

    async def _end_draining(self, client: Client, replies: str) -> None:
        """Open a batch, or go back to the single way, once nothing is under way."""
        window, ingest = self._window, self._ingest
        first, oldest = next(iter(window.messages.items()), (0, None))
        if oldest is not None and oldest.look is not None:
            return
        if oldest is None or not ingest.still_wants_batch(len(window.messages)):
            await self._send_waiting(client, replies)
            ingest.forget()
            return
        self._prefix = f"{replies}{token_hex(8)}."
        ingest.open(self._prefix, first, len(window.messages), window.num_bytes)
        await self.append(client, first, oldest)

    async def _send_waiting(self, client: Client, replies: str) -> None:
        while waiting := self._waiting():
            for number, unacked in waiting:
                if self._ingest.phase is not IngestPhase.draining:
                    return
                await self._send(client, number, unacked, f"{replies}{number}")

    async def _fill(self, client: Client) -> None:
        """Send what waits into the batch, and what is accepted meanwhile as well; then it is open.

        Nothing of it had been sent before.
        """
        while waiting := self._waiting():
            for number, unacked in waiting:
                if self._ingest.phase is not IngestPhase.opening:
                    return
                await self.append(client, number, unacked)
        if self._ingest.phase is IngestPhase.opening:
            self._ingest.phase = IngestPhase.open
            self._wake()

    def _waiting(self) -> list[tuple[int, Unacked]]:
        messages = self._window.messages.items()
        return [(number, unacked) for number, unacked in messages if unacked.look is None]

    def on_answer(self, message: Msg) -> bool:
        """Take an answer; say whether it brings news of the present batch."""
        ingest = self._ingest
        if not message.subject.startswith(self._prefix) or ingest.phase is IngestPhase.single:
            return False  # of a batch that is over
        taken = ingest.apply(decode_answer(message.data) if message.data else None)
        for number in taken.stored:
            self._forget(number)
        if taken.failure:
            self.leave(taken.failure)
            return False
        if ingest.phase is not IngestPhase.open:
            self._wake()
        return True

    def is_late(self) -> bool:
        """Say whether an answer should have come by now."""
        is_closing, window = self._ingest.phase is IngestPhase.closing, self._window
        return window.is_late(window.oldest_look) or (is_closing and window.is_late(self._end_look))

    def leave(self, reason: str) -> None:
        """Have all that is not known to be stored sent again, one by one."""
        _logger.info("%s: %s; publishing without batches", self._stream_name, reason)
        self._ingest.fail(asyncio.get_running_loop().time())
        self._window.fail_all()
        self._wake()
