"""Anybody, with equal chances."""

from kvatlas.router.decision.policies.policy import Choice, draw
from kvatlas.router.decision.pricing import price_all
from kvatlas.schemas.routing import Question
from kvatlas.schemas.settings import RouterSettings


class RandomChoice:
    """Takes the candidate with the lowest draw of the seed."""

    name = "random"

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    def choose(self, question: Question) -> Choice:
        draws = [draw(question.seed, candidate) for candidate in question.candidates]
        chosen = draws.index(min(draws))
        return Choice(chosen, price_all(question, self._settings), "drawn from the seed")
