"""What tests of the bus share: collecting what callbacks get, and the two kinds of broker."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from kvatlas.events.bus import StreamSpec
from testkit.waiting import WAIT_SECONDS

T = TypeVar("T")


class Collected(Generic[T]):
    """A callback that keeps what it gets, in order, and lets a test wait for it."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._news = asyncio.Event()

    def __call__(self, item: T) -> None:
        self.items.append(item)
        self._news.set()

    async def until(self, is_there: Callable[[list[T]], bool]) -> list[T]:
        """Return the items once they are as wanted."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not is_there(self.items):
                self._news.clear()
                await self._news.wait()
        return self.items

    async def count(self, wanted: int) -> list[T]:
        """Return the items once there are as many as wanted."""
        return await self.until(lambda items: len(items) >= wanted)


def a_stream(
    name: str = "TEST",
    subjects: tuple[str, ...] = ("test.>",),
    max_bytes: int = 64 << 20,
    max_age_seconds: float = 3600.0,
    max_messages_per_subject: int = 0,
) -> StreamSpec:
    return StreamSpec(
        name,
        subjects,
        max_bytes,
        max_age_seconds,
        max_messages_per_subject=max_messages_per_subject,
    )
