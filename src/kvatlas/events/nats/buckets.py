"""The buckets of a bus: made where there is none, and looked at once for what is otherwise.

A bucket is a stream (`KV_<bucket>` of keys, `OBJ_<bucket>` of objects). The process that writes to
it first makes it, so every one of them has to know how many replicas it shall have (ADR-0019).
"""

import asyncio
import logging

from nats.aio.client import Client
from nats.js.api import StreamConfig
from nats.js.errors import BadRequestError

from kvatlas.events.bus import StreamDifference
from kvatlas.events.nats.connection import EXCHANGE_SECONDS, NatsConnection
from kvatlas.events.nats.errors import STREAM_NAME_IN_USE
from kvatlas.events.nats.quorum import patient_info
from kvatlas.schemas.conditions import LIMITS_DIFFER
from kvatlas.schemas.errors import BusUnavailable, StreamRefused

#: of an existing bucket; the rest of its configuration is its owner's
_CHECKED = ("num_replicas", "storage", "allow_msg_ttl")

_logger = logging.getLogger(__name__)


class Buckets:
    """Makes and checks the buckets of one bus; `close` ends the checks under way."""

    def __init__(self, connection: NatsConnection, replicas: int) -> None:
        self._connection = connection
        #: of buckets that are made here
        self.replicas = replicas
        #: stream -> its check
        self._checks: dict[str, asyncio.Task[None]] = {}

    async def create(self, config: StreamConfig, seconds: float = EXCHANGE_SECONDS) -> None:
        """Make a bucket unless there is one of its name. Raises BusUnavailable, StreamRefused."""

        async def create(client: Client) -> None:
            try:
                await client.jsm().add_stream(config)
            except BadRequestError as error:
                if error.err_code != STREAM_NAME_IN_USE:
                    raise

        await self._connection.call(f"create {config.name}", create, seconds)

    def check(self, config: StreamConfig) -> None:
        """Compare a bucket with what it should be, once and beside everything else.

        What differs becomes a condition. A user who may not look at it is no error.
        """
        name = config.name or ""
        if name not in self._checks:
            self._connection.tolerate(f"$JS.API.STREAM.INFO.{name}")
            self._checks[name] = asyncio.create_task(self._check(config))

    async def close(self) -> None:
        """End the checks under way."""
        for check in self._checks.values():
            check.cancel()
        if self._checks:
            await asyncio.wait(self._checks.values())

    async def _check(self, config: StreamConfig) -> None:
        name = config.name or ""
        try:
            info = await self._connection.call(
                f"look at {name}", lambda client: patient_info(client, name)
            )
        except StreamRefused:
            return  # there is none, so it is made as it should be
        except BusUnavailable as error:
            _logger.info("the limits of %s are not checked: %s", name, error)
            return
        report_differences(self._connection, name, differences(config, info.config, _CHECKED))


def differences(
    wanted: StreamConfig, found: StreamConfig, limits: tuple[str, ...]
) -> tuple[StreamDifference, ...]:
    """Return the limits of a stream that are not as wanted; of no concern are those not set."""
    pairs = ((limit, getattr(wanted, limit), getattr(found, limit)) for limit in limits)
    return tuple(
        StreamDifference(wanted.name or "", limit, str(want), str(have))
        for limit, want, have in pairs
        if want is not None and want != have
    )


def report_differences(
    connection: NatsConnection, stream_name: str, found: tuple[StreamDifference, ...]
) -> None:
    """Let what differs of a stream be a condition, or over."""
    if found:
        reason = "; ".join(map(str, found))
        connection.conditions.begin(LIMITS_DIFFER, reason, source=stream_name)
    else:
        connection.conditions.end(LIMITS_DIFFER, source=stream_name)
