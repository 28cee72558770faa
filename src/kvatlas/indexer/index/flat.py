"""The fast index: the port's events and questions, put to the kernels over FlatStorage's arrays."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import accumulate, repeat

import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.index import kernel
from kvatlas.indexer.index.exporting import Export, InvalidSnapshot, Parts, Room, check_numbers
from kvatlas.indexer.index.flat_parts import (
    NUM_SET_COLUMNS,
    FlatCopy,
    FlatNumbers,
    copied,
    fill_cells,
    read_flat,
)
from kvatlas.indexer.index.port import (
    Match,
    MatchColumns,
    TreeNode,
    TreeSource,
    check_hash,
    check_packed,
)
from kvatlas.indexer.index.storage import FlatStorage, power_of_two
from kvatlas.indexer.index.tree import ArrayRuns, radix_view
from kvatlas.indexer.index.tree_copy import TreeCopy
from kvatlas.schemas.digest import BLOCK_HASH_BYTES, TierDigest, index_key
from kvatlas.schemas.errors import IndexFull, UnknownInstance
from kvatlas.schemas.ids import NUM_TIERS, Tier

_ALL_TIERS = (1 << NUM_TIERS) - 1
_U64 = np.dtype(np.uint64)
#: kernels do not check a tier, so it goes through here
_TIER_NUMBERS = tuple(int(tier) for tier in Tier)


class FlatRadixIndex(FlatStorage):
    """Blocks in an open-addressing table, their holder sets interned: see kernel/.

    `max_bytes` bounds the memory, and that much address space is reserved at once; the system
    gives memory when it is used. A store that would need more raises IndexFull, a removal only
    where the system has no memory for new sets of holders. Too low, blocks that engines hold are
    refused.
    `segment_cells` is the unit in which the table grows: too low, the directory is large; too high,
    an event waits longer for a split (50 us at 4,096 cells). `first_segments` are there at once.
    `set_rows` and `set_words` are the room for holder sets at first. All four are powers of two.
    `arrays` says where the arrays live, in this process unless told otherwise.

    An index is used from one thread: kernels run without the interpreter lock, and nothing in here
    is locked. A sweep, which reclaims what forgotten instances held, is O(index); events take it
    on bit by bit, and only one that lacks room otherwise waits for the whole of it.
    """

    # --- instances --------------------------------------------------------------------------

    def add_instance(self) -> int:
        if self._is_sweep_due():
            self._begin_sweep()
        if self._free:
            instance = self._free.pop()
        elif self._num_numbers < self._max_instances:
            instance = self._num_numbers
            self._fit_instances(instance + 1)
            self._num_numbers += 1
        else:
            raise IndexFull(f"{len(self._live)} instances, the limit is {self._max_instances}")
        self._live.add(instance)
        self._masks[instance // kernel.GROUP] |= _instance_mask(instance)
        return instance

    def forget_instance(self, instance: int) -> None:
        self._check_instance(instance)
        self._live.remove(instance)
        self._masks[instance // kernel.GROUP] &= ~_instance_mask(instance)
        digests = self._digests[instance]
        if digests[:, kernel.COUNT].any():
            self._forgotten.add(instance)
            digests[:] = 0
        else:
            self._free.append(instance)

    # --- events -----------------------------------------------------------------------------

    def store(self, instance: int, tier: Tier, parent: bytes, hashes: bytes) -> int:
        if len(parent) != BLOCK_HASH_BYTES or len(hashes) % BLOCK_HASH_BYTES:
            check_hash(parent)
            check_packed(hashes)
        if instance not in self._live:
            raise UnknownInstance(instance)
        number = _TIER_NUMBERS[tier]
        num_new, position = kernel.store(parent, hashes, 0, instance, number, self._handle)
        while position * BLOCK_HASH_BYTES < len(hashes):
            self._make_room()
            more, position = kernel.store(parent, hashes, position, instance, number, self._handle)
            num_new += more
        if self._leaving:
            self._sweep_some(len(hashes))
        return int(num_new)

    def store_runs(self, instance: int, tier: Tier, runs: Sequence[tuple[bytes, bytes]]) -> int:
        for parent, hashes in runs:
            check_hash(parent)
            check_packed(hashes)
        if instance not in self._live:
            raise UnknownInstance(instance)
        packed = b"".join(map(b"".join, runs))
        lengths = [1 + len(hashes) // BLOCK_HASH_BYTES for _, hashes in runs]
        ends = np.array([*accumulate(lengths)], _U64)
        ends.flags.writeable = False  # as kernels want their input
        slot = instance, _TIER_NUMBERS[tier]
        num_new, position = kernel.store_runs(packed, ends, 0, *slot, self._handle)
        while position * BLOCK_HASH_BYTES < len(packed):
            self._make_room()
            more, position = kernel.store_runs(packed, ends, position, *slot, self._handle)
            num_new += more
        if self._leaving:
            self._sweep_some(len(packed))
        return int(num_new)

    def remove(self, instance: int, tier: Tier, hashes: bytes) -> int:
        if len(hashes) % BLOCK_HASH_BYTES:
            check_packed(hashes)
        if instance not in self._live:
            raise UnknownInstance(instance)
        number = _TIER_NUMBERS[tier]
        num_held, position = kernel.remove(hashes, 0, instance, number, self._handle)
        while position * BLOCK_HASH_BYTES < len(hashes):
            self._sweep(is_bounded=False)
            more, position = kernel.remove(hashes, position, instance, number, self._handle)
            num_held += more
        if self._leaving:
            self._sweep_some(len(hashes))
        return int(num_held)

    def clear(self, instance: int, tier: Tier | None) -> int:
        self._check_instance(instance)
        tiers = list(_TIER_NUMBERS if tier is None else _TIER_NUMBERS[tier : tier + 1])
        digests = self._digests[instance]
        num_cleared = int(digests[tiers, kernel.COUNT].sum())
        if num_cleared:
            while not self._take_out(instance, sum(1 << number for number in tiers)):
                self._sweep(is_bounded=False)
            digests[tiers] = 0
        return num_cleared

    def _take_out(self, instance: int, tier_bits: int) -> bool:
        after = np.full(len(self._rows), kernel.FULL)
        table = self._cells, self._segments
        return kernel.clear(instance, tier_bits, after, *table, *self._sets, self._state)

    # --- questions --------------------------------------------------------------------------

    def match(self, chain: bytes) -> list[Match]:
        instances, num_blocks, *by_tier = self._match(chain).tolist()
        fields = zip(instances, num_blocks, zip(*by_tier, strict=True), strict=True)
        # what Match(...) does, without a Python call per match
        return list(map(tuple.__new__, repeat(Match), fields))

    def match_columns(self, chain: bytes) -> MatchColumns:
        columns = self._match(chain)
        return MatchColumns(columns[0], columns[1], columns[2:])

    def _match(self, chain: bytes) -> NDArray[np.uint32]:
        check_packed(chain)
        return kernel.match(chain, self._handle)

    def holders(self, block_hash: bytes) -> list[tuple[int, Tier]]:
        check_hash(block_hash)
        key = index_key(block_hash)
        row = int(kernel.row_of(key, self._cells, self._directory, self._state))
        return list(self._slots(row))

    def digest(self, instance: int, tier: Tier) -> TierDigest:
        self._check_instance(instance)
        return TierDigest(*self._digests[instance, tier].tolist())

    def audit(self) -> list[tuple[int, Tier]]:
        found, num_blocks = np.zeros_like(self._digests), np.zeros(len(self._rows), np.uint64)
        kernel.audit(*self._read_arrays, num_blocks, found)
        live = sorted(self._live)
        differs = (found[live] != self._digests[live]).any(axis=2)
        return [(live[at], Tier(int(tier))) for at, tier in np.argwhere(differs).tolist()]

    def mend(self, slots: Iterable[tuple[int, Tier]]) -> None:
        num_segments = int(self._state[kernel.NUM_SEGMENTS])
        rows = self._cells[: num_segments * self._segment_cells, kernel.ROW]
        held = (rows != 0).reshape(num_segments, self._segment_cells).sum(axis=1)
        self._segments[:num_segments, kernel.HELD] = held
        self._state[kernel.NUM_BLOCKS] = held.sum()
        kernel.free_void(self._cells, self._segments, self._rows, self._state)
        self._rows[:, kernel.BLOCKS] = np.bincount(rows, minlength=len(self._rows))
        self._rows[0, kernel.BLOCKS] = 0
        for instance, tier in slots:
            while not self._take_out(instance, 1 << tier):
                self._sweep(is_bounded=False)
            self._digests[instance, tier] = 0

    def tree(self, depth: int, width: int) -> list[TreeNode]:
        if self._forgotten:  # equal rows are then equal sets
            self._sweep()
        num_holders = self._num_holders()
        columns = kernel.compress(self._cells, self._directory, num_holders, self._state)
        return radix_view(ArrayRuns(columns, self._instances), depth, width)

    def copy_runs(self) -> Callable[[], TreeSource]:
        num_segments = int(self._state[kernel.NUM_SEGMENTS])
        copy = TreeCopy(
            cells=self._cells[: num_segments * self._segment_cells].copy(),
            segments=self._segments[:num_segments].copy(),
            directory=self._directory.copy(),
            rows=self._rows.copy(),
            words=self._words.copy(),
            masks=self._masks.copy(),
            state=self._state.copy(),
            is_swept=not self._forgotten,
        )
        return copy.runs

    def _slots(self, row: int) -> Iterator[tuple[int, Tier]]:
        start, length = self._rows[row, : kernel.BLOCKS].tolist()
        for word in self._words[start : start + length].tolist():
            group = word >> int(kernel.GROUP_SHIFT)
            live = word & int(self._masks[group])
            for byte in range(kernel.GROUP):
                for tier in Tier:
                    if live >> (8 * byte + tier) & 1:
                        yield group * kernel.GROUP + byte, tier

    def _instances(self, row: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(instance for instance, _ in self._slots(row)))

    def _check_instance(self, instance: int) -> None:
        if instance not in self._live:
            raise UnknownInstance(instance)

    # --- snapshots --------------------------------------------------------------------------

    def export(self, room: Room | None = None) -> Export:
        num_segments, num_rows = self._state[[kernel.NUM_SEGMENTS, kernel.NUM_ROWS]].tolist()
        numbers = FlatNumbers(
            self._num_numbers, sorted(self._live), sorted(self._forgotten), list(self._free)
        )
        copy = FlatCopy(
            numbers=numbers,
            state=self._state.copy(),
            masks=self._masks.copy(),
            digests=self._digests.copy(),
            directory=self._directory.copy(),
            segments=self._segments[:num_segments].copy(),
            rows=self._rows[:num_rows, :NUM_SET_COLUMNS].copy(),
            words=self._words[: int(self._state[kernel.NUM_WORDS])].copy(),
            cells=copied(self._cells[: num_segments * self._segment_cells], room),
        )
        return copy.parts

    def restore(self, parts: Parts, numbers: Set[int] | None = None) -> None:
        found = read_flat(parts)
        check_numbers(set(found.numbers.live), numbers)
        if found.numbers.num_numbers > self._max_instances:
            raise IndexFull(
                f"{found.numbers.num_numbers} instances, the limit is {self._max_instances}"
            )
        num_cells, num_segments = len(found.occupied), len(found.segments)
        if found.segment_cells != self._segment_cells or num_segments > len(self._segments):
            raise InvalidSnapshot(
                f"{num_segments} segments of {found.segment_cells} cells,"
                f" there is room for {len(self._segments)} of {self._segment_cells}"
            )
        if not self._has_cells(max(self._num_provided, num_segments)):
            raise IndexFull(f"no memory for a snapshot's cells: {self._cell_shortage}")
        masks = self._home.zeros("masks", found.masks.shape, np.uint64)
        directory = self._home.zeros("directory", found.directory.shape, np.uint32)
        num_rows = max(len(self._rows), power_of_two(len(found.rows)))
        rows = self._home.zeros("rows", (num_rows, kernel.NUM_COLUMNS), np.uint64)
        num_words = power_of_two(2 * (len(found.words) + len(found.masks) + 1))
        words = self._home.zeros("words", (max(self._min_words, num_words),), np.uint64)
        # from here on nothing fails
        masks[:], directory[:] = found.masks, found.directory
        rows[: len(found.rows), :NUM_SET_COLUMNS] = found.rows

        self._num_provided = max(self._num_provided, num_segments)
        old_segments = int(self._state[kernel.NUM_SEGMENTS])
        self._cells[: old_segments * self._segment_cells] = 0
        fill_cells(self._cells[:num_cells], found)
        self._segments[:num_segments] = found.segments
        self._segments[num_segments:old_segments] = 0
        self._state[:] = found.state
        self._masks, self._digests = masks, found.digests.copy()
        self._directory, self._rows, self._words = directory, rows, found.words.copy()
        given = found.numbers
        self._num_numbers, self._free = given.num_numbers, list(given.free)
        self._live, self._forgotten = set(given.live), set(given.forgotten)
        self._leaving.clear()
        self._collect_into(rows, words)


def _instance_mask(instance: int) -> np.uint64:
    return np.uint64(_ALL_TIERS << 8 * (instance % kernel.GROUP))
