"""Who may speak for a stream: a node of its cluster that is cut off answers as well, with less.

Tried on nats-server 2.15: a node that knows no leader answers `STREAM.INFO` with what it has
itself, and names no leader. A leader that is cut off gives up after some 20 s and answers until
then, while its successor is there after 4 to 9 s. But it says when it has last heard of each
follower, which is within a second while all is well.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from nats.aio.client import Client
from nats.errors import NoRespondersError
from nats.js.api import ClusterInfo, PeerInfo, StreamInfo
from nats.js.errors import APIError, ServiceUnavailableError

from kvatlas.events.nats.broker_clock import BrokerClock

_1970 = datetime(1970, 1, 1, tzinfo=UTC)
#: a follower that was heard of within this has not elected another leader; below 4 s
HEARD_SECONDS = 3.0
#: JetStream's own word for a node that knows no leader
NO_LEADER = 10008
TRY_SECONDS, RETRY_SECONDS = 1.0, 0.2
#: whoever asks has a deadline of its own, which is sooner
LONGEST_SECONDS = 60.0


def is_without_leader(error: BaseException) -> bool:
    """Say whether an answer of JetStream says that there is nobody who could answer."""
    return isinstance(error, ServiceUnavailableError) and error.err_code in (None, NO_LEADER)


def speaks_for_majority(cluster: ClusterInfo | None) -> bool:
    """Say whether what a node told is what the stream has; on a broker of its own it always is."""
    if cluster is None:
        return True
    replicas: Sequence[PeerInfo] = cluster.replicas or ()
    num_heard = 1 + sum(0 < (peer.active or 0) < HEARD_SECONDS * 1e9 for peer in replicas)
    return bool(cluster.leader) and 2 * num_heard > 1 + len(replicas)


def told_by_leader(info: StreamInfo) -> StreamInfo:
    """Return what was told, if by a node that may speak for the stream.

    Raises what nats-py raises for a node that knows no leader.
    """
    if not speaks_for_majority(info.cluster):
        text = f"{info.config.name} has no leader"
        raise ServiceUnavailableError(code=503, err_code=NO_LEADER, description=text)
    return info


async def info_of_leader(
    client: Client,
    stream_name: str,
    *,
    with_deleted: bool = False,
    clock: BrokerClock | None = None,
) -> StreamInfo:
    """Ask once about a stream. Raises what nats-py raises, also where nobody speaks for it.

    The `clock` learns from the leader's answer, which stores the stream's messages.
    """
    asked = json.dumps({"deleted_details": True}).encode() if with_deleted else b""
    subject = f"$JS.API.STREAM.INFO.{stream_name}"
    sent_ns = time.monotonic_ns()
    try:
        answer = json.loads((await client.request(subject, asked, LONGEST_SECONDS)).data)
    except NoRespondersError as error:
        raise ServiceUnavailableError(code=503, description="no JetStream") from error
    if "error" in answer:
        raise APIError.from_error(answer["error"])
    received_ns, answered_at = time.monotonic_ns(), answer.get("ts")
    info: StreamInfo = told_by_leader(StreamInfo.from_response(answer))
    if clock is not None and (broker_ns := _nanoseconds(answered_at)) is not None:
        clock.take(sent_ns, received_ns, broker_ns)
    return info


def _nanoseconds(text: object) -> int | None:
    """Return a time of the broker (RFC 3339) in ns since 1970; None where it gives none."""
    if not isinstance(text, str):
        return None
    try:
        return (datetime.fromisoformat(text) - _1970) // timedelta(microseconds=1) * 1000
    except (ValueError, TypeError):
        return None


async def patient_info(
    client: Client,
    stream_name: str,
    *,
    with_deleted: bool = False,
    clock: BrokerClock | None = None,
) -> StreamInfo:
    """Ask until the leader answers; who calls bounds it.

    What was asked while there was no leader is never answered, so ask again, each time with more
    patience for a broker that is slow.
    """
    patience = TRY_SECONDS
    while True:
        try:
            async with asyncio.timeout(patience):
                return await info_of_leader(
                    client, stream_name, with_deleted=with_deleted, clock=clock
                )
        except TimeoutError:
            patience *= 2
        except ServiceUnavailableError as error:
            if error.err_code != NO_LEADER:
                raise
            await asyncio.sleep(RETRY_SECONDS)
