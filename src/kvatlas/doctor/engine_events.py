"""Listens to an engine's own ZMQ events while a probe is served, to see how it names blocks."""

import asyncio
import contextlib
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import TYPE_CHECKING

from kvatlas.doctor.facts import SeenHash
from kvatlas.schemas.errors import MalformedBatch
from kvatlas.worker_hooks.engines.registry import adapter_of
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
        return find_first_hash(engine, self.payloads, prompt)


def find_first_hash(engine: str, payloads: Iterable[bytes], prompt: Sequence[int]) -> SeenHash:
    """Return the engine's hash of a prompt's first block from its batches. Pure."""
    adapter = adapter_of(engine)
    for payload in payloads:
        try:
            events = adapter.decode(payload).events
        except MalformedBatch:
            continue
        for event in events:
            if not isinstance(event, RawStored) or event.parent is not None or not event.tokens:
                continue
            block_tokens = len(event.tokens) // 4 // len(event.engine_hashes)
            first = tuple(prompt[:block_tokens])
            if event.tokens.startswith(array("I", first).tobytes()):
                return SeenHash(event.engine_hashes[0], first)
    return SeenHash(None, missing=_NOT_SEEN)


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
        yield Heard("pyzmq is not installed here")
        return
    heard = Heard()
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(endpoint)
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
