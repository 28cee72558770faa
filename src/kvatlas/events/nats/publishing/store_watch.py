"""Notices a broker that answers and stores nothing: what publishers have unacknowledged."""

import asyncio
from collections.abc import Callable, Mapping

from kvatlas.events.nats.publishing.publisher import Unstored
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS
from kvatlas.schemas.conditions import DECISIONS_NOT_STORED, LOG_NOT_STORED, Conditions

#: an election of a cluster takes about as long, and is worth a line too
NOT_STORED_SECONDS = 5.0
LOOK_SECONDS = 0.5
CONDITIONS = {KV_EVENTS: LOG_NOT_STORED, KV_DECISIONS: DECISIONS_NOT_STORED}
SOURCE = "publishers"


async def watch_stores(
    unstored: Callable[[], Mapping[str, Unstored]], conditions: Conditions
) -> None:
    """Begin and end the conditions of the streams that are published to, without end.

    `unstored` says of which of them nothing is stored at the moment.
    """
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        found_now = unstored()
        for stream_name, condition in CONDITIONS.items():
            found = found_now.get(stream_name)
            if found is None:
                conditions.end(condition, source=SOURCE)
            elif found.seconds >= NOT_STORED_SECONDS:
                conditions.begin(condition, f"{stream_name}: {found.reason}", source=SOURCE)
