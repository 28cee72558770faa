"""What a router gathers is what index, loads and overlay say by name, however the fleet changes."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.reader import InstanceView
from kvatlas.router.decision.candidate_set import CandidateSet, candidate_set_of
from kvatlas.router.decision.requests import Report
from kvatlas.router.service import choose_again
from kvatlas.schemas.errors import NoCandidate, UnknownModel
from kvatlas.schemas.hashing import BlockHasher
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Candidate
from testkit.fleet import MODEL, Fleet, RouterUnderTest, a_prompt, a_request

PROMPTS = [a_prompt(200), a_prompt(120) + a_prompt(80, start=900), a_prompt(150, start=5_000)]
#: a worker's name is its number; half of them cut blocks of another size
kinds = ["up"] * 4 + ["holds"] * 5 + ["route"] * 6 + ["done"] * 2 + ["failed", "gap", "down"]
steps = st.tuples(
    st.sampled_from(kinds),
    st.integers(0, 4),
    st.integers(0, len(PROMPTS) - 1),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.1, 1.0, 6.0]),
)


class World:
    """A fleet and its router, told by number what happens."""

    def __init__(self, is_flat: bool, policy: str) -> None:
        self.fleet = Fleet(FlatRadixIndex() if is_flat else ReferenceIndex())
        self.router = self.fleet.router(policy=policy, min_pull_tokens=16, load_window_ms=10.0)
        self.epochs: dict[int, int] = {}
        self.living: set[int] = set()
        self.routed: list[str] = []

    def happen(self, kind: str, number: int, prompt: int, num_blocks: int) -> None:
        worker, tokens = f"w{number}", PROMPTS[prompt]
        if kind == "up":
            self.epochs[number] = self.epochs.get(number, 0) + 1
            size = 32 if number % 2 else 16
            self.fleet.up(worker, block_tokens=size, epoch=self.epochs[number])
            self.living.add(number)
        elif kind in ("done", "failed") and self.routed:
            self.router.done(self.routed.pop(), Report(failed=kind == "failed"))
        elif kind == "route" and self.living:
            self.routed.append(self.router.route(a_request(tokens)).decision_id)
        elif number in self.living:
            if kind == "holds":
                self.fleet.holds(worker, tokens, num_blocks=num_blocks)
            elif kind == "gap":
                self.fleet.tell(worker, skip=1)
            elif kind == "down":
                self.fleet.down(worker)
                self.living.remove(number)


def by_name(router: RouterUnderTest, tokens: list[int]) -> tuple[Candidate, ...]:
    """Return the candidates as they are found one by one."""
    now = router.clock()
    candidate_set = candidate_set_of(router.index.serving(MODEL), MODEL, None)
    candidate_set = candidate_set.without(router.failures.avoided(now))
    held: list[dict[InstanceId, tuple[int, int, int, int, int]]] = []
    predicted: dict[tuple[InstanceId, int], int] = {}
    for key in candidate_set.groups:
        chain = BlockHasher(key.descriptor.namespace(MODEL, None, None)).chain(tokens)
        matches = router.index.match(chain)
        held.append({match.instance: match.by_tier for match in matches})
        num_held = {match.instance: match.num_blocks for match in matches}
        predicted |= router.overlay.predicted_beyond(chain, num_held, now)
    found = []
    for view, candidate_row in zip(candidate_set.views, candidate_set.rows, strict=True):
        load = router.load_of(view.instance)
        assert load is not None
        by_tier = held[candidate_row.group].get(view.instance, (0, 0, 0, 0, 0))
        expected = predicted.get((view.instance, view.epoch), 0)
        rates = load.compute_ms_per_token, load.pull_ms_per_token
        loads = load.in_flight, load.queued_ms, load.work_ms, *rates
        found.append(Candidate(*candidate_row, by_tier, expected, *loads))
    return tuple(found)


def columns_of(candidate_set: CandidateSet) -> dict[str, object]:
    """Return all that a decision may look at."""
    return {
        "views": [(v.instance, v.epoch, v.info, v.trust, v.muted) for v in candidate_set.views],
        "groups": candidate_set.groups,
        "seats": candidate_set.rows,
        "shown": candidate_set.answer_fields,
        "traits": candidate_set.traits.tolist(),
        "num_classes": candidate_set.num_classes,
        "rolls": [
            (selection.instances, lines.tolist()) for selection, lines in candidate_set.selections
        ],
        "loads": (candidate_set.loads.keys, candidate_set.loads.epochs.tolist()),
        "line_of": candidate_set.row_of,
        "lots": candidate_set.tie_break_keys,
        "leasable": candidate_set.leasable,
        "lends_everything": candidate_set.all_lend_every_tier,
        "doubtful": candidate_set.not_exact,
        "muted": [
            (view.instance, group) for view, group in candidate_set.with_over_budget_namespaces
        ],
    }


@given(st.lists(steps, max_size=30))
def test_a_candidate_set_that_is_kept_up_to_date_is_one_made_anew(
    history: list[tuple[str, int, int, int, float]],
) -> None:
    world = World(False, "least_loaded")
    index, kept = world.router.index, None
    before: list[InstanceView] = []
    for kind, number, prompt, num_blocks, _ in history:
        world.happen(kind, number, prompt, num_blocks)
        now = index.serving(MODEL)
        if not now:
            kept = None
            continue
        made = candidate_set_of(now, MODEL, None)
        kept = (kept and kept.revised(before, now)) or made
        before = now
        assert columns_of(kept) == columns_of(made)


def test_a_candidate_set_keeps_what_trust_says_nothing_about() -> None:
    world = World(False, "least_loaded")
    for number in (0, 2, 4):
        world.happen("up", number, 0, 1)
    before = world.router.index.serving(MODEL)
    candidate_set = candidate_set_of(before, MODEL, None)
    columns_of(candidate_set)
    world.happen("gap", 2, 0, 1)
    now = world.router.index.serving(MODEL)
    revised = candidate_set.revised(before, now)
    assert revised is not None
    assert revised.selections is candidate_set.selections
    assert revised.loads is candidate_set.loads
    assert revised.not_exact == {InstanceId("w2", 0)}
    assert candidate_set.not_exact == frozenset(), "whoever has the other one keeps it"
    assert revised.revised(now, now) is revised


@given(
    st.lists(steps, max_size=40),
    st.booleans(),
    st.sampled_from(["predicted_ttft", "predicted_ttft", "least_loaded"]),
)
def test_candidates_are_those_found_one_by_one(
    history: list[tuple[str, int, int, int, float]], is_flat: bool, policy: str
) -> None:
    world = World(is_flat, policy)
    router = world.router
    for kind, number, prompt, num_blocks, seconds in history:
        router.clock.advance(seconds)
        world.happen(kind, number, prompt, num_blocks)
        for tokens in PROMPTS:
            try:
                gathered = router._find_candidates(a_request(tokens), router.clock())
            except (UnknownModel, NoCandidate):
                assert not world.living
                continue
            assert gathered.table.question.candidates == by_name(router, tokens)
    for decision_id in world.routed:
        decision = router.decision(decision_id)
        again = choose_again(decision)
        chosen = decision.question.candidates[again.chosen]
        assert chosen.instance == (decision.chosen.worker, decision.chosen.rank)
        assert again.prices[again.chosen].cost_ms == decision.chosen.cost_ms
