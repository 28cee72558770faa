"""What a router answers before it can answer: that it is alive, and what it waits for.

    GET /healthz   200        GET /metrics         kv_connected, kv_ready, kv_condition, ...
    GET /readyz    503        GET /, /openapi.json as later; the page says what is waited for
                              all others           503, and when to try again

The process shows it until its index is there, then the application in `app.py`.
"""

from functools import cache
from importlib.resources import files
from typing import Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvatlas import __version__
from kvatlas.router.answers import encoded
from kvatlas.router.http.condition_metric import condition_gauge
from kvatlas.router.http.control_api import PAGE_POLICY, Health
from kvatlas.router.http.openapi import document
from kvatlas.router.http.problems import problem
from kvatlas.router.http.server.messages import Receive, Scope, Send, send_answer
from kvatlas.schemas.conditions import Conditions


class StartupStatus(Protocol):
    """What keeps a process from being of use."""

    @property
    def connected(self) -> bool:
        """Whether the broker is there."""
        ...

    @property
    def conditions(self) -> Conditions:
        """What is wrong meanwhile."""
        ...

    @property
    def reason(self) -> str:
        """What it waits for, since when, and what is wrong."""
        ...


class StartupApp:
    """The ASGI application of a process that waits; one whose router `decides` will route, too."""

    def __init__(self, wait: StartupStatus, policy: str, *, decides: bool = True) -> None:
        self._wait, self._decides = wait, decides
        self._registry = CollectorRegistry()
        self._registry.register(_StartupCollector(wait, policy))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; of a lifespan and of web sockets it knows nothing."""
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        match scope["method"], scope["path"]:
            case "GET", "/healthz":
                await send_answer(send, encoded(Health("ok", __version__)))
            case "GET", "/metrics":
                await send_body(send, generate_latest(self._registry), CONTENT_TYPE_LATEST)
            case "GET", "/":
                page = (files("kvatlas.router.http") / "page.html").read_bytes()
                await send_body(send, page, "text/html; charset=utf-8", _PAGE_HEADERS)
            case "GET", "/openapi.json":
                await send_body(send, _document(self._decides), "application/json")
            case _:
                await send_answer(send, problem(503, self._wait.reason))


class _StartupCollector(Collector):
    """The state that the router's own metrics start from."""

    def __init__(self, wait: StartupStatus, policy: str) -> None:
        self._wait, self._policy = wait, policy

    def collect(self) -> list[Metric]:
        info = GaugeMetricFamily("kv_build_info", "1", labels=["version", "policy"])
        info.add_metric([__version__, self._policy], 1)
        connected = float(self._wait.connected)
        return [
            info,
            GaugeMetricFamily("kv_connected", "Broker is there", value=connected),
            GaugeMetricFamily("kv_ready", "Index has caught up", value=0.0),
            condition_gauge(self._wait.conditions),
        ]


@cache
def _document(decides: bool) -> bytes:
    return encoded(document(decides))


_PAGE_HEADERS = (
    (b"content-security-policy", PAGE_POLICY.encode()),
    (b"cache-control", b"no-store"),
)


async def send_body(
    send: Send, body: bytes, media_type: str, more: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """Answer with a whole body."""
    headers = [
        (b"content-type", media_type.encode()),
        (b"content-length", b"%d" % len(body)),
        *more,
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
