"""The Unix socket between an engine and its sidecar.

Frames are msgpack arrays, tag first, each preceded by its length (u32 LE). The engine asks, many at
a time; every question has an id of its own and gets one answer, in any order.

    PullBlocks -> PullEnded      bring blocks of peers into slots offered in the serve pool
    Flush      -> Flushed        everything appended to the ring before has been stored by the bus
    AskStatus  -> Status         how the sidecar is doing
"""

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from kvatlas.common.own_files import FILE_MODE, has_stale_socket
from kvatlas.schemas.errors import (
    EndpointUnusable,
    ForeignFile,
    MalformedBatch,
    SidecarUnavailable,
)
from kvatlas.schemas.ids import InstanceId

MAX_FRAME_BYTES = 16 * 1024 * 1024
#: how much longer than its deadline a pull is waited for, in case the sidecar is stopped
PULL_SLACK_SECONDS = 1.0
#: how long a sidecar waits for its predecessor to leave the socket, and between two looks
PATIENCE_SECONDS, RETRY_SECONDS = 5.0, 0.05


class PullBlocks(Struct, frozen=True, array_like=True, tag="pull"):
    """Bring the blocks of `hashes` (packed) into `slots`, from the first owner that has them."""

    id: int
    hashes: bytes
    slots: tuple[int, ...]
    owners: tuple[InstanceId, ...]
    deadline_ms: int


class PullEnded(Struct, frozen=True, array_like=True, tag="pulled"):
    """Which positions of the pull are held now, and why the others are not.

    A position that is in neither list is missing as well.
    """

    id: int
    held: tuple[int, ...]
    missing: tuple[tuple[int, str], ...] = ()
    num_bytes: int = 0
    transport: str = ""
    checksum_failures: int = 0
    seconds: float = 0.0


class Flush(Struct, frozen=True, array_like=True, tag="flush"):
    """Answer when all events appended before this question are stored."""

    id: int


class Flushed(Struct, frozen=True, array_like=True, tag="flushed"):
    """They are; the last of them is in batch `seq` of `epoch`."""

    id: int
    epoch: int
    seq: int


class StatusRequest(Struct, frozen=True, array_like=True, tag="ask_status"):
    """How is it going?"""

    id: int


class SidecarStatus(Struct, frozen=True, array_like=True, tag="status"):
    """A sidecar at one moment; `counters` rise only, `epoch` is 0 until the broker was there."""

    id: int
    epoch: int
    seq: int
    is_connected: bool
    num_blocks: int
    waiting_bytes: int
    transport: str
    counters: dict[str, int]


Question = PullBlocks | Flush | StatusRequest
Answer = PullEnded | Flushed | SidecarStatus

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class ChannelServer:
    """The sidecar's end: answers each question in a task of its own, inside `async with`.

    Entering waits up to `patience_seconds` for another that still listens there to end. It raises
    ForeignFile for what is then there and is no socket that was left, and EndpointUnusable.
    """

    def __init__(
        self,
        path: Path,
        answer: Callable[[Question], Awaitable[Answer]],
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._path, self._answer, self._patience_seconds = path, answer, patience_seconds
        self._connections: set[asyncio.Task[None]] = set()
        self.num_malformed = 0

    async def __aenter__(self) -> Self:
        await self._clear()
        try:
            bound = _bound(self._path)
        except OSError as error:
            raise EndpointUnusable(str(self._path), f"{error.strerror or error}") from error
        self._own = self._path.lstat()
        self._server = await asyncio.start_unix_server(self._serve, sock=bound)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self._path.lstat(), self._own):  # another sidecar's may be there
                self._path.unlink()

    async def _clear(self) -> None:
        """Remove the socket of a sidecar that is gone, or goes soon. Raises ForeignFile."""
        give_up_at = time.monotonic() + self._patience_seconds
        while True:
            try:
                if has_stale_socket(self._path, "name another path for the sidecar's socket"):
                    self._path.unlink(missing_ok=True)
                return
            except ForeignFile as error:
                if not error.is_in_use or time.monotonic() >= give_up_at:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with asyncio.TaskGroup() as answers:
                while (frame := await _read_frame(reader)) is not None:
                    try:
                        question = _questions.decode(frame)
                    except (msgspec.DecodeError, RecursionError):
                        self.num_malformed += 1
                        break
                    answers.create_task(self._reply(question, writer))
        except* (OSError, MalformedBatch):
            self.num_malformed += 1
        except* asyncio.CancelledError:
            pass  # the sidecar ends; a cancelled handler is an error for asyncio's server
        finally:
            writer.close()
            self._connections.discard(task)

    async def _reply(self, question: Question, writer: asyncio.StreamWriter) -> None:
        answer = await self._answer(question)
        with contextlib.suppress(ConnectionError):
            await _write_frame(writer, answer)


def _bound(path: Path) -> socket.socket:
    """Return a socket that only this user may connect to, bound and not listening yet."""
    made = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(OSError):  # what Linux makes at the path has this mode
            os.fchmod(made.fileno(), FILE_MODE)
        made.bind(str(path))
    except OSError:
        made.close()
        raise
    return made


class SidecarChannel:
    """The engine's end. Connects again by itself; a question meanwhile is SidecarUnavailable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ids = itertools.count(1)
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._receiver: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)

    async def wait_ready(self, timeout_seconds: float = 20.0) -> None:
        """Return when the sidecar answers; raises SidecarUnavailable."""
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    with contextlib.suppress(SidecarUnavailable):
                        await self.status()
                        return
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            raise SidecarUnavailable(f"{self._path}: silent for {timeout_seconds} s") from error

    async def pull(
        self,
        hashes: bytes,
        slots: Sequence[int],
        owners: Sequence[InstanceId],
        deadline_seconds: float,
    ) -> PullEnded:
        """Pull blocks into slots offered for them; raises SidecarUnavailable."""
        deadline_ms = max(int(deadline_seconds * 1000), 1)
        question = PullBlocks(next(self._ids), hashes, tuple(slots), tuple(owners), deadline_ms)
        # the sidecar keeps the deadline; we only have to outlive it
        answer = await self._ask(question, deadline_seconds + PULL_SLACK_SECONDS)
        assert isinstance(answer, PullEnded)
        return answer

    async def flush(self, timeout_seconds: float = 30.0) -> Flushed:
        """Return when everything reported so far is stored; raises SidecarUnavailable."""
        answer = await self._ask(Flush(next(self._ids)), timeout_seconds)
        assert isinstance(answer, Flushed)
        return answer

    async def status(self, timeout_seconds: float = 5.0) -> SidecarStatus:
        """Return how the sidecar is doing; raises SidecarUnavailable."""
        answer = await self._ask(StatusRequest(next(self._ids)), timeout_seconds)
        assert isinstance(answer, SidecarStatus)
        return answer

    async def _ask(self, question: Question, timeout_seconds: float) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_seconds):
                writer = await self._connected()
                self._open[question.id] = answer
                await _write_frame(writer, question)
                return await answer
        except (OSError, TimeoutError) as error:
            problem = str(error) or "no answer in time"
            raise SidecarUnavailable(f"{self._path}: {problem}") from error
        finally:
            self._open.pop(question.id, None)

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self._receiver = asyncio.create_task(self._receive(reader, self._writer))
            return self._writer

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (frame := await _read_frame(reader)) is not None:
                answer = _answers.decode(frame)
                asked = self._open.pop(answer.id, None)
                if asked is not None and not asked.done():
                    asked.set_result(answer)
        except (OSError, MalformedBatch, msgspec.DecodeError, RecursionError):
            pass  # the connection is of no use any more, like one that the sidecar closed
        finally:
            self._writer = None
            writer.close()
            lost = SidecarUnavailable(f"{self._path}: the sidecar went away")
            for asked in self._open.values():
                if not asked.done():
                    asked.set_exception(lost)
            self._open.clear()


async def _read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next frame, or None at the end of the stream."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "little")
        if size > MAX_FRAME_BYTES:
            raise MalformedBatch(f"a frame of {size} bytes, the limit is {MAX_FRAME_BYTES}")
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError:
        return None


async def _write_frame(writer: asyncio.StreamWriter, message: Question | Answer) -> None:
    frame = _encoder.encode(message)
    writer.write(len(frame).to_bytes(4, "little") + frame)
    await writer.drain()
