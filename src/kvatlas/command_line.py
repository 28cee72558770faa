"""What commands have in common: options, the settings that these make, how they end."""

from pathlib import Path
from typing import Annotated

import typer

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.settings import Settings, load_settings

Nats = Annotated[
    str | None, typer.Option("--nats", help="Broker URL; `serve` without one embeds it.")
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
WorkerName = Annotated[str, typer.Option(help="Name of the worker in the fleet.")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="Reference engines to run.")]
BlocksPerWorker = Annotated[int, typer.Option(min=1, help="KV blocks of each reference engine.")]
BlockBytes = Annotated[int, typer.Option(min=16, help="KV bytes of a block.")]
BlockTokens = Annotated[int, typer.Option(min=1, max=65_536, help="Tokens of a block.")]
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
        "port": "router.port",
        "policy": "router.policy",
        "archive": "archive.url",
        "data": "nats.folder",
    }
    shortcuts = {"nats.url": nats, "nats.credentials": creds}
    shortcuts |= {keys[name]: None if v is None else str(v) for name, v in named.items()}
    flags |= {key: value for key, value in shortcuts.items() if value is not None}
    return load_settings(config, flags=flags.items())


def with_broker(settings: Settings) -> Settings:
    """Return them as they are. Raises InvalidSetting where they name no broker."""
    if not settings.nats.url:
        missing = "no broker: give --nats nats://HOST:4222 or KVATLAS_NATS__URL"
        raise InvalidSetting("nats.url", "", missing)
    return settings


def fingerprint_of(text: str) -> bytes:
    """Return what --kv-fingerprint says in hex digits. Raises InvalidSetting."""
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidSetting("kv_fingerprint", "flag --kv-fingerprint", str(error)) from error


def exit_as(reason: str) -> None:
    """Exit with the status by which an engine knows why its sidecar has stopped."""
    from kvatlas.worker_hooks.launch import FENCED_STATUS
    from kvatlas.worker_hooks.sidecar_service import FENCED

    if reason == FENCED:
        raise typer.Exit(FENCED_STATUS)
