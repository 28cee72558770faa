"""The commands `decode` and `record`: what an engine said, read again and written down.

They register themselves on the application of `commands`; `__main__` imports both.
"""

import asyncio
import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvatlas.cli.commands import app
from kvatlas.cli.options import Creds, JsonFlag, say, say_error, say_json
from kvatlas.common.line_writing import write_line
from kvatlas.schemas.errors import CaptureUnreadable, InvalidSetting
from kvatlas.schemas.printable import printable
from kvatlas.worker_hooks.recordings.captures import (
    QUIET_SECONDS,
    Capture,
    CaptureFile,
    read_capture,
)
from kvatlas.worker_hooks.recordings.decoding import DecodeOptions, Decoding
from kvatlas.worker_hooks.recordings.redaction import Redactor
from kvatlas.worker_hooks.recordings.stream_decoding import StreamDecoding
from kvatlas.worker_hooks.recordings.stream_rows import own_batches, stream_rows
from kvatlas.worker_hooks.sidecar.process import signals_call

if TYPE_CHECKING:
    from kvatlas.worker_hooks.recordings.recording import RecordOptions

CapturePath = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]


@app.command()
def decode(
    file: CapturePath,
    engine: Annotated[
        str,
        typer.Option(
            help="vllm, sglang, trtllm, mooncake or lmcache; none for what `record --nats` or"
            " `dead-letters --payload` wrote."
        ),
    ] = "",
    block_tokens: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Tokens of a block; none: learn it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model; none: from the topic.")] = None,
    worker: Annotated[str | None, typer.Option(help="Worker; none: from the topic.")] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Also digests that say the same again; --json does too.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Read a recorded stream and say what each event became, and what is held at the end."""
    options = DecodeOptions(
        engine=engine, block_tokens=block_tokens, model=model, worker=worker, file_stem=file.stem
    )
    capture = read_capture(file)
    ours = None if engine else own_batches(capture)
    capture = ours or capture
    folds = not (all_ or json)
    if ours:
        decoding: Decoding | StreamDecoding = StreamDecoding(ours.batches, folds=folds)
    else:
        decoding = _decoding(capture, options, folds)
    for bad in capture.rejected:
        decoding.reject(bad.kind)
        _print(f"rejected ({bad.kind}): {bad.reason}")
    for line in decoding.story():
        _print(line)
    if capture.damage is not None:
        decoding.reject("truncated")
        say_error(capture.damage)
    report = decoding.report()
    if json:
        say_json(json_module.dumps(report))
    else:
        for line in decoding.resident_lines():
            _print(line)
        say(", ".join(f"{key} {value}" for key, value in report["counts"].items()))
    if report["counts"]["rejected"] and not decoding.num_read:
        format_ = engine or "our own log"
        raise CaptureUnreadable(file, f"nothing in it could be read as batches of {format_}")


def _decoding(capture: Capture, options: DecodeOptions, folds: bool) -> Decoding | StreamDecoding:
    """Return what reads a file: as our own log if any of it is, else as an engine's."""
    if capture.batches:
        of_log = StreamDecoding(capture.batches, folds=folds)
        for _ in capture.frames:
            of_log.reject("foreign_line")
        return of_log
    if not options.engine:
        problem = "whose batches these are: vllm, sglang, trtllm, mooncake or lmcache"
        raise InvalidSetting("engine", "flag --engine", problem)
    return Decoding(capture.frames, options)


def _print(line: str) -> None:
    say(line)


@app.command()
def record(
    file: CapturePath,
    endpoint: Annotated[str, typer.Option(help="Where the engine publishes.")] = "",
    replay_endpoint: Annotated[str, typer.Option(help="The engine's replay socket.")] = "",
    bind: Annotated[bool, typer.Option("--bind/--connect", help="As for `bridge`.")] = False,
    nats: Annotated[
        str | None, typer.Option("--nats", help="Broker URL, for a worker's own batches.")
    ] = None,
    creds: Creds = None,
    worker: Annotated[str | None, typer.Option(help="Whose batches, with --nats.")] = None,
    redact: Annotated[bool, typer.Option(help="Take prompts and tenants out.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="End after so long.")] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
) -> None:
    """Write what an engine says into a file for `decode`, or a worker's own batches (--nats)."""
    redactor = Redactor() if redact else None
    if bool(endpoint) == bool(nats):
        raise InvalidSetting("endpoint", "", "either --endpoint or --nats is needed")
    with CaptureFile(file) as out:
        if nats:
            asyncio.run(_record_stream(out, nats, creds, worker, redactor, seconds, batches))
        else:
            from kvatlas.worker_hooks.recordings.recording import RecordOptions

            options = RecordOptions(endpoint, replay_endpoint, bind, seconds, batches)
            _record_engine(out, options, redactor)
    say(f"{out.num_written} batches in {file}")


def _record_engine(out: CaptureFile, options: "RecordOptions", redactor: Redactor | None) -> None:
    """Write an engine's batches until a bound is reached or a signal comes."""
    from kvatlas.worker_hooks.recordings.recording import Listener, stop_signals
    from kvatlas.worker_hooks.recordings.recording import record as frames_of

    def on_ready() -> None:
        write_line(sys.stdout, printable(f"listening to {options.endpoint}"))

    with stop_signals() as is_stopped:
        for frame in frames_of(options, Listener(on_ready, _warn, is_stopped)):
            if redactor is not None:
                frame = frame._replace(payload=redactor.payload(frame.payload))
            out.put_frame(frame)


async def _record_stream(
    out: CaptureFile,
    url: str,
    creds: str | None,
    worker: str | None,
    redactor: Redactor | None,
    seconds: float | None,
    batches: int | None,
) -> None:
    """Write a worker's batches as the stream keeps and gets them, until a bound or a signal."""
    from kvatlas.events.nats.bus import NatsBus

    bus = NatsBus(url, creds_file=Path(creds) if creds else None)
    loop = asyncio.get_running_loop()
    whose = f"of worker {worker!r} " if worker else ""
    silence = f"no batch {whose}from {url} within {QUIET_SECONDS:g} s: look at --nats and --worker"
    warning = loop.call_later(QUIET_SECONDS, _warn, silence)
    until = asyncio.timeout(seconds)

    def stop(_reason: str) -> None:
        if not until.expired():
            until.reschedule(loop.time())

    try:
        async with until, signals_call(stop), bus:
            async for row in stream_rows(bus, worker):
                warning.cancel()
                out.put_row(row if redactor is None else redactor.own_batch(row))
                if out.num_written == batches:
                    break
    except TimeoutError:
        if not until.expired():
            raise
    finally:
        warning.cancel()


def _warn(problem: str) -> None:
    say_error(problem)
