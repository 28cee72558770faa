"""What a process that archives answers: whether it does, and what it has written.

GET /healthz   200        GET /metrics   kv_archive_*, kv_connected, kv_ready, kv_condition
GET /readyz    200, or 503 with the reason while the archive does not take what the log has
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvatlas import __version__
from kvatlas.common.line_writing import num_dropped_lines
from kvatlas.router.answers import encoded
from kvatlas.router.http.condition_metric import condition_gauge
from kvatlas.router.http.control_api import Health
from kvatlas.router.http.problems import problem
from kvatlas.router.http.server.messages import Receive, Scope, Send, send_answer
from kvatlas.router.http.startup import StartupStatus, send_body


class Archiving(Protocol):
    """How far an archive is; Archiver is one."""

    num_written: int
    num_failures: int

    @property
    def cursors(self) -> Mapping[str, int]:
        """Stream name -> sequence up to which it is in the archive."""
        ...


class ArchiveReadiness(Struct, frozen=True):
    """What is in the archive, by stream, and what is wrong: name -> reason."""

    status: str
    cursors: Mapping[str, int]
    connected: bool
    conditions: dict[str, str]


class ArchiveCollector(Collector):
    """Reads the totals of an archive when somebody asks for them."""

    def __init__(self, archiving: Archiving) -> None:
        self._archiving = archiving

    def collect(self) -> Iterable[Metric]:
        """Yield the state of this moment."""
        cursors = GaugeMetricFamily(
            "kv_archive_stream_sequence", "Last message in the archive", labels=["stream"]
        )
        for stream_name, cursor in self._archiving.cursors.items():
            cursors.add_metric([stream_name], cursor)
        yield cursors
        yield CounterMetricFamily(
            "kv_archive_written", "Messages and holes archived", value=self._archiving.num_written
        )
        yield CounterMetricFamily(
            "kv_archive_failures",
            "Transactions that the archive did not take",
            value=self._archiving.num_failures,
        )


class ArchiveApp:
    """The ASGI application of a process that archives and does nothing else.

    Any condition makes it not ready: what it is there for is to write.
    """

    def __init__(self, archiving: Archiving, wait: StartupStatus) -> None:
        self._archiving, self._wait = archiving, wait
        self._registry = CollectorRegistry()
        self._registry.register(ArchiveCollector(archiving))
        self._registry.register(_ProcessCollector(wait))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; of a lifespan and of web sockets it knows nothing."""
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        match scope["method"], scope["path"]:
            case "GET" | "HEAD", "/healthz":
                await send_answer(send, encoded(Health("ok", __version__)))
            case "GET" | "HEAD", "/readyz":
                await self._readyz(send)
            case "GET" | "HEAD", "/metrics":
                await send_body(send, generate_latest(self._registry), CONTENT_TYPE_LATEST)
            case _:
                known = "this process archives: /healthz, /readyz and /metrics"
                await send_answer(send, problem(404, known))

    async def _readyz(self, send: Send) -> None:
        reasons = self._wait.conditions.reasons
        if reasons:
            await send_answer(send, problem(503, "; ".join(reasons.values())))
            return
        cursors = self._archiving.cursors
        ready = ArchiveReadiness("ready", cursors, self._wait.connected, reasons)
        await send_answer(send, encoded(ready))


class _ProcessCollector(Collector):
    def __init__(self, wait: StartupStatus) -> None:
        self._wait = wait

    def collect(self) -> Iterable[Metric]:
        conditions = self._wait.conditions
        info = GaugeMetricFamily("kv_build_info", "1", labels=["version", "policy"])
        info.add_metric([__version__, ""], 1)
        yield info
        connected = float(self._wait.connected)
        yield GaugeMetricFamily("kv_connected", "Broker is there", value=connected)
        is_ready = float(not conditions.present)
        yield GaugeMetricFamily("kv_ready", "What it is there for is done", value=is_ready)
        yield condition_gauge(conditions)
        dropped, text = num_dropped_lines(), "Lines of this process's log that nothing read"
        yield CounterMetricFamily("kv_log_lines_dropped", text, value=dropped)
