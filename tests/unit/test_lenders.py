"""What a plan pulls where workers lend their pool's blocks only."""

from kvatlas.router.decision.candidates import candidate_set_of
from kvatlas.router.decision.plans import MAX_LOOKED_AT, LendableBlocks, plan_for
from kvatlas.router.decision.pricing import price_all
from kvatlas.schemas.fleet import NamespaceDescriptor
from kvatlas.schemas.hashing import BlockHasher, pack_tokens
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import BlockRemoved
from kvatlas.schemas.routing import Plan, Question
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import MODEL, Fleet, a_candidate, a_prompt

NUM_BLOCKS = 50
PROMPT = a_prompt(16 * NUM_BLOCKS)
HASHER = BlockHasher(NamespaceDescriptor(16).namespace(MODEL, None, None))
CHAIN = HASHER.chain(pack_tokens(PROMPT))
SETTINGS = RouterSettings(min_pull_tokens=64)
POOL = (Tier.dram,)


def a_fleet(*owners: str, leasable_tiers: tuple[Tier, ...] = POOL) -> Fleet:
    """Return a fleet of a puller that holds nothing and owners that hold the prompt in hbm."""
    fleet = Fleet()
    fleet.up("puller", leasable_tiers=POOL)
    for owner in owners:
        fleet.up(owner, leasable_tiers=leasable_tiers)
        fleet.holds(owner, PROMPT)
    return fleet


def planned(fleet: Fleet) -> Plan:
    """Plan the prompt at the puller, everybody else being too busy to compute it."""
    candidate_set = candidate_set_of(fleet.state.serving(MODEL), MODEL, None)
    held = {match.instance: match.by_tier for match in fleet.state.match(CHAIN)}
    candidates = tuple(
        a_candidate(
            view.instance.worker,
            held=held.get(view.instance, (0, 0, 0, 0, 0)),
            queued_ms=0.0 if view.instance.worker == "puller" else 10_000.0,
        )
        for view in candidate_set.views
    )
    question = Question(len(PROMPT) + 1, 0, 1, candidates)
    chosen = next(n for n, c in enumerate(candidates) if c.worker == "puller")
    price = price_all(question, SETTINGS)[chosen]
    assert price.pull_end == NUM_BLOCKS
    return plan_for(
        question, chosen, price, SETTINGS, LendableBlocks(fleet.state, candidate_set, CHAIN)
    )


def lose(fleet: Fleet, worker: str, block: int) -> None:
    """Let the pool of a worker evict one block."""
    evicted = CHAIN[16 * block : 16 * (block + 1)]
    fleet.tell(worker, BlockRemoved(HASHER.root, evicted, Tier.dram))


def test_what_lies_in_the_engine_s_memory_only_is_computed() -> None:
    plan = planned(a_fleet("owner"))
    assert (plan.pulls, plan.compute_tokens) == ((), len(PROMPT) + 1)


def test_what_lies_in_both_is_pulled() -> None:
    fleet = a_fleet("owner")
    fleet.holds("owner", PROMPT, tier=Tier.dram)
    [step] = planned(fleet).pulls
    assert (step.worker, step.first_block, step.num_blocks) == ("owner", 0, NUM_BLOCKS)


def test_a_block_that_the_pool_has_evicted_ends_the_pull() -> None:
    fleet = a_fleet("owner")
    fleet.holds("owner", PROMPT, tier=Tier.dram)
    lose(fleet, "owner", 20)
    plan = planned(fleet)
    assert [(s.first_block, s.num_blocks) for s in plan.pulls] == [(0, 20)]
    assert plan.compute_tokens == len(PROMPT) + 1 - 20 * 16


def test_too_little_to_lend_is_not_worth_a_pull() -> None:
    fleet = a_fleet("owner")
    fleet.holds("owner", PROMPT, tier=Tier.dram, num_blocks=3)  # 48 tokens
    assert planned(fleet).pulls == ()


def test_the_rest_comes_from_who_has_it_to_lend() -> None:
    fleet = a_fleet("long", "short")
    fleet.holds("short", PROMPT, tier=Tier.dram, num_blocks=46)
    fleet.holds("long", PROMPT, tier=Tier.dram)
    lose(fleet, "long", 45)
    [step] = planned(fleet).pulls
    assert (step.worker, step.num_blocks) in {("short", 46), ("long", 45)}
    assert len(step.fallbacks) == 1


def test_who_does_not_say_lends_every_tier_and_nothing_is_asked() -> None:
    fleet = a_fleet("owner", leasable_tiers=tuple(Tier))
    candidate_set = candidate_set_of(fleet.state.serving(MODEL), MODEL, None)
    asked: list[bytes] = []

    class Watched:
        def holders(self, block_hash: bytes) -> list[tuple[InstanceId, Tier]]:
            asked.append(block_hash)
            return fleet.state.holders(block_hash)

    owner = next(n for n, view in enumerate(candidate_set.views) if view.instance.worker == "owner")
    lenders = LendableBlocks(Watched(), candidate_set, CHAIN)
    assert lenders.limit({owner: NUM_BLOCKS}, 0, NUM_BLOCKS) == {owner: NUM_BLOCKS}
    assert asked == []
    [step] = planned(fleet).pulls
    assert step.num_blocks == NUM_BLOCKS


def test_the_look_at_the_index_is_bounded() -> None:
    owners = [f"w{n}" for n in range(MAX_LOOKED_AT // 20)]
    fleet = a_fleet(*owners)
    for owner in owners:
        fleet.holds(owner, PROMPT, tier=Tier.dram)
    candidate_set = candidate_set_of(fleet.state.serving(MODEL), MODEL, None)
    ends = {
        n: NUM_BLOCKS for n, v in enumerate(candidate_set.views) if v.instance.worker != "puller"
    }
    cut = LendableBlocks(fleet.state, candidate_set, CHAIN).limit(ends, 0, NUM_BLOCKS)
    # each block has two slots an owner
    assert set(cut.values()) == {11}
    assert cut.keys() == ends.keys()
