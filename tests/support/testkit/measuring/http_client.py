"""The client of the HTTP benchmark: prepared requests over blocking sockets, one for all sides."""

import contextlib
import re
import selectors
import socket
import time
from collections.abc import Generator

#: connections that ask at once, and asks that do not count
CONNECTIONS, WARM_UP_ASKS = 16, 5


class Connection:
    """One keep-alive connection that sends prepared requests and returns bodies of answers."""

    _LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> bytes:
        """Send a request; return the body of its answer."""
        self.socket.sendall(request)
        return self.answer()

    def answer(self) -> bytes:
        """Return the body of the next answer. Raises ConnectionError when the server hangs up."""
        received = b""
        while True:
            chunk = self.socket.recv(1 << 18)
            if not chunk:
                raise ConnectionError("the server has hung up")
            received += chunk
            head = received.find(b"\r\n\r\n")
            if head < 0:
                continue
            length = self._LENGTH.search(received, 0, head)
            assert length, received[:head]
            if len(received) >= head + 4 + int(length[1]):
                assert received.startswith(b"HTTP/1.1 200"), received
                return received[head + 4 :]


def post(path: str, body: bytes, *headers: str) -> bytes:
    """Return a whole request."""
    lines = [f"POST {path} HTTP/1.1", "host: bench", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextlib.contextmanager
def connected(port: int) -> Generator[Connection, None, None]:
    """Yield a connection of its own: a server may end one that idles while the others' turn is."""
    connection = Connection(port)
    try:
        yield connection
    finally:
        connection.socket.close()


def microseconds_of(port: int, request: bytes, count: int) -> list[float]:
    """Ask one after the other, over one connection that has been used before."""
    taken = []
    with connected(port) as connection:
        for _ in range(WARM_UP_ASKS):
            connection.ask(request)
        for _ in range(count):
            started = time.perf_counter()
            connection.ask(request)
            taken.append(1e6 * (time.perf_counter() - started))
    return taken


def requests_per_second(port: int, request: bytes, seconds: float) -> float:
    """Ask over 16 connections, each as soon as its last answer is there."""
    with selectors.DefaultSelector() as ready, contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            connection = stack.enter_context(connected(port))
            ready.register(connection.socket, selectors.EVENT_READ, connection)
            connection.socket.sendall(request)
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            for key, _ in ready.select():
                key.data.answer()
                key.data.socket.sendall(request)
                count += 1
        return count / (time.perf_counter() - started)
