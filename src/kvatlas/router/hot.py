"""The routes that every request takes: score, route, and the reports of its end.

    plain HTTP/1.1 --HotProtocol--> HotRoutes.answer --> Router        see hot_protocol.py
    any other form --uvicorn------> HotRoutes, as bare ASGI --^

Bodies are read under a limit and parsed by requests.py; nothing else stands between the
socket and the router. Whatever else is asked goes on to the control API.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple

from kvatlas.router.answers import ReportAnswer, encoded
from kvatlas.router.bodies import SALT_HEADER, refuse_unknown
from kvatlas.router.problems import (
    MEDIA_TYPE,
    Boundary,
    Problem,
    headers_of,
    problem,
    problem_of,
    wrong_method,
)
from kvatlas.router.requests import MAX_REPORT_BYTES, decode_report, decode_score_request
from kvatlas.router.service import Router
from kvatlas.router.signals import MAX_DECISION_ID
from kvatlas.schemas.errors import (
    InvalidRequest,
    KvatlasError,
    PromptTooLarge,
    RequestTooSlow,
    UnsupportedContentType,
)
from kvatlas.schemas.settings import RouterSettings

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
#: told the route's template and the status of each answer
OnAnswer = Callable[[str, int], None]

SCORE, ROUTE = "/v1/score", "/v1/route"
REPORTS = "/v1/requests/"
PREFILLED, DONE = "/prefilled", "/done"

#: a client that sends slower than this holds memory for nothing
MAX_BODY_SECONDS = 30.0

_SALT_HEADER = SALT_HEADER.encode()


class ClientGone(ConnectionError):
    """The client left before its request was complete: nobody waits for an answer."""


class Asked(NamedTuple):
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

    def answer(self, asked: Asked, body: bytes) -> bytes | Problem:
        """Answer one POST with a body within the limit, and count it. Never raises."""
        found: bytes | Problem | None = None
        with Boundary(asked.template) as boundary:
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

    def _answer(self, asked: Asked, body: bytes) -> bytes:
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
                asked, declared_bytes = _asked(template, scope)
                body = await read_body(receive, declared_bytes, self.max_body_bytes(template))
            except ClientGone:
                return
            except InvalidRequest as error:
                answer = problem_of(error)
                self.count(template, answer)
            else:
                answer = self.answer(asked, body)
        await send_answer(send, answer)


async def read_body(receive: Receive, declared_bytes: int, limit_bytes: int) -> bytes:
    """Return the body of a request, reading no more than the limit.

    Raises PromptTooLarge, from the declared length if there is one, RequestTooSlow and ClientGone.
    """
    if declared_bytes > limit_bytes:
        raise PromptTooLarge("body", f"{declared_bytes} bytes, the limit is {limit_bytes}")
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            return await _whole_body(receive, limit_bytes)
    except TimeoutError:
        raise too_slow() from None


def too_slow() -> RequestTooSlow:
    """Return the error of a body that has not come within MAX_BODY_SECONDS."""
    return RequestTooSlow("body", f"not complete after {MAX_BODY_SECONDS:g} s")


async def _whole_body(receive: Receive, limit_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        if chunk := message.get("body", b""):
            num_bytes += len(chunk)
            if num_bytes > limit_bytes:
                raise PromptTooLarge("body", f"more bytes than the limit of {limit_bytes}")
            chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def send_answer(send: Send, answer: bytes | Problem) -> None:
    """Send a JSON body, or a problem with its status."""
    status, headers, body = parts_of(answer)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def parts_of(answer: bytes | Problem) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return the status of an answer, its headers in lower case, and its body."""
    status, media_type, body = 200, b"application/json", answer
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(answer, Problem):
        status, media_type, body = answer.status, MEDIA_TYPE.encode(), answer.encoded()
        headers = [(k.encode(), v.encode()) for k, v in headers_of(status).items()]
        if status == 405:
            headers.append((b"allow", b"POST"))
    assert isinstance(body, bytes)
    headers += [(b"content-type", media_type), (b"content-length", b"%d" % len(body))]
    return status, headers, body


def _decision_id(path: str, end: str) -> str:
    return path[len(REPORTS) : -len(end)][:MAX_DECISION_ID]


def _asked(template: str, scope: Scope) -> tuple[Asked, int]:
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
    asked = Asked(template, scope["path"], scope["query_string"], content_type, tuple(salts))
    return asked, declared_bytes
