"""The default: the candidate with the lowest predicted cost."""

from kvatlas.router.decision.candidate_table import CandidateTable, price_inputs_of
from kvatlas.router.decision.policies.policy import Choice, Pick, lightest
from kvatlas.router.decision.pricing import price_all
from kvatlas.schemas.routing import Question
from kvatlas.schemas.settings import RouterSettings


class PredictedTtft:
    """Takes the least of wait + tier_load + predicted + trust + pull + compute + balance.

    Equal costs go to the lower load. Inside the load window a longer match wins; beyond it every
    queued millisecond counts against a candidate as much as a computed one.
    """

    name = "predicted_ttft"

    def __init__(self, settings: RouterSettings) -> None:
        self._settings, self._numbers = settings, price_inputs_of(settings)

    def choose(self, question: Question) -> Choice:
        prices = price_all(question, self._settings)
        costs = [price.cost_ms for price in prices]
        least_ms = min(costs)
        cheapest = [at for at, cost_ms in enumerate(costs) if cost_ms == least_ms]
        chosen = cheapest[0] if len(cheapest) == 1 else lightest(question, cheapest)
        return Choice(chosen, prices, _reason(len(cheapest)))

    def pick(self, candidate_table: CandidateTable) -> Pick:
        chosen, num_cheapest = candidate_table.price(self._settings, self._numbers)
        if num_cheapest > 1:
            chosen = candidate_table.least_loaded_of_cheapest(chosen, num_cheapest)
        return Pick(chosen, _reason(num_cheapest))


def _reason(num_cheapest: int) -> str:
    if num_cheapest == 1:
        return "the lowest predicted cost"
    return f"{num_cheapest} at the lowest cost, then the lower load"
