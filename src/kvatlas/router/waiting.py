"""What a router answers before it can answer: that it is alive, and what it waits for.

    GET /healthz   200        GET /metrics    kv_connected, kv_ready, kv_build_info
    GET /readyz    503        all others      503, and when to try again

The process shows it until its index is there, then the application in `app.py`.
"""

from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvatlas import __version__
from kvatlas.router.answers import encoded
from kvatlas.router.control import Health
from kvatlas.router.hot import Receive, Scope, Send, send_answer
from kvatlas.router.problems import problem


class Wait(Protocol):
    """What keeps a process from being of use."""

    @property
    def connected(self) -> bool:
        """Whether the broker is there."""
        ...

    @property
    def why(self) -> str:
        """What it waits for, and since when."""
        ...


class WaitingApp:
    """The ASGI application of a process that waits."""

    def __init__(self, wait: Wait, policy: str) -> None:
        self._wait = wait
        self._registry = CollectorRegistry()
        self._registry.register(_WaitCollector(wait, policy))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; of a lifespan and of web sockets it knows nothing."""
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        match scope["method"], scope["path"]:
            case "GET", "/healthz":
                await send_answer(send, encoded(Health("ok", __version__)))
            case "GET", "/metrics":
                await _send_text(send, generate_latest(self._registry))
            case _:
                await send_answer(send, problem(503, self._wait.why))


class _WaitCollector(Collector):
    """The state that the router's own metrics start from."""

    def __init__(self, wait: Wait, policy: str) -> None:
        self._wait, self._policy = wait, policy

    def collect(self) -> list[Metric]:
        info = GaugeMetricFamily("kv_build_info", "1", labels=["version", "policy"])
        info.add_metric([__version__, self._policy], 1)
        connected = float(self._wait.connected)
        return [
            info,
            GaugeMetricFamily("kv_connected", "Broker is there", value=connected),
            GaugeMetricFamily("kv_ready", "Index has caught up", value=0.0),
        ]


async def _send_text(send: Send, body: bytes) -> None:
    headers = [
        (b"content-type", CONTENT_TYPE_LATEST.encode()),
        (b"content-length", b"%d" % len(body)),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
