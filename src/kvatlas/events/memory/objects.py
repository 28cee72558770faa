"""Objects within one process; the twin of `nats_objects`."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from kvatlas.events.objects import Buffer, ObjectEntry, Take, check_name, chunks_of
from kvatlas.schemas.errors import NotFound

CHUNK_BYTES = 64 << 10


class ObjectConnection(Protocol):
    """What objects need of the bus that they were taken from."""

    def check_connected(self) -> None: ...


class ObjectBucket:
    """What all connections see of one bucket."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        #: name -> content, and when it was stored; the newest last
        self.objects: dict[str, tuple[bytes, int]] = {}

    def store(self, name: str, content: bytes) -> None:
        """Make an object visible."""
        self.objects.pop(name, None)
        self.objects[name] = content, self._now_ns()


class MemoryObjects:
    """The `ObjectStore` within one process."""

    def __init__(self, bus: ObjectConnection, bucket: ObjectBucket) -> None:
        self._bus, self._bucket = bus, bucket

    async def put(self, name: str, parts: Iterable[Buffer]) -> None:
        check_name(name)
        content = bytearray()
        for chunk in chunks_of(parts, CHUNK_BYTES):
            self._bus.check_connected()
            content += chunk
            await asyncio.sleep(0)
        self._bus.check_connected()
        self._bucket.store(name, bytes(content))

    async def get(self, name: str, take: Take) -> None:
        check_name(name)
        self._bus.check_connected()
        if name not in self._bucket.objects:
            raise NotFound(f"no object {name}")
        content = memoryview(self._bucket.objects[name][0])
        for chunk in chunks_of([content], CHUNK_BYTES):
            self._bus.check_connected()
            if name not in self._bucket.objects:
                raise NotFound(f"object {name} was deleted while it was read")
            if not take(chunk):
                return
            await asyncio.sleep(0)

    async def entries(self) -> list[ObjectEntry]:
        self._bus.check_connected()
        return [
            ObjectEntry(name, len(content), stored_ns)
            for name, (content, stored_ns) in reversed(self._bucket.objects.items())
        ]

    async def delete(self, name: str) -> None:
        check_name(name)
        self._bus.check_connected()
        self._bucket.objects.pop(name, None)
