"""The port: what every policy promises."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import xxhash

from kvatlas.router.lineup import lot
from kvatlas.router.pricing import Price
from kvatlas.router.slate import Slate
from kvatlas.schemas.routing import Candidate, Question


class Choice(NamedTuple):
    """The candidate taken, by its position in the question, and what every candidate costs."""

    chosen: int
    prices: list[Price]
    reason: str


class Policy(Protocol):
    """Decides which candidate takes a request."""

    @property
    def name(self) -> str:
        """The name in the settings and in decisions."""
        ...

    def choose(self, question: Question) -> Choice:
        """Return one candidate of a question that has at least one. O(candidates).

        Pure: equal questions and settings give equal choices, and the order of the candidates does
        not matter. What looks random comes from the question's seed.
        """
        ...


class Pick(NamedTuple):
    """The candidate taken, by its line in the slate, and why."""

    chosen: int
    reason: str


@runtime_checkable
class SlatePolicy(Protocol):
    """A policy that needs no objects: `pick` is what `choose` says of the slate's question."""

    def pick(self, slate: Slate) -> Pick:
        """Return one candidate of a slate, and leave the prices of all in it."""
        ...


def picker(policy: Policy) -> Callable[[Slate], Pick]:
    """Return what picks of a slate as a policy does, and leaves the prices of all in it."""

    def pick(slate: Slate) -> Pick:
        choice = policy.choose(slate.question)
        slate.take(choice.prices)
        return Pick(choice.chosen, choice.reason)

    return policy.pick if isinstance(policy, SlatePolicy) else pick


def draw(seed: int, candidate: Candidate) -> int:
    """Return a number that is random over seeds and fixed for a seed and a candidate."""
    return xxhash.xxh3_64_intdigest(lot(candidate.worker, candidate.rank), seed)


def lightest(question: Question, positions: Iterable[int]) -> int:
    """Return the position with the least load; ties are drawn."""

    def load(position: int) -> tuple[float, int, int]:
        candidate = question.candidates[position]
        return candidate.queued_ms, candidate.in_flight, draw(question.seed, candidate)

    return min(positions, key=load)
