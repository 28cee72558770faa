"""The test's side of a peer process: start it, ask it, stop it, lose it."""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvatlas.schemas.errors import NoResponder, RequestTimedOut
from testkit.peer_main import PeerSettings
from testkit.waiting import WAIT_SECONDS

_T = TypeVar("_T")
FINGERPRINT = bytes(range(16))
STOP_SECONDS = 15.0


class PeerProcess:
    """A running peer. `request` has the shape that a Puller wants."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.process, self._reader, self._writer = process, reader, writer
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._is_lost = False

    async def request(self, subject: str, payload: bytes, timeout_seconds: float) -> bytes:
        return await self._ask(0, payload, timeout_seconds)

    async def control(self, *verb: Any) -> Any:
        answer = await self._ask(1, msgspec.msgpack.encode(verb), WAIT_SECONDS)
        return msgspec.msgpack.decode(answer) if answer else None

    def freeze(self) -> None:
        """Stop the process that answers lease requests."""
        stop(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def source_pid(self) -> int:
        """Return the process from which peers read."""
        pid = await self.control("source_pid")
        assert isinstance(pid, int)
        return pid

    async def kill(self) -> None:
        """Lose both processes at once."""
        os.kill(await self.source_pid(), signal.SIGKILL)
        self.process.kill()
        await self.process.wait()

    async def listen(self) -> None:
        """Hand answers to whoever asked, until the peer is gone."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await self._reader.readexactly(8)
                answer = await self._reader.readexactly(int.from_bytes(head[:4], "little"))
                asked = self._answers.pop(int.from_bytes(head[4:], "little"), None)
                if asked is not None and not asked.done():
                    asked.set_result(answer)
        self._is_lost = True
        for asked in self._answers.values():
            if not asked.done():
                asked.set_exception(NoResponder("the peer is gone"))

    async def _ask(self, kind: int, body: bytes, timeout_seconds: float) -> bytes:
        if self._is_lost:
            raise NoResponder("the peer is gone")
        number = next(self._numbers)
        asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = asked
        head = len(body).to_bytes(4, "little") + number.to_bytes(4, "little") + bytes([kind])
        self._writer.write(head + body)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await asked
        except TimeoutError as error:
            raise RequestTimedOut("the peer is silent") from error


def stop(pid: int) -> None:
    """Freeze a process, and return when it stands still."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


@contextlib.asynccontextmanager
async def a_peer(
    folder: Path,
    worker: str = "w1",
    block_bytes: int = 16384,
    num_slots: int = 64,
    num_blocks: int = 64,
    fingerprint: bytes = FINGERPRINT,
    epoch: int = 1,
    ucx_tls: str = "",
    progress_thread: bool = False,
    max_ttl_ms: int = 30_000,
) -> AsyncIterator[PeerProcess]:
    """Run a peer with blocks 0 to `num_blocks` and end it, whatever became of it."""
    settings = PeerSettings(
        worker,
        str(folder),
        block_bytes,
        num_slots,
        num_blocks,
        fingerprint,
        epoch,
        ucx_tls,
        progress_thread,
        max_ttl_ms,
    )
    main = Path(__file__).with_name("peer_main.py")
    path = folder / f"{worker}-{epoch}.socket"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(main),
        str(path),
        msgspec.json.encode(settings).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ, PYTHONPATH=str(main.parent.parent)),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        while (line := await process.stdout.readline()) != b"ready\n":
            assert line, "the peer did not start"
        reader, writer = await asyncio.open_unix_connection(path)
        peer = PeerProcess(process, reader, writer)
        listening = asyncio.create_task(peer.listen())
        try:
            yield peer
        finally:
            listening.cancel()
            writer.close()
            await asyncio.gather(listening, writer.wait_closed(), return_exceptions=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
