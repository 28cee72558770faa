"""What commands have in common: options, the settings that these make, how they end."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.common.line_writing import write_line
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.fleet import MAX_UNREUSABLE_BLOCKS
from kvatlas.schemas.hashing import MAX_LOOKAHEAD_TOKENS
from kvatlas.schemas.printable import printable, printable_json
from kvatlas.schemas.settings import Settings, load_settings
from kvatlas.worker_hooks.sidecar.options import check_name

#: columns of a table that goes into a file or another program
WIDTH = 200
#: of a line that a command prints; a decoded batch is long
MAX_LINE_CHARACTERS = 100_000
#: a module that may be missing -> the smallest extra that brings it
EXTRAS = {
    "numpy": "indexer",
    "numba": "indexer",
    "fastapi": "router",
    "uvicorn": "router",
    "prometheus_client": "router",
    "sqlalchemy": "archive",
    "psycopg": "postgresql",
    "nixl": "transfer",
    "zmq": "bridge",
    "tokenizers": "tokenizer",
    "jinja2": "tokenizer",
    "nkeys": "credentials",
    "typer": "cli",
    "rich": "cli",
    "aiohttp": "cli",
}


def _name(_: typer.Context, flag: typer.CallbackParam, value: str) -> str:
    check_name(flag.name or "", f"flag {flag.opts[0]}", value)
    return value


Nats = Annotated[
    str | None,
    typer.Option("--nats", help="Broker URL; needed, here or as KVATLAS_NATS__URL."),
]
NatsOrEmbedded = Annotated[
    str | None, typer.Option("--nats", help="Broker URL; none: an embedded one.")
]
Creds = Annotated[str | None, typer.Option("--creds", help="Credentials file for the broker.")]
Config = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]
SetFlags = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="One setting; may be repeated."),
]
HttpPort = Annotated[int | None, typer.Option("--port", help="HTTP port; 0 takes a free one.")]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy", help="predicted_ttft, round_robin, random, least_loaded or power_of_two."
    ),
]
ArchiveUrl = Annotated[
    str | None, typer.Option("--archive", help="Database URL, such as sqlite:///kvatlas.db.")
]
ParentPid = Annotated[
    int, typer.Option(min=0, help="Stop when this process ends; 0: no.", hidden=True)
]
DataFolder = Annotated[
    Path | None, typer.Option("--data", help="Keeps the embedded broker's log; none: temporary.")
]
WorkerName = Annotated[str, typer.Option(help="Name of the worker in the fleet.", callback=_name)]
ModelName = Annotated[
    str, typer.Option(help="Model of the engine, as requests name it.", callback=_name)
]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Reference engines to run.")]
BlocksPerWorker = Annotated[int, typer.Option(min=1, help="KV blocks of each reference engine.")]
BlockBytes = Annotated[int, typer.Option(min=16, help="KV bytes of a block.")]
BlockTokens = Annotated[int, typer.Option(min=1, max=65_536, help="Tokens of a block.")]
LookaheadTokens = Annotated[
    int,
    typer.Option(
        min=0, max=MAX_LOOKAHEAD_TOKENS, help="Tokens behind a block that its hash covers."
    ),
]
UnreusableBlocks = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_UNREUSABLE_BLOCKS,
        help="Blocks at the end of a match that the engine computes again.",
    ),
]
Speed = Annotated[float, typer.Option(min=0.01, help="Model seconds per second.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
Rate = Annotated[float, typer.Option(min=1, help="Tokens per model second.")]


def settings_from(
    config: Path | None,
    nats: str | None,
    creds: str | None,
    set_: list[str] | None,
    **named: str | int | Path | None,
) -> Settings:
    """Merge all sources; named options win over --set, which wins over environment and file.

    Raises InvalidSetting.
    """
    flags: dict[str, str] = {}
    for flag in set_ or []:
        key, equals, value = flag.partition("=")
        if not equals:
            raise InvalidSetting(key, "flag --set", "expected SECTION.KEY=VALUE")
        flags[key] = value
    keys = {
        "nats": "nats.url",
        "creds": "nats.credentials",
        "port": "router.port",
        "policy": "router.policy",
        "archive": "archive.url",
        "data": "nats.folder",
    }
    given = {"nats": nats, "creds": creds, **named}
    options = [(f"--{n}", keys[n], str(value)) for n, value in given.items() if value is not None]
    if config is not None:
        check_file("--config", config)
    return load_settings(config, flags=flags.items(), options=options)


def with_broker(settings: Settings) -> Settings:
    """Return them as they are. Raises InvalidSetting where they name no broker."""
    if not settings.nats.url:
        missing = "no broker: give --nats nats://HOST:4222 or KVATLAS_NATS__URL"
        raise InvalidSetting("nats.url", "", missing)
    _check_credentials(settings)
    return settings


def with_archive(settings: Settings) -> Settings:
    """Return them as they are. Raises InvalidSetting for an archive that cannot be opened."""
    if settings.archive.url:
        from kvatlas.events.archive.sql import check_archive_url

        check_archive_url(settings.archive.url)
    return settings


def with_index(settings: Settings, *, is_shared: bool = False) -> Settings:
    """Return them as they are. Raises InvalidSetting for an index that cannot be shared."""
    kernel, folder = settings.indexer.kernel, settings.indexer.shared_folder
    if (is_shared or folder) and kernel != "flat":
        problem = "only `flat` can be shared (--routers, indexer.shared_folder)"
        raise InvalidSetting("indexer.kernel", kernel, problem)
    if folder:
        from kvatlas.indexer.index.shared.folder import check_shared_folder

        check_folder("indexer.shared_folder", Path(folder))
        check_shared_folder(Path(folder))
    return settings


def for_serving(settings: Settings, num_routers: int = 0) -> Settings:
    """Return them as they are. Raises InvalidSetting for what `serve` would fail at later."""
    nats = settings.nats
    _check_credentials(settings)
    if nats.url and nats.folder:
        both = "--nats (nats.url) and --data (nats.folder) exclude each other: a given broker keeps"
        raise InvalidSetting("nats.folder", "", f"{both} its own log; leave one of them out")
    if not nats.url and settings.log.replicas > 1:
        problem = f"log.replicas is {settings.log.replicas}, and the embedded broker is one node"
        help_ = "leave it at 1, or give the address of a cluster with --nats"
        raise InvalidSetting("log.replicas", "", f"{problem}: {help_}")
    if nats.folder:
        check_folder("--data", Path(nats.folder))
    return with_archive(with_index(settings, is_shared=num_routers > 0))


def _check_credentials(settings: Settings) -> None:
    if settings.nats.credentials:
        file = Path(settings.nats.credentials)
        check_file("--creds", file)
        from kvatlas.events.nats.credentials import login_of  # not for commands without a broker

        login_of(file)


def check_file(flag: str, file: Path) -> None:
    """Raise InvalidSetting where a flag names no file."""
    if not os.path.exists(file):
        raise InvalidSetting(flag, "", f"{flag} {file}: no such file")
    if file.is_dir():
        raise InvalidSetting(flag, "", f"{flag} {file}: is a folder, expected a file")


def check_folder(flag: str, folder: Path) -> None:
    """Raise InvalidSetting where a flag names a folder that is none and cannot be made."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise InvalidSetting(flag, "", f"{flag} {nearest}: is a file, expected a folder")


def extra_of(error: ModuleNotFoundError) -> str:
    """Return the smallest extra of ours that brings a module; `all` where none is known."""
    return EXTRAS.get((error.name or "").partition(".")[0], "all")


def fingerprint_of(text: str) -> bytes:
    """Return what --kv-fingerprint says in hex digits. Raises InvalidSetting."""
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidSetting("kv_fingerprint", "flag --kv-fingerprint", str(error)) from error


def say(*lines: str) -> None:
    """Print lines in which others may have a part: names, URLs, reasons."""
    print("\n".join(printable(line, MAX_LINE_CHARACTERS) for line in lines), flush=True)


def say_json(text: str) -> None:
    """Print a JSON object in which others may have a part."""
    print(printable_json(text), flush=True)


def say_error(problem: object) -> None:
    """Print what went wrong in one line on stderr."""
    write_line(sys.stderr, f"kvatlas: {printable(str(problem))}")


def exit_as(reason: str) -> None:
    """Exit with the status by which an engine knows why its sidecar has stopped."""
    from kvatlas.worker_hooks.sidecar.launch import FENCED_STATUS
    from kvatlas.worker_hooks.sidecar.service import FENCED

    if reason == FENCED:
        raise typer.Exit(FENCED_STATUS)
