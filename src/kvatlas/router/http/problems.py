"""Errors as HTTP answers: RFC 9457 problem documents, for every status alike."""

import logging
import traceback
from http import HTTPStatus
from types import TracebackType
from typing import Self

from msgspec import Struct

from kvatlas.router.answers import encoded
from kvatlas.schemas.errors import (
    Conflict,
    InvalidInput,
    InvalidRequest,
    KvatlasError,
    LimitReached,
    NoCandidate,
    NotFound,
    PromptTooLarge,
    RequestTooSlow,
    Unavailable,
    UnknownModel,
    UnsupportedContentType,
)

MEDIA_TYPE = "application/problem+json"
#: the first that an error is an instance of gives its status
STATUS_OF: tuple[tuple[type[KvatlasError], HTTPStatus], ...] = (
    (RequestTooSlow, HTTPStatus.REQUEST_TIMEOUT),
    (PromptTooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (UnsupportedContentType, HTTPStatus.UNSUPPORTED_MEDIA_TYPE),
    (InvalidInput, HTTPStatus.BAD_REQUEST),
    (NotFound, HTTPStatus.NOT_FOUND),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (LimitReached, HTTPStatus.SERVICE_UNAVAILABLE),
    (Conflict, HTTPStatus.CONFLICT),
)
RETRY_AFTER_SECONDS = 1

_log = logging.getLogger("kvatlas.router")


class Problem(Struct, frozen=True, omit_defaults=True):
    """What went wrong; `field` names the part of the request that is wrong."""

    type: str
    title: str
    status: int
    detail: str
    field: str = ""

    def encoded(self) -> bytes:
        """Return the body of the answer."""
        return encoded(self)


def problem(status: int, detail: str, field: str = "") -> Problem:
    """Return the problem document of a status."""
    title = HTTPStatus(status).phrase
    name = title.lower().replace(" ", "-")
    return Problem(f"urn:kvatlas:problem:{name}", title, int(status), detail, field)


def problem_of(error: KvatlasError) -> Problem:
    """Return the problem document of one of our errors."""
    status = next(
        (status for kind, status in STATUS_OF if isinstance(error, kind)),
        HTTPStatus.INTERNAL_SERVER_ERROR,
    )
    match error:
        case InvalidRequest():
            return problem(status, error.problem, error.field)
        case UnknownModel() | NoCandidate():
            return problem(status, str(error), "model")
        case _:
            return problem(status, str(error))


def wrong_method(path: str, allowed: str) -> str:
    """Return what a request is told whose method its route does not take."""
    return f"{path} takes {allowed} only"


def headers_of(status: int) -> dict[str, str]:
    """Return the headers that a status calls for."""
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return {"retry-after": str(RETRY_AFTER_SECONDS)}
    return {}


class ErrorBoundary:
    """Ends an unexpected error here: it is logged, and told by `failed`; the service goes on.

    What is logged is its type and where it happened. Its text is not, since it may repeat a prompt.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failed = True
        frames = "".join(traceback.format_tb(at))
        _log.error("unexpected %s in %s\n%s", type(error).__name__, self._what, frames)
        return True
