"""How much a bucket gives at once and over time."""

from kvatlas.common.token_bucket import TokenBucket

SECOND = 1_000_000_000


def a_bucket() -> TokenBucket:
    return TokenBucket.full(tokens_per_second=10.0, burst_tokens=100.0, now_ns=5 * SECOND)


def test_a_full_one_gives_its_burst_at_once_and_no_more() -> None:
    bucket = a_bucket()
    assert bucket.spend(60, 5 * SECOND)
    assert bucket.spend(40, 5 * SECOND)
    assert not bucket.spend(1, 5 * SECOND)


def test_it_fills_with_time_up_to_its_burst() -> None:
    bucket = a_bucket()
    assert bucket.spend(100, 5 * SECOND)
    assert bucket.fill(5 * SECOND + SECOND // 4) == 2.5
    assert bucket.fill(7 * SECOND) == 20
    assert bucket.fill(1_000 * SECOND) == 100


def test_who_asks_for_too_much_gets_nothing_and_empties_it() -> None:
    bucket = a_bucket()
    assert not bucket.spend(101, 5 * SECOND)
    assert not bucket.spend(1, 5 * SECOND)
    assert bucket.spend(10, 6 * SECOND)


def test_looking_takes_nothing() -> None:
    bucket = a_bucket()
    assert [bucket.fill(5 * SECOND) for _ in range(3)] == [100, 100, 100]
    assert bucket.spend(100, 5 * SECOND)


def test_time_that_a_clock_repeats_counts_once() -> None:
    bucket = a_bucket()
    assert bucket.spend(100, 9 * SECOND)
    assert bucket.fill(2 * SECOND) == 0
    assert bucket.fill(9 * SECOND) == 0
    assert bucket.spend(10, 10 * SECOND)


def test_without_a_rate_it_gives_its_burst_once() -> None:
    bucket = TokenBucket.full(0.0, 3.0, 0)
    assert [bucket.spend(1, n * SECOND) for n in range(4)] == [True, True, True, False]
