"""Records an engine's batches as they come, without doing anything with them.

Needs the extra `bridge`. What the replay socket still has comes first, then what is live; a batch
that both have is written once.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Iterator
from itertools import islice
from types import FrameType
from typing import NamedTuple

import zmq

from kvatlas.schemas.errors import EndpointUnusable
from kvatlas.worker_hooks.recordings.captures import QUIET_SECONDS, Frame
from kvatlas.worker_hooks.recordings.zmq_binding import bind
from kvatlas.worker_hooks.sidecar.process import STOP_SIGNALS

_END = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 100
#: a replay without a word for so long is over
_SILENT_SECONDS = 3.0
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


class Listener(NamedTuple):
    """Whom a recording talks to while it goes on."""

    #: called once it listens
    on_ready: Callable[[], None] = lambda: None
    #: called at most once an endpoint that says nothing, with what to look at
    on_silent: Callable[[str], None] = lambda problem: None
    #: asked several times a second; the recording ends where it is True
    is_stopped: Callable[[], bool] = lambda: False


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Give whether a signal has asked to end; the second one does what it does anywhere.

    In a process's main thread only. No write is interrupted, so what is in the file is whole.
    """
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    asked = False

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        restore()

    for number in STOP_SIGNALS:
        signal.signal(number, note)
    try:
        yield lambda: asked
    finally:
        restore()


def record(
    options: RecordOptions,
    listener: Listener = Listener(),  # noqa: B008 - it is immutable
) -> Generator[Frame, None, None]:
    """Yield batches until a bound is reached or somebody stops it; raises EndpointUnusable.

    The sockets are closed with the iterator.
    """
    ends_at = None if options.seconds is None else time.monotonic() + options.seconds
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with context.socket(zmq.SUB) as live:
            _listen(live, options)
            listener.on_ready()
            with contextlib.closing(_frames(context, live, options, listener, ends_at)) as frames:
                yield from islice(frames, options.max_batches)
    finally:
        context.destroy(linger=0)


def _listen(live: "zmq.Socket[bytes]", options: RecordOptions) -> None:
    live.subscribe(b"")
    try:
        if options.binds:
            bind(live, options.endpoint)
        else:
            live.connect(options.endpoint)
    except zmq.ZMQError as error:
        raise EndpointUnusable(options.endpoint, f"{error}; see --endpoint") from error


def _frames(
    context: "zmq.Context[zmq.Socket[bytes]]",
    live: "zmq.Socket[bytes]",
    options: RecordOptions,
    listener: Listener,
    ends_at: float | None,
) -> Generator[Frame, None, None]:
    def is_over() -> bool:
        return listener.is_stopped() or (ends_at is not None and time.monotonic() >= ends_at)

    quiet_at: float | None = time.monotonic() + QUIET_SECONDS
    replayed: dict[int | None, bytes] = {}
    if options.replay_endpoint:
        for frame in _replay(context, options.replay_endpoint, listener, is_over):
            replayed[frame.sequence] = frame.payload
            yield frame
    while not is_over():
        if live.poll(_POLL_MS):
            quiet_at = None
            found = _frame(live.recv_multipart())
            if found is not None and replayed.pop(found.sequence, None) != found.payload:
                yield found
        elif quiet_at is not None and time.monotonic() >= quiet_at:
            quiet_at = None
            listener.on_silent(_silence(options))


def _silence(options: RecordOptions) -> str:
    other = "--connect" if options.binds else "--bind"
    return (
        f"no batch from {options.endpoint} within {QUIET_SECONDS:g} s: the engine is idle or not "
        f"there, or --endpoint is another (or wants {other})"
    )


def _replay(
    context: "zmq.Context[zmq.Socket[bytes]]",
    endpoint: str,
    listener: Listener,
    is_over: Callable[[], bool],
) -> Generator[Frame, None, None]:
    """Yield what the engine still has, from its first batch on; with or without topics."""
    with context.socket(zmq.DEALER) as asking:
        asking.set(zmq.LINGER, 0)
        asking.set(zmq.RCVHWM, _MAX_REPLAYED)
        try:
            asking.connect(endpoint)
            asking.send_multipart([b"", bytes(8)])
        except zmq.ZMQError as error:
            raise EndpointUnusable(endpoint, f"{error}; see --replay-endpoint") from error
        silent_at, has_answered = time.monotonic() + _SILENT_SECONDS, False
        while not is_over() and time.monotonic() < silent_at:
            if not asking.poll(_POLL_MS):
                continue
            silent_at, has_answered = time.monotonic() + _SILENT_SECONDS, True
            parts = asking.recv_multipart()
            if len(parts) < 3 or parts[-2] == _END:
                return
            frame = _frame([parts[-3], *parts[-2:]])
            if frame is not None:
                yield frame
        if not has_answered and not is_over():
            problem = f"{endpoint} has not answered within {_SILENT_SECONDS:g} s"
            listener.on_silent(f"{problem}: is it the engine's --replay-endpoint?")


def _frame(parts: list[bytes]) -> Frame | None:
    if len(parts) < 2 or len(parts[-2]) != 8:
        return None
    topic = parts[0].decode(errors="replace") if len(parts) > 2 else ""
    return Frame(parts[-1], topic, int.from_bytes(parts[-2], "big"))
