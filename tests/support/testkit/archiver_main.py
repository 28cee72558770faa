"""An archiver as a process of its own, to be killed: `archiver_main.py BROKER_URL DATABASE_URL N`.

Prints its cursor after each transaction and `done` when it has caught up; after N transactions (0:
never) it stands still, so that whoever kills it comes in time.
"""

import asyncio
import sys
import threading
from collections.abc import Sequence

from kvatlas.events.archive.archiver import Archiver, ArchiverSettings
from kvatlas.events.archive.port import EventRecord, Hole
from kvatlas.events.archive.sql import SqlArchive
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_EVENTS


class TellingArchive(SqlArchive):
    """Says what it has written, and stands still when that is enough."""

    num_left = 0

    def append_events(
        self, records: Sequence[EventRecord], holes: Sequence[Hole], cursor: int
    ) -> None:
        super().append_events(records, holes, cursor)
        print(cursor, flush=True)
        self.num_left -= 1
        if self.num_left == 0:
            threading.Event().wait()


async def main(broker_url: str, database_url: str, num_transactions: str) -> None:
    settings = ArchiverSettings(max_queued=500, max_batch=37)
    with TellingArchive(database_url) as archive:
        archive.num_left = int(num_transactions)
        async with NatsBus(broker_url) as bus:
            streams = (KV_EVENTS,)
            async with Archiver(bus, archive, streams=streams, settings=settings) as archiver:
                await archiver.caught_up()
                print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
