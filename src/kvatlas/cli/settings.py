"""The command `settings`: what can be set, by which name, and within which bounds.

Registers itself on the application of `commands`; `__main__` imports both.
"""

import sys
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvatlas.cli.commands import app
from kvatlas.cli.options import WIDTH, JsonFlag, say_json
from kvatlas.schemas.settings import Settings, kind_and_bounds, settings_by_key, variable_of


class Setting(Struct, frozen=True):
    """A setting as its struct declares it; empty `bounds` allow anything of its type."""

    name: str
    type: str
    default: Any
    bounds: str
    environment: str


@app.command("settings")
def settings_(json: JsonFlag = False) -> None:
    """List all settings: --set NAME=VALUE, a key of a --config file, or the environment."""
    found = all_settings()
    if json:
        say_json(msgspec.json.encode({"settings": found}).decode())
        return
    table = Table(box=None, pad_edge=False)
    for name in Setting.__struct_fields__:
        table.add_column(name, overflow="fold")
    for one in found:
        default = msgspec.json.encode(one.default).decode()
        table.add_row(*map(Text, (one.name, one.type, default, one.bounds, one.environment)))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def all_settings() -> list[Setting]:
    """Return all settings in the order of their structs."""
    defaults = msgspec.to_builtins(Settings())
    return [
        Setting(key, kind, defaults[section][name], bounds, variable_of(key))
        for key, wanted in settings_by_key().items()
        for section, _, name in (key.partition("."),)
        for kind, bounds in (kind_and_bounds(wanted),)
    ]
