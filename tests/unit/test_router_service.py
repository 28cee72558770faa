"""What the router answers, remembers and records."""

from collections import Counter

import msgspec
import pytest

from kvatlas.indexer.reader import Lag
from kvatlas.router.decision.overdue import PROBE_REQUESTS
from kvatlas.router.decision.requests import Report
from kvatlas.router.service import choose_again
from kvatlas.schemas.errors import NoCandidate, UnknownDecision, UnknownModel, UnknownPolicy
from kvatlas.schemas.fleet import Trust
from kvatlas.schemas.ids import InstanceId, Tier
from kvatlas.schemas.kv_events import ENGINE_STALLED, SourceDegraded
from kvatlas.schemas.routing import Decision, decode_decision, encode_decision
from testkit.fleet import MODEL, Fleet, RouterUnderTest, StillFeed, a_prompt, a_request

PROMPT = a_prompt(1_600)


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    for n in range(1, 4):
        fleet.up(f"w{n}")
    return fleet


@pytest.fixture
def router(fleet: Fleet) -> RouterUnderTest:
    return fleet.router()


class TestScore:
    def test_asking_changes_nothing(self, fleet: Fleet, router: RouterUnderTest) -> None:
        fleet.holds("w2", PROMPT)
        first = router.score(a_request(PROMPT))
        assert router.score(a_request(PROMPT)) == first
        assert len(router.loads) == len(router.overlay) == 0

    def test_terms_add_up_and_the_cheapest_stands_first(
        self, fleet: Fleet, router: RouterUnderTest
    ) -> None:
        fleet.holds("w2", PROMPT)
        answer = router.score(a_request(PROMPT))
        costs = [score.cost_ms for score in answer.candidates]
        assert costs == sorted(costs)
        assert all(sum(score.terms.values()) == score.cost_ms for score in answer.candidates)

    def test_the_answer_is_bounded(self, fleet: Fleet) -> None:
        router = fleet.router(max_candidates=2)
        assert len(router.score(a_request(PROMPT)).candidates) == 2
        assert len(router.score(a_request(PROMPT, max_candidates=1)).candidates) == 1
        assert len(router.score(a_request(PROMPT, max_candidates=9)).candidates) == 3
        assert router.score(a_request(PROMPT)).num_candidates == 3

    def test_the_answer_says_what_it_stands_on(self, fleet: Fleet, router: RouterUnderTest) -> None:
        router.still_feed.connected = False
        router.still_feed.lag = Lag(0, 2.5)
        answer = router.score(a_request(PROMPT))
        assert (answer.stream_sequence, answer.index_age_ms, answer.connected) == (3, 2_500, False)


class TestPullsFromPools:
    """w1 has half of the prompt, lends what is in its pool only, and is busy."""

    @pytest.mark.parametrize("num_pooled", [0, 30, 50])
    def test_a_plan_pulls_what_the_owner_can_lend(self, num_pooled: int) -> None:
        fleet = Fleet()
        for worker in ("w1", "w2"):
            fleet.up(worker, leasable_tiers=(Tier.dram,))
        fleet.holds("w1", PROMPT, num_blocks=50)
        if num_pooled:
            fleet.holds("w1", PROMPT, tier=Tier.dram, num_blocks=num_pooled)
        router = fleet.router(load_window_ms=0.0, predicted_seconds=0.0)
        answers = [router.route(a_request(PROMPT)) for _ in range(40)]
        plans = [answer.plan for answer in answers if answer.worker == "w2"]
        assert plans
        assert {sum(step.num_blocks for step in plan.pulls) for plan in plans} == {num_pooled}
        assert all(plan.num_tokens == len(PROMPT) for plan in plans)


class TestRoute:
    def test_the_request_goes_where_its_prefix_is(
        self, fleet: Fleet, router: RouterUnderTest
    ) -> None:
        fleet.holds("w2", PROMPT, num_blocks=90)
        answer = router.route(a_request(PROMPT))
        assert (answer.worker, answer.rank, answer.base_url) == ("w2", 0, "http://w2")
        assert (answer.match_tokens, answer.trust) == (1_440, Trust.exact)
        assert (answer.plan.reuse_blocks, answer.plan.compute_tokens) == (90, 160)
        assert msgspec.to_builtins(answer.kv_transfer_params) == {
            "kvatlas": {
                "decision_id": answer.decision_id,
                "plan": msgspec.to_builtins(answer.plan),
            }
        }

    def test_a_burst_of_siblings_lands_together(self, router: RouterUnderTest) -> None:
        """Requests that come before the first BlockStored must not scatter their prefix."""
        taken: Counter[str] = Counter()
        for n in range(64):
            router.clock.advance(0.010 / 64)
            taken[router.route(a_request([*PROMPT, n])).worker] += 1
        assert len(taken) <= 2

    def test_strangers_spread(self, router: RouterUnderTest) -> None:
        taken: Counter[str] = Counter()
        for n in range(300):
            taken[router.route(a_request(a_prompt(160, start=1_000 * n))).worker] += 1
        assert set(taken.values()) == {100}

    def test_a_hot_prefix_spills_outside_the_load_window(self, fleet: Fleet) -> None:
        router = fleet.router(load_window_ms=300.0, predicted_seconds=0.0)
        fleet.holds("w1", PROMPT, num_blocks=50)
        taken = Counter(router.route(a_request(PROMPT)).worker for _ in range(30))
        assert set(taken) == {"w1", "w2", "w3"}
        assert max(taken.values()) <= 16

    def test_a_worker_may_pull_what_a_busy_one_holds(self, fleet: Fleet) -> None:
        router = fleet.router(load_window_ms=0.0, predicted_seconds=0.0)
        fleet.holds("w1", PROMPT, num_blocks=50)
        plans = [router.route(a_request(PROMPT)).plan for _ in range(40)]
        assert any(step.worker == "w1" for plan in plans for step in plan.pulls)

    def test_a_doubtful_worker_is_marked_and_discounted(
        self, fleet: Fleet, router: RouterUnderTest
    ) -> None:
        fleet.holds("w1", PROMPT, num_blocks=60)
        fleet.holds("w2", PROMPT, num_blocks=60)
        fleet.tell("w1", skip=1)
        answer = router.route(a_request(PROMPT))
        trusts = {score.worker: score.trust for score in answer.candidates}
        assert trusts == {"w1": Trust.degraded, "w2": Trust.exact, "w3": Trust.exact}
        assert answer.worker == "w2"

    def test_a_request_may_require_an_exact_worker(self, fleet: Fleet) -> None:
        fleet.tell("w1", skip=3)
        fleet.holds("w1", PROMPT)
        router = fleet.router()
        assert router.route(a_request(PROMPT)).worker == "w1"
        answer = router.route(a_request(PROMPT, requires_exact=True))
        assert answer.worker in ("w2", "w3")
        assert {score.worker for score in answer.candidates} == {"w2", "w3"}
        fleet.tell("w2", skip=3)
        fleet.tell("w3", skip=3)
        with pytest.raises(NoCandidate, match="none of its workers is exact"):
            router.route(a_request(PROMPT, requires_exact=True))
        assert router.route(a_request(PROMPT)).worker

    def test_decisions_have_ids_that_differ_and_sort(self, fleet: Fleet) -> None:
        router = RouterUnderTest(fleet, StillFeed(), fleet.router().settings, True)
        router._new_id = router._timed_id
        ids = []
        for _ in range(10):
            router.clock.advance(0.002)
            ids.append(router.route(a_request(PROMPT)).decision_id)
        assert ids == sorted(set(ids))


class TestReports:
    def test_a_done_request_is_no_load(self, router: RouterUnderTest) -> None:
        answer = router.route(a_request(PROMPT))
        instance = InstanceId(answer.worker, answer.rank)
        assert (load := router.load_of(instance))
        assert load.in_flight == 1
        assert router.prefilled(answer.decision_id, Report()).applied
        assert router.done(answer.decision_id, Report()).applied
        assert (load := router.load_of(instance))
        assert load.queued_ms == load.in_flight == 0

    def test_a_second_report_is_no_error(self, router: RouterUnderTest) -> None:
        answer = router.route(a_request(PROMPT))
        router.done(answer.decision_id, Report())
        assert not router.done(answer.decision_id, Report()).applied

    def test_a_report_about_nothing_is_refused(self, router: RouterUnderTest) -> None:
        with pytest.raises(UnknownDecision, match="no decision 'x'"):
            router.done("x", Report())
        with pytest.raises(UnknownDecision):
            router.prefilled("x", Report())

    def test_a_report_outlives_the_kept_decision(self, fleet: Fleet) -> None:
        router = fleet.router(max_kept_decisions=1)
        first = router.route(a_request(PROMPT)).decision_id
        router.route(a_request(PROMPT))
        assert router.done(first, Report()).applied
        with pytest.raises(UnknownDecision):
            router.done(first, Report())

    def test_a_failed_request_predicts_nothing(self, router: RouterUnderTest) -> None:
        answer = router.route(a_request(PROMPT))
        router.done(answer.decision_id, Report(failed=True))
        scores = router.score(a_request(PROMPT)).candidates
        assert all(score.predicted_tokens == 0 for score in scores)

    def test_a_worker_whose_request_failed_is_left_out_for_a_while(self, fleet: Fleet) -> None:
        router = fleet.router()
        first = router.route(a_request(PROMPT))
        router.done(first.decision_id, Report(failed=True))
        assert first.worker not in {c.worker for c in router.score(a_request(PROMPT)).candidates}
        router.clock.advance(1.1)
        assert first.worker in {c.worker for c in router.score(a_request(PROMPT)).candidates}

    def test_a_worker_whose_engine_has_stalled_is_left_out_until_it_lives(
        self, fleet: Fleet
    ) -> None:
        router = fleet.router()
        first = router.route(a_request(PROMPT))
        fleet.tell(
            first.worker, SourceDegraded(f"{ENGINE_STALLED}: no sign of life for 6 s; and more")
        )
        answers = [router.route(a_request(PROMPT)) for _ in range(10)]
        assert first.worker not in {answer.worker for answer in answers}
        assert first.worker not in {c.worker for c in router.score(a_request(PROMPT)).candidates}
        (reason,) = [why for why in answers[-1].reasons if "left out" in why]
        assert reason.startswith(
            f"{InstanceId(first.worker, 0)} is left out: doubted: engine_stalled"
        )
        fleet.tell(first.worker, SourceDegraded(""))
        assert first.worker in {c.worker for c in router.score(a_request(PROMPT)).candidates}

    def test_engines_that_have_all_stalled_are_still_tried(self, fleet: Fleet) -> None:
        router = fleet.router()
        num_workers = router.score(a_request(PROMPT)).num_candidates
        for view in fleet.state.instances():
            fleet.tell(view.instance.worker, SourceDegraded(ENGINE_STALLED))
        answer = router.route(a_request(PROMPT))
        assert answer.num_candidates == num_workers
        assert not [why for why in answer.reasons if "left out" in why]

    def test_a_worker_of_which_nothing_is_heard_is_left_out_and_tried_again(
        self, fleet: Fleet
    ) -> None:
        router = fleet.router(overdue_seconds=10.0)
        hung = router.route(a_request(PROMPT))
        router.done(hung.decision_id, Report())
        chosen: list[str] = []
        for _ in range(120):
            # what fits best at the one that hangs now, and a stranger
            for prompt in (PROMPT, a_prompt(32, start=50_000 + len(chosen))):
                answer = router.route(a_request(prompt))
                chosen.append(answer.worker)
                if answer.worker != hung.worker:
                    router.done(answer.decision_id, Report())
            router.clock.advance(1.0)
        assert chosen[:60].count(hung.worker) > 5
        assert chosen[-60:].count(hung.worker) <= 60 / PROBE_REQUESTS
        assert router.overdue_at(InstanceId(hung.worker, 0)).startswith("overdue: no answer")

    def test_workers_that_all_failed_are_still_tried(self, fleet: Fleet) -> None:
        router = fleet.router()
        while True:
            answer = router.route(a_request(PROMPT))
            router.done(answer.decision_id, Report(failed=True))
            if answer.num_candidates == 1:
                break
        assert router.score(a_request(PROMPT)).num_candidates > 1

    def test_what_an_engine_reports_as_cached_says_what_was_computed(self, fleet: Fleet) -> None:
        router = fleet.router()
        answer = router.route(a_request(a_prompt(1_600)))
        before = router.load_of(InstanceId(answer.worker, answer.rank))
        report = Report(cached_tokens=1_200, prompt_tokens=1_600)
        assert router.done(answer.decision_id, report).applied
        after = router.load_of(InstanceId(answer.worker, answer.rank))
        assert before is not None
        assert after is not None
        assert after.work_ms == pytest.approx(before.work_ms / 4)

    def test_a_failure_counts_once_however_often_it_is_reported(self, fleet: Fleet) -> None:
        router = fleet.router()
        answer = router.route(a_request(a_prompt(160)))
        instance = InstanceId(answer.worker, answer.rank)
        for _ in range(20):
            router.done(answer.decision_id, Report(failed=True))
            router.clock.advance(1.0)
        assert not router.failures.avoided(router.clock())

        answer = router.route(a_request(a_prompt(160)))
        for _ in range(20):
            router.prefilled(answer.decision_id, Report(failed=True))
            router.clock.advance(1.0)
        assert not router.failures.avoided(router.clock()), instance

    def test_workers_that_prove_fast_get_more(self, fleet: Fleet) -> None:
        router = fleet.router(seed=3)
        for n in range(200):
            answer = router.route(a_request(a_prompt(1_600, start=10_000 * n)))
            ms = 40.0 if answer.worker == "w1" else 160.0
            router.clock.advance(0.2)
            report = Report(computed_tokens=1_600, prefill_ms=ms, ttft_ms=ms)
            router.done(answer.decision_id, report)
        asked = router.score(a_request(a_prompt(1_600, start=9_999_999)))
        assert asked.chosen.worker == "w1"


class TestReadiness:
    def test_an_unknown_model_may_come_while_the_index_catches_up(self) -> None:
        feed = StillFeed(is_ready=False)
        router = Fleet().router(feed)
        with pytest.raises(NoCandidate, match="the index is catching up"):
            router.route(a_request(PROMPT))
        feed.is_ready = True
        with pytest.raises(UnknownModel):
            router.route(a_request(PROMPT))

    def test_a_router_answers_without_a_broker(self, router: RouterUnderTest) -> None:
        router.still_feed.connected = False
        router.still_feed.lag = Lag(0, 60.0)
        answer = router.route(a_request(PROMPT))
        assert "no broker: the index is 60000 ms old" in answer.reasons
        assert not answer.connected

    def test_an_unknown_policy_is_refused_at_once(self, fleet: Fleet) -> None:
        with pytest.raises(UnknownPolicy):
            fleet.router(policy="best")


class TestDecisions:
    def recorded(self, router: RouterUnderTest, **more: str) -> Decision:
        return router.decision(router.route(a_request(PROMPT, **more)).decision_id)

    def test_a_decision_holds_what_it_was_made_of(
        self, fleet: Fleet, router: RouterUnderTest
    ) -> None:
        fleet.holds("w2", PROMPT, num_blocks=90)
        decision = self.recorded(router)
        assert (decision.policy, decision.model) == ("predicted_ttft", MODEL)
        assert (decision.stream_sequence, decision.prompt_tokens) == (4, 1_600)
        assert decision.chosen.worker == "w2"
        assert len(decision.question.candidates) == decision.num_candidates == 3
        assert len(decision.chain) == 16 * 100
        assert fleet.state.match(decision.chain)[0].num_blocks == 90

    def test_a_decision_travels_whole(self, fleet: Fleet, router: RouterUnderTest) -> None:
        fleet.holds("w2", PROMPT, num_blocks=90)
        decision = self.recorded(router)
        assert decode_decision(encode_decision(decision)) == decision

    @pytest.mark.parametrize(
        "policy", ["predicted_ttft", "round_robin", "random", "least_loaded", "power_of_two"]
    )
    def test_a_decision_made_again_is_the_same(self, fleet: Fleet, policy: str) -> None:
        router = fleet.router(policy=policy, balance_weight=0.5, seed=7)
        fleet.holds("w2", PROMPT, num_blocks=90)
        fleet.up("w4", block_tokens=64)
        for n in range(20):
            router.clock.advance(0.01)
            answer = router.route(a_request(PROMPT[: 1_600 - n]))
            decision = decode_decision(encode_decision(router.decision(answer.decision_id)))
            again = choose_again(decision)
            chosen = decision.question.candidates[again.chosen]
            assert chosen.instance == (answer.worker, answer.rank)
            assert again.prices[again.chosen].cost_ms == decision.chosen.cost_ms

    def test_a_salted_prompt_leaves_no_hashes(self, fleet: Fleet, router: RouterUnderTest) -> None:
        fleet.holds("w2", PROMPT, cache_salt="s3cret")
        decision = self.recorded(router, cache_salt="s3cret")
        assert decision.chosen.worker == "w2"
        assert decision.chain == b""
        assert decision.groups[0].salted
        assert b"s3cret" not in encode_decision(decision)
        assert "the prompt is salted: its hashes are not recorded" in decision.reasons

    def test_a_match_that_was_passed_over_is_explained(self, fleet: Fleet) -> None:
        router = fleet.router(load_window_ms=0.0, predicted_seconds=0.0, pull_weight=1_000.0)
        fleet.holds("w1", PROMPT, num_blocks=10)
        decisions = [self.recorded(router) for _ in range(10)]
        passed = [d for d in decisions if d.chosen.worker != "w1"]
        assert passed
        assert "the longest match, 160 tokens at w1/0, would cost" in passed[0].reasons[1]

    def test_a_large_fleet_is_cut_to_the_cheapest(self) -> None:
        fleet = Fleet()
        for n in range(300):
            fleet.up(f"w{n:03}")
        fleet.holds("w299", PROMPT)
        decision = self.recorded(fleet.router())
        assert decision.num_candidates == 300
        assert 255 <= len(decision.question.candidates) <= 256
        assert not decision.is_question_complete
        assert "w299" in {candidate.worker for candidate in decision.question.candidates}

    def test_a_decision_is_forgotten_after_many(self, fleet: Fleet) -> None:
        router = fleet.router(max_kept_decisions=2)
        ids = [self.recorded(router).id for _ in range(3)]
        with pytest.raises(UnknownDecision):
            router.decision(ids[0])
        assert router.decision(ids[2]).id == ids[2]

    def test_a_decision_shows_as_json(self, router: RouterUnderTest) -> None:
        assert msgspec.json.decode(msgspec.json.encode(self.recorded(router)))["chosen_group"] == 0
