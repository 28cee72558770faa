"""An engine's ZMQ sockets: batches as they come, and those of before on request.

    live     PUB -> SUB      [topic, sequence u64 BE, payload]
    replay   DEALER -> ROUTER  ["", first sequence u64 BE]
             ROUTER -> DEALER  ["", (topic,) sequence, payload] ..., ["", (topic,) ff*8, ""]

The topic of a replay is in some versions only, so that sequence and payload are read from the end.
Engines bind their PUB where the endpoint has a wildcard and connect where it has not: the bridge
does the other thing.
"""

import asyncio
import contextlib
import logging
from typing import Self

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvatlas.schemas.errors import EndpointUnusable, ForeignFile
from kvatlas.worker_hooks.bridge.stimuli import (
    Connected,
    Disconnected,
    FrameArrived,
    FrameReplayed,
    ReplayEnded,
    ReplayFailed,
    RequestReplay,
    Stimulus,
)
from kvatlas.worker_hooks.recordings.zmq_binding import bind

#: batches read and not yet handled; with more, the sockets' own bounds count, and then the engine's
MAX_QUEUED = 256
#: batches of a replay kept unread: an engine sends its whole buffer at once, and its socket drops
#: without a word what does not fit
MAX_REPLAYED = 16_384
END = (-1).to_bytes(8, "big", signed=True)
#: a replay without a word for so long has failed
SILENT_SECONDS = 5.0
#: no engine counts so far
MAX_SEQUENCE = 2**63 - 1
#: connections to engines that are away are tried this often
RECONNECT_MS, MAX_RECONNECT_MS = 50, 1000

_logger = logging.getLogger(__name__)


class ZmqSource:
    """One rank's sockets, open inside `async with`. `next` gives what happens, in order.

    Entering raises EndpointUnusable, and ForeignFile where a path to be bound is taken. Nobody else
    may call `ask` and `next` meanwhile.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        *,
        binds: bool = False,
        max_queued: int = MAX_QUEUED,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._endpoint, self._replay_endpoint, self._binds = endpoint, replay_endpoint, binds
        self._silent_seconds = silent_seconds
        self._queue: asyncio.Queue[Stimulus] = asyncio.Queue(max_queued)
        self._tasks: list[asyncio.Task[None]] = []
        self._asking: asyncio.Task[None] | None = None
        self._num_connections = 0
        self.num_malformed = 0

    async def __aenter__(self) -> Self:
        await _resolve(self._endpoint, self._binds)
        if self._replay_endpoint:
            await _resolve(self._replay_endpoint, False)
        self._context = zmq.asyncio.Context()
        try:
            self._open_live()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EndpointUnusable(self._endpoint, str(error)) from error
        except ForeignFile:
            self._context.destroy(linger=0)
            raise
        self._tasks = [
            asyncio.create_task(self._receive()),
            asyncio.create_task(self._watch_connections()),
        ]
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [*self._tasks, *([self._asking] if self._asking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._live.disable_monitor()
        self._context.destroy(linger=0)

    async def next(self) -> Stimulus:
        """Return what happened next."""
        return await self._queue.get()

    def put(self, stimulus: Stimulus) -> None:
        """Add what happened elsewhere; left out while there is no room."""
        with contextlib.suppress(asyncio.QueueFull):
            self._queue.put_nowait(stimulus)

    def request_replay(self, asked: RequestReplay) -> None:
        """Ask for a replay, instead of the one under way; the answer comes out of `next`."""
        if self._asking is not None:
            self._asking.cancel()
        self._asking = asyncio.create_task(self._replay(asked))

    # --- live ---------------------------------------------------------------------------------

    def _open_live(self) -> None:
        self._live = self._context.socket(zmq.SUB)
        self._live.set(zmq.RCVHWM, MAX_QUEUED)
        self._live.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._live.set(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        # a host that vanishes without a word is noticed
        self._live.set(zmq.HEARTBEAT_IVL, 2000)
        self._live.set(zmq.HEARTBEAT_TIMEOUT, 10_000)
        self._live.set(zmq.IPV6, 1)
        self._live.subscribe(b"")
        self._monitor = self._live.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        if self._binds:
            bind(self._live, self._endpoint)
        else:
            self._live.connect(self._endpoint)

    async def _receive(self) -> None:
        while True:
            frames = await self._live.recv_multipart()
            if len(frames) < 2 or len(frames[-2]) != 8:
                self.num_malformed += 1
                continue
            sequence = int.from_bytes(frames[-2], "big")
            if sequence > MAX_SEQUENCE:
                self.num_malformed += 1
            else:
                await self._queue.put(FrameArrived(sequence, frames[-1]))

    async def _watch_connections(self) -> None:
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._num_connections = max(self._num_connections - 1, 0)
                if self._num_connections == 0:
                    await self._queue.put(Disconnected())
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_connections += 1
                await self._queue.put(Connected())

    # --- replay -------------------------------------------------------------------------------

    async def _replay(self, asked: RequestReplay) -> None:
        # a socket for each question: nothing of an earlier answer can come out of it
        with self._context.socket(zmq.DEALER) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, MAX_REPLAYED)
            socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
            socket.set(zmq.IPV6, 1)
            try:
                socket.connect(self._replay_endpoint)
                await socket.send_multipart([b"", asked.first_sequence.to_bytes(8, "big")])
                await self._take_answer(socket, asked)
            except zmq.ZMQError as error:
                await self._fail(asked, str(error))
            except TimeoutError:
                await self._fail(asked, f"silent for {self._silent_seconds:g} s")

    async def _take_answer(self, socket: zmq.asyncio.Socket, asked: RequestReplay) -> None:
        """Take what comes in rising order; whatever else comes is no progress and ends in time."""
        loop, highest = asyncio.get_running_loop(), -1
        until = loop.time() + self._silent_seconds
        while True:
            async with asyncio.timeout_at(until):
                frames = await socket.recv_multipart()
            if len(frames) < 3 or len(frames[-2]) != 8:
                self.num_malformed += 1
            elif frames[-2] == END:
                await self._queue.put(ReplayEnded(asked.ask))
                return
            else:
                sequence = int.from_bytes(frames[-2], "big")
                if not highest < sequence <= MAX_SEQUENCE:
                    self.num_malformed += 1
                    continue
                highest = sequence
                await self._queue.put(FrameReplayed(asked.ask, sequence, frames[-1]))
                until = loop.time() + self._silent_seconds

    async def _fail(self, asked: RequestReplay, problem: str) -> None:
        reason = f"replay endpoint {self._replay_endpoint}: {problem}"
        _logger.warning("%s", reason)
        await self._queue.put(ReplayFailed(asked.ask, reason))


def offset_port(endpoint: str, rank: int) -> str:
    """Return the endpoint of a rank: the port of rank 0 plus the rank, as engines count them."""
    if rank == 0 or not endpoint:
        return endpoint
    scheme, _, address = endpoint.partition("://")
    host, colon, port = address.rpartition(":")
    if scheme != "tcp" or not colon or not port.isdecimal():
        raise EndpointUnusable(endpoint, f"no port to count rank {rank} from")
    return f"{scheme}://{host}:{int(port) + rank}"


async def _resolve(endpoint: str, binds: bool) -> None:
    """Raise EndpointUnusable now for what ZMQ would try for ever in silence."""
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in ("tcp", "ipc", "inproc"):
        raise EndpointUnusable(endpoint, "expected tcp://HOST:PORT or ipc://PATH")
    if scheme != "tcp":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise EndpointUnusable(endpoint, "expected tcp://HOST:PORT")
    if binds or host == "*":
        if not binds:
            raise EndpointUnusable(endpoint, "a wildcard can be bound only")
        return
    try:
        await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise EndpointUnusable(endpoint, str(error)) from error
