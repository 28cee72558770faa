"""Following a JetStream stream, each sequence once and in order."""

import asyncio
import logging
from datetime import datetime

from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.manager import JetStreamManager

from kvatlas.events.bus import Message, OnHole, OnMessage
from kvatlas.events.nats.connection import NatsConnection
from kvatlas.events.nats.quorum import told_by_leader
from kvatlas.events.nats.reading.consumer import PENDING_BYTES, PENDING_MESSAGES, PushConsumer
from kvatlas.schemas.errors import BusUnavailable

#: how often a stream that ends before our position is looked at again before we believe it; the
#: next leader of a cluster may for a while not know all that was stored
LOOKS_BACK, LOOKS_BACK_IN_CLUSTER = 4, 50

_logger = logging.getLogger(__name__)


class NatsFollower(PushConsumer):
    """The `Subscription` of `follow`: knows the next stream sequence, whoever delivers it."""

    def __init__(
        self,
        connection: NatsConnection,
        stream_name: str,
        from_sequence: int,
        on_message: OnMessage,
        on_hole: OnHole | None,
        subjects: str | None,
        pending_messages: int = PENDING_MESSAGES,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        super().__init__(
            connection,
            stream_name,
            self._start_at_next,
            self._on_delivery,
            pending_messages=pending_messages,
            pending_bytes=pending_bytes,
        )
        #: the sequence that comes next; all before it were delivered or told as a hole
        self._next_sequence = max(1, from_sequence)
        #: when the stream was made; another time means another stream of the same name
        self._created: datetime | None = None
        self._num_looks_back = 0
        self._on_message, self._on_hole, self._subjects = on_message, on_hole, subjects

    async def _start_at_next(self, manager: JetStreamManager) -> ConsumerConfig:
        info = told_by_leader(await manager.stream_info(self._stream_name))
        state = info.state
        first = state.first_seq if state.messages else state.last_seq + 1
        has_gone_back = self._next_sequence > state.last_seq + 1
        is_another = self._created is not None and info.created != self._created
        max_looks_back = (
            LOOKS_BACK_IN_CLUSTER if info.cluster and info.cluster.replicas else LOOKS_BACK
        )
        if has_gone_back and not is_another and self._num_looks_back < max_looks_back:
            self._num_looks_back += 1
            behind = f"{self._stream_name} ends at {state.last_seq}"
            raise BusUnavailable(f"{behind}, expected {self._next_sequence - 1}")
        self._num_looks_back = 0
        if has_gone_back or is_another or self._next_sequence < first:
            # not here: what the callback raises would end the consumer
            asyncio.get_running_loop().call_soon(self._report_hole, self._next_sequence, first)
            self._next_sequence = first
        self._created = info.created
        return ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self._next_sequence,
            filter_subject=self._subjects,
        )

    def _report_hole(self, expected: int, got: int) -> None:
        _logger.warning("%s: expected %d, got %d", self._stream_name, expected, got)
        if self._on_hole is not None and not self.is_closed:
            self._on_hole(expected, got)

    def _on_delivery(
        self, message: Msg, stream_sequence: int, broker_ns: int, _num_pending: int
    ) -> None:
        expected = self._next_sequence
        if stream_sequence < expected:
            return
        self._next_sequence = stream_sequence + 1
        if stream_sequence > expected and self._subjects is None:
            self._report_hole(expected, stream_sequence)
        self._on_message(Message(stream_sequence, message.subject, message.data, broker_ns))
