"""The token bucket against one that fills tick by tick, and its promise for every span of time."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.common.token_bucket import TokenBucket

SECOND = 1_000_000_000
TICKS_PER_SECOND = 512
TICK_NS = SECOND // TICKS_PER_SECOND


class TickingBucket:
    """The plainest account: whole tokens, some more at each tick that its clock has not had yet."""

    def __init__(self, tokens_per_tick: int, burst: int, tick: int) -> None:
        self.tokens_per_tick, self.burst, self.left, self.tick = tokens_per_tick, burst, burst, tick

    def take(self, num_tokens: int, tick: int) -> bool:
        while self.tick < tick:
            self.tick += 1
            self.left = min(self.left + self.tokens_per_tick, self.burst)
        enough = self.left >= num_tokens
        self.left = self.left - num_tokens if enough else 0
        return enough


#: what a clock does between two takes: it stands still, goes on, steps back
ticks_on = st.just(0) | st.integers(0, 50) | st.integers(-50, 0) | st.integers(0, 2_000)
#: the same in steps that are no whole ticks
ns_on = st.just(0) | st.integers(0, SECOND) | st.integers(-SECOND, 0) | st.integers(0, 10**13)
#: none so small that a rounding doubles it
rates, bursts, amounts = (st.floats(0, top, allow_subnormal=False) for top in (1e3, 1e4, 2e3))
#: now, as the broker tells it and as a process does
beginnings = st.sampled_from([0, 5 * SECOND, 1_796_000_000 * SECOND])
takes = st.lists(st.tuples(ns_on, amounts), max_size=40)


@given(
    st.integers(0, 5),
    st.integers(0, 1_000),
    beginnings,
    st.lists(st.tuples(ticks_on, st.integers(0, 200)), max_size=40),
)
@settings(deadline=None)
def test_it_answers_as_one_that_fills_tick_by_tick(
    tokens_per_tick: int, burst: int, begin_ns: int, steps: list[tuple[int, int]]
) -> None:
    tick = begin_ns // TICK_NS
    bucket = TokenBucket.full(tokens_per_tick * TICKS_PER_SECOND, burst, tick * TICK_NS)
    twin = TickingBucket(tokens_per_tick, burst, tick)
    for ticks, num_tokens in steps:
        tick += ticks
        assert bucket.spend(num_tokens, tick * TICK_NS) == twin.take(num_tokens, tick)
        assert bucket.tokens_left == twin.left


@given(rates, bursts, beginnings, takes)
@settings(deadline=None)
def test_no_span_of_time_gives_more_than_a_burst_and_the_rate(
    tokens_per_second: float, burst: float, begin_ns: int, steps: list[tuple[int, float]]
) -> None:
    """Time that a clock repeats after it stepped back counts once."""
    bucket = TokenBucket.full(tokens_per_second, burst, begin_ns)
    now_ns = latest_ns = begin_ns
    #: (when, how much) of all that was given
    given_out: list[tuple[int, Fraction]] = []
    for ns, num_tokens in steps:
        now_ns += ns
        latest_ns = max(latest_ns, now_ns)
        if bucket.spend(num_tokens, now_ns):
            given_out.append((latest_ns, Fraction(num_tokens)))
        assert 0 <= bucket.tokens_left <= burst
        assert bucket.filled_at_ns == latest_ns
    for first, (begin, _) in enumerate(given_out):
        total = Fraction(0)
        for end, num in given_out[first:]:
            total += num
            allowed = Fraction(burst) + Fraction(tokens_per_second) * (end - begin) / SECOND
            assert total <= allowed * (1 + Fraction(1, 10**12))


@given(rates, bursts, beginnings, takes)
@settings(deadline=None)
def test_a_clock_that_steps_back_is_worth_one_that_stands_still(
    tokens_per_second: float, burst: float, begin_ns: int, steps: list[tuple[int, float]]
) -> None:
    stepping, standing = (TokenBucket.full(tokens_per_second, burst, begin_ns) for _ in range(2))
    now_ns = latest_ns = begin_ns
    for ns, num_tokens in steps:
        now_ns += ns
        latest_ns = max(latest_ns, now_ns)
        assert stepping.spend(num_tokens, now_ns) == standing.spend(num_tokens, latest_ns)
    assert stepping == standing
