"""One policy per module, known by name."""

from collections.abc import Callable

from kvatlas.router.decision.policies.least_loaded import LeastLoaded
from kvatlas.router.decision.policies.policy import Choice, Pick, Policy, picker
from kvatlas.router.decision.policies.power_of_two import PowerOfTwo
from kvatlas.router.decision.policies.predicted_ttft import PredictedTtft
from kvatlas.router.decision.policies.random_choice import RandomChoice
from kvatlas.router.decision.policies.round_robin import RoundRobin
from kvatlas.schemas.errors import UnknownPolicy
from kvatlas.schemas.settings import RouterSettings

__all__ = ["POLICIES", "Choice", "Pick", "Policy", "picker", "policy_named"]

POLICIES: dict[str, Callable[[RouterSettings], Policy]] = {
    PredictedTtft.name: PredictedTtft,
    RoundRobin.name: RoundRobin,
    RandomChoice.name: RandomChoice,
    LeastLoaded.name: LeastLoaded,
    PowerOfTwo.name: PowerOfTwo,
}


def policy_named(name: str, settings: RouterSettings) -> Policy:
    """Return the policy of this name; raises UnknownPolicy."""
    if name not in POLICIES:
        raise UnknownPolicy(name, tuple(POLICIES))
    return POLICIES[name](settings)
