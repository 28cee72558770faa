"""How the chosen candidate gets the KV of a prompt: reuse, pull from peers, compute."""

from collections.abc import Iterable, Mapping
from heapq import nsmallest
from typing import Protocol

from kvatlas.router.decision.candidate_set import CandidateSet
from kvatlas.router.decision.policies.policy import draw, lightest
from kvatlas.router.decision.pricing import OWNER_TRUST, Price
from kvatlas.schemas.digest import BLOCK_HASH_BYTES
from kvatlas.schemas.ids import NUM_TIERS, InstanceId, Tier
from kvatlas.schemas.routing import Plan, PullStep, Question
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


class Peers(Protocol):
    """The candidates of a request by position, as plans need them; a CandidateTable is one."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        ...

    def block_tokens(self, position: int, /) -> int:
        """Return the size of a candidate's blocks."""
        ...

    def instance(self, position: int, /) -> InstanceId:
        """Return who a candidate is."""
        ...

    def owners(self, chosen: int, first: int, /) -> dict[int, int]:
        """Return who may lend to the chosen one more than `first` blocks, and how many."""
        ...

    def lightest(self, positions: Iterable[int], /) -> int:
        """Return the one with the least load; ties are drawn."""
        ...

    def next_best(self, owners: Mapping[int, int], count: int, /) -> list[int]:
        """Return those with the most blocks, the less queued first; ties are drawn."""
        ...


class QuestionPeers:
    """The candidates of a question."""

    def __init__(self, question: Question) -> None:
        self._question, self._candidates = question, question.candidates
        self.prompt_tokens = question.prompt_tokens

    def block_tokens(self, position: int) -> int:
        return self._candidates[position].block_tokens

    def instance(self, position: int) -> InstanceId:
        return self._candidates[position].instance

    def owners(self, chosen: int, first: int) -> dict[int, int]:
        puller = self._candidates[chosen]
        return {
            position: sum(owner.held)
            for position, owner in enumerate(self._candidates)
            if position != chosen
            and owner.kv_class == puller.kv_class
            and owner.trust in OWNER_TRUST
            and sum(owner.held) > first
        }

    def lightest(self, positions: Iterable[int]) -> int:
        return lightest(self._question, positions)

    def next_best(self, owners: Mapping[int, int], count: int) -> list[int]:
        def rank(position: int) -> tuple[int, float, int]:
            candidate = self._candidates[position]
            lot = draw(self._question.seed, candidate)
            return -owners[position], candidate.queued_ms, lot

        return nsmallest(count, owners, key=rank)


class LendableBlocks:
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

    def __init__(self, index: Holders, candidate_set: CandidateSet, chain: bytes) -> None:
        self._index, self._candidate_set, self._chain = index, candidate_set, chain

    def limit(self, owners: dict[int, int], first: int, end: int) -> dict[int, int]:
        """Return the owners, position -> end of what they can lend from `first` on without a hole.

        `owners` has the ends of their matches. Those with nothing to lend are left out.
        """
        if self._candidate_set.all_lend_every_tier:
            return {at: owned for at, owned in owners.items() if owned > first}
        asked, views = self._candidate_set.leasable, self._candidate_set.views
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
    asked: Question | Peers,
    chosen: int,
    price: Price,
    settings: RouterSettings,
    lenders: LendableBlocks | None = None,
) -> Plan:
    """Return the plan that the price of the chosen candidate stands for.

    Without `lenders`, all that owners hold is taken as theirs to lend.
    """
    peers: Peers = QuestionPeers(asked) if isinstance(asked, Question) else asked
    pulls: tuple[PullStep, ...] = ()
    if price.pull_end:
        pulls = _pulls(peers, chosen, price, settings, lenders)
    present = price.reuse_blocks + sum(step.num_blocks for step in pulls)
    block_tokens = peers.block_tokens(chosen)
    return Plan(
        block_tokens=block_tokens,
        reuse_blocks=price.reuse_blocks,
        pulls=pulls,
        compute_tokens=max(peers.prompt_tokens - present * block_tokens, 1),
    )


def _pulls(
    peers: Peers,
    chosen: int,
    price: Price,
    settings: RouterSettings,
    lenders: LendableBlocks | None,
) -> tuple[PullStep, ...]:
    """Pull from a little loaded owner of nearly all, then what is left from the longest one."""
    first, end = price.reuse_blocks, price.pull_end
    owners = peers.owners(chosen, first)
    if lenders is not None:
        owners = lenders.limit(owners, first, end)
    end = min(end, max(owners.values(), default=0))
    steps: list[PullStep] = []
    share = NEARLY_ALL
    while first < end and len(steps) < MAX_PULL_STEPS:
        if (end - first) * peers.block_tokens(chosen) < settings.min_pull_tokens:
            break
        enough = first + share * (end - first)
        owner = peers.lightest(at for at, blocks in owners.items() if blocks >= enough)
        steps.append(_step(peers, owners, owner, first, min(owners[owner], end)))
        first, share = steps[-1].first_block + steps[-1].num_blocks, 1.0
    return tuple(steps)


def _step(peers: Peers, owners: dict[int, int], owner: int, first: int, end: int) -> PullStep:
    others = {at: owned for at, owned in owners.items() if at != owner and owned > first}
    fallbacks = tuple(peers.instance(at) for at in peers.next_best(others, MAX_FALLBACKS))
    return PullStep(*peers.instance(owner), first, end - first, fallbacks)
