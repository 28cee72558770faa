"""One connection's deadlines, its part of the body budget, and how it ends."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from http import HTTPStatus

from kvatlas.router.http.problems import Problem, problem
from kvatlas.router.http.server.limits import FREE_BODY_BYTES, LINGER_SECONDS, HttpLimits
from kvatlas.router.http.server.messages import parts_of

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_HEADER = b"%b: %b\r\n"


class Phase(Enum):
    """What a connection waits for."""

    #: a first request, or the rest of a head
    HEAD = auto()
    #: the rest of a body
    BODY = auto()
    #: the application
    ANSWER = auto()
    #: another request
    IDLE = auto()


class Lifetime:
    """Ends a connection that is in a phase for too long; its protocol says which phase it is in.

    The clock is looked at now and then: a timer for each request would cost each of them.
    """

    def __init__(
        self,
        limits: HttpLimits,
        loop: asyncio.AbstractEventLoop,
        on_late: Callable[[Phase], None],
    ) -> None:
        self._limits, self._loop, self._on_late = limits, loop, on_late
        self.phase, self.since = Phase.HEAD, loop.time()
        #: since when the client leaves an answer unread
        self.unread_since: float | None = None
        bounds = limits.bounds
        self._seconds = {
            Phase.HEAD: bounds.head_seconds,
            Phase.BODY: bounds.body_seconds,
            Phase.ANSWER: float("inf"),
            Phase.IDLE: bounds.keep_alive_seconds,
        }
        self._unread_seconds = bounds.unread_seconds
        self._every = min(*self._seconds.values(), self._unread_seconds) / 2
        #: of the body that is under way: those that came, and those that are counted
        self._num_bytes = self._num_held = 0
        #: whether its last answer was sent; what comes is dropped
        self.is_ending = False
        self._look = loop.call_later(self._every, self._look_at_clock)

    @property
    def idle_since(self) -> float | None:
        """When the connection began to wait for a request; None while one is under way."""
        return self.since if self.phase in (Phase.HEAD, Phase.IDLE) else None

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self.phase, self.since = phase, self._loop.time()

    def came(self, num_bytes: int) -> bool:
        """Count so many bytes of a body that is not answered; False: there is no room for them."""
        self._num_bytes += num_bytes
        more = self._num_bytes - FREE_BODY_BYTES - self._num_held
        if more <= 0:
            return True
        if not self._limits.hold(more):
            return False
        self._num_held += more
        return True

    def body_done(self) -> None:
        """Count the body no more."""
        if self._num_bytes:
            self._limits.release(self._num_held)
            self._num_bytes = self._num_held = 0

    def end(self, transport: asyncio.Transport, answer: bytes = b"") -> None:
        """Send a last answer and end the connection once the client has seen it.

        To close with bytes unread would reset it, and the answer could be lost.
        """
        self.body_done()
        if self.is_ending or transport.is_closing():
            return
        self.is_ending = True
        if not answer:
            transport.abort()
            return
        transport.write(answer)
        transport.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()
        self._look.cancel()
        self._look = self._loop.call_later(LINGER_SECONDS, transport.abort)

    def over(self) -> None:
        """Let go of all that it holds; the connection is lost."""
        self._look.cancel()
        self.body_done()

    def _look_at_clock(self) -> None:
        now = self._loop.time()
        self._look = self._loop.call_later(self._every, self._look_at_clock)
        if self.unread_since is not None and now - self.unread_since >= self._unread_seconds:
            self._limits.refused["unread_answer"] += 1
            self._on_late(Phase.ANSWER)
        elif now - self.since >= self._seconds[self.phase]:
            if self.phase is not Phase.IDLE:
                reason = "head_seconds" if self.phase is Phase.HEAD else "body_seconds"
                self._limits.refused[reason] += 1
            self._on_late(self.phase)


def last_answer(status: int, detail: str, field: str = "") -> bytes:
    """Return a problem as the bytes of a connection's last answer."""
    return raw_answer(problem(status, detail, field), b"", is_last=True)


def raw_answer(answer: Problem, default_lines: bytes, *, is_last: bool) -> bytes:
    """Return a problem as the bytes of an answer; `default_lines` are headers."""
    status, headers, body = parts_of(answer)
    ending = b"connection: close\r\n\r\n" if is_last else b"\r\n"
    lines = [_STATUS_LINES[status], default_lines, *(_HEADER % header for header in headers)]
    return b"".join((*lines, ending, body))
