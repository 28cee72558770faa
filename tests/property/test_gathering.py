"""What a router gathers is what index, loads and overlay say by name, however the fleet changes."""

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.reader import InstanceView
from kvatlas.router.lineup import Lineup, line_up
from kvatlas.router.requests import Report
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
    lineup = line_up(router.index.serving(MODEL), MODEL, None)
    lineup = lineup.without(router.failures.avoided(now))
    held: list[dict[InstanceId, tuple[int, int, int, int, int]]] = []
    predicted: dict[tuple[InstanceId, int], int] = {}
    for key in lineup.groups:
        chain = BlockHasher(key.descriptor.namespace(MODEL, None, None)).chain(tokens)
        matches = router.index.match(chain)
        held.append({match.instance: match.by_tier for match in matches})
        num_held = {match.instance: match.num_blocks for match in matches}
        predicted |= router.overlay.beyond(chain, num_held, now)
    found = []
    for view, seat in zip(lineup.views, lineup.seats, strict=True):
        load = router.load_of(view.instance)
        assert load is not None
        by_tier = held[seat.group].get(view.instance, (0, 0, 0, 0, 0))
        expected = predicted.get((view.instance, view.epoch), 0)
        rates = load.compute_ms_per_token, load.pull_ms_per_token
        loads = load.in_flight, load.queued_ms, load.work_ms, *rates
        found.append(Candidate(*seat, by_tier, expected, *loads))
    return tuple(found)


def columns_of(lineup: Lineup) -> dict[str, object]:
    """Return all that a decision may look at."""
    return {
        "views": [(v.instance, v.epoch, v.info, v.trust, v.muted) for v in lineup.views],
        "groups": lineup.groups,
        "seats": lineup.seats,
        "shown": lineup.shown,
        "traits": lineup.traits.tolist(),
        "num_classes": lineup.num_classes,
        "rolls": [(roll.instances, lines.tolist()) for roll, lines in lineup.rolls],
        "loads": (lineup.loads.asked, lineup.loads.epochs.tolist()),
        "line_of": lineup.line_of,
        "lots": lineup.lots,
        "leasable": lineup.leasable,
        "lends_everything": lineup.lends_everything,
        "doubtful": lineup.doubtful,
        "muted": [(view.instance, group) for view, group in lineup.muted],
    }


@given(st.lists(steps, max_size=30))
def test_a_lineup_that_is_kept_up_to_date_is_one_made_anew(
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
        made = line_up(now, MODEL, None)
        kept = (kept and kept.revised(before, now)) or made
        before = now
        assert columns_of(kept) == columns_of(made)


def test_a_lineup_keeps_what_trust_says_nothing_about() -> None:
    world = World(False, "least_loaded")
    for number in (0, 2, 4):
        world.happen("up", number, 0, 1)
    before = world.router.index.serving(MODEL)
    lineup = line_up(before, MODEL, None)
    columns_of(lineup)
    world.happen("gap", 2, 0, 1)
    now = world.router.index.serving(MODEL)
    revised = lineup.revised(before, now)
    assert revised is not None
    assert revised.rolls is lineup.rolls
    assert revised.loads is lineup.loads
    assert revised.doubtful == {InstanceId("w2", 0)}
    assert lineup.doubtful == frozenset(), "whoever has the other one keeps it"
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
                gathered = router._ask(a_request(tokens), router.clock())
            except (UnknownModel, NoCandidate):
                assert not world.living
                continue
            assert gathered.slate.question.candidates == by_name(router, tokens)
    for decision_id in world.routed:
        decision = router.decision(decision_id)
        again = choose_again(decision)
        chosen = decision.question.candidates[again.chosen]
        assert chosen.instance == (decision.chosen.worker, decision.chosen.rank)
        assert again.prices[again.chosen].cost_ms == decision.chosen.cost_ms
