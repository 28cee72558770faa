"""What is asked while a storm goes on: prompts of the router, state of routers and indexers.

Everything that was answered is kept with the time, and judged afterwards (verifying.py).
"""

import asyncio
import time
from base64 import b64encode
from collections import Counter
from random import Random
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from kvatlas.router.answers import RouteAnswer, ScoreAnswer, WorkersAnswer
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.routing import CandidateScore
from testkit.storm.chains import BLOCK_TOKENS, CHAIN_BLOCKS, MODEL, Chains

RETRY_SECONDS = 0.25
ATTEMPT_SECONDS = 10.0
LOOK_SECONDS = 0.25
ROUTED_PART = 0.25


class Matched(Struct, frozen=True, gc=False):
    """An answer about one prompt: what each exact candidate was said to hold of it."""

    stream_sequence: int
    chain: int
    num_blocks: int
    #: (worker, blocks), of candidates that are said to be exact
    exact: tuple[tuple[str, int], ...]


class Seen(Struct, frozen=True, gc=False):
    """A worker as one reader shows it."""

    worker: str
    epoch: int
    seq: int
    trust: Trust
    num_blocks: int
    xor: int

    @property
    def is_exact(self) -> bool:
        """Whether the reader vouches for it."""
        return self.trust is Trust.exact


class Look(Struct, frozen=True, gc=False):
    """All workers as one reader shows them."""

    reader: str
    asked_at: float
    stream_sequence: int
    workers: tuple[Seen, ...]


class Disturbances:
    """When a process was in no state to answer: from a fault to the first answer after it.

    What it had answered before the fault may still arrive, and ends nothing.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._repaired_at: float | None = None
        self._spans: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Expect no answers from now on."""
        self._repaired_at = None
        if self._since is None:
            self._since = time.monotonic()

    def repaired(self) -> None:
        """Note that the process has been started again or goes on."""
        self._repaired_at = time.monotonic()

    def answered(self, asked_at: float) -> None:
        """Expect answers again if this one was asked for after the repair."""
        if self._since is not None and self._repaired_at and asked_at >= self._repaired_at:
            self._spans.append((self._since, time.monotonic()))
            self._since = None

    def touches(self, begin: float, end: float) -> bool:
        """Say whether any of this time was disturbed."""
        if self._since is not None and self._since <= end:
            return True
        return any(first <= end and last >= begin for first, last in self._spans)


class Asker:
    """Sends prompts to the router at a steady rate; every one has to be answered."""

    def __init__(
        self, chains: Chains, url: str, seed: int, per_second: float, patience_seconds: float
    ) -> None:
        self._chains, self._url, self._per_second = chains, url, per_second
        self._patience_seconds = patience_seconds
        self._random = Random(f"asker {seed}")
        self.router = Disturbances()
        self.answers: list[Matched] = []
        self.statuses: Counter[int] = Counter()
        self.num_asked = 0
        self.num_retried = 0
        #: what was wrong with requests that count as unanswered
        self.unanswered: list[str] = []

    async def run(self, session: aiohttp.ClientSession, resting: asyncio.Event) -> None:
        """Ask until told to rest, and wait for the last answers."""
        async with asyncio.TaskGroup() as asking:
            while not resting.is_set():
                asking.create_task(self._ask(session))
                await asyncio.sleep(1 / self._per_second)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        chain = self._random.randrange(len(self._chains.chains))
        num_blocks = self._random.randint(1, CHAIN_BLOCKS)
        route = self._random.random() < ROUTED_PART
        self.num_asked += 1
        tokens = b64encode(self._chains.chains[chain].packed(0, num_blocks)).decode()
        body = {"model": MODEL, "token_ids_b64": tokens, "max_candidates": 1024}
        status, answer = await self._answered(session, "route" if route else "score", body)
        if status != 200:
            return
        found = msgspec.json.decode(answer, type=RouteAnswer if route else ScoreAnswer)
        self.answers.append(
            Matched(found.stream_sequence, chain, num_blocks, _exact(found.candidates))
        )
        if isinstance(found, RouteAnswer):
            await self._answered(session, f"requests/{found.decision_id}/done", {})

    async def _answered(
        self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]
    ) -> tuple[int, bytes]:
        """Return the answer to one request, which is asked again while the router is away."""
        began = time.monotonic()
        while True:
            attempted = time.monotonic()
            try:
                timeout = aiohttp.ClientTimeout(ATTEMPT_SECONDS)
                url = f"{self._url}/v1/{path}"
                async with session.post(url, json=body, timeout=timeout) as response:
                    answer = await response.read()
                    self.router.answered(attempted)
                    self.statuses[response.status] += 1
                    if response.status == 500:
                        self.unanswered.append(f"{path}: 500 {answer[:200]!r}")
                    return response.status, answer
            except (aiohttp.ClientError, TimeoutError) as error:
                now = time.monotonic()
                if not self.router.touches(attempted, now):
                    self.unanswered.append(f"{path}: {error!r}, and nobody had touched the router")
                    return 0, b""
                if now - began > self._patience_seconds:
                    self.unanswered.append(f"{path}: no answer in {now - began:.1f} s: {error!r}")
                    return 0, b""
            self.num_retried += 1
            await asyncio.sleep(RETRY_SECONDS)


def _exact(candidates: tuple[CandidateScore, ...]) -> tuple[tuple[str, int], ...]:
    return tuple(
        (each.worker, each.match_tokens // BLOCK_TOKENS)
        for each in candidates
        if each.trust is Trust.exact
    )


class Watcher:
    """Looks at what some readers show of all workers, again and again."""

    def __init__(self, urls: dict[str, str]) -> None:
        self._urls = urls
        self.looks: list[Look] = []
        self.newest: dict[str, Look] = {}

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Look until cancelled."""
        async with asyncio.TaskGroup() as looking:
            for reader, url in self._urls.items():
                looking.create_task(self._look(session, reader, url))

    async def _look(self, session: aiohttp.ClientSession, reader: str, url: str) -> None:
        while True:
            asked_at = time.monotonic()
            answer = await fetched(session, f"{url}/v1/workers")
            if answer is not None:
                found = msgspec.json.decode(answer, type=WorkersAnswer)
                workers = tuple(_seen(each) for each in found.workers)
                look = Look(reader, asked_at, found.stream_sequence, workers)
                self.looks.append(look)
                self.newest[reader] = look
            await asyncio.sleep(LOOK_SECONDS)


def _seen(worker: Any) -> Seen:
    digest = worker.digests.get("hbm")
    return Seen(
        worker.worker,
        worker.epoch,
        worker.seq,
        worker.trust,
        worker.num_blocks,
        int(digest.xor, 16) if digest else 0,
    )


async def fetched(session: aiohttp.ClientSession, url: str, seconds: float = 3.0) -> bytes | None:
    """Return what a GET answers, None if it does not."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(seconds)) as response:
            return await response.read() if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None
