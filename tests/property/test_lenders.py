"""Laws of plans where workers lend some tiers only, on random fleets and pools with holes."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.router.decision.candidates import candidate_set_of
from kvatlas.router.decision.plans import LendableBlocks, plan_for
from kvatlas.router.decision.pricing import price_all
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, pack_tokens
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import BlockRemoved, BlockStored
from kvatlas.schemas.routing import Question
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import MODEL, Fleet, a_candidate, a_prompt

NUM_BLOCKS = 12
HASHER = BlockHasher(NamespaceDescriptor(16).namespace(MODEL, None, None))
CHAIN = HASHER.chain(pack_tokens(a_prompt(16 * NUM_BLOCKS)))
#: of each block of the prompt, the tiers that hold it
HELD = st.lists(st.sets(st.sampled_from(list(Tier)[:3])), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS)
LEASABLE = st.sets(st.sampled_from(list(Tier)))


def block(number: int) -> bytes:
    return CHAIN[16 * number : 16 * (number + 1)]


@given(
    st.lists(st.tuples(HELD, LEASABLE, st.floats(0, 1_000)), min_size=2, max_size=5),
    st.integers(0, 100),
)
def test_every_block_of_a_plan_is_one_that_its_owner_lends(
    workers: list[tuple[list[set[Tier]], set[Tier], float]], min_pull_tokens: int
) -> None:
    fleet = Fleet()
    held: dict[InstanceId, list[set[Tier]]] = {}
    leasable: dict[InstanceId, set[Tier]] = {}
    queued: dict[InstanceId, float] = {}
    for number, (tiers_of, lends, queued_ms) in enumerate(workers):
        instance = fleet.up(f"w{number}", leasable_tiers=tuple(sorted(lends)))
        held[instance], leasable[instance], queued[instance] = tiers_of, lends, queued_ms
        for tier in Tier:
            fleet.tell(instance.worker, BlockStored(HASHER.root, CHAIN, None, tier))
            gone = b"".join(block(n) for n in range(NUM_BLOCKS) if tier not in tiers_of[n])
            fleet.tell(instance.worker, BlockRemoved(HASHER.root, gone, tier))

    def lends_up_to(instance: InstanceId, first: int) -> int:
        end = first
        while end < NUM_BLOCKS and held[instance][end] & leasable[instance]:
            end += 1
        return end

    candidate_set = candidate_set_of(fleet.state.serving(MODEL), MODEL, None)
    matches = {match.instance: match.by_tier for match in fleet.state.match(CHAIN)}
    candidates = tuple(
        a_candidate(
            view.instance.worker,
            held=matches.get(view.instance, (0, 0, 0, 0, 0)),
            queued_ms=queued[view.instance],
        )
        for view in candidate_set.views
    )
    matched = {c.instance: sum(c.held) for c in candidates}
    question = Question(16 * NUM_BLOCKS + 1, 0, 1, candidates)
    settings = RouterSettings(min_pull_tokens=min_pull_tokens, pull_fixed_ms=0.0, pull_weight=1.0)
    lenders = LendableBlocks(fleet.state, candidate_set, CHAIN)
    for chosen, price in enumerate(price_all(question, settings)):
        plan = plan_for(question, chosen, price, settings, lenders)
        assert plan.num_tokens == question.prompt_tokens
        at = plan.reuse_blocks
        for step in plan.pulls:
            assert step.first_block == at
            at += step.num_blocks
            owner = InstanceId(step.worker, step.rank)
            assert at <= min(lends_up_to(owner, plan.reuse_blocks), matched[owner])
            for other in step.fallbacks:
                assert held[other][step.first_block] & leasable[other]
        if price.pull_end:
            others = [c.instance for n, c in enumerate(candidates) if n != chosen]
            ends = [min(lends_up_to(o, plan.reuse_blocks), matched[o]) for o in others]
            best = min(max(ends), price.pull_end)
            # all that anybody lends, but for a rest that is not worth another pull
            assert at == best or (best - at) * 16 < min_pull_tokens
