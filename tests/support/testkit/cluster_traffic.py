"""Who writes to a cluster's log, who reads it and who asks where it ends, while its nodes fail."""

import asyncio
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import accumulate, pairwise

from kvatlas.events.bus import Message
from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.streams import KV_EVENTS
from kvatlas.schemas.errors import BusUnavailable
from testkit.cluster import WAIT_SECONDS
from testkit.waiting import until


class Reader:
    """Keeps what a follower gets and when."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.times: list[float] = []
        self.holes: list[tuple[int, int]] = []
        #: subject -> numbers as they were first met
        self.numbers: dict[str, list[int]] = defaultdict(list)
        self._met: set[tuple[str, int]] = set()

    def __call__(self, message: Message) -> None:
        self.messages.append(message)
        self.times.append(time.monotonic())
        number = int(message.payload)
        if (message.subject, number) not in self._met:
            self._met.add((message.subject, number))
            self.numbers[message.subject].append(number)

    def on_hole(self, expected: int, got: int) -> None:
        self.holes.append((expected, got))

    @property
    def num_repeated(self) -> int:
        return len(self.messages) - len(self._met)

    @property
    def log(self) -> list[tuple[int, str, bytes]]:
        return [(one.stream_sequence, one.subject, one.payload) for one in self.messages]

    async def further(self, count: int) -> None:
        """Return when so many more have come."""
        wanted = len(self.messages) + count
        await until(lambda: len(self.messages) >= wanted, WAIT_SECONDS)

    def missing(self, published: dict[str, int]) -> dict[str, list[int]]:
        """Return what has not come of all that was published."""
        found = {
            subject: sorted(set(range(1, last + 1)) - set(self.numbers[subject]))
            for subject, last in published.items()
        }
        return {subject: numbers for subject, numbers in found.items() if numbers}

    async def has_all(self, published: dict[str, int]) -> None:
        """Return when all that was published has come, or will not come any more."""
        with suppress(TimeoutError):
            await until(lambda: not self.missing(published), WAIT_SECONDS)

    def assert_complete(self, published: dict[str, int]) -> None:
        """Check that each sequence came once and no number is missing."""
        sequences = [message.stream_sequence for message in self.messages]
        assert sequences == list(range(1, len(sequences) + 1))
        assert self.holes == []
        assert self.missing(published) == {}

    def assert_exact(self, published: dict[str, int]) -> None:
        """Check besides that each subject's numbers only rise."""
        self.assert_complete(published)
        assert all(numbers == sorted(numbers) for numbers in self.numbers.values())

    @property
    def num_overtaken(self) -> int:
        """How many messages were stored after a newer one of their subject."""
        return sum(
            sum(number < newest for number, newest in zip(ns, accumulate(ns, max), strict=True))
            for ns in self.numbers.values()
        )

    @property
    def pauses(self) -> tuple[float, float]:
        """For how long nothing was stored, and for how long nothing came."""
        stored = [message.broker_ns / 1e9 for message in self.messages]
        return _longest_pause(stored), _longest_pause(self.times)


def _longest_pause(times: list[float]) -> float:
    return max(later - earlier for earlier, later in pairwise(times))


class Writer:
    """Publishes 1, 2, 3, ... to each of some subjects until it is told to stop."""

    def __init__(self, bus: NatsBus, *names: str, burst: int, pause_seconds: float) -> None:
        self.publisher = bus.publisher(KV_EVENTS)
        #: subject -> the last number accepted
        self.published = {f"kv.events.model.{name}.0": 0 for name in names}
        self._burst, self._pause_seconds = burst, pause_seconds
        self._is_over = False

    async def run(self) -> None:
        while not self._is_over:
            for _ in range(self._burst):
                for subject in self.published:
                    self.published[subject] += 1
                    await self.publisher.publish(subject, b"%d" % self.published[subject])
            await asyncio.sleep(self._pause_seconds)

    @property
    def num_acked(self) -> int:
        return sum(self.published.values()) - self.publisher.num_unacked

    async def finish(self) -> None:
        self._is_over = True
        await self.publisher.flush()


@asynccontextmanager
async def running(*writers: Writer) -> AsyncIterator[None]:
    """Run writers, and see all that they published stored at the end."""
    tasks = [asyncio.create_task(writer.run()) for writer in writers]
    try:
        yield
        async with asyncio.timeout(WAIT_SECONDS):
            for writer, task in zip(writers, tasks, strict=True):
                await writer.finish()
                await task
                await writer.publisher.flush()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


#: a follower of the stream may deliver what its leader has yet to take in; a leader that is cut off
#: is behind by more
LEADER_LAG_SECONDS = 1.0


class Asker:
    """Asks again and again where the log ends: an answer is hardly older than its question."""

    def __init__(self, bus: NatsBus, reader: Reader) -> None:
        self._bus, self._reader = bus, reader
        #: (what was told, what a reader had read a while before it was asked)
        self.told: list[tuple[int, int]] = []
        self.num_refused = 0

    async def run(self) -> None:
        while True:
            num_read = bisect(self._reader.times, time.monotonic() - LEADER_LAG_SECONDS)
            had = self._reader.messages[num_read - 1].stream_sequence if num_read else 0
            try:
                self.told.append((await self._bus.last_sequence(KV_EVENTS), had))
            except BusUnavailable:
                self.num_refused += 1
            await asyncio.sleep(0.05)

    @property
    def outdated(self) -> list[tuple[int, int]]:
        return [(told, had) for told, had in self.told if told < had]


@asynccontextmanager
async def asking(bus: NatsBus, reader: Reader) -> AsyncIterator[Asker]:
    asker = Asker(bus, reader)
    task = asyncio.create_task(asker.run())
    try:
        yield asker
        assert not task.done()  # nothing but BusUnavailable was raised
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def report(what: str, reader: Reader, *writers: Writer) -> None:
    sent_again = [writer.publisher.num_resent for writer in writers]
    stored, came = reader.pauses
    print(
        f"{what}: nothing stored for {stored:.2f} s, nothing came for {came:.2f} s; "
        f"{len(reader.messages)} messages, {reader.num_repeated} stored twice, "
        f"{reader.num_overtaken} overtaken; sent again {sent_again}"
    )
