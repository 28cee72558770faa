"""The command `bridge`: beside an engine that knows nothing of us.

Registers itself on the application of `commands`; `__main__` imports both.
"""

import asyncio
from typing import Annotated

import typer

from kvatlas.cli.commands import app
from kvatlas.cli.options import (
    Config,
    Creds,
    ModelName,
    Nats,
    SetFlags,
    UnreusableBlocks,
    WorkerName,
    exit_as,
    fingerprint_of,
    settings_from,
    with_broker,
)
from kvatlas.schemas.hashing import MAX_LOOKAHEAD_TOKENS
from kvatlas.schemas.ids import MAX_RANK
from kvatlas.worker_hooks.log_lines import write_log_lines


@app.command()
def bridge(
    engine: Annotated[str, typer.Option(help="vllm, sglang or trtllm.")],
    worker: WorkerName,
    model: ModelName,
    endpoint: Annotated[
        str, typer.Option(help="Where the engine publishes, tcp://HOST:PORT.")
    ] = "",
    replay_endpoint: Annotated[
        str, typer.Option(help="Its replay socket; none: what is missed is missed for good.")
    ] = "",
    rank: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_RANK, help="The only rank, at exactly these endpoints."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks 0..N-1, at ports that count up.")
    ] = None,
    block_tokens: Annotated[
        int, typer.Option(min=0, max=65_536, help="Tokens of a block; 0: learn it.")
    ] = 0,
    lookahead_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_LOOKAHEAD_TOKENS,
            help="Tokens behind a block that its hash covers; none: learn it.",
        ),
    ] = None,
    unreusable_blocks: UnreusableBlocks = 0,
    binds: Annotated[
        bool,
        typer.Option(
            "--bind/--connect",
            help="Bind the endpoint where the engine connects to it (its endpoint has no `*`).",
        ),
    ] = False,
    num_blocks: Annotated[
        int, typer.Option(min=0, help="KV blocks of the engine; 0: learn it from --engine-url.")
    ] = 0,
    engine_url: Annotated[str, typer.Option(help="The engine's HTTP server.")] = "",
    base_url: Annotated[
        str, typer.Option(help="Where the engine takes requests; none: --engine-url.")
    ] = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="A LoRA adapter of the engine; may be repeated. Others are learnt."),
    ] = None,
    kv_fingerprint: Annotated[
        str, typer.Option(help="32 hex digits, equal where engines may exchange KV.")
    ] = "",
    p2p_address: Annotated[
        str, typer.Option(help="Where rank 0's own transfer tier listens, HOST:PORT.")
    ] = "",
    report_seconds: Annotated[float, typer.Option(min=0.1, help="How often to log counts.")] = 60.0,
    nats: Nats = None,
    creds: Creds = None,
    config: Config = None,
    set_: SetFlags = None,
) -> None:
    """Report an unmodified engine's KV events, replayed and repaired, until stopped."""
    from kvatlas.common.runtime_folder import runtime_folder
    from kvatlas.worker_hooks.bridge.options import BridgeOptions
    from kvatlas.worker_hooks.bridge.run import run_bridge

    settings = with_broker(settings_from(config, nats, creds, set_))
    write_log_lines(f"bridge {worker}")
    options = BridgeOptions(
        engine=engine,
        worker=worker,
        model=model,
        settings=settings,
        endpoint=endpoint,
        replay_endpoint=replay_endpoint,
        binds=binds,
        rank=rank,
        num_ranks=ranks,
        block_tokens=block_tokens,
        lookahead_tokens=lookahead_tokens,
        unreusable_blocks=unreusable_blocks,
        num_blocks=num_blocks,
        engine_url=engine_url.rstrip("/"),
        base_url=base_url,
        adapters=tuple(adapter or ()),
        kv_fingerprint=fingerprint_of(kv_fingerprint),
        p2p_address=p2p_address,
        report_seconds=report_seconds,
    )
    with runtime_folder() as folder:
        reason = asyncio.run(run_bridge(options, folder))
    exit_as(reason)
