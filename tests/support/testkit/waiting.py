"""Waiting for something that no event tells of: another process, mostly."""

import asyncio
from collections.abc import Awaitable, Callable


async def until(is_so: Callable[[], bool], timeout_seconds: float = 10.0) -> None:
    """Return once it is so; fail if that takes too long."""
    async with asyncio.timeout(timeout_seconds):
        while not is_so():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.001)


async def until_told(ask: Callable[[], Awaitable[bool]], timeout_seconds: float = 10.0) -> None:
    """Return once somebody who has to be asked, over HTTP or the bus, says so."""
    async with asyncio.timeout(timeout_seconds):
        while not await ask():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.02)
