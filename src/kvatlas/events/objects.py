"""The port of large objects: snapshots are some hundred megabytes, more than a message can be.

Adapters are `MemoryObjects`, `NatsObjects` (an object store bucket of JetStream, as every NATS
client knows it) and `FolderObjects` (one file an object, for offline use: it can be mapped).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from msgspec import Struct

from kvatlas.schemas.errors import InvalidSubject

#: what an interrupted `put` left behind is removed by later ones after this; an upload that takes
#: longer loses its beginning
ORPHAN_SECONDS = 3_600.0

Buffer = bytes | bytearray | memoryview
#: takes the next bytes, which it must not keep a view of; returns whether it wants more
Take = Callable[[bytes], bool]

_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class ObjectEntry(Struct, frozen=True):
    """An object that is there whole; `stored_ns` is by the store's clock, ns since 1970."""

    name: str
    num_bytes: int
    stored_ns: int


class ObjectStore(Protocol):
    """A bucket of objects. All methods raise Unavailable (BusUnavailable) while it is away.

    A name is up to 200 letters, digits, `.`, `_` and `-`; another one raises InvalidSubject.
    """

    async def put(self, name: str, parts: Iterable[Buffer]) -> None:
        """Store an object, the parts one behind the other, in place of any of this name.

        Others see it whole or not at all, whatever happens to this process meanwhile. Parts are
        asked for as they are sent, a chunk at a time is copied. After an error it is not
        there, unless the broker went away in the last exchange. Raises StreamRefused when there is
        no room.
        """
        ...

    async def get(self, name: str, take: Take) -> None:
        """Hand an object over in order, until it ends or `take` wants no more of it.

        The content is as the store has it: checksums are the caller's. Raises NotFound when there
        is none of the name, or when it is deleted meanwhile.
        """
        ...

    async def entries(self) -> list[ObjectEntry]:
        """Return what is there, newest first; a bucket that nobody has put to is empty."""
        ...

    async def delete(self, name: str) -> None:
        """Remove an object; none of the name is no error."""
        ...


def check_name(name: str) -> None:
    """Raise InvalidSubject unless an object may have this name."""
    if not _name.fullmatch(name):
        raise InvalidSubject(name)


def chunks_of(parts: Iterable[Buffer], num_bytes: int) -> Iterator[bytes]:
    """Cut parts that lie one behind the other into chunks of one size; the last may be shorter."""
    chunk = bytearray()
    for part in parts:
        rest = memoryview(part)
        while rest:
            taken = rest[: num_bytes - len(chunk)]
            chunk += taken
            rest = rest[len(taken) :]
            if len(chunk) == num_bytes:
                yield bytes(chunk)
                chunk.clear()
    if chunk:
        yield bytes(chunk)
