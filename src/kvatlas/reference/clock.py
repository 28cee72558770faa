"""Model time: what a request would take on the modelled machine, played faster or by hand."""

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class ModelClock(Protocol):
    """Seconds of the modelled machine."""

    def now(self) -> float:
        """Return the present; it never goes back."""
        ...

    async def sleep_until(self, moment: float) -> None:
        """Return at that moment, or at once if it has passed."""
        ...


class ScaledClock:
    """Model seconds = real seconds x `speed`, from 0 on.

    A sleep is late by up to a millisecond of real time, so by `speed` milliseconds: whoever models
    throughput sleeps until moments that it computed, and never for what is left.
    """

    def __init__(self, speed: float = 1.0) -> None:
        if speed <= 0:
            raise ValueError(f"a clock of speed {speed} stands or goes back")
        self.speed = speed
        self._started = time.monotonic()

    def now(self) -> float:
        return (time.monotonic() - self._started) * self.speed

    async def sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(moment - self.now(), 0) / self.speed)


class ManualClock:
    """Stands still until it is turned; sleepers wake in the order of their moments."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []

    def now(self) -> float:
        return self._now

    async def sleep_until(self, moment: float) -> None:
        if moment > self._now:
            woken = asyncio.Event()
            heapq.heappush(self._sleepers, (moment, next(self._order), woken))
            await woken.wait()

    async def advance(self, seconds: float) -> None:
        """Turn the clock; whoever wakes on the way runs at the moment it asked for."""
        end = self._now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now = self._sleepers[0][0]
            heapq.heappop(self._sleepers)[2].set()
            await settle()
        self._now = end


async def settle(rounds: int = 20) -> None:
    """Let every task run until it waits for something."""
    for _ in range(rounds):
        await asyncio.sleep(0)
