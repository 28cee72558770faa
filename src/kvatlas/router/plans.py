"""How the chosen candidate gets the KV of a prompt: reuse, pull from peers, compute."""

from typing import Protocol

from kvatlas.router.candidates import Lineup
from kvatlas.router.policies.policy import draw, lightest
from kvatlas.router.pricing import OWNER_TRUST, Price
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.ids import NUM_TIERS, InstanceId, Tier
from kvatlas.schemas.routing import Candidate, Plan, PullStep, Question
from kvatlas.schemas.settings import RouterSettings

#: an owner of at least this part of the longest pull may be taken for its lower load
NEARLY_ALL = 0.9
MAX_PULL_STEPS = 2
MAX_FALLBACKS = 2
#: slots (instance, tier) that a plan looks at in the index; more makes longer pulls, later plans
MAX_LOOKED_AT = 4096


class Holders(Protocol):
    """Who holds a block; an IndexReader is one."""

    def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
        """Return who holds one block, and where."""
        ...


class Lenders:
    """What owners can lend of a prompt's chain, as the index says when the plan is made.

    A match counts each block at its best tier, so a block in `hbm` and in the serve pool looks like
    one in `hbm` only, and many a worker leases its pool's blocks only (`leasable_tiers`). Prices
    take the match as it is: they are asked for with every request, and what an engine has computed
    is in its pool as a rule. A plan that pulls asks the index block by block, from the first one to
    pull on and once for all owners. It does not search: pools evict in any order, so a run may have
    a hole anywhere. So each block of a plan is one that its owner can lease, as of the decision's
    stream sequence, and a pull may be shorter than its price says, never longer; what is behind
    `MAX_LOOKED_AT` slots is computed. Where every worker lends all its tiers, nothing is asked.
    """

    def __init__(self, index: Holders, lineup: Lineup, chain: bytes) -> None:
        self._index, self._lineup, self._chain = index, lineup, chain

    def cut(self, owners: dict[int, int], first: int, end: int) -> dict[int, int]:
        """Return the owners, position -> end of what they can lend from `first` on without a hole.

        `owners` has the ends of their matches. Those with nothing to lend are left out.
        """
        infos, views = self._lineup.infos, self._lineup.views
        asked = {at: frozenset(infos[at].leasable_tiers) for at in owners}
        lending = {views[at].instance: at for at in owners if len(asked[at]) < NUM_TIERS}
        ends = {at: owned for at, owned in owners.items() if len(asked[at]) == NUM_TIERS}
        block, num_left = first, MAX_LOOKED_AT
        while lending and block < end and num_left > 0:
            at = block * BLOCK_HASH_BYTES
            slots = self._index.holders(self._chain[at : at + BLOCK_HASH_BYTES])
            num_left -= len(slots)
            lent = {
                instance
                for instance, tier in slots
                if instance in lending and tier in asked[lending[instance]]
            }
            for instance in lending.keys() - lent:
                ends[lending.pop(instance)] = block
            block += 1
        ends |= dict.fromkeys(lending.values(), block)
        return {at: min(ends[at], owned) for at, owned in owners.items() if ends[at] > first}


def plan_for(
    question: Question,
    chosen: int,
    price: Price,
    settings: RouterSettings,
    lenders: Lenders | None = None,
) -> Plan:
    """Return the plan that the price of the chosen candidate stands for.

    Without `lenders`, all that owners hold is taken as theirs to lend.
    """
    candidate = question.candidates[chosen]
    pulls: tuple[PullStep, ...] = ()
    if price.pull_end:
        pulls = _pulls(question, chosen, price, settings, lenders)
    present = price.reuse_blocks + sum(step.num_blocks for step in pulls)
    return Plan(
        block_tokens=candidate.block_tokens,
        reuse_blocks=price.reuse_blocks,
        pulls=pulls,
        compute_tokens=max(question.prompt_tokens - present * candidate.block_tokens, 1),
    )


def _pulls(
    question: Question,
    chosen: int,
    price: Price,
    settings: RouterSettings,
    lenders: Lenders | None,
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
    if lenders is not None:
        owners = lenders.cut(owners, first, end)
    end = min(end, max(owners.values(), default=0))
    steps: list[PullStep] = []
    share = NEARLY_ALL
    while first < end and len(steps) < MAX_PULL_STEPS:
        if (end - first) * puller.block_tokens < settings.min_pull_tokens:
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
