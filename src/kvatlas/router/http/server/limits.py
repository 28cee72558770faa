"""Bounds over all HTTP connections of a process, and how often each of them was met.

    connections    a new one over the bound ends idle ones, the longest idle first; or is refused
    bodies         bytes of requests that are not answered are counted over all connections
    time           a head, a body and the reading of an answer have a deadline each

One object for all servers of a process; connection.py and bounded.py keep to it. Pure: no clock.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol, Self

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvatlas.schemas.settings import RouterSettings

#: of a request line and its headers
MAX_HEAD_BYTES = 64 * 1024
#: from the first moment of a connection, or the first byte of a request, to the end of its head
HEAD_SECONDS = 15.0
#: from the end of a head to the end of the body
BODY_SECONDS = 30.0
#: how long a client may leave an answer unread
UNREAD_SECONDS = 30.0
#: how long what a refused client still sends is read and dropped, so that it sees the answer
LINGER_SECONDS = 2.0
#: these of each body are not counted: a small request is read also when others fill the budget
FREE_BODY_BYTES = 64 * 1024
#: descriptors that are left for files, the broker, and connections that are not counted yet
RESERVED_DESCRIPTORS = 128
#: of the open connections, how many idle ones end at once to make room
EVICTED_SHARE = 16

#: reasons for which something is refused or ended, as `kv_http_refused_total` names them
REASONS = (
    "connections",
    "descriptors",
    "evicted",
    "head_seconds",
    "head_bytes",
    "body_seconds",
    "body_budget",
    "unread_answer",
    "malformed",
    "host",
    "origin",
)


class LimitedConnection(Protocol):
    """What is counted and may be ended."""

    @property
    def idle_since(self) -> float | None:
        """When its last request ended or it began; None while a request is under way."""
        ...

    def evict(self) -> None:
        """End at once."""
        ...


class Bounds(Struct, frozen=True):
    """The bounds of one process."""

    max_connections: int = 4_096
    max_inflight_body_bytes: int = 256 * 1024**2
    keep_alive_seconds: float = 120.0
    head_seconds: float = HEAD_SECONDS
    body_seconds: float = BODY_SECONDS
    unread_seconds: float = UNREAD_SECONDS

    @classmethod
    def of(cls, settings: RouterSettings, num_descriptors: int | None = None) -> Self:
        """Return what the settings say, within the descriptors that the process may have."""
        connections = settings.max_connections
        if num_descriptors is not None:
            connections = min(connections, max(num_descriptors - RESERVED_DESCRIPTORS, 16))
        # a single body of the allowed length always fits
        body_bytes = max(settings.max_inflight_body_bytes, settings.max_body_bytes)
        return cls(connections, body_bytes, settings.keep_alive_seconds)


class HttpLimits:
    """Counts connections and the bytes of bodies under way against their bounds."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        #: bytes of bodies not answered, beyond the first FREE_BODY_BYTES of each; <= the bound
        self.num_body_bytes = 0
        #: how often each of REASONS applied
        self.refused = Counter[str](dict.fromkeys(REASONS, 0))
        #: open and admitted; at most max_connections
        self._connections = set[LimitedConnection]()

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def admit(self, connection: LimitedConnection) -> bool:
        """Take in a new connection, ending idle ones if need be; False: it is one too many."""
        if len(self._connections) >= self.bounds.max_connections:
            self.make_room()
            if len(self._connections) >= self.bounds.max_connections:
                self.refused["connections"] += 1
                return False
        self._connections.add(connection)
        return True

    def replace(self, old: LimitedConnection, new: LimitedConnection) -> None:
        """Let a connection go on with another protocol."""
        self._connections.discard(old)
        self._connections.add(new)

    def leave(self, connection: LimitedConnection) -> None:
        """Forget a connection that has ended."""
        self._connections.discard(connection)

    def make_room(self) -> None:
        """End some of the idle connections, those that are idle longest. O(n log n)."""
        idle = [(each.idle_since, each) for each in self._connections]
        found = sorted(
            ((since, each) for since, each in idle if since is not None), key=lambda item: item[0]
        )
        for _, connection in found[: max(len(self._connections) // EVICTED_SHARE, 1)]:
            self._connections.discard(connection)
            self.refused["evicted"] += 1
            connection.evict()

    def hold(self, num_bytes: int) -> bool:
        """Count bytes of a body that is not answered; False if there is no room for them."""
        if self.num_body_bytes + num_bytes > self.bounds.max_inflight_body_bytes:
            self.refused["body_budget"] += 1
            return False
        self.num_body_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        """Count bytes no more: their request is answered, or given up."""
        self.num_body_bytes -= num_bytes


class LimitsCollector(Collector):
    """The limits as metrics."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits

    def collect(self) -> Iterable[Metric]:
        """Yield the state of this moment."""
        limits = self._limits
        yield GaugeMetricFamily(
            "kv_http_connections", "Open HTTP connections", value=limits.num_connections
        )
        yield GaugeMetricFamily(
            "kv_http_inflight_body_bytes",
            "Bytes of request bodies that are not answered",
            value=limits.num_body_bytes,
        )
        refused = CounterMetricFamily(
            "kv_http_refused", "Connections and requests refused or ended", labels=["reason"]
        )
        for reason, count in limits.refused.items():
            refused.add_metric([reason], count)
        yield refused
