"""Answers lease requests for the blocks of a serve pool; what the sidecar serves on `kv.lease`."""

import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvatlas.schemas.digest import BLOCK_HASH_BYTES, split_hashes
from kvatlas.schemas.errors import MalformedBatch
from kvatlas.schemas.transfer import (
    LeaseGranted,
    LeaseMissing,
    LeaseRelease,
    LeaseReleased,
    LeaseRequest,
    MissingReason,
    SourceAnnounced,
    TransferAnswer,
    decode_transfer_request,
    encode_transfer,
)
from kvatlas.worker_hooks.transfer.lease_table import LeaseLimits, LeaseTable
from kvatlas.worker_hooks.transfer.pool import ServePool
from kvatlas.worker_hooks.transfer.transport import Source, SourceRef


class KeyWriter(Protocol):
    """The part of a key-value bucket that an announcement needs."""

    async def put(self, key: str, value: bytes) -> object:
        """Store the value under the key."""
        ...


class SlotDirectory:
    """Where the blocks of a pool are. An answer may be old at once: `ServePool.lease` checks it."""

    def __init__(self, pool: ServePool) -> None:
        self._pool = pool
        self._position = (0, 0)
        #: slots in which a block was seen, more than one if it came twice
        self._slots_of: dict[bytes, tuple[int, ...]] = {}
        #: what was seen in each slot
        self._seen: list[bytes | None] = [None] * pool.num_slots

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the slots of the leading hashes that are held. O(hashes + what became held)."""
        self._catch_up()
        slots = []
        for block_hash in hashes:
            for slot in self._slots_of.get(block_hash, ()):
                if self._pool.hash_of(slot) == block_hash:
                    slots.append(slot)
                    break
            else:
                break
        return slots

    def _catch_up(self) -> None:
        changed, self._position = self._pool.held_since(self._position)
        for slot in range(self._pool.num_slots) if changed is None else changed:
            before, now = self._seen[slot], self._pool.hash_of(slot)
            if before == now:
                continue
            self._seen[slot] = now
            if before is not None:
                others = tuple(other for other in self._slots_of[before] if other != slot)
                if others:
                    self._slots_of[before] = others
                else:
                    del self._slots_of[before]
            if now is not None:
                self._slots_of[now] = (*self._slots_of.get(now, ()), slot)


#: what an owner answers that has said that it is down, while leases are still held
LEAVING = LeaseMissing(reason=MissingReason.busy, detail="the owner leaves")
#: what an owner answers whose transport is not there yet, or not there again
NOT_READY = LeaseMissing(reason=MissingReason.not_ready, detail="the owner's transport starts")


class LeaseServer:
    """Grants, refuses and ends leases; `answer` never raises for what a peer sends.

    The requester's order decides between the sources. `on_not_held` hears the packed hashes, from
    the first block on that a peer asked for in vain, so that the owner can tell the fleet. The
    table's `epoch` may be set later, when it is known.
    """

    def __init__(
        self,
        pool: ServePool,
        sources: Sequence[Source],
        fingerprint: bytes,
        epoch: int,
        limits: LeaseLimits | None = None,
        on_not_held: Callable[[bytes], None] | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._pool, self._sources, self._clock_ns = pool, sources, clock_ns
        self._on_not_held = on_not_held
        self._directory = SlotDirectory(pool)
        #: nothing is granted any more: the owner leaves
        self.is_closing = False
        # From the clock, so that the ids of an earlier incarnation mean nothing here.
        self.table = LeaseTable(
            fingerprint, epoch, pool.block_bytes, limits or LeaseLimits(), first_lease_id=clock_ns()
        )

    @property
    def num_leases(self) -> int:
        """Leases that are held and have not expired."""
        self.table.expire(self._clock_ns())
        return len(self.table)

    async def handle(self, payload: bytes) -> bytes:
        """Serve the bus: request in, answer out."""
        return self.answer(payload)

    async def announce(self, source: Source, keys: KeyWriter, key: str) -> None:
        """Put how to reach a source under a key, for peers that connect ahead of need."""
        reference = source.reference
        if reference is None:
            return
        announced = SourceAnnounced(
            epoch=self.table.epoch,
            transport=reference.transport,
            agent=reference.agent,
            metadata=reference.metadata,
            metadata_version=reference.metadata_version,
        )
        await keys.put(key, encode_transfer(announced))

    def answer(self, payload: bytes) -> bytes:
        """Return the answer to one request; O(blocks asked for)."""
        now_ns = self._clock_ns()
        self.table.expire(now_ns)  # the pool's slots expire by themselves
        return encode_transfer(self._answer(payload, now_ns))

    def _answer(self, payload: bytes, now_ns: int) -> TransferAnswer:
        try:
            request = decode_transfer_request(payload)
        except MalformedBatch as error:
            return LeaseMissing(reason=MissingReason.malformed, detail=str(error)[:200])
        match request:
            case LeaseRelease(lease_id=lease_id):
                return self._release(lease_id)
            case LeaseRequest():
                if self.is_closing:
                    return LEAVING
                return self.table.refusal(request) or self._grant(request, now_ns)

    def _release(self, lease_id: int) -> LeaseReleased:
        until_ns = self.table.release(lease_id)
        if until_ns is not None:
            self._pool.set_leases(until_ns)  # if the lock is not free, the slots expire
            if not self.table:
                for source in self._sources:
                    source.expect_reads(0)
        return LeaseReleased(lease_id=lease_id, was_held=until_ns is not None)

    def _grant(self, request: LeaseRequest, now_ns: int) -> LeaseGranted | LeaseMissing:
        chosen = self._choose_source(request.transports)
        if chosen is None:
            if any(source.reference is None for source in self._sources):
                return NOT_READY
            detail = f"none of {', '.join(request.transports)} is served now"
            return LeaseMissing(reason=MissingReason.no_transport, detail=detail)
        source, reference = chosen
        hashes = list(split_hashes(request.hashes))
        num_admitted, rest_reason = self.table.admit(request)
        slots = self._directory.find(hashes[:num_admitted])
        expires_ns = self.table.expiry_ns(request.ttl_ms, now_ns)
        checksums = self._pool.lease(slots, hashes[: len(slots)], expires_ns)
        if checksums is None:
            return LeaseMissing(reason=MissingReason.busy, detail="the pool is locked")
        num_leased = len(checksums)
        if num_leased < num_admitted:
            rest_reason = MissingReason.not_held
            if self._on_not_held is not None:
                self._on_not_held(request.hashes[num_leased * BLOCK_HASH_BYTES :])
        if not num_leased:
            return LeaseMissing(reason=rest_reason)
        leased = tuple(slots[:num_leased])
        lease = self.table.grant(request.requester, leased, expires_ns)
        source.expect_reads((expires_ns - now_ns) / 1e9)
        is_known = request.known_metadata == reference.metadata_version
        return LeaseGranted(
            lease_id=lease.lease_id,
            epoch=self.table.epoch,
            expires_in_ms=(expires_ns - now_ns) // 1_000_000,
            transport=reference.transport,
            agent=reference.agent,
            metadata=b"" if is_known else reference.metadata,
            metadata_version=reference.metadata_version,
            rows=tuple(source.rows([self._pool.place_of(slot) for slot in leased])),
            checksums=struct.pack(f"<{num_leased}Q", *checksums),
            missing_from=num_leased,
            missing_reason=rest_reason,
        )

    def _choose_source(self, transports: Sequence[str]) -> tuple[Source, SourceRef] | None:
        """Return our source for the first transport that both sides have."""
        ours = {s.reference.transport: (s, s.reference) for s in self._sources if s.reference}
        return next((ours[name] for name in transports if name in ours), None)
