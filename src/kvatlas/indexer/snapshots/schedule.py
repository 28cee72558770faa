"""Which snapshots are kept and when the next is due; pure, asked by snapshot_writing.py.

A name is the stream sequence that the snapshot stands for, in 20 digits, and a random end.
"""

import re
from collections.abc import Sequence
from secrets import token_hex

from kvatlas.events.objects import ObjectEntry

_name = re.compile(r"(\d{20})-[0-9a-f]+")
#: of the log's length; an older snapshot is about to be lost to it
NEAR_SHARE = 0.25


def name_for(stream_sequence: int) -> str:
    """Return a name that no other snapshot has."""
    return f"{stream_sequence:020}-{token_hex(4)}"


def sequence_of(name: str) -> int | None:
    """Return what a snapshot stands for by its name; None where that tells nothing."""
    found = _name.fullmatch(name)
    return int(found[1]) if found else None


def is_due(entries: Sequence[ObjectEntry], stream_sequence: int, num_messages: int) -> bool:
    """Say whether so many messages have come since the newest snapshot.

    One that stands for more than there is now is of a log that was lost.
    """
    newest = sequence_of(entries[0].name) if entries else None
    if newest is None or newest > stream_sequence:
        return stream_sequence > 0
    return stream_sequence - newest >= num_messages


def surplus(
    entries: Sequence[ObjectEntry], num_kept: int, kept_seconds: float
) -> list[ObjectEntry]:
    """Return those that go: beyond the count, or older than the newest by that much."""
    if not entries:
        return []
    oldest_ns = entries[0].stored_ns - kept_seconds * 1e9
    return [
        entry
        for place, entry in enumerate(entries)
        if place >= num_kept or (place and entry.stored_ns < oldest_ns)
    ]


def headroom(entries: Sequence[ObjectEntry], first: int) -> int | None:
    """Return how many messages the log may lose before the oldest snapshot is of no use.

    Negative where it is of none already; None without snapshots.
    """
    sequences = [at for entry in entries if (at := sequence_of(entry.name)) is not None]
    return min(sequences) + 1 - first if sequences else None


def is_near(headroom_messages: int, first: int, last: int) -> bool:
    """Say whether a log that discards messages is about to reach the oldest snapshot."""
    return first > 1 and headroom_messages < NEAR_SHARE * (last + 1 - first)
