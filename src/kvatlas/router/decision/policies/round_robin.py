"""One after the other, by name and rank."""

from kvatlas.router.decision.policies.policy import Choice
from kvatlas.router.decision.pricing import price_all
from kvatlas.schemas.routing import Question
from kvatlas.schemas.settings import RouterSettings


class RoundRobin:
    """Takes candidate number `turn` in the order of their names, whatever they hold."""

    name = "round_robin"

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    def choose(self, question: Question) -> Choice:
        candidates = question.candidates
        order = sorted(range(len(candidates)), key=lambda at: candidates[at].instance)
        chosen = order[question.turn % len(order)]
        return Choice(chosen, price_all(question, self._settings), f"turn {question.turn}")
