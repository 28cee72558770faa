"""Faults that others had, by number: where requests go."""

from collections import Counter

from prometheus_client import generate_latest

from kvatlas.events.codec import encode
from kvatlas.events.memory.bus import MemoryBroker
from kvatlas.events.streams import KV_DECISIONS, KV_EVENTS, decisions_stream, events_stream
from kvatlas.hindsight.replay import replay_stream
from kvatlas.indexer import FlatRadixIndex, ReferenceIndex
from kvatlas.indexer.fold.state import IndexState
from kvatlas.indexer.service.index_service import IndexService
from kvatlas.router.decision.requests import Report
from kvatlas.router.http.app import create_app
from kvatlas.router.recorder import StreamDecisionLog
from kvatlas.router.service import RouterService, choose_again
from kvatlas.schemas.ids import InstanceId
from kvatlas.schemas.routing import decode_decision
from kvatlas.schemas.settings import RouterSettings
from testkit.builders import MODEL as LOGGED_MODEL
from testkit.builders import a_batch, stored, subject_of, up
from testkit.fleet import Fleet, RouterUnderTest, a_prompt, a_request
from testkit.waiting import until

PROMPT = a_prompt(1_600)
#: of 1,000 requests at 8 workers: the mean, and four standard deviations
MEAN, FOUR_SIGMA = 125, 42


def a_fleet(num_workers: int) -> Fleet:
    fleet = Fleet()
    for n in range(1, num_workers + 1):
        fleet.up(f"w{n}")
    return fleet


def queued_ms(router: RouterUnderTest, worker: str) -> float:
    load = router.load_of(InstanceId(worker, 0))
    return load.queued_ms if load else 0.0


# --- load -----------------------------------------------------------------------------------------


def test_f62_cold_requests_avoid_the_slow_worker() -> None:
    """w1 turns out to be four times as slow as the others; nothing is cached anywhere."""
    router = a_fleet(4).router()
    taken: Counter[str] = Counter()
    for n in range(200):
        answer = router.route(a_request(a_prompt(800, start=1_000 * n)))
        taken[answer.worker] += 1
        slowness = 4.0 if answer.worker == "w1" else 1.0
        report = Report(prefill_ms=20.0 * slowness, computed_tokens=800)
        router.clock.advance(0.1)
        router.prefilled(answer.decision_id, report)
        router.done(answer.decision_id, report)
    assert taken["w1"] < 200 / 4 / 2
    assert min(taken[f"w{n}"] for n in (2, 3, 4)) > 200 / 4


def test_f63_a_hot_prefix_is_kept_inside_a_load_window_and_given_up_outside_it() -> None:
    """Twice as many requests as its holder can serve: it stays busy and is never far behind."""
    fleet = a_fleet(4)
    fleet.holds("w1", PROMPT, num_blocks=50)
    window_ms, one_ms = 300.0, 160.0
    router = fleet.router(load_window_ms=window_ms, predicted_seconds=0.0)
    taken: Counter[str] = Counter()
    for _ in range(100):
        answer = router.route(a_request(PROMPT))
        taken[answer.worker] += 1
        others = min(queued_ms(router, f"w{n}") for n in (2, 3, 4))
        assert queued_ms(router, "w1") - others <= window_ms + one_ms
        router.clock.advance(0.040)  # half of what its holder needs for one
    # all that it could serve in this time, and a window's worth of waiting
    assert taken["w1"] >= 100 * 40 / 80 + 3
    assert len(taken) == 4


def test_f65_equal_requests_of_one_moment_spread_over_equal_workers() -> None:
    for policy in ("predicted_ttft", "random", "power_of_two"):
        router = a_fleet(8).router(predicted_seconds=0.0, policy=policy)
        taken: Counter[str] = Counter()
        for _ in range(1_000):
            answer = router.route(a_request(a_prompt(160)))
            taken[answer.worker] += 1
            decision = router.decision(answer.decision_id)
            # the draw can be made again from what is recorded
            chosen = decision.question.candidates[choose_again(decision).chosen]
            assert chosen.worker == answer.worker
        assert len(taken) == 8
        assert all(abs(count - MEAN) <= FOUR_SIGMA for count in taken.values()), taken


# --- what is not in the log yet ----------------------------------------------------------------


def test_f66_siblings_land_together_until_the_log_says_where_their_prefix_is() -> None:
    fleet = a_fleet(4)
    router = fleet.router()
    taken: Counter[str] = Counter()
    for n in range(64):
        router.clock.advance(0.010 / 64)
        taken[router.route(a_request([*PROMPT, n])).worker] += 1
    assert len(taken) <= 2
    expected = len(router.overlay)
    for worker in taken:
        fleet.holds(worker, PROMPT)
    answer = router.score(a_request([*PROMPT, 99]))
    assert answer.candidates[0].match_tokens == 1_600
    assert {score.predicted_tokens for score in answer.candidates} == {0}
    assert len(router.overlay) < expected


def test_f67_a_prediction_is_no_match_and_what_became_of_it_is_counted() -> None:
    fleet = a_fleet(2)
    router = fleet.router()
    app = create_app(router)
    metered = app._hot._router
    first = metered.route(a_request(PROMPT))
    again = metered.route(a_request(PROMPT))
    assert (again.worker, again.match_tokens, again.predicted_tokens) == (first.worker, 0, 1_600)
    metered.done(first.decision_id, Report(failed=True))
    metered.done(again.decision_id, Report(failed=True))
    assert len(router.overlay) == 0
    third = metered.route(a_request(PROMPT))
    assert (third.match_tokens, third.predicted_tokens) == (0, 0)
    fleet.holds(third.worker, PROMPT, num_blocks=50)
    hit = metered.route(a_request(PROMPT))
    assert (hit.worker, hit.match_tokens, hit.predicted_tokens) == (third.worker, 800, 800)
    metered.done(hit.decision_id, Report(local_blocks=10, ttft_ms=5.0))
    shown = generate_latest(app.metrics.registry).decode()
    assert f'kv_failed_requests_total{{worker="{first.worker}"}} 2.0' in shown
    assert f'kv_expected_reuse_tokens_total{{worker="{hit.worker}"}} 1600.0' in shown
    assert f'kv_actual_reuse_tokens_total{{worker="{hit.worker}"}} 160.0' in shown
    usual = metered.route(a_request(PROMPT))
    metered.done(usual.decision_id, Report(cached_tokens=800, prompt_tokens=1_600))
    shown = generate_latest(app.metrics.registry).decode()
    assert f'kv_actual_reuse_tokens_total{{worker="{hit.worker}"}} 960.0' in shown


# --- afterwards -----------------------------------------------------------------------------------


async def test_f77_the_past_can_be_replayed_and_a_decision_made_again() -> None:
    async with MemoryBroker().connect() as bus:
        for stream in (events_stream(), decisions_stream()):
            await bus.declare_stream(stream)
        settings = RouterSettings(seed=1)
        publisher, state = bus.publisher(KV_EVENTS), IndexState(FlatRadixIndex())
        async with (
            IndexService(bus, state) as service,
            StreamDecisionLog(bus.publisher(KV_DECISIONS), settings) as log,
        ):
            router = RouterService(service.index, service, settings, log=log)
            for seq in range(1, 21):
                for worker in ("w1", "w2"):
                    batch = a_batch(
                        *([up()] if seq == 1 else []), stored(seq), worker=worker, seq=seq
                    )
                    await publisher.publish(subject_of(batch), encode(batch))
                await publisher.flush()
                await until(lambda seq=seq: state.stream_sequence == 2 * seq)  # type: ignore[misc]
                router.route(a_request(a_prompt(40, start=seq), LOGGED_MODEL))
            live = state.state_digest()
        replayed = await replay_stream(bus, make_index=ReferenceIndex)
        assert (replayed.state_digest, replayed.stream_sequence) == (live, 40)
        recorded = [decode_decision(m.payload) async for m in bus.read_range(KV_DECISIONS, 1, 99)]
        assert len(recorded) == 20
        for decision in recorded:
            chosen = decision.question.candidates[choose_again(decision).chosen]
            assert (chosen.worker, chosen.rank) == (decision.chosen.worker, decision.chosen.rank)
