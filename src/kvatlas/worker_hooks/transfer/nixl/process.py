"""The transfer process: the only one that loads NIXL. Started by `NixlTransport`, one a sidecar.

Why a process: NIXL holds the interpreter's lock while it copies on one host (1.5.1), which would
stop the sidecar; and UCX can abort the process over a peer that died, which must not stop it.

Two agents over the whole pool: the *source*, from which peers read, and the *reader*. A read that
is not over at its deadline keeps its handle and its places in quarantine: releasing the handle
would not stop bytes from arriving. Too many such places, and the reader is destroyed and made
again, which stops them; over TCP that can abort a source that is stalled at that moment.
"""

import contextlib
import gc
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from kvatlas.common.child_processes import die_with_parent
from kvatlas.schemas.errors import PoolUnreadable, TransportUnavailable
from kvatlas.worker_hooks.transfer.nixl.agent import MEMORY, Nixl, describe, meaning
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
    encode_message,
    to_process,
)
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.transport import ReadStatus

_PENDING, _DONE = "PROC", "DONE"
_READING_SECONDS, _QUARANTINE_SECONDS = 0.0001, 0.01


class TransferSettings(Struct, frozen=True):
    """What the transfer process is told at its start."""

    pool: str
    agent: str
    nixl: NixlSettings
    parent_pid: int


class NixlSource:
    """An agent from which peers read the pool, until the process ends."""

    def __init__(self, nixl: Nixl, name: str, pool: ServePool, settings: NixlSettings) -> None:
        self.name, self._nixl, self._settings = name, nixl, settings
        self._agent: Any = nixl.agent(name, settings.progress_thread)
        self._agent.register_memory([(pool.address, len(pool.blocks), 0, "")], MEMORY)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._busy_until = self._next_look = 0.0

    def expect_reads(self, seconds: float) -> None:
        now = time.monotonic()
        self._busy_until = max(self._busy_until, now + seconds) if seconds else now
        self._next_look = now

    def poll(self) -> float:
        """Drive connections and replies, as NIXL does when asked for notifications.

        Returns the seconds until it wants to look again.
        """
        now = time.monotonic()
        if now >= self._next_look:
            with contextlib.suppress(*self._nixl.errors):  # the peer it is about sees it too
                self._agent.get_new_notifs()
            is_busy = now < self._busy_until
            pause_ms = self._settings.busy_ms if is_busy else self._settings.idle_ms
            self._next_look = time.monotonic() + pause_ms / 1000
        return max(0.0, self._next_look - time.monotonic())


class _Reading(Struct):
    """A read on its way."""

    read: Read
    started: float
    handle: Any = None
    descriptors: Any = None

    @property
    def deadline(self) -> float:
        return self.started + self.read.seconds


class NixlReader:
    """Reads from sources into places of the pool."""

    def __init__(
        self,
        nixl: Nixl,
        name: str,
        pool: ServePool,
        settings: NixlSettings,
        tell: Callable[[FromProcess], None],
    ) -> None:
        self._nixl, self._name, self._pool, self._tell = nixl, name, pool, tell
        self._max_sources = settings.max_sources
        self._max_quarantined = settings.max_quarantined or max(1, pool.num_bounce // 2)
        self._agent: Any = None
        self._local: Any = None
        #: version of the metadata of each known source, least recently used first
        self._sources: dict[str, int] = {}
        #: sources whose connection was lost; each is also in `_sources`
        self._lost: set[str] = set()
        self._active: list[_Reading] = []
        self._quarantined: list[_Reading] = []
        self._num_opened = 0

    def open(self) -> None:
        """Make an agent of a new name."""
        pool, name = self._pool, f"{self._name}:{self._num_opened}"
        self._num_opened += 1
        self._agent = self._nixl.agent(name, progress_thread=False)
        try:
            self._agent.register_memory([(pool.address, len(pool.blocks), 0, "")], MEMORY)
            size = pool.block_bytes
            rows = [(pool.address + place * size, size, 0) for place in range(pool.num_places)]
            self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, MEMORY)
        except self._nixl.errors as error:
            raise TransportUnavailable(f"NIXL agent {name}: {describe(error)}") from error

    def connect(self, command: Connect) -> None:
        try:
            self._reach(command)
            self._tell(Ended(command.number, ReadStatus.done))
        except self._nixl.errors as error:
            self._tell(Ended(command.number, meaning(error), describe(error)))

    def start(self, read: Read) -> None:
        """Begin a read; on one host it is over when this returns."""
        reading = _Reading(read, time.monotonic())
        size, agent = self._pool.block_bytes, self._agent
        if any(length != size for _, length, _ in read.rows):
            self._end(reading, ReadStatus.refused, f"a row is not of {size} bytes")
            return
        try:
            self._reach(read)
            reading.descriptors = agent.prep_xfer_dlist(read.agent, list(read.rows), MEMORY)
            reading.handle = agent.make_prepped_xfer(
                "READ",
                self._local,
                list(read.places),
                reading.descriptors,
                list(range(len(read.rows))),
            )
            state = agent.transfer(reading.handle)
        except self._nixl.errors as error:
            self._fail(reading, error)
            return
        if state == _PENDING:
            self._active.append(reading)
        else:
            self._end_as(reading, state)

    def poll(self) -> float | None:
        """See what became of reads. Returns the seconds until the next look, None for never."""
        if self._active:
            self._poll_active()
        if self._quarantined:
            self._poll_quarantined()
        if self._active:
            return _READING_SECONDS
        return _QUARANTINE_SECONDS if self._quarantined else None

    def _poll_active(self) -> None:
        now, active, self._active = time.monotonic(), self._active, []
        for reading in active:
            try:
                state = self._agent.check_xfer_state(reading.handle)
            except self._nixl.errors as error:
                self._fail(reading, error)
                continue
            if state != _PENDING:
                self._end_as(reading, state)
            elif now < reading.deadline:
                self._active.append(reading)
            else:
                self._quarantined.append(reading)
                detail = f"{len(reading.read.places)} places are in quarantine"
                ended = Ended(reading.read.number, ReadStatus.timed_out, detail, is_over=False)
                self._tell(ended)
        num_places = sum(len(reading.read.places) for reading in self._quarantined)
        if num_places >= self._max_quarantined:
            self._recycle()

    def _poll_quarantined(self) -> None:
        quarantined, self._quarantined = self._quarantined, []
        for reading in quarantined:
            try:
                is_over = self._agent.check_xfer_state(reading.handle) != _PENDING
            except self._nixl.errors:
                is_over = True
            if is_over:
                self._release(reading)
                self._tell(Freed(reading.read.number))
            else:
                self._quarantined.append(reading)

    def _reach(self, source: Read | Connect) -> None:
        """Make the agent know the source; again when its connection was lost.

        Never while other reads from it are not over: the driver then knows nothing of them, and
        bytes might arrive at places that we believe to be at rest.
        """
        known = self._sources.get(source.agent)
        is_old = source.agent in self._lost or known not in (None, source.metadata_version)
        if is_old and source.agent not in self._agents_in_use():
            self._forget(source.agent)
        if source.agent not in self._sources:
            self._make_place()
            added = self._agent.add_remote_agent(source.metadata)
            self._sources[added.decode()] = source.metadata_version
            self._agent.make_connection(source.agent)  # not found when the metadata is another's
        self._sources[source.agent] = self._sources.pop(source.agent)

    def _make_place(self) -> None:
        in_use = self._agents_in_use()
        idle = [agent for agent in self._sources if agent not in in_use]
        for agent in idle[: max(0, len(self._sources) - self._max_sources + 1)]:
            self._forget(agent)

    def _agents_in_use(self) -> set[str]:
        return {reading.read.agent for reading in (*self._active, *self._quarantined)}

    def _forget(self, agent: str) -> None:
        self._lost.discard(agent)
        if self._sources.pop(agent, None) is not None:
            with contextlib.suppress(*self._nixl.errors):
                self._agent.remove_remote_agent(agent)

    def _fail(self, reading: _Reading, error: Exception) -> None:
        status = meaning(error)
        self._end(reading, status, describe(error))
        if status is ReadStatus.disconnected and reading.read.agent in self._sources:
            self._lost.add(reading.read.agent)

    def _end_as(self, reading: _Reading, state: str) -> None:
        if state == _DONE:
            self._end(reading, ReadStatus.done, "")
        else:
            self._end(reading, ReadStatus.failed, f"the driver says {state}")

    def _end(self, reading: _Reading, status: ReadStatus, detail: str) -> None:
        self._release(reading)
        seconds = time.monotonic() - reading.started
        self._tell(Ended(reading.read.number, status, detail, seconds))

    def _release(self, reading: _Reading) -> None:
        """Let go of the driver's memory for a read; only when its transfer is over."""
        handle, descriptors = reading.handle, reading.descriptors
        reading.handle = reading.descriptors = None
        with contextlib.suppress(*self._nixl.errors):
            if handle is not None:
                self._agent.release_xfer_handle(handle)
        with contextlib.suppress(*self._nixl.errors):
            if descriptors is not None:
                self._agent.release_dlist_handle(descriptors)

    def _recycle(self) -> None:
        """Stop what is in quarantine by destroying the agent; then its places are at rest."""
        active, self._active = self._active, []
        quarantined, self._quarantined = self._quarantined, []
        for reading in (*active, *quarantined):
            self._release(reading)
        with contextlib.suppress(*self._nixl.errors):
            self._agent.release_dlist_handle(self._local)
        self._local = self._agent = None
        self._sources.clear()
        self._lost.clear()
        gc.collect()  # nothing may keep the driver's agent alive
        self.open()
        for reading in quarantined:
            self._tell(Freed(reading.read.number))
        for reading in active:
            self._end(reading, ReadStatus.failed, "the reading agent was made again")
        self._tell(Recycled())


def serve(channel: socket.socket, settings: TransferSettings) -> None:
    """Carry out commands until the sidecar closes the channel."""
    name = f"{settings.agent}:{time.time_ns():x}"  # unique, whatever became of our predecessors

    def tell(message: FromProcess) -> None:
        channel.send(encode_message(message))

    try:
        pool = ServePool.attach(Path(settings.pool))
        nixl = Nixl()
        source = NixlSource(nixl, f"{name}:source", pool, settings.nixl)
        reader = NixlReader(nixl, f"{name}:reader", pool, settings.nixl, tell)
        reader.open()
    except (PoolUnreadable, TransportUnavailable) as error:
        tell(Broken(str(error)))
        return
    tell(Hello(source.name, source.metadata, pool.address))
    while True:
        pauses = [pause for pause in (source.poll(), reader.poll()) if pause is not None]
        readable, _, _ = select.select([channel], [], [], min(pauses))
        while readable:
            try:
                payload = channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            if not payload:
                return
            match to_process.decode(payload):
                case Ping(number):
                    tell(Pong(number))
                case command:
                    _carry_out(command, source, reader)


def _carry_out(
    command: Read | Connect | ExpectReads, source: NixlSource, reader: NixlReader
) -> None:
    match command:
        case Read():
            reader.start(command)
        case Connect():
            reader.connect(command)
        case ExpectReads(seconds):
            source.expect_reads(seconds)


def main(fd: int, settings: bytes) -> None:
    """Run on an inherited socket; what `python -m` does."""
    told = msgspec.json.decode(settings, type=TransferSettings)
    # the driver may block, and then nobody reads that the channel was closed
    die_with_parent(told.parent_pid)
    with socket.socket(fileno=fd) as channel, contextlib.suppress(ConnectionError):
        serve(channel, told)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].encode())
    os._exit(0)  # NIXL's destructors are not safe at the interpreter's end
