"""An archiver as a process of its own, to be killed: `archiver_main.py BROKER_URL DATABASE_URL`.

Prints its cursor after each transaction and `done` when it has caught up.
"""

import asyncio
import sys
from collections.abc import Sequence

from kvatlas.events.archive import EventRecord, Hole
from kvatlas.events.archiver import Archiver, ArchiverSettings
from kvatlas.events.nats_bus import NatsBus
from kvatlas.events.sql_archive import SqlArchive
from kvatlas.events.streams import KV_EVENTS


class TellingArchive(SqlArchive):
    """Says what it has written."""

    def append_events(
        self, records: Sequence[EventRecord], holes: Sequence[Hole], cursor: int
    ) -> None:
        super().append_events(records, holes, cursor)
        print(cursor, flush=True)


async def main(broker_url: str, database_url: str) -> None:
    settings = ArchiverSettings(max_queued=500, max_batch=37)
    with TellingArchive(database_url) as archive:
        async with NatsBus(broker_url) as bus:
            streams = (KV_EVENTS,)
            async with Archiver(bus, archive, streams=streams, settings=settings) as archiver:
                await archiver.caught_up()
                print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
