"""When a bridge may trust again after it has missed something.

An engine reuses its blocks. Once it has stored as many as it has, each of them has had the chance
to be told of again, and what was not is given up: it may be gone since a removal that nobody heard.
A block that hits keep alive is given up as well, although the engine has it; a bridge cannot know
better, for an engine says nothing about a hit. What is left is true, and short of that block until
it is stored again.
"""

from kvatlas.worker_hooks.bridge.observed import Observed


class Turnover:
    """Counts blocks in the engine's own memory; with `num_blocks` None it never says a thing."""

    def __init__(self, num_blocks: int | None) -> None:
        self.num_blocks = num_blocks
        #: stores less removals since nothing was held
        self._num_believed = 0
        #: stored since the last doubt; None while nothing is doubted
        self._num_stored: int | None = None
        self._num_removed = 0

    def begin(self) -> None:
        """Doubt everything held now; a doubt before it is part of this one."""
        self._num_stored = self._num_removed = 0

    def end(self) -> None:
        """Doubt no longer; at least what was stored and not removed since is believed."""
        if self._num_stored is not None:
            self._num_believed = max(self._num_stored - self._num_removed, 0)
        self._num_stored = None

    def empty(self) -> None:
        """Nothing is held."""
        self._num_believed, self._num_stored = 0, None

    def observe(self, observed: Observed) -> None:
        """Count a batch."""
        if observed.is_cleared:
            self._num_believed = 0
        self._num_believed += observed.num_stored - observed.num_removed
        self._num_believed = max(self._num_believed, 0)
        if self._num_stored is not None:
            self._num_stored += observed.num_stored
            self._num_removed += observed.num_removed

    @property
    def is_complete(self) -> bool:
        """Whether the doubt may be taken back."""
        if self.num_blocks is None or self._num_stored is None:
            return False
        return self._num_stored >= self.num_blocks

    @property
    def num_too_many(self) -> int:
        """Blocks believed beyond what the engine has: it has told some without a copy of them."""
        if self.num_blocks is None or self._num_stored is not None:
            return 0
        return max(self._num_believed - self.num_blocks, 0)
