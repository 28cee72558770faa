"""Blocks that are about to be stored: what recent decisions will bring, until the index says so.

A burst of siblings arrives before the first of them has been computed, let alone reported. So a
decision's chain counts as predicted at its instance for a few seconds.

    chain     h1 h2 h3 h4 h5 h6 h7 h8 ... h64 ... h512      a hash covers all before it
    marks      *  *  *  *  *  *  *  *      *       *        few per doubling, in one table

The deepest mark of a prompt's chain that the table has tells how much of a recent chain it shares
to within a mark; comparing with that chain between the marks gives the rest. So an entry costs some
tens of table entries however long its chain is. Pure: callers pass the time.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from functools import lru_cache

from msgspec import Struct

from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.ids import InstanceId

MAX_ENTRIES = 16_384
MAX_BYTES = 64 * 1024 * 1024
#: marks per doubling of the depth; with fewer an entry is smaller and a partial match shorter
MARKS_PER_OCTAVE = 4

#: an instance in one of its lives; what it was about to hold dies with it
Life = tuple[InstanceId, int]


class _Entry(Struct, eq=False):
    decision_id: str
    life: Life
    chain: bytes
    expires_at: float

    @property
    def num_blocks(self) -> int:
        return len(self.chain) // BLOCK_HASH_BYTES


class PredictedBlocks:
    """Predicted blocks by instance, bounded in entries, bytes and time; the oldest goes first."""

    def __init__(self, life_seconds: float) -> None:
        self._life_seconds = life_seconds
        #: decision id -> entry, oldest first
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        #: hash at a mark -> entries of each instance that have it, oldest first; never empty.
        #: An entry that has a mark of a chain has all of its marks above
        self._marks: dict[bytes, dict[Life, list[_Entry]]] = {}
        self._num_bytes = 0
        #: what has expired, oldest first, until `settle` says whether it came true unseen: the
        #: instance and the last hash of the chain, which stands for all before it
        self._lapsed: deque[tuple[Life, bytes]] = deque()
        self.num_confirmed = self.num_expired = self.num_withdrawn = self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of chains that are kept."""
        return self._num_bytes

    def expect(self, decision_id: str, life: Life, chain: bytes, now: float) -> None:
        """Take it that the instance will soon hold the chain."""
        self._expire(now)
        if decision_id in self._entries:  # told twice
            self._drop(decision_id)
        if not chain or not self._life_seconds:
            return
        entry = _Entry(decision_id, life, chain, now + self._life_seconds)
        self._entries[decision_id] = entry
        self._num_bytes += len(chain)
        for depth in _marks(entry.num_blocks):
            self._marks.setdefault(_hash_at(chain, depth), {}).setdefault(life, []).append(entry)
        while len(self._entries) > MAX_ENTRIES or self._num_bytes > MAX_BYTES:
            self._drop(next(iter(self._entries)))
            self.num_dropped += 1

    @property
    def num_lapsed(self) -> int:
        """Expired expectations that have not been judged yet."""
        return len(self._lapsed)

    def settle(self, is_held: Callable[[Life, bytes], bool], count: int) -> bool:
        """Judge up to `count` expired expectations; return whether there are more.

        One that its instance holds by now came true, though no request has asked for it since.
        """
        for _ in range(min(count, len(self._lapsed))):
            if is_held(*self._lapsed.popleft()):
                self.num_confirmed += 1
            else:
                self.num_expired += 1
        return bool(self._lapsed)

    def withdraw(self, decision_id: str) -> None:
        """Take back an expectation: the request failed. None of this id is no error."""
        if decision_id in self._entries:
            self._drop(decision_id)
            self.num_withdrawn += 1

    def predicted_beyond(
        self, chain: bytes, held_blocks: Mapping[InstanceId, int], now: float
    ) -> dict[Life, int]:
        """Return how many leading blocks each instance is expected to hold beyond those it holds.

        An expectation that the index has confirmed in full is dropped.
        """
        self._expire(now)
        expected: dict[Life, int] = {}
        if not self._entries:
            return expected
        for life, (entry, mark) in self._deepest(chain).items():
            held = held_blocks.get(life[0], 0)
            depth = _shared_blocks(chain, entry.chain, at_least=mark)
            if depth > held:
                expected[life] = depth - held
            elif depth == entry.num_blocks:
                self._drop(entry.decision_id)
                self.num_confirmed += 1
        return expected

    def _deepest(self, chain: bytes) -> dict[Life, tuple[_Entry, int]]:
        """Return, for each instance, its entry that shares the deepest mark with the chain."""
        marks = _marks(len(chain) // BLOCK_HASH_BYTES)
        known = bisect_left(
            marks, True, key=lambda depth: _hash_at(chain, depth) not in self._marks
        )
        found: dict[Life, tuple[_Entry, int]] = {}
        for at in range(known - 1, -1, -1):
            lives = self._marks[_hash_at(chain, marks[at])]
            if len(lives) == len(found):
                continue  # those of the deeper marks: an entry has all the marks above its own
            for life, entries in lives.items():
                if life not in found:
                    found[life] = entries[-1], marks[at]
        return found

    def _expire(self, now: float) -> None:
        while self._entries:
            oldest = next(iter(self._entries.values()))
            if oldest.expires_at > now:
                break
            self._drop(oldest.decision_id)
            self._lapsed.append((oldest.life, _hash_at(oldest.chain, oldest.num_blocks)))
            if len(self._lapsed) > MAX_ENTRIES:  # more than anybody has judged
                self._lapsed.popleft()
                self.num_expired += 1

    def _drop(self, decision_id: str) -> None:
        entry = self._entries.pop(decision_id)
        self._num_bytes -= len(entry.chain)
        for depth in _marks(entry.num_blocks):
            key = _hash_at(entry.chain, depth)
            lives = self._marks[key]
            lives[entry.life].remove(entry)
            if not lives[entry.life]:
                del lives[entry.life]
            if not lives:
                del self._marks[key]


def _hash_at(chain: bytes, depth: int) -> bytes:
    """Return the hash of block number `depth`, counted from 1."""
    return chain[(depth - 1) * BLOCK_HASH_BYTES : depth * BLOCK_HASH_BYTES]


@lru_cache(maxsize=4096)
def _marks(num_blocks: int) -> tuple[int, ...]:
    """Return the marked depths of a chain, ascending: the first few, then some per doubling."""
    depths, step, depth = [], 1, 1
    while depth <= num_blocks:
        depths.append(depth)
        if depth >= 2 * MARKS_PER_OCTAVE * step:
            step *= 2
        depth += step
    return tuple(depths)


def _shared_blocks(chain: bytes, other: bytes, at_least: int) -> int:
    """Return how many leading blocks two chains share, knowing that it is `at_least` so many."""
    low, high = at_least, min(len(chain), len(other)) // BLOCK_HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if _hash_at(chain, middle) == _hash_at(other, middle):
            low = middle
        else:
            high = middle - 1
    return low
