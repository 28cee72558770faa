"""The processes of our side of the ingest benchmark: broker, publisher and index, one each."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import events_stream
from testkit.measuring.ingest_index import indexer
from testkit.measuring.ingest_teller import teller
from testkit.measuring.timing import cpu_seconds_of


class Remote:
    """An object in a process of its own: its methods are called by name, one at a time."""

    def __init__(self, role: str, url: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(role, url, other), daemon=True)
        self._process.start()
        other.close()
        self._pipe.recv()
        self.pid = self._process.pid or 0

    def ask(self, call: str, *arguments: Any) -> Any:
        """Return what the method returns."""
        self.begin(call, *arguments)
        return self.result()

    def begin(self, call: str, *arguments: Any) -> None:
        """Call a method; `result` waits for it."""
        self._pipe.send((call, arguments))

    def result(self) -> Any:
        """Return what the method that was begun returns."""
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)


def _serve(role: str, url: str, pipe: Connection) -> None:
    asyncio.run(_answer(role, url, pipe))


async def _answer(role: str, url: str, pipe: Connection) -> None:
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    async with NatsBus(url) as bus:
        await bus.declare_stream(events_stream())
        role_of = indexer(bus) if role == "indexer" else teller(bus, url)
        async with role_of as served:
            pipe.send(None)
            loop.add_reader(pipe.fileno(), readable.set)
            with suppress(EOFError):
                while True:
                    await readable.wait()
                    readable.clear()
                    if not pipe.poll():
                        continue  # told twice; to wait for it here would stop everything else
                    call, arguments = pipe.recv()
                    try:
                        pipe.send(await getattr(served, call)(*arguments))
                    except Exception as error:  # noqa: BLE001 - told to the other side
                        pipe.send(error)
            loop.remove_reader(pipe.fileno())


class Fleet(NamedTuple):
    """Our three processes."""

    broker_folder: Path
    broker_pid: int
    teller: Remote
    indexer: Remote

    def cpu_seconds(self) -> float:
        """Return what all three have used."""
        return sum(map(cpu_seconds_of, (self.broker_pid, self.teller.pid, self.indexer.pid)))


@contextmanager
def remotes(folder: Path, url: str, broker_pid: int) -> Iterator[Fleet]:
    """Run publisher and index on a broker."""
    with ExitStack() as stack:
        found = [Remote(role, url) for role in ("teller", "indexer")]
        for remote in found:
            stack.callback(remote.close)
        yield Fleet(folder, broker_pid, *found)
