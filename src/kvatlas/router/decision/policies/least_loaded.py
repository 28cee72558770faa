"""The shortest queue."""

from kvatlas.router.decision.policies.policy import Choice, lightest
from kvatlas.router.decision.pricing import price_all
from kvatlas.schemas.routing import Question
from kvatlas.schemas.settings import RouterSettings


class LeastLoaded:
    """Takes the least queued prefill, then the fewest requests in flight, then a draw."""

    name = "least_loaded"

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    def choose(self, question: Question) -> Choice:
        chosen = lightest(question, range(len(question.candidates)))
        return Choice(chosen, price_all(question, self._settings), "the lowest load")
