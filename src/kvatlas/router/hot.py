"""The routes that every request takes, as bare ASGI: score, route, and the reports of its end.

Bodies are read under a limit and parsed by router/requests.py; nothing else stands between the
socket and the router. Whatever else is asked goes on to the control API.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from kvatlas.router.answers import ReportAnswer
from kvatlas.router.problems import MEDIA_TYPE, Boundary, Problem, headers_of, problem, problem_of
from kvatlas.router.requests import MAX_REPORT_BYTES, decode_report, decode_score_request
from kvatlas.router.service import Router
from kvatlas.schemas.errors import KvatlasError, PromptTooLarge, RequestTooSlow
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
MAX_DECISION_ID = 128

#: a client that sends slower than this holds memory for nothing
MAX_BODY_SECONDS = 30.0

_encode = msgspec.json.Encoder().encode


class ClientGone(ConnectionError):
    """The client left before its request was complete: nobody waits for an answer."""


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

    async def __call__(self, template: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request for a path with this template."""
        answer: bytes | Problem | None = None
        with Boundary(template) as boundary:
            try:
                answer = await self._answer(template, scope, receive)
            except KvatlasError as error:
                answer = problem_of(error)
            except ClientGone:
                return
        if boundary.failed or answer is None:
            answer = problem(500, "an unexpected error; the log has it")
        status = answer.status if isinstance(answer, Problem) else 200
        self._on_answer(template, status)
        await send_answer(send, answer)

    async def _answer(self, template: str, scope: Scope, receive: Receive) -> bytes | Problem:
        if scope["method"] != "POST":
            return problem(405, f"{template} takes POST only")
        content_type, declared_bytes = _headers(scope)
        if template in (SCORE, ROUTE):
            body = await read_body(receive, declared_bytes, self._settings.max_body_bytes)
            request = decode_score_request(body, content_type, self._settings)
            ask = self._router.score if template == SCORE else self._router.route
            return _encode(ask(request))
        body = await read_body(receive, declared_bytes, MAX_REPORT_BYTES)
        report = decode_report(body, content_type)
        if template.endswith(DONE):
            decision_id = _decision_id(scope["path"], DONE)
            outcome = self._router.done(decision_id, report)
        else:
            decision_id = _decision_id(scope["path"], PREFILLED)
            outcome = self._router.prefilled(decision_id, report)
        return _encode(ReportAnswer(decision_id, outcome.applied))


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
        raise RequestTooSlow("body", f"not complete after {MAX_BODY_SECONDS:g} s") from None


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
    status, media_type, body = 200, b"application/json", answer
    headers: list[tuple[bytes, bytes]] = []
    if isinstance(answer, Problem):
        status, media_type, body = answer.status, MEDIA_TYPE.encode(), answer.encoded()
        headers = [(k.encode(), v.encode()) for k, v in headers_of(status).items()]
        if status == 405:
            headers.append((b"allow", b"POST"))
    assert isinstance(body, bytes)
    headers += [(b"content-type", media_type), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _decision_id(path: str, end: str) -> str:
    return path[len(REPORTS) : -len(end)][:MAX_DECISION_ID]


def _headers(scope: Scope) -> tuple[str, int]:
    content_type, declared_bytes = "", 0
    for name, value in scope["headers"]:
        if name == b"content-type":
            content_type = value.decode("latin-1")
        elif name == b"content-length" and value.isdigit():
            declared_bytes = int(value)
    return content_type, declared_bytes
