"""Which blocks of the serve pool are promised to whom, until when. Pure: time is an argument."""

import heapq

from msgspec import Struct

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidSetting
from kvatlas.schemas.transfer import LeaseMissing, LeaseRequest, MissingReason


class LeaseLimits(Struct, frozen=True):
    """Bounds on what peers can keep from eviction."""

    #: leases at a time; too few turn pulls away, each costs some hundred bytes
    max_leases: int = 256
    #: blocks leased at a time, counted once a lease; near the pool's size, peers starve the engine
    max_bytes: int = 1 << 30
    #: blocks of one lease, at most MAX_LEASE_BLOCKS; large ones make bursts and large answers
    max_blocks: int = 512
    #: a puller that dies blocks its slots for so long; below a read's time, reads are in vain
    max_ttl_ms: int = 30_000

    def validate(self) -> None:
        """Raise InvalidSetting for the first bound that makes no sense."""
        for key in ("max_leases", "max_bytes", "max_blocks", "max_ttl_ms"):
            if getattr(self, key) < 1:
                raise InvalidSetting(key, "leases", f"{getattr(self, key)} is below 1")


class Lease(Struct, frozen=True):
    """Slots that a requester may read until `expires_ns`."""

    lease_id: int
    requester: str
    slots: tuple[int, ...]
    expires_ns: int


class LeaseTable:
    """Grants, ends and bounds leases.

    Ids rise from `first_lease_id`; start each incarnation at another one, so that a release meant
    for the last incarnation finds nothing.
    """

    def __init__(
        self,
        fingerprint: bytes,
        epoch: int,
        block_bytes: int,
        limits: LeaseLimits,
        first_lease_id: int = 1,
    ) -> None:
        limits.validate()
        self.fingerprint, self.epoch = fingerprint, epoch
        self._block_bytes, self._limits = block_bytes, limits
        self._next_id = first_lease_id
        self._leases: dict[int, Lease] = {}
        #: (expires_ns, lease_id) of each lease, and of some that ended before
        self._expiries: list[tuple[int, int]] = []
        #: ids of the leases of a slot; never empty
        self._by_slot: dict[int, set[int]] = {}
        #: over all leases, a slot as often as it is leased
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def leased_bytes(self) -> int:
        """Bytes leased now, counted once a lease."""
        return self._num_blocks * self._block_bytes

    def refusal(self, request: LeaseRequest) -> LeaseMissing | None:
        """Return why the request gets nothing whatever is held, or None. Expire first."""
        if request.fingerprint != self.fingerprint:
            found, expected = request.fingerprint.hex(), self.fingerprint.hex()
            detail = f"KV fingerprint {found}, expected {expected}"
            return LeaseMissing(reason=MissingReason.incompatible, detail=detail)
        if request.epoch not in (0, self.epoch):
            detail = f"epoch {request.epoch}, this is {self.epoch}"
            return LeaseMissing(reason=MissingReason.wrong_epoch, detail=detail)
        if len(self._leases) >= self._limits.max_leases or self._num_free_blocks() < 1:
            detail = f"{len(self._leases)} leases of {self.leased_bytes} bytes"
            return LeaseMissing(reason=MissingReason.busy, detail=detail)
        return None

    def admit(self, request: LeaseRequest) -> tuple[int, str]:
        """Return how many of the request's blocks a lease may have, and why not all (else "")."""
        num_asked = len(request.hashes) // BLOCK_HASH_BYTES
        if num_asked > self._num_free_blocks() < self._limits.max_blocks:
            return self._num_free_blocks(), MissingReason.busy
        if num_asked > self._limits.max_blocks:
            return self._limits.max_blocks, MissingReason.too_large
        return num_asked, ""

    def expiry_ns(self, ttl_ms: int, now_ns: int) -> int:
        """Return when a lease of this length would end."""
        return now_ns + min(ttl_ms, self._limits.max_ttl_ms) * 1_000_000

    def grant(self, requester: str, slots: tuple[int, ...], expires_ns: int) -> Lease:
        """Record a lease; its slots may be leased already."""
        lease = Lease(self._next_id, requester, slots, expires_ns)
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        heapq.heappush(self._expiries, (expires_ns, lease.lease_id))
        for slot in slots:
            self._by_slot.setdefault(slot, set()).add(lease.lease_id)
        self._num_blocks += len(slots)
        return lease

    def release(self, lease_id: int) -> dict[int, int] | None:
        """End a lease. Returns until when each of its slots is still leased, 0 for not at all.

        None when there is no such lease; a second release is no error.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return None
        self._drop(lease)
        return {slot: self._until_ns(slot) for slot in lease.slots}

    def expire(self, now_ns: int) -> list[Lease]:
        """End the leases whose time is over and return them, the oldest first."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now_ns:
            lease = self._leases.get(heapq.heappop(self._expiries)[1])
            if lease is not None:
                self._drop(lease)
                expired.append(lease)
        return expired

    def validate(self) -> None:
        """Assert what holds between calls."""
        slots = [(slot, lease.lease_id) for lease in self._leases.values() for slot in lease.slots]
        assert {(slot, i) for slot, ids in self._by_slot.items() for i in ids} == set(slots)
        assert all(self._by_slot.values())
        assert self._num_blocks == sum(len(lease.slots) for lease in self._leases.values())
        assert {lease_id for _, lease_id in self._expiries} >= set(self._leases)
        assert len(self._leases) <= self._limits.max_leases

    def _num_free_blocks(self) -> int:
        return self._limits.max_bytes // self._block_bytes - self._num_blocks

    def _until_ns(self, slot: int) -> int:
        ids = self._by_slot.get(slot, ())
        return max((self._leases[lease_id].expires_ns for lease_id in ids), default=0)

    def _drop(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        self._num_blocks -= len(lease.slots)
        for slot in lease.slots:
            ids = self._by_slot.get(slot)
            if ids is not None:
                ids.discard(lease.lease_id)
                if not ids:
                    del self._by_slot[slot]
