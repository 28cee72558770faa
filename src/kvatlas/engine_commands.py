"""The commands `decode` and `record`: what an engine said, read again and written down.

They register themselves on the application of `commands`; `__main__` imports both.
"""

import asyncio
import contextlib
import json as json_module
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Annotated

import msgspec
import typer

from kvatlas.commands import Creds, JsonFlag, Nats, _run, app
from kvatlas.schemas.errors import CaptureUnreadable, InvalidSetting
from kvatlas.worker_hooks.captures import Frame, read_capture, write_jsonl, write_kvcap
from kvatlas.worker_hooks.decoding import DecodeOptions, Decoding
from kvatlas.worker_hooks.redaction import Redactor
from kvatlas.worker_hooks.stream_rows import stream_rows

CaptureFile = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]


@app.command()
def decode(
    file: CaptureFile,
    engine: Annotated[str, typer.Option(help="vllm, sglang, trtllm, mooncake or lmcache.")],
    block_tokens: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Tokens of a block; none: learn it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model; none: from the topic.")] = None,
    worker: Annotated[str | None, typer.Option(help="Worker; none: from the topic.")] = None,
    json: JsonFlag = False,
) -> None:
    """Read a recorded stream and say what each event became, and what is held at the end."""
    options = DecodeOptions(
        engine=engine, block_tokens=block_tokens, model=model, worker=worker, file_stem=file.stem
    )
    capture = read_capture(file)
    decoding = Decoding(capture.frames, options)
    for line in decoding.story():
        # what engines send may hold anything that a terminal would obey
        print(line.encode("unicode_escape").decode())
    if capture.damage is not None:
        decoding.reject("truncated")
        print(f"kvatlas: {capture.damage}", file=sys.stderr)
    report = decoding.report()
    if json:
        print(json_module.dumps(report))
        return
    for name, ranks in report["workers"].items():
        for rank, groups in ranks.items():
            for group, tiers in groups.items():
                held = ", ".join(f"{tier} {found['blocks']}" for tier, found in tiers.items())
                print(f"{name}/{rank} group {group}: {held}")
    print(", ".join(f"{key} {value}" for key, value in report["counts"].items()))


@app.command()
def record(
    file: CaptureFile,
    endpoint: Annotated[str, typer.Option(help="Where the engine publishes.")] = "",
    replay_endpoint: Annotated[str, typer.Option(help="The engine's replay socket.")] = "",
    bind: Annotated[bool, typer.Option("--bind/--connect", help="As for `bridge`.")] = False,
    nats: Nats = None,
    creds: Creds = None,
    worker: Annotated[str | None, typer.Option(help="Whose batches, with --nats.")] = None,
    redact: Annotated[bool, typer.Option(help="Take prompts and tenants out.")] = False,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="End after so long.")] = None,
    batches: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
) -> None:
    """Write what an engine says into a file for `decode`, or a worker's own batches (--nats)."""
    redactor = Redactor() if redact else None
    if bool(endpoint) == bool(nats):
        raise InvalidSetting("endpoint", "record", "either --endpoint or --nats is needed")
    try:
        opened = file.open("wb")
    except OSError as error:
        raise CaptureUnreadable(file, error.strerror or str(error)) from error
    with opened as out:
        if nats:
            num_written = _run(_record_stream(out, nats, creds, worker, redactor, seconds, batches))
        else:
            from kvatlas.worker_hooks.recording import RecordOptions
            from kvatlas.worker_hooks.recording import record as frames_of

            options = RecordOptions(endpoint, replay_endpoint, bind, seconds, batches)
            ready = lambda: print(f"listening to {endpoint}", flush=True)  # noqa: E731
            frames = frames_of(options, ready)
            num_written = _write(out, frames, redactor, is_text=file.suffix == ".jsonl")
    print(f"{num_written} batches in {file}")


async def _record_stream(
    out: IO[bytes],
    url: str,
    creds: str | None,
    worker: str | None,
    redactor: Redactor | None,
    seconds: float | None,
    batches: int | None,
) -> int:
    """Write a worker's batches as the stream keeps and gets them, one JSON object a line."""
    from kvatlas.events.nats_bus import NatsBus

    num_written = 0
    async with NatsBus(url, creds_file=Path(creds) if creds else None) as bus:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for row in stream_rows(bus, worker):
                    row = row if redactor is None else redactor.own_batch(row)
                    out.write(msgspec.json.encode(row) + b"\n")
                    out.flush()
                    num_written += 1
                    if num_written == batches:
                        break
    return num_written


def _write(
    out: IO[bytes], frames: Iterable[Frame], redactor: Redactor | None, *, is_text: bool
) -> int:
    num_written = 0
    # an interrupt ends a recording as its bounds do
    with contextlib.suppress(KeyboardInterrupt):
        for frame in frames:
            if redactor is not None:
                frame = frame._replace(payload=redactor.payload(frame.payload))
            if is_text:
                write_jsonl(out, frame, time.time())
            else:
                write_kvcap(out, frame)
            out.flush()
            num_written += 1
    return num_written
