from kvatlas.router.decision.policies import policy_named
from kvatlas.schemas.routing import Candidate, Question
from kvatlas.schemas.settings import RouterSettings
from testkit.fleet import a_candidate

SETTINGS = RouterSettings()


def chosen(policy: str, *candidates: Candidate, turn: int = 0, seed: int = 1) -> str:
    question = Question(1_600, turn, seed, candidates)
    return str(candidates[policy_named(policy, SETTINGS).choose(question).chosen].instance)


def test_round_robin_goes_by_name_and_rank() -> None:
    fleet = (a_candidate("w2"), a_candidate("w1", rank=1), a_candidate("w1"))
    order = [chosen("round_robin", *fleet, turn=turn) for turn in range(4)]
    assert order == ["w1/0", "w1/1", "w2/0", "w1/0"]


def test_least_loaded_takes_the_shortest_queue() -> None:
    busy = a_candidate("w1", queued_ms=200.0, held=(99, 0, 0, 0, 0))
    assert chosen("least_loaded", busy, a_candidate("w2", queued_ms=100.0, in_flight=9)) == "w2/0"


def test_least_loaded_takes_the_fewest_requests_of_equal_queues() -> None:
    assert chosen("least_loaded", a_candidate("w1", in_flight=2), a_candidate("w2")) == "w2/0"


def test_random_takes_everybody_at_times() -> None:
    fleet = tuple(a_candidate(f"w{n}") for n in range(4))
    assert len({chosen("random", *fleet, seed=seed) for seed in range(100)}) == 4


def test_power_of_two_never_takes_the_busiest() -> None:
    fleet = tuple(a_candidate(f"w{n}", queued_ms=n * 10.0) for n in range(4))
    taken = {chosen("power_of_two", *fleet, seed=seed) for seed in range(100)}
    assert taken == {"w0/0", "w1/0", "w2/0"}


class TestPredictedTtft:
    def test_the_longer_match_wins(self) -> None:
        short, long = (
            a_candidate("w1", held=(2, 0, 0, 0, 0)),
            a_candidate("w2", held=(9,) + (0,) * 4),
        )
        assert chosen("predicted_ttft", short, long) == "w2/0"

    def test_affinity_is_kept_inside_the_load_window(self) -> None:
        warm = a_candidate("w1", held=(9, 0, 0, 0, 0), kv_class=0, queued_ms=900.0)
        assert chosen("predicted_ttft", warm, a_candidate("w2", kv_class=0)) == "w1/0"

    def test_affinity_is_given_up_outside_it(self) -> None:
        warm = a_candidate("w1", held=(9, 0, 0, 0, 0), kv_class=0, queued_ms=1_900.0)
        assert chosen("predicted_ttft", warm, a_candidate("w2", kv_class=0)) == "w2/0"

    def test_a_miss_avoids_the_slow_worker(self) -> None:
        slow = a_candidate("w1", compute_ms_per_token=1.0)
        assert chosen("predicted_ttft", slow, a_candidate("w2", work_ms=500.0)) == "w2/0"

    def test_equal_costs_go_to_the_shorter_queue(self) -> None:
        fleet = (a_candidate("w1", queued_ms=20.0), a_candidate("w2", queued_ms=10.0))
        assert all(chosen("predicted_ttft", *fleet, seed=seed) == "w2/0" for seed in range(20))

    def test_a_hundred_fast_blocks_beat_more_slow_ones(self) -> None:
        hbm = a_candidate("w1", held=(60, 0, 0, 0, 0), kv_class=0)
        ssd = a_candidate("w2", held=(0, 0, 66, 0, 0), kv_class=0, compute_ms_per_token=0.1)
        settings = RouterSettings(ssd_ms_per_1k_tokens=50.0)
        question = Question(1_600, 0, 1, (hbm, ssd))
        assert policy_named("predicted_ttft", settings).choose(question).chosen == 0
