"""Listens to an engine's own ZMQ events while a probe is served, to see how it names blocks."""

import asyncio
import contextlib
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TYPE_CHECKING

from kvatlas.doctor.facts import SeenHash
from kvatlas.schemas.errors import InvalidSetting, MalformedBatch
from kvatlas.worker_hooks.engines.registry import ADAPTERS, adapter_of
from kvatlas.worker_hooks.raw_events import RawStored

if TYPE_CHECKING:
    import zmq.asyncio

#: batches kept; a busy engine's older ones are no probe of ours
MAX_BATCHES = 1_000

_NOT_SEEN = "the probe's first block was not among the events"


class Heard:
    """Payloads that came while listening."""

    def __init__(self, missing: str = "") -> None:
        self.payloads: deque[bytes] = deque(maxlen=MAX_BATCHES)
        self.missing = missing

    def first_hash(self, engine: str, prompt: Sequence[int]) -> SeenHash:
        """Return the engine's hash of a prompt's first block, if it was told."""
        if self.missing:
            return SeenHash(None, missing=self.missing)
        if engine not in ADAPTERS:
            return SeenHash(None, missing=f"nobody reads the events of engine {engine!r}")
        return find_first_hash(engine, self.payloads, prompt)


def find_first_hash(engine: str, payloads: Iterable[bytes], prompt: Sequence[int]) -> SeenHash:
    """Return the engine's hash of a prompt's first block from its batches. Pure."""
    adapter = adapter_of(engine)
    for payload in payloads:
        try:
            events = adapter.decode(payload).events
        except (MalformedBatch, RecursionError):
            continue
        for event in events:
            if not isinstance(event, RawStored) or event.parent is not None or not event.tokens:
                continue
            block_tokens = len(event.tokens) // 4 // len(event.engine_hashes)
            first = tuple(prompt[:block_tokens])
            if event.tokens.startswith(array("I", first).tobytes()):
                return SeenHash(event.engine_hashes[0], first)
    return SeenHash(None, missing=_NOT_SEEN)


def check_endpoint(endpoint: str) -> None:
    """Raise InvalidSetting for what ZMQ could not connect to; nothing at all is no endpoint."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 0 < int(port[:6]) <= 65_535
    is_tcp = scheme == "tcp" and host not in ("", "*") and is_port
    if endpoint and not is_tcp and not (scheme == "ipc" and address):
        problem = f"{endpoint!r:.80} is neither tcp://HOST:PORT nor ipc://PATH"
        raise InvalidSetting("events_endpoint", "flag --events-endpoint", problem)


@contextlib.asynccontextmanager
async def listening(endpoint: str) -> AsyncGenerator[Heard, None]:
    """Collect what an endpoint publishes while the block runs; without one, say so."""
    if not endpoint:
        yield Heard("no --events-endpoint to see its hashes at")
        return
    try:
        import zmq
        import zmq.asyncio
    except ModuleNotFoundError:
        yield Heard("pyzmq is not installed here: pip install 'kvatlas[bridge]'")
        return
    heard = Heard()
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(b"")
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            yield Heard(f"--events-endpoint {endpoint} cannot be listened to: {error}")
            return
        collecting = asyncio.create_task(_collect(socket, heard))
        try:
            yield heard
        finally:
            collecting.cancel()
            await asyncio.wait([collecting])


async def _collect(socket: "zmq.asyncio.Socket", heard: Heard) -> None:
    while True:
        frames = await socket.recv_multipart()
        heard.payloads.append(frames[-1])
