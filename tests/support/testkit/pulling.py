"""A worker that pulls over NIXL: its pool, transport and puller, in the test's own process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kvatlas.worker_hooks.transfer import BouncePlaces
from kvatlas.worker_hooks.transfer.nixl.messages import NixlSettings
from kvatlas.worker_hooks.transfer.nixl.transport import NixlTransport
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pull_protocol import Owner, PullSettings
from kvatlas.worker_hooks.transfer.puller import Puller, PullResult
from testkit.blocks import a_block, a_chain, a_hash
from testkit.peer import FINGERPRINT, PeerProcess


class Fetcher:
    """Pulls from peers; `route` is the bus: subject -> peer."""

    def __init__(
        self, name: str, folder: Path, block_bytes: int, num_slots: int, num_bounce: int
    ) -> None:
        self.pool = ServePool.create(name, num_slots, block_bytes, num_bounce, folder)
        self.bounce = BouncePlaces(self.pool.bounce_places())
        self.route: dict[str, PeerProcess] = {}
        self.transport: NixlTransport
        self.puller: Puller

    async def request(self, subject: str, payload: bytes, timeout_seconds: float) -> bytes:
        return await self.route[subject].request(subject, payload, timeout_seconds)

    def owners(self) -> list[Owner]:
        return [Owner(subject, subject) for subject in self.route]

    async def pull(self, numbers: Sequence[int], deadline_seconds: float = 30.0) -> PullResult:
        """Pull block n of the list into slot n, whatever was there."""
        slots = list(range(len(numbers)))
        assert self.pool.try_evict(slots) == slots
        assert self.pool.offer(slots, a_chain(*numbers))
        return await self.puller.pull(a_chain(*numbers), slots, self.owners(), deadline_seconds)

    async def pull_until_held(self, numbers: Sequence[int]) -> PullResult:
        """Pull again and again until all is held; for a fleet that recovers."""
        async with asyncio.timeout(60):
            while len((result := await self.pull(numbers)).held) < len(numbers):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        return result

    def check(self, numbers: Sequence[int], result: PullResult) -> None:
        """Assert that what is held is right and that nothing else is held."""
        for slot, number in enumerate(numbers):
            if slot in set(result.held):
                assert self.pool.hash_of(slot) == a_hash(number)
                assert bytes(self.pool.block(slot)) == a_block(number, self.pool.block_bytes)
            else:
                assert self.pool.hash_of(slot) is None


@contextlib.asynccontextmanager
async def a_fetcher(
    folder: Path,
    *peers: contextlib.AbstractAsyncContextManager[PeerProcess],
    name: str = "fetcher",
    block_bytes: int = 16384,
    num_slots: int = 64,
    num_bounce: int = 64,
    settings: PullSettings | None = None,
    nixl: NixlSettings | None = None,
) -> AsyncIterator[tuple[Fetcher, list[PeerProcess]]]:
    """Run a fetcher and its peers; afterwards all its bounce places are free again."""
    fetcher = Fetcher(name, folder, block_bytes, num_slots, num_bounce)
    with fetcher.pool:
        async with contextlib.AsyncExitStack() as stack:
            transport = NixlTransport(f"{name}/0", fetcher.pool, fetcher.bounce, nixl)
            starting = [stack.enter_async_context(peer) for peer in peers]
            fetcher.transport, running = await asyncio.gather(
                stack.enter_async_context(transport), asyncio.gather(*starting)
            )
            fetcher.route = {f"peer{at}": peer for at, peer in enumerate(running)}
            puller = Puller(
                f"{name}/0",
                FINGERPRINT,
                fetcher.pool,
                fetcher.bounce,
                [transport],
                fetcher.request,
                settings,
            )
            fetcher.puller = await stack.enter_async_context(puller)
            yield fetcher, running
        assert fetcher.bounce.num_free == fetcher.bounce.num_places
