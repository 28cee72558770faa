"""What each part of kvatlas costs a request, measured one by one; see bench/coordination.py.

All of it runs as in production but for the socket of the HTTP server: the router over a real index,
the hook over a ring in shared memory, leases over a nats-server. Times are microseconds.
"""

import asyncio
import itertools
import tempfile
import time
from array import array
from pathlib import Path
from random import Random

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.subjects import lease_subject
from kvatlas.indexer import FlatRadixIndex, prompt_kernel
from kvatlas.router.decision.requests import Report
from kvatlas.router.http.bodies.decoding import decode_score_request
from kvatlas.router.service import RouterService
from kvatlas.schemas.hashing import Namespace
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.settings import RouterSettings
from kvatlas.schemas.transfer import (
    LeaseGranted,
    LeaseRelease,
    LeaseRequest,
    decode_transfer_answer,
    encode_transfer,
)
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from kvatlas.worker_hooks.reporting.ring import RingWriter
from kvatlas.worker_hooks.transfer import MemoryFabric, MemorySource
from kvatlas.worker_hooks.transfer.lease_server import LeaseServer
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pool_file import default_folder
from testkit.blocks import a_block, a_chain, a_hash
from testkit.fleet import MODEL, Fleet, StillFeed
from testkit.measuring.timing import mean_us, mean_us_over

BLOCK_TOKENS = 16
NUM_HOLDERS = 8
LEASE_BLOCKS = 512
_FINGERPRINT = bytes(16)
_JSON = "application/json"


# --- the router -------------------------------------------------------------------------------


class RoutedFleet:
    """A router over workers, the first eight of which hold one long prompt."""

    def __init__(self, workers: int, num_tokens: int) -> None:
        self._random = Random(1)
        self._held = self._tokens(num_tokens)
        fleet = Fleet(FlatRadixIndex())
        for worker in range(workers):
            fleet.up(f"w{worker}")
        for worker in range(min(workers, NUM_HOLDERS)):
            fleet.holds(f"w{worker}", self._held)
        self._settings = RouterSettings()
        self._router = RouterService(fleet.state, StillFeed(), self._settings)
        self.encode = msgspec.json.Encoder().encode

    def longest_match(self, num_tokens: int, reused_tokens: int) -> int:
        """Return how many tokens the router finds held of such a prompt."""
        request = decode_score_request(self._body(num_tokens, reused_tokens), _JSON, self._settings)
        answer = self._router.score(request)
        return max(candidate.match_tokens for candidate in answer.candidates)

    def route_us(self, num_tokens: int, reused_tokens: int, num_prompts: int) -> float:
        """Return the mean time from the body of a request to the body of its answer.

        Of each prompt the beginning is held and the rest is new. The report that the request has
        ended, by which it stops being a load, is in it as well.
        """
        bodies = [self._body(num_tokens, reused_tokens) for _ in range(num_prompts + 1)]
        self._route(bodies.pop())
        return mean_us_over(self._route, bodies)

    def _route(self, body: bytes) -> None:
        answer = self._router.route(decode_score_request(body, _JSON, self._settings))
        self.encode(answer)
        self._router.done(answer.decision_id, Report())

    def _body(self, num_tokens: int, reused_tokens: int) -> bytes:
        tokens = self._held[:reused_tokens] + self._tokens(num_tokens - reused_tokens)
        return msgspec.json.encode({"model": MODEL, "token_ids": tokens})

    def _tokens(self, num_tokens: int) -> list[int]:
        words = array("I", self._random.randbytes(4 * num_tokens))
        return [word % 2**17 for word in words]


def hash_us(num_tokens: int, calls: int) -> float:
    """Return what of a route is hashing the prompt."""
    prompt_kernel.warm()
    root = Namespace(MODEL, BLOCK_TOKENS).root()
    tokens = array("I", Random(1).randbytes(4 * num_tokens)).tobytes()
    return mean_us(lambda: prompt_kernel.hash_chain(root, tokens, BLOCK_TOKENS), calls)


# --- the engine -------------------------------------------------------------------------------


def hook_us_per_block(event_blocks: int, calls: int) -> float:
    """Return what the engine's thread pays for a stored block, `event_blocks` of them at a time."""
    random = Random(1)
    hashes = [random.getrandbits(64) for _ in range(event_blocks)]
    tokens = random.randbytes(4 * BLOCK_TOKENS * event_blocks)
    with tempfile.TemporaryDirectory(dir=default_folder()) as folder:
        hook = WorkerHook(RingWriter.create(Path(folder) / "ring", 1 << 26))
        spent = mean_us(lambda: hook.stored(hashes, 7, tokens), calls)
        assert hook.num_lost == hook.num_rejected == 0
        hook.close()
    return spent / event_blocks


# --- a pull -----------------------------------------------------------------------------------


def lease_us(num_blocks: int, num_leases: int) -> list[float]:
    """Return the times of leases of so many blocks: asked, granted, read by us, released."""
    with (
        tempfile.TemporaryDirectory(dir=default_folder()) as folder,
        ServePool.create("w1", LEASE_BLOCKS, 4096, folder=Path(folder)) as pool,
    ):
        for number in range(LEASE_BLOCKS):
            pool.commit(number, a_hash(number), a_block(number, 4096))
        return asyncio.run(_lease_us(pool, Path(folder), num_blocks, num_leases))


async def _lease_us(pool: ServePool, folder: Path, num_blocks: int, num_leases: int) -> list[float]:
    subject, spent = lease_subject(InstanceId("w1", 0)), list[float]()
    source = MemorySource(MemoryFabric(), "w1/0:1", pool)
    server = LeaseServer(pool, [source], _FINGERPRINT, 1)
    request = LeaseRequest(
        fingerprint=_FINGERPRINT,
        hashes=a_chain(*range(num_blocks)),
        ttl_ms=1000,
        requester="w2/0",
        transports=("memory",),
        known_metadata=source.reference.metadata_version,
    )
    async with (
        embedded_server(folder / "nats") as broker,
        NatsBus(broker.url) as owner,
        NatsBus(broker.url) as puller,
    ):
        await owner.serve(subject, server.handle)
        for _ in range(num_leases):
            began = time.perf_counter_ns()
            answer = await puller.request(subject, encode_transfer(request), 5.0)
            granted = decode_transfer_answer(answer)
            assert isinstance(granted, LeaseGranted)
            assert granted.missing_from == num_blocks
            release = encode_transfer(LeaseRelease(lease_id=granted.lease_id))
            await puller.request(subject, release, 5.0)
            spent.append((time.perf_counter_ns() - began) / 1e3)
    return spent


def verify_us(block_bytes: int, calls: int) -> float:
    """Return what checking a block's bytes takes; they come out of memory, not out of a cache."""
    num_blocks = max(2, (256 << 20) // block_bytes)
    memory = np.random.default_rng(1).bytes(num_blocks * block_bytes)
    view, numbers = memoryview(memory), itertools.cycle(range(num_blocks))

    def verify() -> int:
        begin = next(numbers) * block_bytes
        return xxh3_64_intdigest(view[begin : begin + block_bytes])

    return mean_us(verify, calls)
