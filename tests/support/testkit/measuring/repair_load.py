"""Requests at a steady rate from a process of their own, and a look at whom the index believes.

A request's latency counts from when it was due, not from when it was sent: one that has to wait
behind a slow one has waited.
"""

import multiprocessing
import threading
import time
from multiprocessing.connection import Connection as Pipe
from typing import NamedTuple

from testkit.measuring.http_client import Connection

REQUESTS_PER_SECOND = 200
#: between two looks at all workers
LOOK_SECONDS = 0.05
#: a repair takes no longer than this
REPAIR_SECONDS = 60.0


class Asked(NamedTuple):
    """What one run has found; times by `perf_counter`."""

    #: form, when it was due, microseconds
    answers: list[tuple[str, float, float]]
    #: when it was looked, workers that were exact
    looks: list[tuple[float, int]]


class RequestLoad:
    """The process that asks; forms take turns, each over a connection of its own."""

    def __init__(
        self, port: int, requests: dict[str, bytes], look: bytes, num_workers: int
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        process = spawn.Process(
            target=_ask_when_told, args=(theirs, port, requests, look, num_workers), daemon=True
        )
        process.start()
        self._process = process
        self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join(10)

    def for_seconds(self, seconds: float) -> Asked:
        """Ask for so long."""
        self._pipe.send(seconds)
        return self.result()

    def begin_until_healed(self) -> None:
        """Begin to ask until some worker was not exact, and then all are."""
        self._pipe.send(0.0)

    def result(self) -> Asked:
        """Return what the run has found, when it is over."""
        found: Asked = self._pipe.recv()
        return found


class _Looking(threading.Thread):
    """Looks at the trust in all workers, until it is over."""

    def __init__(self, port: int, request: bytes, num_workers: int, seconds: float) -> None:
        super().__init__(daemon=True)
        self._connection, self._request = Connection(port), request
        self._num_workers, self._seconds = num_workers, seconds
        self.looks: list[tuple[float, int]] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        started, was_broken = time.perf_counter(), False
        while not self.is_over.is_set():
            num_exact = self._connection.ask(self._request).count(b'"exact"')
            now = time.perf_counter()
            self.looks.append((now, num_exact))
            is_whole = num_exact == self._num_workers
            was_broken |= not is_whole
            seconds = now - started
            if seconds >= (self._seconds or REPAIR_SECONDS):
                break
            if not self._seconds and was_broken and is_whole:
                break
            time.sleep(LOOK_SECONDS)
        self.is_over.set()
        self._connection.socket.close()


def _ask_when_told(
    pipe: Pipe, port: int, requests: dict[str, bytes], look: bytes, num_workers: int
) -> None:
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        looking = _Looking(port, look, num_workers, seconds)
        connections = {form: Connection(port) for form in requests}
        for form, connection in connections.items():
            connection.ask(requests[form])
        looking.start()
        answers = _ask_steadily(connections, requests, looking.is_over)
        looking.join()
        for connection in connections.values():
            connection.socket.close()
        pipe.send(Asked(answers, looking.looks))


def _ask_steadily(
    connections: dict[str, Connection], requests: dict[str, bytes], is_over: threading.Event
) -> list[tuple[str, float, float]]:
    answers: list[tuple[str, float, float]] = []
    forms, started = list(requests), time.perf_counter()
    while not is_over.is_set():
        form = forms[len(answers) % len(forms)]
        due = started + len(answers) / REQUESTS_PER_SECOND
        if (early := due - time.perf_counter()) > 0:
            time.sleep(early)
        connections[form].ask(requests[form])
        answers.append((form, due, 1e6 * (time.perf_counter() - due)))
    return answers
