"""The text of /metrics, written bit by bit: a fleet of thousands holds up no request meanwhile.

Collectors may yield a family in parts, each with some of its samples; here they become one. What is
shown is of several moments, as it is of several processes.
"""

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

#: after so much time others get their turn
SLICE_SECONDS = 0.0005
#: turns of the event loop between two slices: a request takes a few of them
TURNS = 3
#: samples between two looks at the clock
SAMPLES_A_LOOK = 16

T = TypeVar("T")

_number_of: Callable[[float], str] = floatToGoString


class Exposition:
    """Writes what a registry has; one text at a time, since each takes memory."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry, self._turn = registry, asyncio.Lock()

    async def text(self) -> bytes:
        """Return what Prometheus reads; equal to `generate_latest` for families in one part."""
        async with self._turn:
            parts: dict[str, list[str]] = {}
            pause = Slices()
            for family in self._registry.collect():
                lines = parts.get(family.name)
                if lines is None:
                    lines = parts[family.name] = [_head(family)]
                for first in range(0, len(family.samples), SAMPLES_A_LOOK):
                    lines += map(_line, family.samples[first : first + SAMPLES_A_LOOK])
                    await pause.when_due()
                await pause.when_due()
            return "".join(line for lines in parts.values() for line in lines).encode()


class Slices:
    """Cuts long work on the event loop into slices of SLICE_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._began = clock, clock()

    async def when_due(self) -> None:
        """Let others have their turn, if this slice is over."""
        if self._clock() - self._began >= SLICE_SECONDS:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            self._began = self._clock()


async def in_slices(steps: Generator[None, None, T]) -> T:
    """Return what a generator returns, with others' turns between its steps."""
    pause = Slices()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: T = end.value
            return value
        await pause.when_due()


class _Only(Collector):
    """One family without samples, for its head."""

    def __init__(self, family: Metric) -> None:
        self._family = Metric(family.name, family.documentation, family.type, family.unit)

    def collect(self) -> list[Metric]:
        return [self._family]


def _head(family: Metric) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Only(family))
    return generate_latest(registry).decode()


def _line(sample: Sample) -> str:
    number = _number_of(sample.value)
    if not sample.labels:
        return f"{sample.name} {number}\n"
    labels = ",".join(
        [f'{name}="{_escaped(value)}"' for name, value in sorted(sample.labels.items())]
    )
    return f"{sample.name}{{{labels}}} {number}\n"


def _escaped(value: str) -> str:
    if "\\" in value or "\n" in value or '"' in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value
