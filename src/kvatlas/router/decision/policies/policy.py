"""The port: what every policy promises."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import xxhash

from kvatlas.router.decision.candidate_set import tie_break_key
from kvatlas.router.decision.candidate_table import CandidateTable
from kvatlas.router.decision.pricing import Price
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
    """The candidate taken, by its line in the candidate table, and why."""

    chosen: int
    reason: str


@runtime_checkable
class TablePolicy(Protocol):
    """A policy that needs no objects: `pick` takes the same candidate as `choose`."""

    def pick(self, candidate_table: CandidateTable) -> Pick:
        """Return one candidate of a candidate table, and leave the prices of all in it."""
        ...


def picker(policy: Policy) -> Callable[[CandidateTable], Pick]:
    """Return a function that picks as the policy does and stores all prices in the table."""

    def pick(candidate_table: CandidateTable) -> Pick:
        choice = policy.choose(candidate_table.question)
        candidate_table.store_prices(choice.prices)
        return Pick(choice.chosen, choice.reason)

    return policy.pick if isinstance(policy, TablePolicy) else pick


def draw(seed: int, candidate: Candidate) -> int:
    """Return a number that is random over seeds and fixed for a seed and a candidate."""
    return xxhash.xxh3_64_intdigest(tie_break_key(candidate.worker, candidate.rank), seed)


def lightest(question: Question, positions: Iterable[int]) -> int:
    """Return the position with the least load; ties are drawn."""

    def load(position: int) -> tuple[float, int, int]:
        candidate = question.candidates[position]
        return candidate.queued_ms, candidate.in_flight, draw(question.seed, candidate)

    return min(positions, key=load)
