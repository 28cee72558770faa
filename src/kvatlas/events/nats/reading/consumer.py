"""A push consumer that heals itself: the engine of `follow` and of `watch`.

An ephemeral consumer without acknowledgements delivers to the callback of a core subscription,
the cheapest way there is (5 us per message). The price is that nobody resends, so the reader
checks: the consumer's own sequence has no holes, whatever the filter, and an idle heartbeat
repeats the last one. Whatever is wrong (a number missing, silence, a lost connection, a node of
the cluster that has nothing to send because it is behind), the consumer is left to the broker to
sweep and a new one is made where the reader stands.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from secrets import token_hex

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo
from nats.js.manager import JetStreamManager

from kvatlas.common.backoff import Backoff
from kvatlas.events.nats.connection import EXCHANGE_SECONDS, NatsConnection
from kvatlas.events.nats.quorum import info_of_leader
from kvatlas.schemas.errors import BusUnavailable, StreamRefused

HEARTBEAT_SECONDS = 1.0
#: a consumer that says nothing for so long is taken for lost
SILENCE_SECONDS = 2.5
#: bounds of what waits for a slow callback; the broker's flow control stays below the default
PENDING_MESSAGES, PENDING_BYTES = 1 << 19, 128 << 20
#: the broker sweeps a consumer that nobody listens to after this
SWEEP_SECONDS = 5.0
#: what is refused (no such stream, no permission) is tried again ever later
RETRY_SECONDS, LAST_RETRY_SECONDS = 0.2, 2.0
#: after so much work on messages that have come, others on the event loop have their turn: what a
#: request may wait for, behind messages; a turn costs the loop about 10 us
TURN_SECONDS = 0.0002
#: a cluster without a leader never answers what it was asked: ask again soon, and wait longer each
#: time, up to EXCHANGE_SECONDS, for a broker that is slow
FIRST_PATIENCE_SECONDS, MORE_PATIENCE = 1.0, 1.2

#: decides where the next consumer starts; runs before each is made
Plan = Callable[[JetStreamManager], Awaitable[ConsumerConfig]]
#: (message, stream sequence, broker's time in ns, messages that the consumer has still to send)
Deliver = Callable[[Msg, int, int, int], None]

_logger = logging.getLogger(__name__)


class PushConsumer:
    """Delivers what `plan` asks for, in order, over any number of server-side consumers."""

    def __init__(
        self,
        connection: NatsConnection,
        stream_name: str,
        plan: Plan,
        deliver: Deliver,
        on_made: Callable[[ConsumerInfo], None] = lambda _: None,
        on_idle: Callable[[], None] = lambda: None,
        pending_messages: int = PENDING_MESSAGES,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        self._connection = connection
        self._stream_name = stream_name
        self._plan, self._deliver = plan, deliver
        self._on_made, self._on_idle = on_made, on_idle
        self._pending_messages, self._pending_bytes = pending_messages, pending_bytes
        #: the consumer whose messages count; those of an earlier one are ignored
        self._present: _Deliveries | None = None
        self._subscription: NatsSubscription | None = None
        #: the node of a cluster that the present consumer is on
        self._node: str | None = None
        self._trouble = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        #: of `start`: done when the broker delivers or never will
        self._first: asyncio.Future[None] | None = None
        self._stop_listening: list[Callable[[], None]] = []
        self.num_healed = 0
        self.is_closed = False

    async def start(self) -> None:
        """Return when the broker delivers; raises StreamRefused when it never will."""
        self.is_closed = False
        self._first = first = asyncio.get_running_loop().create_future()
        self._stop_listening = [
            self._connection.on_connection(self._on_connection),
            self._connection.on_drop(self._on_drop),
        ]
        self._task = asyncio.create_task(self._run(first))
        try:
            await first
        except (asyncio.CancelledError, BusUnavailable, StreamRefused):
            await self.close()
            raise

    async def close(self) -> None:
        self.is_closed = True
        if self._present is not None:
            self._present.is_over = True
        for stop in self._stop_listening:
            stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        if self._first is not None and not self._first.done():
            self._first.set_exception(BusUnavailable("the bus is closed"))
        await self._leave()

    async def _run(self, first: asyncio.Future[None]) -> None:
        patience = FIRST_PATIENCE_SECONDS
        pauses = Backoff(RETRY_SECONDS, LAST_RETRY_SECONDS)
        while True:
            self._trouble.clear()
            try:
                await self._connection.call(f"read {self._stream_name}", self._make, patience)
            except (BusUnavailable, StreamRefused) as error:
                if isinstance(error, StreamRefused) and not first.done():
                    first.set_exception(error)
                    return
                level = logging.WARNING if patience == FIRST_PATIENCE_SECONDS else logging.DEBUG
                _logger.log(level, "%s; trying again", error)
                patience = min(MORE_PATIENCE * patience, EXCHANGE_SECONDS)
                is_refused = isinstance(error, StreamRefused)
                await asyncio.sleep(pauses.next(time.monotonic()) if is_refused else RETRY_SECONDS)
                continue
            patience = FIRST_PATIENCE_SECONDS
            pauses.reset()
            if not first.done():
                first.set_result(None)
            await self._until_trouble()
            self.num_healed += 1
            await self._leave()

    async def _make(self, client: Client) -> None:
        manager = client.jsm()
        config = await self._plan(manager)
        inbox = client.new_inbox()
        before = (config.opt_start_seq or 1) - 1
        self._present = deliveries = _Deliveries(
            client, self._deliver, self._on_idle, self._trouble.set, before
        )
        self._subscription = await client.subscribe(
            inbox,
            cb=deliveries.on_message,
            pending_msgs_limit=self._pending_messages,
            pending_bytes_limit=self._pending_bytes,
        )
        try:
            info = await manager.add_consumer(
                self._stream_name,
                config.evolve(
                    name=f"kvatlas-{token_hex(8)}",
                    deliver_subject=inbox,
                    ack_policy=AckPolicy.NONE,
                    flow_control=True,
                    idle_heartbeat=HEARTBEAT_SECONDS,
                    inactive_threshold=SWEEP_SECONDS,
                    mem_storage=True,
                    num_replicas=1,
                ),
            )
        except BaseException:
            await self._leave()
            raise
        self._node = info.cluster.leader if info.cluster else None
        self._on_made(info)

    async def _leave(self) -> None:
        if self._present is not None:
            self._present.is_over = True
        subscription, self._present, self._subscription = self._subscription, None, None
        if subscription is not None:
            with suppress(nats.errors.Error):  # its connection is gone, and it with it
                await subscription.unsubscribe()

    async def _until_trouble(self) -> None:
        present = self._present
        while present is not None and not self._trouble.is_set():
            present.was_heard, last_number = False, present.next_number
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    await self._trouble.wait()
            except TimeoutError:
                if not present.was_heard:
                    _logger.warning("the consumer of %s is silent", self._stream_name)
                    return
                if present.next_number == last_number and await self._is_behind(present):
                    text = "the consumer of %s is on %s, which is behind"
                    _logger.warning(text, self._stream_name, self._node)
                    return

    async def _is_behind(self, present: "_Deliveries") -> bool:
        """Say whether the consumer's node of a cluster has less than its stream.

        A node that is back in its cluster may need minutes to catch up, one with a full disk never
        does, and all the while its consumers say that there is nothing to send.
        """
        if self._node is None:
            return False
        try:
            info = await self._connection.call(
                f"look at {self._stream_name}",
                lambda client: info_of_leader(client, self._stream_name),
            )
        except (BusUnavailable, StreamRefused):
            return False  # no leader: nobody has more than anybody else
        if present.last_sequence >= info.state.last_seq:
            return False
        replicas = (info.cluster and info.cluster.replicas) or ()
        return any(replica.name == self._node and not replica.current for replica in replicas)

    def _on_connection(self, is_connected: bool) -> None:
        if not is_connected:
            self._trouble.set()

    def _on_drop(self, subscription: NatsSubscription) -> None:
        if subscription is self._subscription and self._present is not None:
            self._present.end_after_waiting(subscription)


class _Deliveries:
    """What one server-side consumer delivers, until a number is missing."""

    def __init__(
        self,
        client: Client,
        deliver: Deliver,
        on_idle: Callable[[], None],
        on_end: Callable[[], None],
        last_sequence: int,
    ) -> None:
        self._client, self._deliver = client, deliver
        self._on_idle, self._on_end = on_idle, on_end
        #: of the next message, counted by the consumer
        self.next_number = 1
        #: of the stream, of the newest message delivered
        self.last_sequence = last_sequence
        self.is_over = False
        self.was_heard = False
        #: spent on messages since others had their turn
        self._busy_seconds = 0.0
        #: the subscription once it has dropped something: what waits in it is still whole
        self._dropping: NatsSubscription | None = None

    async def on_message(self, message: Msg) -> None:
        if self.is_over:
            return
        if message.headers is not None and "Status" in message.headers and not message.data:
            await self._on_status(message, message.headers)
            return
        stream_sequence, number, broker_ns, num_pending = parse_reply(message.reply)
        if number != self.next_number:
            self._end()
            return
        self.next_number, self.last_sequence = number + 1, stream_sequence
        self.was_heard = True
        began = time.perf_counter()
        self._deliver(message, stream_sequence, broker_ns, num_pending)
        self._busy_seconds += time.perf_counter() - began
        if self._dropping is not None and not self._dropping.pending_msgs:
            self._end()
        if self._busy_seconds >= TURN_SECONDS:
            # the driver calls back with all that has come before it lets anybody else run
            self._busy_seconds = 0.0
            await asyncio.sleep(0)

    def end_after_waiting(self, subscription: NatsSubscription) -> None:
        """Deliver what waits before the first dropped message, then ask for a new consumer."""
        self._dropping = subscription
        if not subscription.pending_msgs:
            self._end()

    async def _on_status(self, message: Msg, headers: dict[str, str]) -> None:
        # A flow control message asks for an answer at its subject, a heartbeat of a stalled
        # consumer names that subject once more.
        reply = message.reply or headers.get("Nats-Consumer-Stalled")
        if reply:
            with suppress(nats.errors.Error):
                await self._client.publish(reply)
        last = headers.get("Nats-Last-Consumer")
        if headers["Status"] != "100" or (last is not None and int(last) >= self.next_number):
            self._end()
            return
        self.was_heard = True
        if last is not None:
            self._on_idle()

    def _end(self) -> None:
        self.is_over = True
        self._on_end()


def parse_reply(reply: str) -> tuple[int, int, int, int]:
    """Return (stream sequence, consumer sequence, broker's ns, pending) of a delivery.

    $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<ns>.<pending>
    $JS.ACK.<domain>.<account>.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.
            <ns>.<pending>[.<random>]
    """
    tokens = reply.split(".")
    if len(tokens) == 9:
        return int(tokens[5]), int(tokens[6]), int(tokens[7]), int(tokens[8])
    return int(tokens[7]), int(tokens[8]), int(tokens[9]), int(tokens[10])
