"""The default: the candidate with the lowest predicted cost."""

from kvatlas.router.policies.policy import Choice, lightest
from kvatlas.router.pricing import price_all
from kvatlas.schemas.routing import Question
from kvatlas.schemas.settings import RouterSettings


class PredictedTtft:
    """Takes the least of wait + tier_load + predicted + trust + pull + compute + balance.

    Equal costs go to the lower load. Inside the load window a longer match wins; beyond it every
    queued millisecond counts against a candidate as much as a computed one.
    """

    name = "predicted_ttft"

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings

    def choose(self, question: Question) -> Choice:
        prices = price_all(question, self._settings)
        costs = [price.cost_ms for price in prices]
        least_ms = min(costs)
        cheapest = [at for at, cost_ms in enumerate(costs) if cost_ms == least_ms]
        if len(cheapest) == 1:
            return Choice(cheapest[0], prices, "the lowest predicted cost")
        chosen = lightest(question, cheapest)
        return Choice(chosen, prices, f"{len(cheapest)} at the lowest cost, then the lower load")
