"""The command line: one function a command, which reads its options and hands over.

Errors of ours end a command with one line on stderr and status 1, wrong usage with 2.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from kvatlas import __version__
from kvatlas.cli.options import (
    ArchiveUrl,
    BlockBytes,
    BlocksPerWorker,
    BlockTokens,
    Config,
    Creds,
    DataFolder,
    HttpPort,
    JsonFlag,
    LookaheadTokens,
    ModelName,
    Nats,
    NatsOrEmbedded,
    ParentPid,
    PolicyName,
    Rate,
    Seed,
    SetFlags,
    Speed,
    UnreusableBlocks,
    WorkerName,
    Workers,
    check_file,
    check_folder,
    exit_as,
    extra_of,
    fingerprint_of,
    for_serving,
    say,
    say_error,
    say_json,
    settings_from,
    with_archive,
    with_broker,
    with_index,
)
from kvatlas.common.line_writing import write_line
from kvatlas.doctor.command import doctor
from kvatlas.schemas.errors import InvalidSetting, KvatlasError
from kvatlas.schemas.ids import MAX_RANK
from kvatlas.schemas.printable import printable
from kvatlas.worker_hooks.log_lines import write_log_lines
from kvatlas.worker_hooks.sidecar.process import leaves
from kvatlas.worker_hooks.sidecar.stop_deadline import limit_stop


class _Commands(TyperGroup):
    """Does not repeat credentials or control characters of a command line that is wrong."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _printable_usage():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _printable_usage():
            return super().invoke(ctx)


#: of typer, which has no public name for it
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


@contextmanager
def _printable_usage() -> Generator[None, None, None]:
    try:
        yield
    except _UsageError as error:
        vars(error)["message"] = printable(str(vars(error)["message"]))
        raise


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(doctor)


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        app(args=None if arguments is None else list(arguments))
    except SystemExit as ended:  # typer's way to return, wrong usage included
        return ended.code if isinstance(ended.code, int) else 1
    except KvatlasError as error:
        say_error(error)
        return 1
    except ExceptionGroup as group:
        ours, others = group.split(KvatlasError)
        if ours is None or others is not None:
            raise
        for leaf in leaves(ours):
            say_error(leaf)
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        say_error(f"{os.fsdecode(error.filename)}: {error.strerror}")  # of what a flag names
        return 1
    except ModuleNotFoundError as error:
        say_error(f"{error}: pip install 'kvatlas[{extra_of(error)}]'")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Event-sourced KV-cache control plane for fleets of LLM inference engines."""


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


@app.command()
def demo(
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace; none: built-in.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many requests to play.")] = 600,
    workers: Annotated[int, typer.Option(min=1, help="Reference engines to run.")] = 4,
    blocks_per_worker: BlocksPerWorker = 500,
    block_bytes: BlockBytes = 16_384,
    speed: Speed = 12.0,
    policy: PolicyName = "predicted_ttft",
    seed: Seed = 0,
    archive: ArchiveUrl = None,
    data: DataFolder = None,
    json: JsonFlag = False,
) -> None:
    """Play requests on a whole fleet on this machine and compare with round robin."""
    from kvatlas.demo.display import LiveDisplay, print_report, report_json
    from kvatlas.demo.run import DemoOptions, load_requests, run_demo

    for_serving(settings_from(None, None, None, None, policy=policy, archive=archive, data=data))
    if trace is not None:
        check_file("--trace", trace)
    options = DemoOptions(
        trace, requests, workers, blocks_per_worker, block_bytes, speed,
        policy or "predicted_ttft", seed, archive, data,
    )  # fmt: skip
    console = Console(stderr=json)
    played = load_requests(options)
    with LiveDisplay(console, len(played)) as display:
        report = asyncio.run(run_demo(options, played, display))
    print_report(console, report)
    if json:
        say_json(report_json(report))
    if not report.holds:
        raise typer.Exit(1)


@app.command()
def serve(
    nats: NatsOrEmbedded = None,
    creds: Creds = None,
    config: Config = None,
    set_: SetFlags = None,
    port: HttpPort = None,
    policy: PolicyName = None,
    archive: ArchiveUrl = None,
    data: DataFolder = None,
    workers: Workers = 0,
    blocks_per_worker: BlocksPerWorker = 1_000,
    block_bytes: BlockBytes = 16_384,
    block_tokens: BlockTokens = 16,
    prefill_tokens_per_second: Rate = 20_000.0,
    decode_tokens_per_second: Rate = 50.0,
    speed: Speed = 1.0,
    routers: Annotated[
        int, typer.Option(min=0, max=64, help="Router processes beside the index; 0: one in it.")
    ] = 0,
    parent_pid: ParentPid = 0,
    json: JsonFlag = False,
) -> None:
    """Run a broker, an index and a router (and reference engines) until stopped."""
    with _no_collections():
        from kvatlas.runtime.serve import serve_all
        from kvatlas.runtime.worker_fleet import EngineOptions

    write_log_lines("serve")
    named = {"port": port, "policy": policy, "archive": archive, "data": data}
    settings = for_serving(settings_from(config, nats, creds, set_, **named), routers)
    engines = EngineOptions(
        workers, blocks_per_worker, block_bytes, block_tokens,
        prefill_tokens_per_second, decode_tokens_per_second, speed,
    )  # fmt: skip
    asyncio.run(serve_all(settings, engines, json, parent_pid, routers))


@app.command()
def router(
    nats: Nats = None,
    creds: Creds = None,
    config: Config = None,
    set_: SetFlags = None,
    port: HttpPort = None,
    policy: PolicyName = None,
    parent_pid: ParentPid = 0,
    json: JsonFlag = False,
) -> None:
    """Run a router on an existing broker, with an index of its own unless it reads a shared one."""
    with _no_collections():
        from kvatlas.runtime.serve import serve_router

    write_log_lines("router")
    settings = settings_from(config, nats, creds, set_, port=port, policy=policy)
    asyncio.run(serve_router(with_broker(settings), json, parent_pid))


@app.command()
def indexer(
    nats: Nats = None,
    creds: Creds = None,
    config: Config = None,
    set_: SetFlags = None,
    port: HttpPort = None,
    json: JsonFlag = False,
) -> None:
    """Run an index that can be looked into over HTTP, on an existing broker."""
    with _no_collections():
        from kvatlas.runtime.serve import serve_indexer

    write_log_lines("indexer")
    settings = with_index(with_broker(settings_from(config, nats, creds, set_, port=port)))
    asyncio.run(serve_indexer(settings, json))


@app.command()
def warm() -> None:
    """Compile all kernels into the on-disk cache, such as when an image is built."""
    from kvatlas.indexer.warming import warm_kernels

    # a kernel is declared when its module is imported

    seconds, num_compiled, folder = warm_kernels()
    say(
        f"kernels  ready in {seconds:.1f} s, {num_compiled} of them compiled",
        f"cache    {folder or 'none: no folder for it can be written to'}",
    )


@app.command("archive")
def archive_(
    nats: Nats = None,
    creds: Creds = None,
    config: Config = None,
    set_: SetFlags = None,
    archive: ArchiveUrl = None,
    json: JsonFlag = False,
) -> None:
    """Write batches and decisions of an existing broker into a database."""
    from kvatlas.runtime.serve import serve_archive

    write_log_lines("archive")
    settings = with_broker(settings_from(config, nats, creds, set_, archive=archive))
    if not settings.archive.url:
        missing = "no archive: give --archive a database URL, such as sqlite:///kvatlas.db"
        raise InvalidSetting("archive.url", "", missing)
    asyncio.run(serve_archive(with_archive(settings), json))


@app.command()
def worker(
    name: WorkerName,
    nats: Nats = None,
    creds: Creds = None,
    config: Config = None,
    set_: SetFlags = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 0,
    model: ModelName = "reference",
    blocks: Annotated[int, typer.Option(min=1, help="KV blocks of the engine.")] = 1_000,
    block_bytes: BlockBytes = 16_384,
    block_tokens: BlockTokens = 16,
    prefill_tokens_per_second: Rate = 20_000.0,
    decode_tokens_per_second: Rate = 50.0,
    speed: Speed = 1.0,
    folder: Annotated[str, typer.Option(help="For shared memory; none: a temporary one.")] = "",
    parent_pid: ParentPid = 0,
) -> None:
    """Run a reference engine with its sidecar on an existing broker."""
    from kvatlas.reference.worker import WorkerOptions, run_worker

    write_log_lines(f"worker {name}")
    if folder:
        check_folder("--folder", Path(folder))
    options = WorkerOptions(
        name=name,
        settings=with_broker(settings_from(config, nats, creds, set_)),
        host=host,
        port=port,
        model=model,
        num_blocks=blocks,
        block_bytes=block_bytes,
        block_tokens=block_tokens,
        prefill_tokens_per_second=prefill_tokens_per_second,
        decode_tokens_per_second=decode_tokens_per_second,
        speed=speed,
        folder=folder,
        parent_pid=parent_pid,
    )
    asyncio.run(
        run_worker(options, lambda url: write_line(sys.stdout, printable(f"worker   {url}")))
    )


@app.command()
def replay(
    archive: Annotated[str, typer.Option(help="Database URL of the archive.")],
    until_seq: Annotated[int | None, typer.Option(min=0, help="Stop at this sequence.")] = None,
    until_time: Annotated[
        str | None,
        typer.Option(
            help="Stop at this time: 14:00 (here), -10m, ISO 8601, or seconds since 1970."
        ),
    ] = None,
    match: Annotated[
        Path | None, typer.Option(help="Who held this prompt: a JSON list of ids, or raw u32 LE.")
    ] = None,
    model: Annotated[str, typer.Option(help="The model of the prompt.")] = "reference",
    config: Config = None,
    set_: SetFlags = None,
    json: JsonFlag = False,
) -> None:
    """Rebuild the index from an archive, to the end or to a moment, and say what it held."""
    from kvatlas.events.archive.replay import parse_time
    from kvatlas.hindsight.replay import (
        Moment,
        match_tokens,
        read_tokens,
        replay_archive,
        report_of,
    )
    from kvatlas.hindsight.reports import match_lines, replay_lines, report_json

    fleet_key = settings_from(config, None, None, set_).fleet.key_bytes
    if match is not None:
        check_file("--match", match)
    tokens = None if match is None else read_tokens(match)
    moment = Moment(until_seq, None if until_time is None else parse_time(until_time))
    replayed = asyncio.run(replay_archive(archive, moment))
    report = report_of(replayed)
    matches = None
    if tokens is not None:
        matches = match_tokens(replayed.state, model, tokens, fleet_key=fleet_key)
    if json:
        say_json(report_json(report, matches))
        return
    say(*replay_lines(report, moment), *match_lines(matches or []))


@app.command()
def explain(
    archive: Annotated[str, typer.Option(help="Database URL of the archive.")],
    decision_id: Annotated[
        str | None, typer.Argument(help="`decision_id` of an answer; none: the newest.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Say why a request went where it went."""
    from kvatlas.hindsight.reports import explained

    text = explained(archive, decision_id, json, say_error)
    if json:
        say_json(text)
    else:
        say(*text.split("\n"))


@app.command()
def check(
    archive: Annotated[str, typer.Option(help="Database URL of the archive.")],
    json: JsonFlag = False,
) -> None:
    """Verify a recorded run from its archive: nothing lost, nothing exact that was not true."""
    from kvatlas.hindsight.check import check_json, check_lines, check_url

    report = check_url(archive)
    say(*check_lines(report))
    if json:
        say_json(check_json(report))
    if report.num_contradictions:
        raise typer.Exit(1)


@app.command()
def sidecar(
    worker: WorkerName,
    model: ModelName,
    ring: Annotated[Path, typer.Option(help="The ring that the engine's hook has made.")],
    socket: Annotated[Path, typer.Option(help="Where the engine asks for pulls.")],
    base_url: Annotated[str, typer.Option(help="Where the engine takes requests.")] = "",
    rank: Annotated[int, typer.Option(min=0, max=MAX_RANK, help="Rank within the worker.")] = 0,
    block_tokens: BlockTokens = 16,
    lookahead_tokens: LookaheadTokens = 0,
    unreusable_blocks: UnreusableBlocks = 0,
    kv_fingerprint: Annotated[str, typer.Option(help="32 hex digits; none: no pulls.")] = "",
    pool: Annotated[str, typer.Option(help="File of the serve pool, in shared memory.")] = "",
    slots: Annotated[int, typer.Option(min=0, help="Slots of the serve pool.")] = 0,
    blocks: Annotated[int, typer.Option(min=0, help="KV blocks of the engine.")] = 0,
    block_bytes: Annotated[int, typer.Option(min=0, help="KV bytes of a block.")] = 0,
    p2p_address: Annotated[
        str, typer.Option(help="HOST:PORT of the engine's own P2P tier, if it has one.")
    ] = "",
    nats: Nats = None,
    creds: Creds = None,
    config: Config = None,
    set_: SetFlags = None,
) -> None:
    """Run the sidecar of an engine that has made its ring, until the engine ends."""
    from kvatlas.worker_hooks.sidecar.__main__ import run_sidecar
    from kvatlas.worker_hooks.sidecar.options import SidecarOptions, shared_options

    write_log_lines(f"sidecar {worker}/{rank}")
    settings = with_broker(settings_from(config, nats, creds, set_))
    options = SidecarOptions(
        nats_url=settings.nats.url,
        creds_file=settings.nats.credentials,
        worker=worker,
        rank=rank,
        model=model,
        base_url=base_url,
        descriptor=settings.fleet.descriptor(block_tokens, lookahead_tokens),
        num_unreusable_trailing_blocks=unreusable_blocks,
        kv_fingerprint=fingerprint_of(kv_fingerprint),
        ring_path=str(ring),
        socket_path=str(socket),
        pool_path=pool,
        num_slots=slots,
        num_blocks=blocks,
        block_bytes=block_bytes,
        p2p_address=p2p_address,
        transport=settings.sidecar.transport,
        **shared_options(settings),
    )
    deadline = limit_stop(f"sidecar {options.instance}", options.stop_limit_seconds)
    exit_as(asyncio.run(run_sidecar(options, deadline)))


@contextmanager
def _no_collections() -> Generator[None, None, None]:
    """Load modules without collections of garbage, a tenth of the time, and in none later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
