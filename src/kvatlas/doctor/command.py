"""The command `kvatlas doctor`."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.printable import printable, printable_json

if TYPE_CHECKING:
    from kvatlas.doctor.checks import Finding


def doctor(
    engine_url: Annotated[str, typer.Option(help="Where the engine takes requests.")],
    router_url: Annotated[str, typer.Option(help="Where a router is.")],
    worker: Annotated[str, typer.Option(help="The engine's name in the fleet.")],
    model: Annotated[str, typer.Option(help="None: the first that the engine serves.")] = "",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder or tokenizer.json to compare the engine's with.")
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="KVATLAS_ENGINE_API_KEY", help="Of the engine, if it wants one.")
    ] = "",
    rank: Annotated[
        int | None, typer.Option(min=0, help="Data-parallel rank to probe; none: the first.")
    ] = None,
    events_endpoint: Annotated[
        str, typer.Option(help="The engine's own ZMQ events, such as tcp://127.0.0.1:5557.")
    ] = "",
    wait_seconds: Annotated[
        float, typer.Option(min=0.1, help="How long a computed prompt may take to be known.")
    ] = 10.0,
    json: Annotated[bool, typer.Option(help="Print one JSON object as the last line.")] = False,
) -> None:
    """Look for silent misses between an engine and a router: one line a check, 1 if one fails."""
    from kvatlas.doctor.checks import Status
    from kvatlas.doctor.engine_events import check_endpoint
    from kvatlas.doctor.run import DoctorOptions, run_doctor

    for name, url in (("engine_url", engine_url), ("router_url", router_url)):
        if not url.startswith(("http://", "https://")):
            raise InvalidSetting(name, f"flag --{name.replace('_', '-')}", "expected http(s)://")
    check_endpoint(events_endpoint)
    options = DoctorOptions(
        engine_url=engine_url,
        router_url=router_url,
        worker=worker,
        model=model,
        tokenizer=tokenizer,
        api_key=api_key,
        rank=rank,
        events_endpoint=events_endpoint,
        wait_seconds=wait_seconds,
    )
    findings = asyncio.run(run_doctor(options, _say))
    failed = any(finding.status is Status.fail for finding in findings)
    if json:
        report = {"healthy": not failed, "findings": findings}
        print(printable_json(msgspec.json.encode(report).decode()))
    if failed:
        raise typer.Exit(1)


def _say(finding: "Finding") -> None:
    print(printable(finding.line()), flush=True)
