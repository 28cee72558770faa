import msgspec
import pytest

from kvatlas.router.decision.loads import InstanceLoad, LoadTracker
from kvatlas.router.decision.requests import Report
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import Plan
from kvatlas.schemas.settings import RouterSettings

W1, W2 = InstanceId("w1", 0), InstanceId("w2", 0)
SETTINGS = RouterSettings(
    prefill_tokens_per_second=1_000.0,  # a token is a millisecond
    pull_tokens_per_second=1_000.0,
    pull_fixed_ms=5.0,
    work_half_life_seconds=100.0,
    request_timeout_seconds=60.0,
)
NOTHING = Report()


class World:
    """Loads with a time of their own."""

    def __init__(self) -> None:
        self.loads, self.now = LoadTracker(SETTINGS), 0.0

    def of(self, instance: InstanceId = W1, epoch: int = 1, model: str = "m") -> InstanceLoad:
        return self.loads.of(instance, epoch, model, self.now)

    def routed(self, name: str, tokens: int, instance: InstanceId = W1, pull_ms: float = 0) -> None:
        self.of(instance)
        self.loads.routed(name, instance, Plan(16, 0, (), tokens), pull_ms, self.now)

    def prefilled(self, name: str, report: Report = NOTHING) -> bool:
        return self.loads.prefilled(name, report, self.now)

    def done(self, name: str, report: Report = NOTHING) -> bool:
        return self.loads.done(name, report, self.now)


@pytest.fixture
def world() -> World:
    return World()


class TestQueue:
    def test_a_routed_request_is_queued_work(self, world: World) -> None:
        world.routed("a", 500, pull_ms=20.0)
        assert world.of() == InstanceLoad(1, 520.0, 500.0, 1.0, 1.0)

    def test_time_drains_the_queue(self, world: World) -> None:
        world.routed("a", 500)
        world.now = 0.2
        assert world.of().queued_ms == pytest.approx(300.0)
        world.now = 9.0
        assert world.of().queued_ms == 0.0

    def test_time_does_not_drain_what_comes_later(self, world: World) -> None:
        world.routed("a", 500)
        world.now = 9.0
        world.routed("b", 400)
        assert world.of().queued_ms == pytest.approx(400.0)

    def test_an_early_prefill_frees_the_queue(self, world: World) -> None:
        world.routed("a", 500)
        world.routed("b", 300)
        world.now = 0.1
        world.prefilled("a")
        assert world.of().queued_ms == pytest.approx(300.0)

    def test_a_late_prefill_holds_up_what_is_behind(self, world: World) -> None:
        world.routed("a", 500)
        world.routed("b", 300)
        world.now = 2.0
        assert world.of().queued_ms == 0.0
        world.prefilled("a")
        assert world.of().queued_ms == pytest.approx(300.0)

    def test_what_was_ahead_of_a_prefilled_request_is_over(self, world: World) -> None:
        world.routed("a", 500)
        world.routed("b", 300)
        world.routed("c", 200)
        world.now = 0.1
        world.prefilled("b")
        assert world.of().queued_ms == pytest.approx(200.0)
        world.prefilled("a")
        assert world.of().queued_ms == pytest.approx(200.0)

    def test_the_end_of_a_request_tells_when_its_prefill_ended(self, world: World) -> None:
        world.routed("a", 500)
        world.routed("b", 300)
        world.now = 1.0
        world.done("a", Report(ttft_ms=900.0))
        assert world.of().queued_ms == pytest.approx(200.0)

    def test_the_end_of_a_request_alone_tells_that_it_is_over(self, world: World) -> None:
        world.routed("a", 500)
        world.routed("b", 300)
        world.now = 0.1
        world.done("a")
        assert world.of().queued_ms == pytest.approx(300.0)

    def test_a_failed_request_leaves_the_queue(self, world: World) -> None:
        world.routed("a", 500)
        world.routed("b", 300)
        world.done("a", Report(failed=True))
        assert world.of() == InstanceLoad(1, 300.0, 300.0, 1.0, 1.0)


class TestInFlight:
    def test_a_request_counts_until_it_is_done(self, world: World) -> None:
        world.routed("a", 500)
        world.now = 30.0
        assert world.prefilled("a")
        assert world.of().in_flight == 1
        assert world.done("a")
        assert world.of().in_flight == 0

    def test_a_second_report_changes_nothing(self, world: World) -> None:
        world.routed("a", 500)
        world.routed("b", 500)
        assert world.done("a")
        before = world.of()
        assert not world.done("a")
        assert not world.prefilled("a")
        assert world.of() == before

    def test_a_request_nobody_knows_is_told(self, world: World) -> None:
        assert not world.done("x")

    def test_a_lost_report_does_not_count_for_ever(self, world: World) -> None:
        world.routed("a", 500)
        world.now = 61.0
        world.routed("b", 500)
        assert world.of().in_flight == 1
        assert world.loads.num_expired == 1
        assert not world.done("a")

    def test_a_sign_of_life_renews_a_long_request(self, world: World) -> None:
        world.routed("a", 500)
        world.now = 50.0
        world.prefilled("a")
        world.now = 100.0
        world.loads.expire(world.now)
        assert world.of().in_flight == 1

    def test_a_new_epoch_has_an_empty_queue(self, world: World) -> None:
        world.routed("a", 500)
        assert world.of(epoch=2).queued_ms == world.of(epoch=2).in_flight == 0
        world.done("a")
        assert world.of(epoch=2).queued_ms == world.of(epoch=2).in_flight == 0


class TestWork:
    def test_work_fades_by_half_in_a_half_life(self, world: World) -> None:
        world.routed("a", 800)
        world.now = 100.0
        assert world.of().work_ms == pytest.approx(400.0)

    def test_work_is_what_was_computed_in_the_end(self, world: World) -> None:
        world.routed("a", 800)
        world.done("a", Report(computed_tokens=300))
        assert world.of().work_ms == pytest.approx(300.0)

    def test_a_new_instance_starts_with_the_mean_of_the_others(self, world: World) -> None:
        world.routed("a", 800, W1)
        world.routed("b", 400, W2)
        world.now = 100.0
        # W2 came with the mean of one other, 800
        assert world.of(InstanceId("w3", 0)).work_ms == pytest.approx((400 + 600) / 2)

    def test_other_models_have_other_means(self, world: World) -> None:
        world.routed("a", 800, W1)
        assert world.of(W2, model="other").work_ms == 0.0


class TestRates:
    def test_a_rate_follows_what_workers_report(self, world: World) -> None:
        for n in range(60):
            world.routed(f"a{n}", 1_000)
            world.now += 0.25
            world.done(f"a{n}", Report(computed_tokens=1_000, prefill_ms=250.0))
        assert world.of().compute_ms_per_token == pytest.approx(0.25, rel=0.05)

    def test_a_new_worker_starts_with_what_the_others_taught(self, world: World) -> None:
        for n in range(60):
            world.routed(f"a{n}", 1_000)
            world.now += 0.25
            world.done(f"a{n}", Report(computed_tokens=1_000, prefill_ms=250.0))
        assert world.of(W2).compute_ms_per_token == pytest.approx(0.25, rel=0.05)

    def test_one_strange_report_moves_nothing(self, world: World) -> None:
        world.routed("a", 1_000)
        world.now = 1e9
        world.done("a", Report(computed_tokens=1_000, prefill_ms=1e9))
        assert world.of().compute_ms_per_token == 1.0
        assert world.loads.num_implausible == 0

    def test_a_time_that_has_not_passed_teaches_nothing(self, world: World) -> None:
        for n in range(60):
            world.routed(f"a{n}", 1_000)
            world.now += 0.25
            world.done(f"a{n}", Report(computed_tokens=1_000, prefill_ms=1e6, ttft_ms=0.0))
        assert world.of().compute_ms_per_token == 1.0
        assert world.loads.num_implausible == 60

    def test_a_whole_latency_is_no_prefill(self, world: World) -> None:
        """Of 1,000 output tokens some of the time has to be theirs."""
        for n in range(60):
            world.routed(f"a{n}", 1_000)
            world.now += 20.0
            report = Report(computed_tokens=1_000, prefill_ms=19_999.0, output_tokens=1_000)
            world.done(f"a{n}", report)
        assert world.of().compute_ms_per_token == 1.0

    def test_false_reports_about_workers_leave_them_comparable(self, world: World) -> None:
        for n in range(300):
            world.routed(f"slow{n}", 1_000, W1)
            world.routed(f"fast{n}", 1_000, W2)
            world.now += 30.0
            world.done(f"slow{n}", Report(computed_tokens=1_000, prefill_ms=30_000.0))
            world.done(f"fast{n}", Report(computed_tokens=1_000, prefill_ms=1e-3))
        slow, fast = world.of(W1), world.of(W2)
        assert slow.compute_ms_per_token <= 9 * fast.compute_ms_per_token

    @pytest.mark.parametrize("num_honest", [0, 1, 10])
    def test_false_reports_about_one_leave_others_comparable_at_once(
        self, world: World, num_honest: int
    ) -> None:
        for n in range(num_honest):
            world.routed(f"true{n}", 1_000, W1)
            world.now += 1.0
            world.done(f"true{n}", Report(computed_tokens=1_000, prefill_ms=1_000.0))
        for n in range(200):  # in less than the interval of comparisons
            world.routed(f"other{n}", 1_000, W1)
            world.routed(f"false{n}", 1_000, W2)
            world.now += 0.001
            world.done(f"false{n}", Report(computed_tokens=1_000, prefill_ms=1e-3))
        slow, fast = world.of(W1), world.of(W2)
        assert slow.compute_ms_per_token <= 9 * fast.compute_ms_per_token

    def test_a_worker_that_is_avoided_is_judged_as_its_peers_after_a_while(
        self, world: World
    ) -> None:
        for n in range(20):
            world.routed(f"a{n}", 1_000, W1)
            world.routed(f"b{n}", 1_000, W2)
            world.now += 1.0
            world.done(f"b{n}", Report(computed_tokens=1_000, prefill_ms=1_000.0))
            world.now += 2.0
            world.done(f"a{n}", Report(computed_tokens=1_000, prefill_ms=2_500.0))
        assert world.of(W1).compute_ms_per_token == pytest.approx(2.5)
        for n in range(60):  # only the other one is asked, for five minutes
            world.now += 5.0
            world.routed(f"c{n}", 1_000, W2)
            world.now += 1.0
            world.done(f"c{n}", Report(computed_tokens=1_000, prefill_ms=1_000.0))
        assert world.of(W1).compute_ms_per_token == pytest.approx(1.0)

    def test_what_is_learnt_stays_while_the_whole_model_is_idle(self, world: World) -> None:
        for n in range(20):
            world.routed(f"a{n}", 1_000, W1)
            world.now += 1.0
            world.done(f"a{n}", Report(computed_tokens=1_000, prefill_ms=500.0))
        for _ in range(50):
            world.now += 10.0
            world.of(W1)
            world.loads.expire(world.now)
        assert world.of(W1).compute_ms_per_token == pytest.approx(0.5)

    def test_tiny_prefills_teach_nothing(self, world: World) -> None:
        world.routed("a", 10)
        world.done("a", Report(computed_tokens=10, prefill_ms=500.0))
        assert world.of().compute_ms_per_token == 1.0

    def test_pulls_teach_their_rate_without_the_fixed_part(self, world: World) -> None:
        for n in range(60):
            world.routed(f"a{n}", 900)
            report = Report(computed_tokens=100, pulled_blocks=50, pull_ms=85.0)
            world.now += 0.1
            world.done(f"a{n}", report)
        assert world.of().pull_ms_per_token == pytest.approx(0.1, rel=0.05)

    def test_nobody_computed_more_than_the_prompt(self, world: World) -> None:
        """One wrong report would starve its worker until its work has decayed."""
        world.routed("a", 1_000)
        world.done("a", Report(computed_tokens=2**53, pulled_blocks=2**50, prefill_ms=5, pull_ms=5))
        assert world.of().work_ms == pytest.approx(1_000.0)

    def test_a_request_teaches_once(self, world: World) -> None:
        report = Report(computed_tokens=1_000, prefill_ms=250.0)
        world.routed("a", 1_000)
        world.prefilled("a", report)
        once = world.of()
        world.done("a", report)
        assert world.of().compute_ms_per_token == once.compute_ms_per_token


def test_ten_thousand_instances_come_and_go(world: World) -> None:
    for n in range(10_000):
        world.now = float(n)
        world.routed(f"r{n}", 100, InstanceId(f"w{n}", 0))
        world.done(f"r{n}")
    assert world.loads.num_workers <= 2 * SETTINGS.request_timeout_seconds + 2
    assert len(world.loads) == 0


def test_no_timeout_is_too_short_to_route_with() -> None:
    loads = LoadTracker(msgspec.structs.replace(SETTINGS, request_timeout_seconds=1e-300))
    for second in (1e6, 1e6, 2e6):  # so large that a short timeout added to it is lost
        loads.of(W1, 1, "m", second)
        loads.routed("a", W1, Plan(16, 0, (), 100), 0.0, second)
        assert loads.num_workers == 1


def test_what_an_earlier_epoch_had_to_do_is_not_shown_of_a_later_one(world: World) -> None:
    world.routed("a", 1_000)
    assert world.loads.known(W1, world.now, epoch=1)
    assert world.loads.known(W1, world.now, epoch=2) is None
