"""An engine that computes nothing: it stores and removes blocks at random and says so."""

from bisect import bisect_right
from collections.abc import Iterator
from random import Random

from kvatlas.worker_hooks.raw_events import RawEvent, RawStored
from kvatlas.worker_hooks.reporting.hook import WorkerHook
from testkit.storm.chains import Chain, Chains
from testkit.storm.truth import TruthWriter

#: blocks held, above which more is removed than stored
FULL = 400
CLEARING = 0.002


class StormEngine:
    """Holds blocks by hashes of its own; `op_at` says which of its ops a record of the ring tells.

    Stores continue a chain from its first missing block on, removals leave holes anywhere.
    """

    def __init__(self, chains: Chains, hook: WorkerHook, truth: TruthWriter, seed: str) -> None:
        self._chains, self._hook, self._truth = chains, hook, truth
        self._random = Random(seed)
        #: our numbers are nobody's hashes: the engine's name of block b is this plus b
        self._first_hash = self._random.getrandbits(62)
        self.held: set[int] = set()
        self.num_ops = 0
        #: records appended before each op's own, and the op
        self._records: list[int] = []
        hook.answer_listings(self._listed)

    def step(self) -> None:
        """Do one thing."""
        if self._random.random() < CLEARING:
            self._clear()
        elif self._random.random() < len(self.held) / (2 * FULL):
            self._remove()
        else:
            self._store()

    def op_at(self, num_records: int) -> int:
        """Return the newest op that the first so many records of the ring tell."""
        return bisect_right(self._records, num_records - 1)

    def _store(self) -> None:
        chain = self._random.choice(self._chains.chains)
        missing = [n for n, block in enumerate(chain.blocks) if block not in self.held]
        if not missing:
            return
        first = missing[0]
        run = sum(1 for at, n in enumerate(missing) if n == first + at)
        num_blocks = min(self._random.randint(1, 12), run)
        added = chain.blocks[first : first + num_blocks]
        self._begin(added, [])
        self.held.update(added)
        event = self._stored(chain, first, num_blocks)
        self._hook.stored(event.engine_hashes, event.parent, event.tokens)

    def _remove(self) -> None:
        removed = self._random.sample(
            sorted(self.held), min(self._random.randint(1, 10), len(self.held))
        )
        self._begin([], removed)
        self.held.difference_update(removed)
        self._hook.removed([self._first_hash + block for block in removed])

    def _clear(self) -> None:
        self._begin([], sorted(self.held))
        self.held.clear()
        self._hook.cleared()

    def _begin(self, added: list[int], removed: list[int]) -> None:
        self.num_ops += 1
        self._truth.op(self.num_ops, added, removed)
        self._records.append(self._hook.num_appended + self._hook.num_lost)

    def _stored(self, chain: Chain, first: int, num_blocks: int) -> RawStored:
        names = [self._first_hash + block for block in chain.blocks[: first + num_blocks]]
        parent = names[first - 1] if first else None
        return RawStored(tuple(names[first:]), parent, chain.packed(first, num_blocks))

    def _listed(self) -> Iterator[RawEvent]:
        told: set[int] = set()
        for chain in self._chains.chains:
            for at, block in enumerate(chain.blocks):
                if block in self.held and block not in told:
                    told.add(block)
                    yield self._stored(chain, at, 1)
