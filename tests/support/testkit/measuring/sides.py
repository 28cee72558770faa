"""Two sides that answer the same calls: an object of ours, and a peer in its own process.

with Sides(OurIndex, "dynamo.py" if bench.has_peer else None) as sides:
    samples = sides.in_turn(9, "match_us", hit_percent=100, calls=50)
    sides.fresh("bytes_per_pair", shared_by=16)         each side in a process made for it
"""

import contextlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import Any, Self

from testkit.measuring.bench import OURS
from testkit.measuring.peer import Peer

Samples = dict[str, list[float]]


class Sides:
    """Asks each side the same, ours first."""

    def __init__(self, ours: Callable[[], object], peer_script: str | None) -> None:
        self._make_ours, self._script = ours, peer_script
        self._ours = ours()
        self._stack = contextlib.ExitStack()
        self._peer: Peer | None = None
        self.peer = peer_script.partition(".")[0] if peer_script else ""

    def __enter__(self) -> Self:
        if self._script:
            self._peer = self._stack.enter_context(Peer(self._script))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """The sides, ours first."""
        return [OURS, self.peer] if self.peer else [OURS]

    def peer_versions(self) -> dict[str, str]:
        """Return the peer's package and its version, if there is a peer."""
        return dict(self._peer.ask("version")) if self._peer else {}

    def ours(self, call: str, **arguments: Any) -> Any:
        """Return what our side alone answers."""
        return getattr(self._ours, call)(**arguments)

    def each(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Return what each side answers to one call."""
        answers = {OURS: self.ours(call, **arguments)}
        if self._peer:
            answers[self.peer] = self._peer.ask(call, **arguments)
        return answers

    def in_turn(self, repetitions: int, call: str, **arguments: Any) -> Samples:
        """Return each side's answers to calls taken in turn: all see the same machine."""
        samples: Samples = {}
        for _ in range(repetitions):
            for side, answer in self.each(call, **arguments).items():
                samples.setdefault(side, []).append(answer)
        return samples

    def phases_in_turn(self, repetitions: int, call: str, **arguments: Any) -> dict[str, Samples]:
        """Return the same of calls that answer with a figure per phase, by phase."""
        phases: dict[str, Samples] = {}
        for _ in range(repetitions):
            for side, answer in self.each(call, **arguments).items():
                for phase, figure in answer.items():
                    phases.setdefault(phase, {}).setdefault(side, []).append(figure)
        return phases

    def fresh(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Return what each side answers in a process of its own, which has done nothing before."""
        answers = {OURS: in_a_fresh_process(_answer, self._make_ours, call, arguments)}
        if self._script:
            with Peer(self._script) as peer:
                answers[self.peer] = peer.ask(call, **arguments)
        return answers


def in_a_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of a module answers in a process made for this call."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def _answer(make: Callable[[], object], call: str, arguments: dict[str, Any]) -> Any:
    return getattr(make(), call)(**arguments)
