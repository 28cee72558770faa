"""What time alone says about an instance, laid over the fold: catching up, silent.

The fold knows `exact`, `degraded` and `gone`. A live reader adds `catching_up` while it has not
seen the log to its end, and `stale` for who has been silent for too long; the worst of all counts.
"""

from collections.abc import Callable, Generator, Set

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvatlas.indexer.reader import (
    IndexReader,
    IndexStats,
    InstanceMatch,
    InstanceSelection,
    InstanceView,
    TreeView,
)
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier

_SEVERITY = {trust: rank for rank, trust in enumerate(Trust)}
CATCHING_UP = "the log is not read to its end"
SILENT = "silent"


class TrustOverlay:
    """An IndexReader over another one, with trust by the clock of whoever calls `lay`."""

    def __init__(self, state: IndexReader) -> None:
        self._state = state
        self._is_catching_up = True
        self._silent: Set[InstanceId] = frozenset()
        self._version = 0
        self._serving: dict[str, list[InstanceView]] = {}
        self._serving_version = -1

    def update_trust(self, is_catching_up: bool, silent: Set[InstanceId]) -> None:
        """Say what holds from now on."""
        if (is_catching_up, silent) != (self._is_catching_up, self._silent):
            self._is_catching_up, self._silent = is_catching_up, silent
            self._version += 1

    @property
    def stream_sequence(self) -> int:
        return self._state.stream_sequence

    @property
    def fleet_version(self) -> int:
        return self._state.fleet_version + self._version

    def match(self, chain: bytes) -> list[InstanceMatch]:
        matches = self._state.match(chain)
        if not self._is_catching_up and not self._silent:
            return matches
        return [match._replace(trust=self._trust(match.instance, match.trust)) for match in matches]

    def held(self, chain: bytes, selection: InstanceSelection) -> NDArray[np.uint32]:
        return self._state.held(chain, selection)

    def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
        return self._state.holders(block_hash)

    def names(self) -> list[InstanceId]:
        return self._state.names()

    def instances(self) -> list[InstanceView]:
        return [self._laid_over(view) for view in self._state.instances()]

    def instance(self, instance: InstanceId) -> InstanceView | None:
        view = self._state.instance(instance)
        return view and self._laid_over(view)

    def serving(self, model: str) -> list[InstanceView]:
        if self._serving_version != self.fleet_version:
            self._serving_version = self.fleet_version
            self._serving.clear()
        found = self._serving.get(model)
        if found is None:
            found = self._state.serving(model)
            if self._is_catching_up or self._silent:
                found = [self._laid_over(view) for view in found]
            if found:
                self._serving[model] = found
        return found

    def copy_tree(self) -> Callable[[], TreeView]:
        return self._state.copy_tree()

    def stats(self) -> IndexStats:
        return self._state.stats()

    def state_digest(self) -> str:
        return self._state.state_digest()

    def digest_steps(self) -> Generator[None, None, str]:
        return self._state.digest_steps()

    def _trust(self, instance: InstanceId, folded: Trust) -> Trust:
        worst = folded
        if self._is_catching_up and _SEVERITY[Trust.catching_up] > _SEVERITY[worst]:
            worst = Trust.catching_up
        if instance in self._silent and _SEVERITY[Trust.stale] > _SEVERITY[worst]:
            worst = Trust.stale
        return worst

    def _laid_over(self, view: InstanceView) -> InstanceView:
        trust = self._trust(view.instance, view.trust)
        if trust is view.trust:
            return view
        why = SILENT if trust is Trust.stale else CATCHING_UP
        return msgspec.structs.replace(view, trust=trust, trust_reasons=(*view.trust_reasons, why))
