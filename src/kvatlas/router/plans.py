"""How the chosen candidate gets the KV of a prompt: reuse, pull from peers, compute."""

from kvatlas.router.policies.policy import draw, lightest
from kvatlas.router.pricing import OWNER_TRUST, Price
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Candidate, Plan, PullStep, Question
from kvatlas.schemas.settings import RouterSettings

#: an owner of at least this part of the longest pull may be taken for its lower load
NEARLY_ALL = 0.9
MAX_PULL_STEPS = 2
MAX_FALLBACKS = 2


def plan_for(question: Question, chosen: int, price: Price, settings: RouterSettings) -> Plan:
    """Return the plan that the price of the chosen candidate stands for."""
    candidate = question.candidates[chosen]
    pulls: tuple[PullStep, ...] = ()
    if price.pull_end:
        pulls = _pulls(question, chosen, price, settings)
    present = price.reuse_blocks + sum(step.num_blocks for step in pulls)
    return Plan(
        block_tokens=candidate.block_tokens,
        reuse_blocks=price.reuse_blocks,
        pulls=pulls,
        compute_tokens=max(question.prompt_tokens - present * candidate.block_tokens, 1),
    )


def _pulls(
    question: Question, chosen: int, price: Price, settings: RouterSettings
) -> tuple[PullStep, ...]:
    """Pull from a little loaded owner of nearly all, then what is left from the longest one."""
    puller = question.candidates[chosen]
    first, end = price.reuse_blocks, price.pull_end
    owners = {
        position: sum(owner.held)
        for position, owner in enumerate(question.candidates)
        if position != chosen
        and owner.kv_class == puller.kv_class
        and owner.trust in OWNER_TRUST
        and sum(owner.held) > first
    }
    steps: list[PullStep] = []
    share = NEARLY_ALL
    while first < end and len(steps) < MAX_PULL_STEPS:
        if steps and (end - first) * puller.block_tokens < settings.min_pull_tokens:
            break
        enough = first + share * (end - first)
        owner = lightest(question, (at for at, blocks in owners.items() if blocks >= enough))
        steps.append(_step(question, owners, owner, first, min(owners[owner], end)))
        first, share = steps[-1].first_block + steps[-1].num_blocks, 1.0
    return tuple(steps)


def _step(question: Question, owners: dict[int, int], owner: int, first: int, end: int) -> PullStep:
    def rank(position: int) -> tuple[int, float, int]:
        candidate = question.candidates[position]
        return -owners[position], candidate.queued_ms, draw(question.seed, candidate)

    others = sorted((at for at in owners if at != owner and owners[at] > first), key=rank)
    taken: Candidate = question.candidates[owner]
    fallbacks: tuple[InstanceId, ...] = tuple(
        question.candidates[at].instance for at in others[:MAX_FALLBACKS]
    )
    return PullStep(taken.worker, taken.rank, first, end - first, fallbacks)
