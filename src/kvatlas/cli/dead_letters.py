"""The command `dead-letters`: what stood in the log and could not be read.

Registers itself on the application of `commands`; `__main__` imports both.
"""

import asyncio
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvatlas.cli.commands import app
from kvatlas.cli.options import (
    WIDTH,
    Config,
    Creds,
    Nats,
    SetFlags,
    say,
    say_json,
    settings_from,
    with_broker,
)
from kvatlas.common.own_files import open_output
from kvatlas.events.bus import Bus, Message
from kvatlas.events.dead_letters import (
    MAX_KEPT_BYTES,
    DeadLetter,
    decode_letter,
    pattern_of,
    read_letters,
    whole_payload,
)
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_DEAD_LETTERS
from kvatlas.schemas.errors import InvalidSetting, MalformedLetter, UnknownLetter
from kvatlas.schemas.printable import printable
from kvatlas.schemas.settings import Settings
from kvatlas.worker_hooks.sidecar.process import signals_call

#: for a broker to be there; who looks at letters does not want to wait for one to be started
CONNECT_SECONDS = 10.0
#: messages that --follow remembers to have shown, since each replica writes its letter
MAX_SHOWN = 100_000

_COLUMNS = ("sequence", "time (UTC)", "worker", "kind", "bytes", "reason")


@app.command("dead-letters")
def dead_letters(
    nats: Nats = None,
    creds: Creds = None,
    config: Config = None,
    set_: SetFlags = None,
    limit: Annotated[int, typer.Option(min=1, help="Only so many, the newest.")] = 50,
    worker: Annotated[
        str | None, typer.Option(help="Only what came on this worker's subjects.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with those to come.")] = False,
    payload: Annotated[
        int | None, typer.Option(min=1, metavar="SEQUENCE", help="Write one message to --out.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the message's bytes.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a letter.")] = False,
) -> None:
    """List the messages of the log that could not be read, with the reason; or take one out."""
    if (payload is None) != (out is None):
        raise InvalidSetting("payload", "", "--payload and --out belong together")
    if out is not None and not out.parent.is_dir():
        raise InvalidSetting("out", "", f"--out {out}: the folder {out.parent} does not exist")
    settings = with_broker(settings_from(config, nats, creds, set_))
    if payload is not None and out is not None:
        letter, content = asyncio.run(_found(settings, payload))
        change = "name a file that is not there yet"
        try:
            with open(open_output(out, lambda _: False, "an empty file", change), "wb") as file:
                file.write(content)
        except OSError as error:
            raise InvalidSetting("out", "flag --out", error.strerror or str(error)) from error
        part = f", the first of {letter.num_bytes}" if len(content) < letter.num_bytes else ""
        say(f"{len(content)} bytes{part} in {out}")
    else:
        asyncio.run(_list(settings, worker, limit, follow, json))


async def _found(settings: Settings, stream_sequence: int) -> tuple[DeadLetter, bytes]:
    """Return the letter about a message, and the message, all of it if the log still has it."""
    async with _bus(settings) as bus:
        found: DeadLetter | None = None
        async for letter in read_letters(bus):
            if letter.stream_sequence == stream_sequence:
                found = letter
        if found is None:
            raise UnknownLetter(stream_sequence)
        return found, await whole_payload(bus, found)


async def _list(
    settings: Settings, worker: str | None, limit: int, follow: bool, as_json: bool
) -> None:
    async with _bus(settings) as bus:
        last = await bus.last_sequence(KV_DEAD_LETTERS)
        newest: deque[DeadLetter] = deque(maxlen=limit)
        async for letter in read_letters(bus, worker):
            newest.append(msgspec.structs.replace(letter, payload=b""))
        letters = sorted(newest, key=lambda letter: letter.stream_sequence)
        _print_all(letters, as_json)
        if follow:
            shown = OrderedDict.fromkeys(letter.stream_sequence for letter in letters)
            await _follow(bus, worker, last + 1, shown, as_json)


async def _follow(
    bus: Bus, worker: str | None, first: int, shown: "OrderedDict[int, None]", as_json: bool
) -> None:
    """Print each new letter once, until a signal comes."""
    stopped = asyncio.Event()

    def on_message(message: Message) -> None:
        try:
            letter = decode_letter(message.payload)
        except MalformedLetter:
            return
        if letter.stream_sequence in shown:
            return
        shown[letter.stream_sequence] = None
        if len(shown) > MAX_SHOWN:
            shown.popitem(last=False)
        if as_json:
            say_json(_json(letter))
        else:
            say("  ".join(_cells(letter)))

    async with signals_call(lambda _: stopped.set()):
        await bus.follow(KV_DEAD_LETTERS, first, on_message, subjects=pattern_of(worker))
        await stopped.wait()


@asynccontextmanager
async def _bus(settings: Settings) -> AsyncGenerator[Bus, None]:
    creds = Path(settings.nats.credentials) if settings.nats.credentials else None
    async with NatsBus(
        settings.nats.url,
        wait_seconds=CONNECT_SECONDS,
        creds_file=creds,
        replicas=settings.log.replicas,
    ) as bus:
        yield bus


def _print_all(letters: list[DeadLetter], as_json: bool) -> None:
    if as_json:
        for letter in letters:
            say_json(_json(letter))
        return
    if not letters:
        say("no dead letters")
        return
    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        is_number = name in ("sequence", "bytes")
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for letter in letters:
        table.add_row(*map(Text, _cells(letter)))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def _cells(letter: DeadLetter) -> list[str]:
    return [
        str(letter.stream_sequence),
        _time(letter).strftime("%Y-%m-%d %H:%M:%S"),
        printable(letter.worker) or "-",
        printable(letter.kind),
        f"{letter.num_bytes}{' (cut)' if letter.num_bytes > MAX_KEPT_BYTES else ''}",
        printable(letter.reason),
    ]


def _json(letter: DeadLetter) -> str:
    content: dict[str, Any] = {
        "stream_sequence": letter.stream_sequence,
        "time": _time(letter).isoformat(),
        "broker_ns": letter.broker_ns,
        "worker": letter.worker,
        "subject": letter.subject,
        "kind": letter.kind,
        "reason": letter.reason,
        "by": letter.by,
        "num_bytes": letter.num_bytes,
    }
    return msgspec.json.encode(content).decode()


def _time(letter: DeadLetter) -> datetime:
    """Return when the broker stored the message; what a forged letter says may be no time."""
    try:
        return datetime.fromtimestamp(letter.broker_ns / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(0, UTC)
