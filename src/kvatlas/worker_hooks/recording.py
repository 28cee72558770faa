"""Records an engine's batches as they come, without doing anything with them.

Needs the extra `bridge`. What the replay socket still has comes first, then what is live; a batch
that both have is written once.
"""

import time
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from typing import NamedTuple

import zmq

from kvatlas.schemas.errors import EndpointUnusable
from kvatlas.worker_hooks.captures import Frame

_END = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 100
#: a replay without a word for so long is over
_SILENT_MS = 3000
#: batches of a replay that wait to be read: more than an engine keeps by default
_MAX_REPLAYED = 16_384


class RecordOptions(NamedTuple):
    """What is recorded, and when it ends; None: never by that."""

    endpoint: str
    replay_endpoint: str = ""
    #: bind where the engine connects
    binds: bool = False
    seconds: float | None = None
    max_batches: int | None = None


def record(
    options: RecordOptions, on_ready: Callable[[], None] = lambda: None
) -> Generator[Frame, None, None]:
    """Yield batches until a bound is reached; raises EndpointUnusable.

    `on_ready` is called once it listens. The sockets are closed with the iterator.
    """
    ends_at = None if options.seconds is None else time.monotonic() + options.seconds
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.SUB) as live:
            _listen(live, options)
            on_ready()
            with closing(_frames(context, live, options, ends_at)) as frames:
                yield from islice(frames, options.max_batches)
    finally:
        context.destroy(linger=0)


def _listen(live: "zmq.Socket[bytes]", options: RecordOptions) -> None:
    live.subscribe(b"")
    try:
        if options.binds:
            live.bind(options.endpoint)
        else:
            live.connect(options.endpoint)
    except zmq.ZMQError as error:
        raise EndpointUnusable(options.endpoint, str(error)) from error


def _frames(
    context: "zmq.Context[zmq.Socket[bytes]]",
    live: "zmq.Socket[bytes]",
    options: RecordOptions,
    ends_at: float | None,
) -> Generator[Frame, None, None]:
    replayed: dict[int | None, bytes] = {}
    if options.replay_endpoint:
        for frame in _replay(context, options.replay_endpoint, ends_at):
            replayed[frame.sequence] = frame.payload
            yield frame
    while ends_at is None or time.monotonic() < ends_at:
        if not live.poll(_POLL_MS):
            continue
        found = _frame(live.recv_multipart())
        if found is None or replayed.pop(found.sequence, None) == found.payload:
            continue
        yield found


def _replay(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, ends_at: float | None
) -> Generator[Frame, None, None]:
    """Yield what the engine still has, from its first batch on; with or without topics."""
    with context.socket(zmq.DEALER) as asking:
        asking.set(zmq.LINGER, 0)
        asking.set(zmq.RCVHWM, _MAX_REPLAYED)
        try:
            asking.connect(endpoint)
            asking.send_multipart([b"", bytes(8)])
        except zmq.ZMQError as error:
            raise EndpointUnusable(endpoint, str(error)) from error
        while asking.poll(_SILENT_MS):
            if ends_at is not None and time.monotonic() >= ends_at:
                return
            parts = asking.recv_multipart()
            if len(parts) < 3 or parts[-2] == _END:
                return
            frame = _frame([parts[-3], *parts[-2:]])
            if frame is not None:
                yield frame


def _frame(parts: list[bytes]) -> Frame | None:
    if len(parts) < 2 or len(parts[-2]) != 8:
        return None
    topic = parts[0].decode(errors="replace") if len(parts) > 2 else ""
    return Frame(parts[-1], topic, int.from_bytes(parts[-2], "big"))
