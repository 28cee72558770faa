"""A broker and an index, in front of which bridges come and go."""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kvatlas.events.nats.bus import NatsBus
from kvatlas.events.nats.embedded.server import embedded_server
from kvatlas.events.streams import events_stream
from kvatlas.indexer import ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.reader import InstanceView
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.indexer.service.patience import IndexServiceLimits
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from testkit.commands import started
from testkit.waiting import until

W = InstanceId("w", 0)
_FAST = IndexServiceLimits(poll_seconds=0.05, lease_ended_seconds=0.1, lease_settling_seconds=0.0)


class Bridged:
    """What the index says of the worker w."""

    def __init__(self, url: str, bus: NatsBus, service: IndexService) -> None:
        self.url, self.bus, self.service = url, bus, service

    @asynccontextmanager
    async def bridge(self, endpoint: str, replay_endpoint: str, *more: str) -> AsyncIterator[None]:
        """Run `kvatlas bridge` beside a vLLM."""
        arguments = ["bridge", "--engine", "vllm", "--worker", "w", "--model", "m"]
        arguments += ["--nats", self.url, "--endpoint", endpoint]
        arguments += ["--replay-endpoint", replay_endpoint] if replay_endpoint else []
        async with started(*arguments, "--set", "sidecar.digest_seconds=0.2", *more):
            yield

    @property
    def view(self) -> InstanceView | None:
        return self.service.index.instance(W)

    @property
    def epoch(self) -> int:
        return self.view.epoch if self.view else 0

    @property
    def is_doubted(self) -> bool:
        return self.view is not None and self.view.trust is Trust.degraded

    def match(self, chain: bytes, instance: InstanceId = W) -> int:
        """Return how many leading blocks the index believes in."""
        found = self.service.index.match(chain)
        return max((m.num_blocks for m in found if m.instance == instance), default=0)

    def holds(self, block: bytes) -> bool:
        """Return whether the index believes in a block."""
        return (W, Tier.hbm) in self.service.index.holders(block)

    async def agrees(
        self, held: Callable[[], set[bytes]], trust: Trust = Trust.exact, seconds: float = 60.0
    ) -> None:
        """Return once the index believes in exactly these blocks, and is as sure as expected."""

        def is_so() -> bool:
            view, blocks = self.view, held()
            if view is None or view.trust is not trust or view.num_blocks != len(blocks):
                return False
            return all(map(self.holds, blocks))

        with contextlib.suppress(TimeoutError):
            await until(is_so, seconds)
        assert self.view is not None
        blocks = held()
        believed = set(filter(self.holds, blocks))
        assert (len(believed), self.view.num_blocks) == (len(blocks), len(blocks))
        assert self.view.trust is trust, self.view.trust_reasons


@asynccontextmanager
async def a_fleet(folder: Path) -> AsyncIterator[Bridged]:
    """Run a broker and an index."""
    async with embedded_server(folder / "nats") as server, NatsBus(server.url) as bus:
        await bus.declare_stream(events_stream(max_bytes=64 << 20))
        state = IndexState(ReferenceIndex())
        async with IndexService(bus, state, settings=_FAST) as service:
            yield Bridged(server.url, bus, service)
