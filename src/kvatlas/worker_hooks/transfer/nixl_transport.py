"""Reading and serving over NIXL: the sidecar's side of the transfer process.

    event loop                            process (nixl_process.py)
    NixlTransport.read   --Read------->   post, poll, quarantine, recycle
                         <--Ended------
                         <--Freed------   a read in quarantine is over
    .expect_reads        --ExpectReads->  look for peers often

When the process dies its transfers die with it: its reads fail, their places are free again, and
another process is started.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from kvatlas.schemas.errors import TransportUnavailable
from kvatlas.worker_hooks.pool import ServePool
from kvatlas.worker_hooks.transfer.nixl_messages import (
    MAX_MESSAGE_BYTES,
    Broken,
    Connect,
    Ended,
    ExpectReads,
    Freed,
    FromProcess,
    Hello,
    NixlSettings,
    Read,
    Recycled,
    ToProcess,
    encode_message,
    from_process,
)
from kvatlas.worker_hooks.transfer.transport import (
    Bounce,
    ReadOutcome,
    ReadStatus,
    Row,
    SourceRef,
    metadata_version,
)

#: how long a read may outlive its deadline because the driver blocks, mostly while it connects
GRACE_SECONDS = 0.25
#: how long after that a transfer process is given up that does not answer
STUCK_SECONDS = 5.0
_FIRST_RESTART_SECONDS, _LAST_RESTART_SECONDS = 0.1, 5.0
_MAX_START_SECONDS = 300.0

_logger = logging.getLogger(__name__)


class _TooSlow(TransportUnavailable):
    """The transfer process has said nothing yet."""


class _Command(Struct):
    """What the process has not answered, or in quarantine still owes the places of."""

    places: Sequence[int]
    answer: "asyncio.Future[ReadOutcome]"


class NixlTransport:
    """A Transport and a Source. `agent_name` names worker and rank; agents' names extend it.

    Entering raises TransportUnavailable where NIXL is missing or has no backend. A process that
    takes longer than `start_seconds`, as on a busy machine, is started again with twice the
    patience; until one is there, `reference` is None and reads fail at once.
    """

    name = "nixl"

    def __init__(
        self,
        agent_name: str,
        pool: ServePool,
        bounce: Bounce,
        settings: NixlSettings | None = None,
    ) -> None:
        self._agent_name, self._pool, self._bounce = agent_name, pool, bounce
        self._settings = settings or NixlSettings()
        self._start_seconds = self._settings.start_seconds
        self._numbers = itertools.count(1)
        self._commands: dict[int, _Command] = {}
        self._late: dict[int, Sequence[int]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._hello: asyncio.Future[Hello | Broken] | None = None
        self._reference: SourceRef | None = None
        self._address = 0
        self._watching: asyncio.Task[None] | None = None
        #: how often the process died, and how often its reading agent was made again
        self.num_restarts = self.num_recycled = 0

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except _TooSlow as error:
            _logger.warning("%s; retrying", error)
            await self._stop()
        except BaseException:
            await self._stop()
            raise
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._stop()

    # --- as a source ------------------------------------------------------------------------

    @property
    def reference(self) -> SourceRef | None:
        return self._reference

    def rows(self, places: Sequence[int]) -> list[Row]:
        address, size = self._address, self._pool.block_bytes
        return [Row(address + place * size, size, 0) for place in places]

    def expect_reads(self, seconds: float) -> None:
        self._tell(ExpectReads(seconds))

    # --- as a transport ---------------------------------------------------------------------

    @property
    def num_quarantined(self) -> int:
        """Reads whose transfer is not over."""
        return len(self._late)

    @property
    def pid(self) -> int | None:
        """The transfer process, None while there is none."""
        return self._process.pid if self._process is not None and self._reference else None

    async def connect(self, source: SourceRef, deadline_seconds: float) -> ReadStatus:
        number = next(self._numbers)
        command = Connect(number, source.agent, source.metadata, source.metadata_version)
        outcome = await self._ask(number, command, (), deadline_seconds)
        return outcome.status

    async def read(
        self, source: SourceRef, rows: Sequence[Row], deadline_seconds: float
    ) -> ReadOutcome:
        places = self._bounce.take(len(rows))
        if not places:
            return ReadOutcome(ReadStatus.no_room)
        number = next(self._numbers)
        command = Read(
            number,
            source.agent,
            source.metadata,
            source.metadata_version,
            tuple(rows),
            tuple(places),
            deadline_seconds,
        )
        return await self._ask(number, command, places, deadline_seconds)

    async def _ask(
        self, number: int, message: Read | Connect, places: Sequence[int], seconds: float
    ) -> ReadOutcome:
        command = _Command(places, asyncio.get_running_loop().create_future())
        if not self._tell(message):
            self._bounce.give_back(places)
            return ReadOutcome(ReadStatus.failed, detail="there is no transfer process now")
        self._commands[number] = command
        try:
            async with asyncio.timeout(seconds + GRACE_SECONDS):
                return await command.answer
        except TimeoutError:
            asyncio.get_running_loop().call_later(STUCK_SECONDS, self._end_if_stuck, number)
            return ReadOutcome(ReadStatus.timed_out, detail="the driver blocks")

    def _end_if_stuck(self, number: int) -> None:
        """Kill a process that has still not answered; what it owed is then free."""
        if number in self._commands and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    # --- messages ---------------------------------------------------------------------------

    def _tell(self, message: ToProcess) -> bool:
        if self._channel is None:
            return False
        try:
            self._channel.send(encode_message(message))
        except OSError:  # it is stopped, or dead and soon reaped; or the message is too large
            return False
        return True

    def _listen(self) -> None:
        """Take what the process has said; the event loop calls it."""
        channel = self._channel
        while channel is not None:
            try:
                payload = channel.recv(MAX_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                payload = b""
            if not payload:  # it is dead; `_watch` sees to the rest
                asyncio.get_running_loop().remove_reader(channel)
                if self._hello is not None and not self._hello.done():
                    self._hello.set_result(Broken("the transfer process died at its start"))
                return
            self._take(from_process.decode(payload))

    def _take(self, message: FromProcess) -> None:
        match message:
            case Hello() | Broken():
                if self._hello is not None and not self._hello.done():
                    self._hello.set_result(message)
            case Ended(number):
                self._end(self._commands.pop(number), message)
            case Freed(number):
                self._bounce.give_back(self._late.pop(number))
            case Recycled():
                self.num_recycled += 1

    def _end(self, command: _Command, ended: Ended) -> None:
        is_waited_for = not command.answer.done()
        is_done = ended.status is ReadStatus.done
        if not ended.is_over:
            self._late[ended.number] = command.places
        elif not (is_done and is_waited_for):
            self._bounce.give_back(command.places)
        if is_waited_for:
            places = command.places if is_done else ()
            outcome = ReadOutcome(ended.status, places, ended.detail, ended.seconds)
            command.answer.set_result(outcome)

    # --- the process ------------------------------------------------------------------------

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._hello = loop.create_future()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        environment = dict(os.environ)
        if self._settings.ucx_tls:
            environment["UCX_TLS"] = self._settings.ucx_tls
        told = {
            "pool": str(self._pool.path),
            "agent": self._agent_name,
            "nixl": self._settings,
        }
        module = "kvatlas.worker_hooks.transfer.nixl_process"
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                module,
                str(theirs.fileno()),
                msgspec.json.encode(told).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # NIXL and UCX talk
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        loop.add_reader(self._channel, self._listen)
        try:
            async with asyncio.timeout(self._start_seconds):
                hello = await self._hello
        except TimeoutError as error:
            problem = f"no transfer process within {self._start_seconds} s"
            self._start_seconds = min(2 * self._start_seconds, _MAX_START_SECONDS)
            raise _TooSlow(problem) from error
        if isinstance(hello, Broken):
            raise TransportUnavailable(hello.problem)
        self._address = hello.address
        version = metadata_version(hello.metadata)
        self._reference = SourceRef(self.name, hello.agent, hello.metadata, version)

    async def _watch(self) -> None:
        """Start the process again whenever it dies."""
        pause = _FIRST_RESTART_SECONDS
        while True:
            started = time.monotonic()
            if self._process is not None:
                await self._process.wait()
            await self._stop()
            if time.monotonic() - started > _LAST_RESTART_SECONDS:
                pause = _FIRST_RESTART_SECONDS
            self.num_restarts += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_RESTART_SECONDS)
            try:
                await self._start()
            except TransportUnavailable:
                await self._stop()

    async def _stop(self) -> None:
        """End the process and, once it is dead, free what its reads had."""
        self._reference = None
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            code, self._process = self._process.returncode, None
            detail = f"the transfer process ended with {code}"
            commands, self._commands = self._commands, {}
            late, self._late = self._late, {}
            for places in (*late.values(), *(c.places for c in commands.values())):
                self._bounce.give_back(places)
            for command in commands.values():
                if not command.answer.done():
                    outcome = ReadOutcome(ReadStatus.failed, detail=detail)
                    command.answer.set_result(outcome)
