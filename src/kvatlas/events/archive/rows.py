"""Rows of an archive that another program may have changed: what is wrong with them. Pure.

A row with a wrong value is left out or read without that value, and noted as damaged. It never
hides the other rows.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvatlas.events.archive.port import DamagedRow, DamagedRows, Hole
from kvatlas.events.bus import Message

#: of a key in a message
_MAX_KEY = 80

_NAMES = {bytes: "blob", str: "text", int: "integer", float: "real", type(None): "NULL"}


def key_of(**columns: object) -> str:
    """Return what names a row in a message."""
    return ", ".join(f"{name} {value!r:.{_MAX_KEY}}" for name, value in columns.items())


def number_problem(name: str, value: object, least: int = 0) -> str:
    """Return what is wrong with a column that holds numbers from `least` on; empty for nothing."""
    if type(value) is not int:
        return f"{name} is {_NAMES.get(type(value), type(value).__name__)}, expected an integer"
    return f"{name} is {value}, expected at least {least}" if value < least else ""


def message_of(table: str, key: str, row: Mapping[str, Any], damaged: DamagedRows) -> Message:
    """Return the message of a row, with empty values for those that are damaged."""
    sequence, subject = row["stream_sequence"], row["subject"]
    payload, broker_ns = row["payload"], row["broker_ns"]
    problems = [
        number_problem("stream_sequence", sequence, 1),
        number_problem("broker_ns", broker_ns),
    ]
    if isinstance(payload, memoryview):
        payload = bytes(payload)
    for name, value, kind in (("subject", subject, str), ("payload", payload, bytes)):
        if not isinstance(value, kind):
            found = _NAMES.get(type(value), type(value).__name__)
            problems.append(f"{name} is {found}, expected {_NAMES[kind]}")
    if any(problems):
        damaged.note(DamagedRow(table, key, "; ".join(filter(None, problems))))
    return Message(
        int(sequence) if isinstance(sequence, int | float) else 0,
        subject if isinstance(subject, str) else "",
        payload if isinstance(payload, bytes) else b"",
        broker_ns if type(broker_ns) is int and broker_ns >= 0 else 0,
    )


def holes_of(rows: Iterable[Mapping[str, Any]], stream: str, damaged: DamagedRows) -> list[Hole]:
    """Return the holes of some rows, in order, without damaged ones."""
    found = []
    for row in rows:
        first, last = row["first"], row["last"]
        problem = number_problem("first", first, 1) or number_problem("last", last, 1)
        if not problem and last < first:
            problem = f"last is {last}, expected at least first, {first}"
        if problem:
            damaged.note(DamagedRow("holes", key_of(stream=stream, first=first), problem))
        else:
            found.append(Hole(first, last))
    return sorted(found)
