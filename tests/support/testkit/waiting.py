"""Waiting for something that no event tells of: another process, mostly."""

import asyncio
from collections.abc import Awaitable, Callable

#: of anything at all: a busy machine takes seconds for what an idle one does at once
WAIT_SECONDS = 30.0
POLL_SECONDS = 0.005


async def until(is_so: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Return once it is so; fail if that takes too long."""
    async with asyncio.timeout(seconds):
        while not is_so():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(POLL_SECONDS)


async def until_told(ask: Callable[[], Awaitable[bool]], seconds: float = WAIT_SECONDS) -> None:
    """Return once somebody who has to be asked, over HTTP or the bus, says so."""
    async with asyncio.timeout(seconds):
        while not await ask():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(4 * POLL_SECONDS)
