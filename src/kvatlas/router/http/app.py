"""The HTTP application: hot routes as bare ASGI in front of a FastAPI control API.

    request --RouterApp--> path of a hot route? --> HotRoutes --> MeteredRouter --> RouterService
                           any other            --> FastAPI: control_routes

It translates and wires; policies decide. Every error is a problem document.
"""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from kvatlas.router.answers import encoded
from kvatlas.router.http.control_api import control_routes
from kvatlas.router.http.hot_protocol import HotProtocol, protocol_of
from kvatlas.router.http.hot_routes import HotRoutes
from kvatlas.router.http.metrics import MeteredRouter, RouterMetrics, StateCollector
from kvatlas.router.http.openapi import ABOUT, complete
from kvatlas.router.http.problems import (
    MEDIA_TYPE,
    ErrorBoundary,
    Problem,
    headers_of,
    problem,
    problem_of,
    wrong_method,
)
from kvatlas.router.http.server.hosts import HostRules
from kvatlas.router.http.server.limits import Bounds, HttpLimits, LimitsCollector
from kvatlas.router.http.server.messages import Message, Receive, Scope, Send
from kvatlas.router.replicas.replicas import RouterReplicas
from kvatlas.router.service import RouterService
from kvatlas.schemas.conditions import Conditions
from kvatlas.schemas.errors import KvatlasError


class RouterApp(FastAPI):
    """A FastAPI application that answers the hot routes before FastAPI sees them."""

    def __init__(
        self,
        service: RouterService,
        decides: bool,
        replicas: RouterReplicas | None,
        conditions: Conditions,
    ) -> None:
        super().__init__(
            title=ABOUT["title"],
            version=ABOUT["version"],
            summary=ABOUT["summary"],
            docs_url=None,  # both pages load their code from elsewhere
            redoc_url=None,
            openapi_url=None,  # below, ending its line as all our answers do
        )
        self.service = service
        self._decides = decides
        #: whose figures the metrics show
        self._limits = list[HttpLimits]()
        self.metrics = RouterMetrics()
        state = StateCollector(service, replicas, conditions, self.metrics.by_worker)
        self.metrics.registry.register(state)
        router = MeteredRouter(service, self.metrics)
        self._hot = HotRoutes(router, service.settings, self.metrics.answered, decides)
        self.add_route("/openapi.json", self._document, include_in_schema=False)
        self.include_router(control_routes(service, self.metrics.registry, replicas, conditions))
        self.add_exception_handler(KvatlasError, _our_error)
        self.add_exception_handler(HTTPException, _http_error)
        self.add_exception_handler(RequestValidationError, _invalid)
        self.add_exception_handler(Exception, _unexpected)

    @property
    def http_protocol(self) -> type[HotProtocol]:
        """The protocol with which uvicorn answers hot routes fastest; without it all work too.

        Its limits are its own: a server of ours gives those of its process to `served_under`.
        """
        return self.served_under(
            HttpLimits(Bounds.of(self.service.settings)), HostRules.accepting_any()
        )

    def served_under(self, limits: HttpLimits, hosts: HostRules) -> type[HotProtocol]:
        """Return the protocol for these limits, which the application's metrics then show."""
        if limits not in self._limits:
            self._limits.append(limits)
            self.metrics.registry.register(LimitsCollector(limits))
        return protocol_of(self._hot, limits, hosts)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, hot routes included."""
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi(), self._decides)
        return self.openapi_schema

    async def _document(self, request: Request) -> Response:
        return Response(encoded(self.openapi()), media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection or request."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        template = self._hot.template(scope["path"])
        if template is not None:
            await self._hot(template, scope, receive, send)
            return
        await self._control(scope, receive, send)

    async def _control(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        # Starlette answers an unexpected error through `_unexpected` and then raises it again.
        with ErrorBoundary(f"{scope['method']} {scope['path'][:256]!r}"):
            await super().__call__(scope, receive, watch)
        route = scope.get("route")
        self.metrics.answered(getattr(route, "path", "(unmatched)"), status)


def create_app(
    service: RouterService,
    *,
    decides: bool = True,
    replicas: RouterReplicas | None = None,
    conditions: Conditions | None = None,
) -> RouterApp:
    """Return the application over a router; whoever owns the router's index and log runs it.

    One that does not decide answers /v1/score and the control API only. `conditions` are those of
    the process, which /readyz and /metrics show.
    """
    return RouterApp(service, decides, replicas, conditions or Conditions())


def _answer(found: Problem, headers: dict[str, str] | None = None) -> Response:
    return Response(
        found.encoded(),
        found.status,
        {**headers_of(found.status), **(headers or {})},
        media_type=MEDIA_TYPE,
    )


async def _our_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, KvatlasError)
    return _answer(problem_of(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        route = request.scope.get("route")
        allowed = headers.get("Allow", "")
        detail = wrong_method(getattr(route, "path", request.url.path[:256]), allowed)
    else:
        phrase = HTTPStatus(error.status_code).phrase
        detail = f"{request.method} {request.url.path[:256]}: {phrase}"
    return _answer(problem(error.status_code, detail), headers)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][1:]) or "request"
    return _answer(problem(400, str(first["msg"]), field))


async def _unexpected(_: Request, __: Exception) -> Response:
    return _answer(problem(500, "an unexpected error; the log has it"))
