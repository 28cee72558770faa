"""A fleet that exists in a real IndexState only, and a router over it with a clock of its own."""

import time
from array import array
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvatlas.events.codec import DecodedBatch
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.fold.stimuli import BatchArrived
from kvatlas.indexer.index.port import PrefixIndex
from kvatlas.indexer.index.reference import ReferenceIndex
from kvatlas.indexer.reader import Lag
from kvatlas.router.decision.requests import ScoreRequest
from kvatlas.router.recorder import DecisionLog
from kvatlas.router.service import RouterService
from kvatlas.schemas.fleet import NamespaceDescriptor, Trust, WorkerInfo
from kvatlas.schemas.hashing import BlockHasher, Extra, HashAlgorithm
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import (
    WIRE_VERSION,
    BlockStored,
    EventBatch,
    KvEvent,
    WorkerDown,
    WorkerUp,
)
from kvatlas.schemas.routing import Candidate
from kvatlas.schemas.settings import RouterSettings

MODEL = "m"
FINGERPRINT = b"f" * 16


class StillFeed:
    """An IndexFeed that says what it is told."""

    def __init__(self, connected: bool = True, is_ready: bool = True) -> None:
        self.connected, self.is_ready = connected, is_ready
        self.lag = Lag(0, 0.0)
        self.why_not_ready = "the index is catching up"

    @asynccontextmanager
    async def still(self) -> AsyncGenerator[None, None]:
        yield

    def convergence_ms(self) -> dict[str, float]:
        return {}

    def broker_ns(self) -> int:
        return time.time_ns()


class TurnedClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Fleet:
    """Workers that come up, hold prompts and leave, by events in a log."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.state = IndexState(index or ReferenceIndex())
        self._infos: dict[InstanceId, WorkerInfo] = {}
        self._next: dict[InstanceId, tuple[int, int]] = {}
        self._stream_sequence = 0

    def up(
        self,
        worker: str,
        rank: int = 0,
        *,
        model: str = MODEL,
        block_tokens: int = 16,
        algorithm: HashAlgorithm = HashAlgorithm.xxh3_128,
        lookahead_tokens: int = 0,
        epoch: int = 1,
        **info: Any,
    ) -> InstanceId:
        instance = InstanceId(worker, rank)
        descriptor = NamespaceDescriptor(block_tokens, algorithm, lookahead_tokens)
        info.setdefault("kv_fingerprint", FINGERPRINT)
        models = info.pop("models", (model,))
        self._infos[instance] = WorkerInfo(f"http://{worker}", models, descriptor, **info)
        self._next[instance] = (epoch, 1)
        self.tell(worker, WorkerUp(self._infos[instance]), rank=rank)
        return instance

    def down(self, worker: str, rank: int = 0) -> None:
        self.tell(worker, WorkerDown("bye"), rank=rank)

    def holds(
        self,
        worker: str,
        tokens: Sequence[int],
        rank: int = 0,
        *,
        tier: Tier = Tier.hbm,
        num_blocks: int | None = None,
        lora: str | None = None,
        cache_salt: str | None = None,
        extras: Iterable[Extra] = (),
        fleet_key: bytes = b"",
    ) -> None:
        """Let an instance store the leading blocks of a prompt."""
        info = self._infos[InstanceId(worker, rank)]
        namespace = info.descriptor.namespace(info.model, lora, cache_salt)
        hasher = BlockHasher(namespace, fleet_key)
        chain = hasher.chain(tokens, extras)
        hashes = chain if num_blocks is None else chain[: 16 * num_blocks]
        self.tell(worker, BlockStored(hasher.root, hashes, None, tier), rank=rank)

    def tell(self, worker: str, *events: KvEvent, rank: int = 0, skip: int = 0) -> None:
        """Put a batch into the log; `skip` loses as many batches before it."""
        instance = InstanceId(worker, rank)
        epoch, seq = self._next[instance]
        seq += skip
        self._next[instance] = (epoch, seq + 1)
        self._stream_sequence += 1
        batch = EventBatch(WIRE_VERSION, worker, rank, epoch, seq, 0, events)
        self.state.handle(BatchArrived(self._stream_sequence, 0, DecodedBatch(batch)))

    def router(
        self,
        feed: StillFeed | None = None,
        fleet_key: bytes = b"",
        log: DecisionLog | None = None,
        counts_ids: bool = True,
        **settings: Any,
    ) -> "RouterUnderTest":
        chosen = RouterSettings(**{"seed": 1, **settings})
        parts = {"fleet_key": fleet_key, "log": log}
        return RouterUnderTest(self, feed or StillFeed(), chosen, counts_ids, **parts)


class RouterUnderTest(RouterService):
    """A router with a clock to turn, and ids that count unless they have to be real."""

    def __init__(
        self,
        fleet: Fleet,
        feed: StillFeed,
        settings: RouterSettings,
        counts_ids: bool,
        **parts: Any,
    ) -> None:
        self.clock = TurnedClock()
        self.still_feed = feed
        numbers = iter(range(1, 1_000_000))
        super().__init__(
            fleet.state,
            feed,
            settings,
            clock=self.clock,
            wall_ns=lambda: int(self.clock.now * 1e9),
            new_id=(lambda: f"d{next(numbers)}") if counts_ids else None,
            **parts,
        )


def a_prompt(num_tokens: int, start: int = 0) -> list[int]:
    return list(range(start, start + num_tokens))


def a_request(tokens: Sequence[int], model: str = MODEL, **more: Any) -> ScoreRequest:
    return ScoreRequest(model, array("I", tokens).tobytes(), **more)


def a_candidate(worker: str = "w1", rank: int = 0, **more: Any) -> Candidate:
    facts: dict[str, Any] = {
        "trust": Trust.exact,
        "group": 0,
        "block_tokens": 16,
        "kv_class": 1,
        "held": (0, 0, 0, 0, 0),
        "predicted_blocks": 0,
        "in_flight": 0,
        "queued_ms": 0.0,
        "work_ms": 0.0,
        "compute_ms_per_token": 0.1,
        "pull_ms_per_token": 0.005,
    }
    return Candidate(worker, rank, **{**facts, **more})
