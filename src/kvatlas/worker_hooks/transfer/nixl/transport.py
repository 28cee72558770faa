"""Reading and serving over NIXL: the sidecar's side of the transfer process.

    event loop                            process (process.py)
    NixlTransport.read   --Read------->   post, poll, quarantine, recycle
                         <--Ended------
                         <--Freed------   a read in quarantine is over
    .expect_reads        --ExpectReads->  look for peers often

When the process dies its transfers die with it: its reads fail, their places are free again, and
another process is started. One that hangs is killed (common/child_processes.py).
"""

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from kvatlas.common.child_processes import ChildLimits, Supervisor, kill_child, signal_child
from kvatlas.schemas.errors import TransportUnavailable
from kvatlas.worker_hooks.transfer.nixl.messages import (
    MAX_MESSAGE_BYTES,
    Broken,
    Connect,
    Ended,
    ExpectReads,
    Freed,
    FromProcess,
    Hello,
    NixlSettings,
    Ping,
    Pong,
    Read,
    Recycled,
    ToProcess,
    encode_message,
    from_process,
)
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.transport import (
    BouncePlaces,
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
_MAX_START_SECONDS = 300.0
COMMAND = (sys.executable, "-P", "-m", "kvatlas.worker_hooks.transfer.nixl.process")
#: of the transfer process; how long it may take to start is a setting, and doubled when it is over
LIMITS = ChildLimits(2 * _MAX_START_SECONDS, first_pause_seconds=0.1)

_logger = logging.getLogger(__name__)


class _Failed(TransportUnavailable):
    """The transfer process has said nothing yet, or died before: no word about NIXL itself."""


class _Command(Struct):
    """What the process has not answered, or in quarantine still owes the places of."""

    places: Sequence[int]
    answer: "asyncio.Future[ReadOutcome]"


class NixlTransport:
    """A Transport and a Source. `agent_name` names worker and rank; agents' names extend it.

    Entering raises TransportUnavailable where NIXL is missing or has no backend, as the process
    itself says. One that dies before it says anything is started again, and so is one that takes
    longer than `start_seconds`, as on a busy machine, with twice the patience. Until one is there,
    `reference` is None and reads fail at once.
    """

    name = "nixl"

    def __init__(
        self,
        agent_name: str,
        pool: ServePool,
        bounce: BouncePlaces,
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
        self._hello: asyncio.Future[Hello | Broken | None] | None = None
        self._reference: SourceRef | None = None
        self._address = 0
        self._watching: asyncio.Task[None] | None = None
        #: how often the reading agent was made again
        self.num_recycled = 0
        #: number of the question whether the process lives, and its answer
        self._pinged = 0
        self._pong: asyncio.Future[None] | None = None
        self._supervisor = Supervisor(self, f"the transfer process of {agent_name}", LIMITS)

    async def __aenter__(self) -> Self:
        failure = ""
        try:
            await self._supervisor.start()
        except (_Failed, OSError) as error:
            failure = f"did not start: {error}"
        self._watching = asyncio.create_task(self._supervisor.run(failure))
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
        await self.kill()

    # --- as a source ------------------------------------------------------------------------

    @property
    def reference(self) -> SourceRef | None:
        return self._reference

    def rows(self, places: Sequence[int]) -> list[Row]:
        address, size = self._address, self._pool.block_bytes
        return [Row(address + place * size, size, 0) for place in places]

    def expect_reads(self, seconds: float) -> None:
        self._send(ExpectReads(seconds))

    # --- as a transport ---------------------------------------------------------------------

    @property
    def num_restarts(self) -> int:
        """How often the process died, hung or did not start."""
        return self._supervisor.health.num_failures

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
        outcome = await self._command(number, command, (), deadline_seconds)
        return outcome.status

    async def read(
        self, source: SourceRef, rows: Sequence[Row], deadline_seconds: float
    ) -> ReadOutcome:
        places = self._bounce.acquire(len(rows))
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
        return await self._command(number, command, places, deadline_seconds)

    async def _command(
        self, number: int, message: Read | Connect, places: Sequence[int], seconds: float
    ) -> ReadOutcome:
        command = _Command(places, asyncio.get_running_loop().create_future())
        if not self._send(message):
            self._bounce.release(places)
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
            signal_child(self._process, signal.SIGKILL)

    # --- messages ---------------------------------------------------------------------------

    def _send(self, message: ToProcess) -> bool:
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
            if not payload:  # it is dead; its supervisor sees to the rest
                asyncio.get_running_loop().remove_reader(channel)
                if self._hello is not None and not self._hello.done():
                    self._hello.set_result(None)
                return
            self._handle_message(from_process.decode(payload))

    def _handle_message(self, message: FromProcess) -> None:
        match message:
            case Hello() | Broken():
                if self._hello is not None and not self._hello.done():
                    self._hello.set_result(message)
            case Ended(number):
                self._end(self._commands.pop(number), message)
            case Freed(number):
                self._bounce.release(self._late.pop(number))
            case Recycled():
                self.num_recycled += 1
            case Pong(number):
                if number == self._pinged and self._pong is not None and not self._pong.done():
                    self._pong.set_result(None)

    def _end(self, command: _Command, ended: Ended) -> None:
        is_waited_for = not command.answer.done()
        is_done = ended.status is ReadStatus.done
        if not ended.is_over:
            self._late[ended.number] = command.places
        elif not (is_done and is_waited_for):
            self._bounce.release(command.places)
        if is_waited_for:
            places = command.places if is_done else ()
            outcome = ReadOutcome(ended.status, places, ended.detail, ended.seconds)
            command.answer.set_result(outcome)

    # --- the process ------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the process; see children.Child."""
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
            "parent_pid": os.getpid(),
        }
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *COMMAND,
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
            raise _Failed(problem) from error
        if hello is None:
            raise _Failed("it died at its start")
        if isinstance(hello, Broken):
            raise TransportUnavailable(hello.problem)
        self._address = hello.address
        version = metadata_version(hello.metadata)
        self._reference = SourceRef(self.name, hello.agent, hello.metadata, version)

    async def ended(self) -> int:
        """Return the process's status when it has ended."""
        return await self._process.wait() if self._process is not None else 0

    async def answers(self) -> bool:
        """Ask the process whether it carries out commands at all."""
        self._pinged += 1
        self._pong = asyncio.get_running_loop().create_future()
        if not self._send(Ping(self._pinged)):
            return False
        await self._pong
        return True

    async def kill(self) -> None:
        """End the process and, once it is dead, free what its reads had."""
        self._reference = None
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
        if self._process is not None:
            code = await kill_child(self._process)
            self._process = None
            detail = f"the transfer process ended with {code}"
            commands, self._commands = self._commands, {}
            late, self._late = self._late, {}
            for places in (*late.values(), *(c.places for c in commands.values())):
                self._bounce.release(places)
            for command in commands.values():
                if not command.answer.done():
                    outcome = ReadOutcome(ReadStatus.failed, detail=detail)
                    command.answer.set_result(outcome)
