"""Two at random, the better of them: near the balance of looking at all, for the cost of two."""

from heapq import nsmallest

from kvatlas.router.decision.policies.policy import Choice, draw, lightest
from kvatlas.router.decision.pricing import price_all
from kvatlas.schemas.routing import Question
from kvatlas.schemas.settings import RouterSettings


class PowerOfTwo:
    """Takes the lower load of the two candidates with the lowest draws."""

    name = "power_of_two"

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    def choose(self, question: Question) -> Choice:
        candidates = question.candidates
        pair = nsmallest(
            2, range(len(candidates)), key=lambda at: draw(question.seed, candidates[at])
        )
        chosen = lightest(question, pair)
        return Choice(chosen, price_all(question, self._settings), "the lower load of two drawn")
