"""A writer of an object that never ends, to be killed: `uploader_main.py BROKER_URL BUCKET NAME`.

Prints how many bytes it has handed over, a line for each megabyte.
"""

import asyncio
import sys
from collections.abc import Iterator

from kvatlas.events.nats.bus import NatsBus

MEGABYTE = bytes(1 << 20)


def parts() -> Iterator[bytes]:
    num_bytes = 0
    while True:
        yield MEGABYTE
        num_bytes += len(MEGABYTE)
        print(num_bytes, flush=True)


async def main(broker_url: str, bucket: str, name: str) -> None:
    async with NatsBus(broker_url) as bus:
        await bus.objects(bucket).put(name, parts())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
