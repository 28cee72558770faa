"""uvicorn's protocol within bounds: one request at a time, a budget for bodies, deadlines.

    bytes --data_received--> raw --slices, while no request waits--> uvicorn's parser --> ASGI

uvicorn alone parses all that a read brings, a request object for each head in it, and goes on
reading with each answer. Here the parser gets a small slice at a time and nothing while a request
waits for its answer; meanwhile the transport is not read.
"""

import asyncio
from typing import Any, ClassVar, cast

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvatlas.router.http.server.connection import Lifetime, Phase, last_answer
from kvatlas.router.http.server.limits import MAX_HEAD_BYTES, HttpLimits
from kvatlas.router.http.server.messages import too_slow

#: given to the parser at once: of heads, each of which may become a request object, and of bodies
HEAD_SLICE_BYTES, BODY_SLICE_BYTES = 1_024, 16_384
MALFORMED = "the bytes that came are not a request of HTTP/1.1"
NO_ROOM = "bodies of other requests under way fill router.max_inflight_body_bytes; try again later"


class _Flow(FlowControl):
    """uvicorn's wish to read or not, which the protocol heeds; it alone pauses the transport."""

    def __init__(self, protocol: "BoundedProtocol", transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._protocol = protocol

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._protocol.go_on()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._protocol.lifetime.unread_since = self._protocol.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._protocol.lifetime.unread_since = None


class BoundedProtocol(HttpToolsProtocol):
    """Takes the place of uvicorn's protocol; also for what other protocols hand over."""

    #: set by `bounded_protocol`
    limits: ClassVar[HttpLimits]
    lifetime: Lifetime

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        #: what the parser has not got yet
        self._raw = bytearray()
        self._is_reading = True
        self._is_pumping_soon = False
        #: between the first byte of a request and the end of its head, or of its body
        self._is_in_head = self._is_in_message = False
        self._num_head_bytes = 0
        self._has_begun = False
        #: behind the answers that are under way, the malformed bytes after them are answered
        self._is_malformed = False

    # --- what the transport says ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._take(transport)
        if not self.limits.admit(self):
            transport.write(too_many_connections())
            transport.close()

    def take_over(self, transport: asyncio.Transport, old: Any, raw: bytes) -> None:
        """Go on with a connection that another protocol had, from a request on that has begun."""
        self._take(transport)
        self.limits.replace(old, self)
        self.data_received(raw)

    def _take(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.lifetime = Lifetime(self.limits, self.loop, self._late)
        self.flow = _Flow(self, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limits.leave(self)
        self.lifetime.over()
        self._raw.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.lifetime.is_ending or self._is_malformed:
            return
        self._has_begun = True
        self._raw += data
        self._pump()

    @property
    def idle_since(self) -> float | None:
        """When it began to wait for a request; None while one is under way."""
        return self.lifetime.idle_since

    def evict(self) -> None:
        """End at once."""
        self.transport.abort()

    # --- to the parser, a slice at a time -----------------------------------------------------

    def go_on(self) -> None:
        """Give the parser more, soon."""
        if not self._is_pumping_soon and self._raw:
            self._is_pumping_soon = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pumping_soon = False
        while self._raw and self._may_parse():
            is_head = self._is_in_head or not self._is_in_message
            num_bytes = HEAD_SLICE_BYTES if is_head else BODY_SLICE_BYTES
            part = bytes(self._raw[:num_bytes])
            del self._raw[:num_bytes]
            super().data_received(part)
            if self._is_in_head:
                self._num_head_bytes += len(part)
                if self._num_head_bytes > MAX_HEAD_BYTES:
                    self.limits.refused["head_bytes"] += 1
                    self._refuse(last_answer(431, f"a head of more than {MAX_HEAD_BYTES} bytes"))
        self._read(not self._raw)

    def _may_parse(self) -> bool:
        """Whether no complete request waits for its answer, and uvicorn wants more."""
        if self.lifetime.is_ending or self._is_malformed or self.transport.is_closing():
            self._raw.clear()
            return False
        if self.flow.read_paused or self.pipeline:
            return False
        is_body = self._is_in_message and not self._is_in_head
        return is_body or self._is_cycle_over()

    def _read(self, is_wanted: bool) -> None:
        if is_wanted != self._is_reading and not self.transport.is_closing():
            self._is_reading = is_wanted
            if is_wanted:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    # --- what the parser says -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = self._is_in_message = True
        self._num_head_bytes = 0
        self._note_phase()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()
        self._note_phase()

    def on_body(self, body: bytes) -> None:
        if self.lifetime.is_ending:
            return
        # what an application does not want any more is not kept
        if not self.cycle.response_complete and not self.lifetime.came(len(body)):
            self._refuse(last_answer(503, NO_ROOM))
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_message = False
        super().on_message_complete()
        self._note_phase()

    def on_response_complete(self) -> None:
        # until now the application may have kept the body; the next one is not given to the parser
        self.lifetime.body_done()
        super().on_response_complete()
        if self._is_malformed and self._is_answered():
            self.lifetime.end(self.transport, last_answer(400, MALFORMED))
        self._note_phase()
        self.go_on()

    def _note_phase(self) -> None:
        """Begin another phase if what the connection waits for is another thing now."""
        is_in_body = self._is_in_message and not self._is_in_head
        if self.pipeline or not (is_in_body or self._is_answered()):
            phase = Phase.ANSWER
        elif self._is_in_message:
            phase = Phase.HEAD if self._is_in_head else Phase.BODY
        else:
            phase = Phase.IDLE
        if phase is not self.lifetime.phase:
            self.lifetime.enter(phase)

    def _unsupported_upgrade_warning(self) -> None:
        """Answer what was asked, in HTTP/1.1, and end: the parser has stopped at the upgrade."""
        self._raw.clear()
        self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        self.limits.refused["malformed"] += 1
        self._raw.clear()
        is_body = self._is_in_message and not self._is_in_head
        if is_body and self.pipeline:
            self.pipeline.popleft()  # the newest; its body cannot be read
        elif is_body or self._is_answered():
            self._refuse(last_answer(400, MALFORMED))
            return
        self._is_malformed = True

    # --- endings ------------------------------------------------------------------------------

    def _is_answered(self) -> bool:
        """Whether all requests whose heads came have their answers."""
        return not self.pipeline and self._is_cycle_over()

    def _is_cycle_over(self) -> bool:
        cycle = cast(RequestResponseCycle | None, self.cycle)  # None before the first
        return cycle is None or cycle.response_complete

    def _refuse(self, answer: bytes) -> None:
        """End with an answer to the request that is being read, unless its answer has begun."""
        if not self._is_cycle_over():
            cycle = self.cycle
            if cycle.response_started:
                answer = b""
            # the application is told that the client has gone
            cycle.disconnected = True
            cycle.message_event.set()
        self._raw.clear()
        self.lifetime.end(self.transport, answer)

    def _late(self, phase: Phase) -> None:
        if phase is Phase.HEAD and self._has_begun:
            seconds = self.limits.bounds.head_seconds
            detail = f"the head of a request was not complete after {seconds:g} s"
            self._refuse(last_answer(408, detail))
        elif phase is Phase.BODY and not self.cycle.response_complete:
            error = too_slow()
            self._refuse(last_answer(408, error.problem, error.field))
        else:
            self._refuse(b"")


def bounded_protocol(limits: HttpLimits) -> type[BoundedProtocol]:
    """Return uvicorn's protocol within these limits, for `uvicorn.Config(http=...)`."""
    return type("LimitedProtocol", (BoundedProtocol,), {"limits": limits})


def too_many_connections() -> bytes:
    """Return the only answer of a connection over the bound."""
    return last_answer(503, "router.max_connections are open, and each has a request under way")
