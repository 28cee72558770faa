"""The routes that every request takes: score, route, and the reports of its end.

    plain HTTP/1.1 --HotProtocol--> HotRoutes.answer --> Router        see hot_protocol.py
    any other form --uvicorn------> HotRoutes, as bare ASGI --^

Bodies are read under a limit and parsed by decoding.py; nothing else stands between the
socket and the router. Whatever else is asked goes on to the control API.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvatlas.router.answers import ReportAnswer, encoded
from kvatlas.router.http.bodies.bodies import SALT_HEADER, refuse_unknown
from kvatlas.router.http.bodies.decoding import (
    MAX_REPORT_BYTES,
    decode_report,
    decode_score_request,
)
from kvatlas.router.http.problems import ErrorBoundary, Problem, problem, problem_of, wrong_method
from kvatlas.router.http.server.messages import (
    ClientGone,
    Receive,
    Scope,
    Send,
    read_body,
    send_answer,
)
from kvatlas.router.replicas.signals import MAX_DECISION_ID
from kvatlas.router.service import Router
from kvatlas.schemas.errors import (
    InvalidRequest,
    KvatlasError,
    UnsupportedContentType,
)
from kvatlas.schemas.settings import RouterSettings

#: told the route's template and the status of each answer
OnAnswer = Callable[[str, int], None]

SCORE, ROUTE = "/v1/score", "/v1/route"
REPORTS = "/v1/requests/"
PREFILLED, DONE = "/prefilled", "/done"

_SALT_HEADER = SALT_HEADER.encode()


class RequestHead(NamedTuple):
    """What stands before the body of a request for a hot route."""

    template: str
    path: str
    query: bytes
    content_type: str
    #: of the salt's header, which may stand there once
    salts: tuple[bytes, ...]


class HotRoutes:
    """Answers the hot routes of one router; one that does not decide only scores."""

    def __init__(
        self, router: Router, settings: RouterSettings, on_answer: OnAnswer, decides: bool
    ) -> None:
        self._router, self._settings, self._on_answer = router, settings, on_answer
        self._decides = decides

    def template(self, path: str) -> str | None:
        """Return the template of a path that is answered here, None for any other."""
        if path == SCORE or (path == ROUTE and self._decides):
            return path
        if not self._decides:
            return None
        if path.startswith(REPORTS):
            for end in (DONE, PREFILLED):
                if path.endswith(end) and "/" not in _decision_id(path, end):
                    return f"{REPORTS}{{decision_id}}{end}"
        return None

    def max_body_bytes(self, template: str) -> int:
        """Return how large the body of a request for this template may be."""
        return self._settings.max_body_bytes if template in (SCORE, ROUTE) else MAX_REPORT_BYTES

    def answer(self, asked: RequestHead, body: bytes) -> bytes | Problem:
        """Answer one POST with a body within the limit, and count it. Never raises."""
        found: bytes | Problem | None = None
        with ErrorBoundary(asked.template) as boundary:
            try:
                found = self._answer(asked, body)
            except KvatlasError as error:
                found = problem_of(error)
        if boundary.failed or found is None:
            found = problem(500, "an unexpected error; the log has it")
        self.count(asked.template, found)
        return found

    def count(self, template: str, answer: bytes | Problem) -> None:
        """Count an answer that is about to be sent."""
        self._on_answer(template, answer.status if isinstance(answer, Problem) else 200)

    def _answer(self, asked: RequestHead, body: bytes) -> bytes:
        template = asked.template
        if template in (SCORE, ROUTE):
            if len(asked.salts) > 1:
                raise InvalidRequest(SALT_HEADER, "stands there twice")
            salt = asked.salts[0] if asked.salts else None
            request = decode_score_request(
                body, asked.content_type, self._settings, asked.query, salt
            )
            ask = self._router.score if template == SCORE else self._router.route
            return encoded(ask(request))
        if asked.query:
            refuse_unknown(asked.query, ())
        report = decode_report(body, asked.content_type)
        if template.endswith(DONE):
            decision_id = _decision_id(asked.path, DONE)
            outcome = self._router.done(decision_id, report)
        else:
            decision_id = _decision_id(asked.path, PREFILLED)
            outcome = self._router.prefilled(decision_id, report)
        return encoded(ReportAnswer(decision_id, outcome.applied))

    async def __call__(self, template: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request for a path with this template."""
        if scope["method"] != "POST":
            answer: bytes | Problem = problem(405, wrong_method(template, "POST"))
            self.count(template, answer)
        else:
            try:
                asked, declared_bytes = _request_head(template, scope)
                body = await read_body(receive, declared_bytes, self.max_body_bytes(template))
            except ClientGone:
                return
            except InvalidRequest as error:
                answer = problem_of(error)
                self.count(template, answer)
            else:
                answer = self.answer(asked, body)
        await send_answer(send, answer)


def _decision_id(path: str, end: str) -> str:
    return path[len(REPORTS) : -len(end)][:MAX_DECISION_ID]


def _request_head(template: str, scope: Scope) -> tuple[RequestHead, int]:
    """Return what is asked, and the declared length of the body; raises UnsupportedContentType."""
    content_type, declared_bytes, salts = "", 0, []
    for name, value in scope["headers"]:
        if name == b"content-type":
            content_type = value.decode("latin-1")
        elif name == b"content-length" and value.isdigit():
            declared_bytes = int(value)
        elif name == _SALT_HEADER:
            salts.append(value)
        elif name == b"content-encoding" and value.lower() != b"identity":
            problem = f"{value[:64].decode('latin-1')} is not read, expected a body as it is"
            raise UnsupportedContentType("content-encoding", problem)
    asked = RequestHead(template, scope["path"], scope["query_string"], content_type, tuple(salts))
    return asked, declared_bytes
