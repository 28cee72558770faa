"""What the protocol of hot routes asks of its transport."""

import asyncio
from typing import Any

import msgspec
import uvicorn
from uvicorn.server import ServerState

from kvatlas.router.http.app import create_app
from testkit.fleet import MODEL, Fleet, a_prompt
from testkit.waiting import until

PROMPT = a_prompt(64)
BODY = msgspec.json.encode({"model": MODEL, "token_ids": PROMPT})
REQUEST = (
    b"POST /v1/score HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class Transport(asyncio.Transport):
    """Notes what is written and whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.reads = True

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


def connected() -> tuple[Any, Transport]:
    fleet = Fleet()
    fleet.up("w1")
    app = create_app(fleet.router())
    config = uvicorn.Config(app, log_config=None)
    config.load()
    protocol = app.http_protocol(config, ServerState(), {})
    transport = Transport()
    protocol.connection_made(transport)
    return protocol, transport


async def test_nothing_is_read_while_requests_wait_and_all_of_them_are_answered() -> None:
    protocol, transport = connected()
    protocol.data_received(REQUEST * 50)
    assert (len(transport.written), transport.reads) == (1, False)
    await until(lambda: transport.reads)
    assert len(transport.written) == 50
    protocol.connection_lost(None)


async def test_the_rest_of_a_body_is_read_and_a_complete_request_pauses_nothing() -> None:
    protocol, transport = connected()
    protocol.data_received(REQUEST[:-1])
    assert (transport.written, transport.reads) == ([], True)
    protocol.data_received(REQUEST[-1:])
    assert (len(transport.written), transport.reads) == (1, True)
    protocol.connection_lost(None)


async def test_answers_that_are_not_taken_stop_reading_until_they_are() -> None:
    protocol, transport = connected()
    protocol.pause_writing()
    seen = [transport.reads]
    protocol.resume_writing()
    assert [*seen, transport.reads] == [False, True]
    protocol.connection_lost(None)
