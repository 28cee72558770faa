"""The serve pool: blocks in shared memory from which peers read, and the rules of their slots.

               offer                fill, verified
    empty ---------------> offered ---------------> held
     ^ \\_________________ commit ___________________/^ |
     |                                                 |
     +---- try_evict; a held slot only without lease --+   (an offer is taken back the same way)

A slot is a number that an engine hands out; its bytes lie at a *place*:

    slots   [ 0 | 1 | 2 | 3 ]                    places that no slot has are the bounce places:
              |   |    \\_ _/                     reads from peers land there, and when such a block
    places  [ 0 | 1 | 2 | 3 | 4 | 5 ]            is verified, its slot takes the place over and
                      ^---+                      leaves its own. Nothing is copied.

One process, the engine, chooses slots: it alone calls `commit`, `offer` and `try_evict`. Another,
the sidecar, leases held blocks to peers and fills offered slots with pulled ones. What both may
change is changed under the lock of the file (`pool_file.py`), which is held for microseconds; a
commit needs none, because nobody else touches an empty slot.
"""

import sys
import threading
import time
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from xxhash import xxh3_64_intdigest

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.errors import InvalidBlock, SlotInUse
from kvatlas.worker_hooks.transfer.pool_file import (
    COUNTERS_OFFSET,
    SLOT_BYTES,
    SLOTS_OFFSET,
    PoolFile,
    PoolLayout,
    attach_pool_file,
    create_pool_file,
    pool_path,
)

#: how long an engine waits for a sidecar that was stopped while it held the lock
ENGINE_LOCK_SECONDS = 0.002
SIDECAR_LOCK_SECONDS = 0.05

_WORDS = SLOT_BYTES // 8
#: words of a slot; 0 and 1 are its hash. The last is its place << 8 | state, in one word so that
#: they change together even when their writer dies
_CHECKSUM, _LEASE_UNTIL, _PLACE_AND_STATE = 2, 3, 4
_STATE_MASK = 0xFF
_BY_COMMIT, _BY_FILL = 0, 1  # journals


class SlotState(IntEnum):
    """What a slot is for now."""

    empty = 0
    offered = 1
    held = 2


_EMPTY, _OFFERED, _HELD = map(int, SlotState)


class Filled(NamedTuple):
    """What became of a fill."""

    #: positions whose bytes are not those of the checksum
    corrupt: list[int]
    #: positions whose slot was no longer offered for the block
    revoked: list[int]
    #: the bounce places now: as many as before, others where a slot took one over
    places: list[int]


class ServePool:
    """Slots of one size in shared memory; the memory at `address` never moves."""

    def __init__(self, file: PoolFile) -> None:
        self._file, self._memory, layout = file, file.memory, file.layout
        self.num_slots, self.block_bytes = layout.num_slots, layout.block_bytes
        self.num_bounce, self.num_places = layout.num_bounce, layout.num_places
        self._blocks_offset = layout.blocks_offset
        self._commits = threading.Lock()  # between threads that commit
        view = memoryview(file.memory)
        slots_end = layout.journals_offset
        #: _WORDS a slot; a store of one word is atomic
        self._words = view[SLOTS_OFFSET:slots_end].cast("Q")
        self._counters = view[COUNTERS_OFFSET : COUNTERS_OFFSET + 16].cast("Q")
        self._journals = view[slots_end : slots_end + 2 * 4 * layout.num_slots].cast("I")
        #: the bytes of all places, one after the other
        self.blocks = view[
            self._blocks_offset : self._blocks_offset + self.num_places * self.block_bytes
        ]
        self.address = file.address + self._blocks_offset

    @classmethod
    def create(
        cls,
        name: str,
        num_slots: int,
        block_bytes: int,
        num_bounce: int = 0,
        folder: Path | None = None,
    ) -> Self:
        """Make the pool of this name and own it: `close` removes it.

        Raises PoolInUse while another owner lives, PoolTooLarge when shared memory is short.
        """
        layout = PoolLayout(num_slots, block_bytes, num_bounce)
        return cls(create_pool_file(pool_path(name, folder), layout))

    @classmethod
    def attach(cls, path: Path) -> Self:
        """Map a pool that another process made, or raise PoolUnreadable."""
        return cls(attach_pool_file(path))

    @property
    def path(self) -> Path:
        return self._file.path

    def close(self) -> None:
        """Let go of the name. Bytes stay mapped while views or transports refer to them."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    # --- for both -------------------------------------------------------------------------

    def block(self, slot: int) -> memoryview:
        """Return the bytes of a slot, writable. They may lie elsewhere after a pull filled it."""
        return self.bytes_at(self.place_of(slot))

    def place_of(self, slot: int) -> int:
        """Return where a slot's bytes lie; changes only while the slot is offered."""
        return self._words[slot * _WORDS + _PLACE_AND_STATE] >> 8

    def bytes_at(self, place: int) -> memoryview:
        """Return the bytes of a place, writable."""
        return self.blocks[place * self.block_bytes : (place + 1) * self.block_bytes]

    def state_of(self, slot: int) -> SlotState:
        return SlotState(self._words[slot * _WORDS + _PLACE_AND_STATE] & _STATE_MASK)

    def hash_of(self, slot: int) -> bytes | None:
        """Return the hash of a held slot, None for any other."""
        block_hash = self._hash(slot)
        is_held = self._words[slot * _WORDS + _PLACE_AND_STATE] & _STATE_MASK == _HELD
        return block_hash if is_held else None

    def checksum_of(self, slot: int) -> int:
        """Return XXH3-64 of a held block, as taken when it came."""
        return self._words[slot * _WORDS + _CHECKSUM]

    def lease_until_ns(self, slot: int) -> int:
        """Return until when a slot is leased (CLOCK_MONOTONIC); 0 when it never was."""
        return self._words[slot * _WORDS + _LEASE_UNTIL]

    # --- for the engine -------------------------------------------------------------------

    def commit(self, slot: int, block_hash: bytes, *parts: Any) -> None:
        """Hold a block in an empty slot. O(block), takes no lock, never waits.

        The parts (bytes, memoryviews, numpy arrays or CPU tensors, C-contiguous) are written one
        after the other and must fill the block; without parts the bytes are already in place.
        Raises SlotInUse when the slot is not empty, InvalidBlock when sizes do not fit.
        """
        state = self.state_of(slot)
        if state is not SlotState.empty:
            raise SlotInUse(slot, state.name)
        if len(block_hash) != BLOCK_HASH_BYTES:
            raise InvalidBlock(f"a block hash of {len(block_hash)} bytes")
        if parts:
            self._write(slot, parts)
        checksum = xxh3_64_intdigest(self.block(slot))
        with self._commits:
            self._mark_held(slot, block_hash, checksum, self.place_of(slot), _BY_COMMIT)

    def try_evict(self, slots: Sequence[int], now_ns: int | None = None) -> list[int]:
        """Empty those of the slots that nobody has leased, and return them.

        An offered slot is taken back. Waits at most ENGINE_LOCK_SECONDS; a sidecar that was
        stopped with the lock makes the answer an empty list.
        """
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        words = self._words
        with self._file.locked(ENGINE_LOCK_SECONDS) as has_lock:
            if not has_lock:
                return []
            evicted = [slot for slot in slots if words[slot * _WORDS + _LEASE_UNTIL] <= now_ns]
            for slot in evicted:
                words[slot * _WORDS + _PLACE_AND_STATE] &= ~_STATE_MASK
                words[slot * _WORDS + _LEASE_UNTIL] = 0
        return evicted

    def offer(self, slots: Sequence[int], hashes: bytes) -> bool:
        """Let a pull fill these empty slots with these blocks; False when the lock was not free.

        An engine that gives up on the pull takes the slots back with `try_evict`; what arrives
        later is dropped. Raises SlotInUse for a slot that is not empty; then none is offered.
        """
        if len(hashes) != len(slots) * BLOCK_HASH_BYTES:
            raise InvalidBlock(f"{len(hashes)} bytes of hashes for {len(slots)} slots")
        for slot in slots:
            if self.state_of(slot) is not SlotState.empty:
                raise SlotInUse(slot, self.state_of(slot).name)
        with self._file.locked(ENGINE_LOCK_SECONDS) as has_lock:
            if has_lock:
                for i, slot in enumerate(slots):
                    self._set_hash(slot, hashes[i * BLOCK_HASH_BYTES : (i + 1) * BLOCK_HASH_BYTES])
                    self._words[slot * _WORDS + _PLACE_AND_STATE] |= _OFFERED
        return has_lock

    # --- for the sidecar ------------------------------------------------------------------

    def bounce_places(self) -> list[int]:
        """Return the places that no slot has, for the one process that fills."""
        with self._file.locked(SIDECAR_LOCK_SECONDS):
            taken = {self.place_of(slot) for slot in range(self.num_slots)}
        return [place for place in range(self.num_places) if place not in taken]

    def lease(
        self, slots: Sequence[int], hashes: Sequence[bytes], until_ns: int
    ) -> list[int] | None:
        """Keep the leading blocks that are still held in their slots until then.

        Returns their checksums, one a leased block; None when the lock was not free. A lease that
        ends later is not shortened.
        """
        checksums = []
        words = self._words
        with self._file.locked(SIDECAR_LOCK_SECONDS) as has_lock:
            if not has_lock:
                return None
            for slot, block_hash in zip(slots, hashes, strict=True):
                at = slot * _WORDS
                is_held = words[at + _PLACE_AND_STATE] & _STATE_MASK == _HELD
                if not is_held or self._hash(slot) != block_hash:
                    break
                words[at + _LEASE_UNTIL] = max(words[at + _LEASE_UNTIL], until_ns)
                checksums.append(words[at + _CHECKSUM])
        return checksums

    def set_leases(self, until_ns: dict[int, int]) -> bool:
        """Set when the leases of slots end, 0 for none left; False when the lock was not free.

        Only for slots whose lease, set by `lease`, has not ended: those are still the same block.
        """
        with self._file.locked(SIDECAR_LOCK_SECONDS) as has_lock:
            if has_lock:
                for slot, until in until_ns.items():
                    if self._words[slot * _WORDS + _LEASE_UNTIL]:
                        self._words[slot * _WORDS + _LEASE_UNTIL] = until
        return has_lock

    def fill(
        self,
        places: Sequence[int],
        slots: Sequence[int],
        hashes: Sequence[bytes],
        checksums: Sequence[int],
    ) -> Filled:
        """Verify blocks at bounce places and hold them in the slots offered for them.

        The places must be at rest and of `bounce_places`; the slots take them over.
        """
        corrupt, revoked, left = [], [], list(places)
        size, blocks, words = self.block_bytes, self.blocks, self._words
        for i, place in enumerate(places):
            if xxh3_64_intdigest(blocks[place * size : (place + 1) * size]) != checksums[i]:
                corrupt.append(i)
        skipped = set(corrupt)
        with self._file.locked(SIDECAR_LOCK_SECONDS) as has_lock:
            for i, slot in enumerate(slots):
                if i in skipped:
                    continue
                before = words[slot * _WORDS + _PLACE_AND_STATE]
                is_offered = has_lock and before & _STATE_MASK == _OFFERED
                if is_offered and self._hash(slot) == hashes[i]:
                    self._mark_held(slot, hashes[i], checksums[i], places[i], _BY_FILL)
                    left[i] = before >> 8
                else:
                    revoked.append(i)
        return Filled(corrupt, revoked, left)

    def held_since(self, position: tuple[int, int]) -> tuple[list[int] | None, tuple[int, int]]:
        """Return the slots that became held since a position, and the next position.

        Start with (0, 0). A slot may come twice and may be empty again. None instead of the list
        when more became held than the journals keep: then look at all slots.
        """
        capacity, counters = self.num_slots, self._counters
        now = (counters[_BY_COMMIT], counters[_BY_FILL])
        slots: list[int] = []
        for journal in (_BY_COMMIT, _BY_FILL):
            base = journal * capacity
            first = max(position[journal], now[journal] - capacity)
            slots += [self._journals[base + n % capacity] for n in range(first, now[journal])]
        if max(counters[_BY_COMMIT] - position[0], counters[_BY_FILL] - position[1]) > capacity:
            return None, now  # overtaken, before or while reading
        return slots, now

    # --- private --------------------------------------------------------------------------

    def _hash(self, slot: int) -> bytes:
        at = SLOTS_OFFSET + slot * SLOT_BYTES
        return self._memory[at : at + BLOCK_HASH_BYTES]

    def _set_hash(self, slot: int, block_hash: bytes) -> None:
        at = SLOTS_OFFSET + slot * SLOT_BYTES
        self._memory[at : at + BLOCK_HASH_BYTES] = block_hash

    def _mark_held(
        self, slot: int, block_hash: bytes, checksum: int, place: int, journal: int
    ) -> None:
        """Make a slot held; place and state last, so that it is never half held."""
        at = slot * _WORDS
        self._set_hash(slot, block_hash)
        self._words[at + _CHECKSUM] = checksum
        self._words[at + _LEASE_UNTIL] = 0
        self._words[at + _PLACE_AND_STATE] = place << 8 | _HELD
        seen = self._counters[journal]
        self._journals[journal * self.num_slots + seen % self.num_slots] = slot
        self._counters[journal] = seen + 1

    def _write(self, slot: int, parts: Sequence[Any]) -> None:
        views = [_bytes_of(part) for part in parts]
        total = sum(view.nbytes for view in views)
        if total != self.block_bytes:
            raise InvalidBlock(f"{total} bytes for a block of {self.block_bytes}")
        at = self._blocks_offset + self.place_of(slot) * self.block_bytes
        for view in views:
            self._memory[at : at + view.nbytes] = view
            at += view.nbytes


def _bytes_of(part: Any) -> memoryview:
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(part, torch.Tensor):
            part = part.detach().reshape(-1).view(torch.uint8).numpy()
        view = memoryview(part)
    except (TypeError, RuntimeError) as error:
        raise InvalidBlock(f"{type(part).__name__} gives no bytes: {error}") from error
    if not view.c_contiguous:
        raise InvalidBlock(f"a part of shape {view.shape} is not contiguous")
    return view
