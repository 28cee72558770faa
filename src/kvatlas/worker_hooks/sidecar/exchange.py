"""What a sidecar lends of its serve pool and what it fetches from those of peers."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from kvatlas.events.subjects import lease_subject
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidBlock, TransportUnavailable
from kvatlas.schemas.transfer import MissingReason
from kvatlas.worker_hooks.sidecar.channel import PullBlocks, PullEnded
from kvatlas.worker_hooks.sidecar.options import SidecarOptions
from kvatlas.worker_hooks.transfer.lease_server import LeaseServer
from kvatlas.worker_hooks.transfer.memory import MemoryFabric, MemorySource, MemoryTransport
from kvatlas.worker_hooks.transfer.nixl.transport import NixlTransport
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.pool_file import PoolLayout, create_pool_file
from kvatlas.worker_hooks.transfer.pull_protocol import Owner
from kvatlas.worker_hooks.transfer.puller import Puller, Request
from kvatlas.worker_hooks.transfer.transport import BouncePlaces, Source, Transport

#: where blocks land before they are verified: more lets more reads run, and is taken for good
BOUNCE_BYTES = 32 * 1024 * 1024
MIN_BOUNCE_BLOCKS, MAX_BOUNCE_BLOCKS = 8, 1024

_logger = logging.getLogger(__name__)


def make_pool(options: SidecarOptions) -> ServePool | None:
    """Make the serve pool that the options ask for."""
    if options.num_slots == 0:
        return None
    num_bounce = 0
    if options.transport != "none":
        fitting = BOUNCE_BYTES // options.block_bytes
        num_bounce = max(MIN_BOUNCE_BLOCKS, min(fitting, MAX_BOUNCE_BLOCKS))
    layout = PoolLayout(options.num_slots, options.block_bytes, num_bounce)
    return ServePool(create_pool_file(options.path_of_pool, layout))


class BlockExchange:
    """Leases out blocks of a pool and pulls into it, inside `async with`.

    Where no transport starts, it says so once, and every pull and lease answers `no_transport`.
    """

    def __init__(
        self,
        options: SidecarOptions,
        pool: ServePool,
        epoch: int,
        request: Request,
        on_not_held: Callable[[bytes], None],
        fabric: MemoryFabric | None = None,
    ) -> None:
        self._options, self._pool, self._request = options, pool, request
        self._fabric = fabric
        #: never used by another process or incarnation
        self._agent = f"{options.instance}@{epoch}"
        self._epoch, self._on_not_held = epoch, on_not_held
        self._puller: Puller | None = None
        #: why nothing can be pulled; empty when it can
        self._no_pulls: str = MissingReason.no_transport
        self._stack = contextlib.AsyncExitStack()
        self.transport = ""

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            sources, transport = await self._open_transport(stack)
            self._leases = LeaseServer(
                self._pool,
                sources,
                self._options.kv_fingerprint,
                self._epoch,
                on_not_held=self._on_not_held,
            )
            if not self._options.kv_fingerprint:
                self._no_pulls = MissingReason.incompatible
            elif transport is not None:
                requester = str(self._options.instance)
                fingerprint = self._options.kv_fingerprint
                bounce = self._bounce
                puller = Puller(
                    requester, fingerprint, self._pool, bounce, [transport], self._request
                )
                self._puller = await stack.enter_async_context(puller)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, at)

    def begin_epoch(self, epoch: int) -> None:
        """Grant leases of this epoch from now on."""
        self._leases.table.epoch = epoch

    @property
    def num_leases(self) -> int:
        """Leases that peers hold now."""
        return self._leases.num_leases

    def grant_no_more(self) -> None:
        """Refuse leases from now on; those that are held end as they do otherwise."""
        self._leases.is_closing = True

    async def answer_lease(self, payload: bytes) -> bytes:
        """Serve `kv.lease`."""
        return await self._leases.handle(payload)

    async def pull(self, question: PullBlocks) -> PullEnded:
        """Bring blocks into their slots; what cannot be had is missing, with the reason."""
        if self._puller is None:
            return missing_all(question, self._no_pulls)
        own = self._options.instance
        owners = [
            Owner(str(owner), lease_subject(owner)) for owner in question.owners if owner != own
        ]
        try:
            result = await self._puller.pull(
                question.hashes, question.slots, owners, question.deadline_ms / 1000
            )
        except InvalidBlock as error:
            return missing_all(question, str(error))
        return PullEnded(
            question.id,
            tuple(result.held),
            tuple(result.missing),
            result.num_bytes,
            "+".join(result.transports),
            result.num_checksum_failures,
            result.seconds,
        )

    async def _open_transport(
        self, stack: contextlib.AsyncExitStack
    ) -> tuple[Sequence[Source], Transport | None]:
        self._bounce = BouncePlaces(self._pool.bounce_places())
        if self._options.transport == "nixl":
            nixl = NixlTransport(self._agent, self._pool, self._bounce, self._options.nixl)
            try:
                await stack.enter_async_context(nixl)
            except TransportUnavailable as error:
                _logger.warning("no blocks are pulled or served: %s", error)
                return [], None
            self.transport = nixl.name
            return [nixl], nixl
        if self._options.transport == "memory" and self._fabric is not None:
            memory = MemoryTransport(self._fabric, self._pool, self._bounce)
            await stack.enter_async_context(memory)
            self.transport = memory.name
            return [MemorySource(self._fabric, self._agent, self._pool)], memory
        return [], None


def missing_all(question: PullBlocks, reason: str) -> PullEnded:
    """Return that nothing came, for one reason."""
    num_blocks = len(question.hashes) // BLOCK_HASH_BYTES
    return PullEnded(question.id, (), tuple((i, reason) for i in range(num_blocks)))
