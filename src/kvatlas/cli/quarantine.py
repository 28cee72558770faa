"""The command `quarantine`: nothing that a worker holds counts as a match until it is released.

Registers itself on the application of `commands`; `__main__` imports both.
"""

import asyncio
import getpass
import socket
import time
from pathlib import Path
from typing import Annotated

import typer

from kvatlas.cli.commands import app
from kvatlas.cli.options import (
    Config,
    Creds,
    Nats,
    SetFlags,
    say,
    settings_from,
    with_broker,
)
from kvatlas.events.bus import Bus
from kvatlas.events.codec import encode
from kvatlas.events.leases import LeaseChange, watch_leases
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_EVENTS, LEASES_BUCKET
from kvatlas.events.subjects import control_subject
from kvatlas.schemas.errors import InvalidSetting, UnknownWorker
from kvatlas.schemas.ids import MAX_RANK, InstanceId
from kvatlas.schemas.kv_events import ControlRecord, lifts_quarantine, quarantine_lifted_because
from kvatlas.schemas.settings import Settings

#: for a broker to be there
CONNECT_SECONDS = 10.0
#: of a reason, which every reader keeps for as long as the worker runs
MAX_REASON_CHARACTERS = 500


@app.command()
def quarantine(
    worker: Annotated[str, typer.Argument(help="The worker's name.")],
    reason: Annotated[
        str,
        typer.Option(help="Why; it is shown wherever the worker is. Required unless --release."),
    ] = "",
    rank: Annotated[
        int | None, typer.Option(min=0, max=MAX_RANK, help="Only this rank; none: all of them.")
    ] = None,
    release: Annotated[
        bool, typer.Option("--release", help="Let its blocks count again instead.")
    ] = False,
    nats: Nats = None,
    creds: Creds = None,
    config: Config = None,
    set_: SetFlags = None,
) -> None:
    """Let nothing that a worker holds count as a match, because its KV is wrong.

    It lasts until it is released or the worker starts anew, for all readers alike.
    """
    if release and not reason:
        reason = "released by command"
    if not reason:
        expected = "expected --reason TEXT, which says why the worker is quarantined"
        raise InvalidSetting("reason", "", expected)
    if not 1 <= len(reason) <= MAX_REASON_CHARACTERS:
        problem = f"expected 1 to {MAX_REASON_CHARACTERS} characters, found {len(reason)}"
        raise InvalidSetting("reason", "flag --reason", problem)
    settings = with_broker(settings_from(config, nats, creds, set_))
    for record, sequence in asyncio.run(_record(settings, worker, rank, reason, release)):
        done = "released" if lifts_quarantine(record) else "quarantined"
        say(f"{record.instance} epoch {record.epoch} {done} at {sequence}: {record.reason}")


async def _record(
    settings: Settings, worker: str, rank: int | None, reason: str, release: bool
) -> list[tuple[ControlRecord, int]]:
    """Put a record about each living rank into the log; return them and the log's end then."""
    creds = Path(settings.nats.credentials) if settings.nats.credentials else None
    done = []
    async with NatsBus(settings.nats.url, wait_seconds=CONNECT_SECONDS, creds_file=creds) as bus:
        publisher = bus.publisher(KV_EVENTS)
        for instance, epoch in (await _living(bus, worker, rank)).items():
            kind = "released" if release else "quarantined"
            why = quarantine_lifted_because(reason) if release else reason
            by, now_ns = f"{getpass.getuser()}@{socket.gethostname()}", time.time_ns()
            record = ControlRecord(
                settings.fleet.wire_version, *instance, epoch, kind, why, by, now_ns
            )
            await publisher.publish(control_subject(instance), encode(record))
            await publisher.flush()
            done.append((record, await bus.last_sequence(KV_EVENTS)))
    return done


async def _living(bus: Bus, worker: str, rank: int | None) -> dict[InstanceId, int]:
    """Return the epoch of each rank of a worker that has a lease; raises UnknownWorker."""
    found: dict[InstanceId, int] = {}

    def on_lease(change: LeaseChange) -> None:
        if change.kind == "alive" and change.epoch is not None:
            found[change.instance] = change.epoch
        else:
            found.pop(change.instance, None)

    watching = await watch_leases(bus.keys(LEASES_BUCKET), on_lease)
    await watching.close()
    living = {
        instance: epoch
        for instance, epoch in sorted(found.items())
        if instance.worker == worker and rank in (None, instance.rank)
    }
    if not living:
        raise UnknownWorker(worker, rank, sorted({instance.worker for instance in found}))
    return living
