"""Reading bodies and sending answers in ASGI, for every application of ours alike."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvatlas.router.http.problems import MEDIA_TYPE, Problem, headers_of
from kvatlas.router.http.server.limits import BODY_SECONDS
from kvatlas.schemas.errors import PromptTooLarge, RequestTooSlow

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientGone(ConnectionError):
    """The client left, or was refused, before its request was complete: no answer is sent."""


async def read_body(receive: Receive, declared_bytes: int, limit_bytes: int) -> bytes:
    """Return the body of a request, reading no more than the limit.

    Raises PromptTooLarge, from the declared length if there is one, RequestTooSlow and ClientGone.
    """
    if declared_bytes > limit_bytes:
        raise PromptTooLarge("body", f"{declared_bytes} bytes, the limit is {limit_bytes}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _whole_body(receive, limit_bytes)
    except TimeoutError:
        raise too_slow() from None


def too_slow() -> RequestTooSlow:
    """Return the error of a body that has not come within BODY_SECONDS."""
    return RequestTooSlow("body", f"not complete after {BODY_SECONDS:g} s")


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
